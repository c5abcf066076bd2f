"""What one program may take of a multiprocessor, by architecture: candidates that cannot run are not compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_KIB = 1 << 10
_WARPS = 4  # of a launch that does not say: Triton's own default


@dataclass(frozen=True)
class Limits:
    """Limits of one program and of the multiprocessor it must fit into.

    Attributes:
        lanes: threads of a warp.
        shared_bytes: shared memory that one program may use.
        file: 32-bit registers of a multiprocessor; a program that needs more never runs.
        registers: 32-bit registers that one thread can address; beyond, values spill to memory.
        threads: most threads of one program.
    """

    lanes: int
    shared_bytes: int
    file: int
    registers: int
    threads: int = 1024


@dataclass(frozen=True)
class Needs:
    """What a launch takes at the least.

    Attributes:
        registers: 32-bit values that a program holds at once, over all of its threads.
        shared_bytes: shared memory.
    """

    registers: int = 0
    shared_bytes: int = 0


# NVIDIA: CUDA C++ programming guide, technical specifications by compute capability.
# AMD: CDNA 2, 3 and 4 instruction set guides: 4 SIMDs of 512 registers times 64 lanes, and the LDS.
LIMITS: Mapping[str, Limits] = {
    **{arch: Limits(32, 163 * _KIB, 1 << 16, 255) for arch in ("sm_80", "sm_87")},
    **{arch: Limits(32, 99 * _KIB, 1 << 16, 255) for arch in ("sm_86", "sm_89", "sm_120", "sm_121")},
    **{arch: Limits(32, 227 * _KIB, 1 << 16, 255) for arch in ("sm_90", "sm_100", "sm_103")},
    **{arch: Limits(64, 64 * _KIB, 1 << 17, 512) for arch in ("gfx90a", "gfx942")},
    "gfx950": Limits(64, 160 * _KIB, 1 << 17, 512),
}

_LEAST_SHARED = 99 * _KIB  # of cards that are not listed: consumer parts


def shared_bytes(arch: str) -> int:
    """Return the shared memory that one program may use on ``arch``; of one that is not listed, what all have."""
    limits = LIMITS.get(arch)
    return _LEAST_SHARED if limits is None else limits.shared_bytes


def fits(launch: Mapping[str, int], needs: Needs, limits: Limits) -> bool:
    """Return whether a program of ``launch`` can be resident, and its values stay in registers."""
    threads = launch.get("num_warps", _WARPS) * limits.lanes
    a_thread = min(limits.registers, launch.get("maxnreg", limits.registers))
    return (
        threads <= limits.threads
        and needs.shared_bytes <= limits.shared_bytes
        and needs.registers <= min(limits.file, a_thread * threads)
    )
