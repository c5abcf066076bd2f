"""Kernels of 4, 10 and 20 arguments, half pointers and half integers: plain, under ``@triton.autotune``, and wrapped.

The constant block size is no argument of the caller's; it is the one option there is to choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from rl_engine.backends.shared.triton.autotuning import KernelLauncher, TunableKernel

if TYPE_CHECKING:
    from collections.abc import Mapping

ELEMENTS = 4096
BLOCK = 1024
WARPS = 4
ARGUMENTS = (4, 10, 20)


def _fixed(_sizes: Mapping[str, Any], _device: Any) -> dict[str, int]:
    return {"BLOCK": BLOCK, "num_warps": WARPS}


def grid(meta: Mapping[str, Any]) -> tuple[int]:
    """Return one program for every block."""
    return (-(-meta["n"] // meta["BLOCK"]),)


def _four(x_ptr, y_ptr, n, s0, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lane * s0, mask=lane < n)
    tl.store(y_ptr + lane, x * tl.sigmoid(x.to(tl.float32)), mask=lane < n)


def _ten(x_ptr, a_ptr, b_ptr, c_ptr, y_ptr, n, s0, s1, s2, s3, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < n
    x = tl.load(x_ptr + lane * s0, mask=mask) + tl.load(a_ptr + lane * s1, mask=mask)
    x += tl.load(b_ptr + lane * s2, mask=mask) + tl.load(c_ptr + lane * s3, mask=mask)
    tl.store(y_ptr + lane, x * tl.sigmoid(x.to(tl.float32)), mask=mask)


def _twenty(
    x_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr, h_ptr, y_ptr,
    n, s0, s1, s2, s3, s4, s5, s6, s7, s8, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < n
    x = tl.load(x_ptr + lane * s0, mask=mask) + tl.load(a_ptr + lane * s1, mask=mask)
    x += tl.load(b_ptr + lane * s2, mask=mask) + tl.load(c_ptr + lane * s3, mask=mask)
    x += tl.load(d_ptr + lane * s4, mask=mask) + tl.load(e_ptr + lane * s5, mask=mask)
    x += tl.load(f_ptr + lane * s6, mask=mask) + tl.load(g_ptr + lane * s7, mask=mask)
    x += tl.load(h_ptr + lane * s8, mask=mask)
    tl.store(y_ptr + lane, x * tl.sigmoid(x.to(tl.float32)), mask=mask)


_BODIES = {4: _four, 10: _ten, 20: _twenty}


@dataclass(frozen=True)
class Kernel:
    """One kernel in three dresses, which share nothing but their text.

    Attributes:
        jitted: under ``@triton.jit`` alone.
        autotuned: under ``@triton.autotune`` with one configuration, which it therefore never times.
        wrapped: under this library's adapter.
        arguments: how many the caller passes.
    """

    jitted: Any
    autotuned: Any
    wrapped: KernelLauncher
    arguments: int

    def values(self, device: str) -> tuple[Any, ...]:
        """Return arguments on ``device``; strides are 1 but for the last, which Triton then does not compile in."""
        pointers = self.arguments // 2
        tensors = [torch.zeros(2 * ELEMENTS, dtype=torch.float32, device=device) for _ in range(pointers)]
        return (*tensors, ELEMENTS, *[1] * (pointers - 2), 2)


def kernel(arguments: int) -> Kernel:
    """Return the kernel of so many arguments."""
    body = _BODIES[arguments]
    config = triton.Config({"BLOCK": BLOCK}, num_warps=WARPS)

    def jit() -> Any:
        return triton.jit(body, do_not_specialize=["n"])

    wrap = TunableKernel(
        outputs=("y_ptr",), data=("x_ptr",), dynamic=("n",), fixed=_fixed, neutral={"BLOCK": (BLOCK, 512)}
    )
    return Kernel(jit(), triton.autotune([config], key=["n"])(jit()), wrap(jit()), arguments)
