"""Which device this is: asked of torch on first use, never at import."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass
from typing import Literal

INTERPRETER = "interpreter"  # architecture of a CPU, which runs Triton kernels through its interpreter only


@dataclass(frozen=True)
class DeviceIdentity:
    """A device as a launch sees it.

    Attributes:
        kind: what torch calls it, with AMD cards told apart.
        name: marketing name.
        arch: ``sm_90``, ``gfx942`` or ``interpreter``.
        sm_count: multiprocessors (compute units); those of the slice, on a MIG device.
        memory_bytes: its memory; that of the slice, on a MIG device.
        l2_bytes: its last-level cache; 0 where torch does not say.
        uuid: physical identity, or None where torch does not say.
        pci: domain:bus:device, or None where torch does not say.
    """

    kind: Literal["cuda", "hip", "cpu"]
    name: str
    arch: str
    sm_count: int
    memory_bytes: int = 0
    l2_bytes: int = 0
    uuid: str | None = None
    pci: str | None = None


# A card of which nothing is known: a fixed launch may only be slower on it.
UNKNOWN = DeviceIdentity("cuda", "unknown", "unknown", sm_count=1)


def for_launch(index: int) -> DeviceIdentity:
    """Return what launch rules go by: `identify`'s answer, or `UNKNOWN`: a card that gives none runs kernels too."""
    try:
        return identify(index)
    except (RuntimeError, AssertionError):
        return UNKNOWN


@functools.cache
def identify(index: int) -> DeviceIdentity:
    """Return the identity of accelerator ``index``, or of the CPU for -1.

    Visibility variables are not parsed: torch's properties already are those of the physical device behind the index.
    Raises RuntimeError or AssertionError, torch's own, where there is no such device.
    """
    import torch  # noqa: PLC0415  # this module is imported by the registry's callers before they need torch

    if index < 0:
        return DeviceIdentity("cpu", platform.machine(), INTERPRETER, os.cpu_count() or 1)
    properties = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    uuid = getattr(properties, "uuid", None)
    pci = [getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device")]
    return DeviceIdentity(
        kind="hip" if hip else "cuda",
        name=properties.name,
        arch=properties.gcnArchName.split(":")[0] if hip else f"sm_{properties.major}{properties.minor}",
        sm_count=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        l2_bytes=getattr(properties, "L2_cache_size", 0),
        uuid=None if uuid is None else str(uuid),
        pci="{:04x}:{:02x}:{:02x}".format(*pci) if any(pci) else None,
    )
