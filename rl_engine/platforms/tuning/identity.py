"""The parts of a key that name the machine: device, driver, runtime. The adapter adds the compiler's."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl_engine.platforms import device

if TYPE_CHECKING:
    from rl_engine.platforms.tuning.key import Part
    from rl_engine.settings import AutotuneScope

_NVIDIA_DRIVER = Path("/sys/module/nvidia/version")
_AMD_DRIVER = Path("/sys/module/amdgpu/version")


def machine_parts(index: int, scope: AutotuneScope) -> dict[str, Part]:
    """Return the key parts of device ``index``; under scope ``model`` without what tells identical cards apart."""
    identity = device.identify(index)
    parts: dict[str, Part] = {
        "device.kind": identity.kind,
        "device.name": identity.name,
        "device.arch": identity.arch,
        "device.sm_count": identity.sm_count,
        "device.memory_bytes": identity.memory_bytes,
        "runtime.torch": str(torch.__version__),  # a subclass of str, which a record read back does not hold
        "runtime.toolkit": torch.version.hip or torch.version.cuda,
        "runtime.driver": _driver() if index >= 0 else None,
    }
    if scope == "device":
        parts |= dict(physical_parts(index))
    return parts


def physical_parts(index: int) -> tuple[tuple[str, Part], ...]:
    """Return what tells this card from an identical one; stored beside every record, whatever its scope."""
    identity = device.identify(index)
    return (("device.pci", identity.pci), ("device.uuid", identity.uuid))


@functools.cache
def _driver() -> str | None:
    """Return the kernel driver's version, or None where it does not say."""
    for path in (_NVIDIA_DRIVER, _AMD_DRIVER):
        if path.exists():
            return path.read_text(encoding="ascii").strip()
    return None
