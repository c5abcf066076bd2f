"""Kernels whose sums have a known order, or a known lack of one; compiled for cards that are not there, never run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.primitives.folds import fold_columns, rounded_product
from tests.support.offline import OPTIONS, Offline, Specialisation, Target, compile_offline

if TYPE_CHECKING:
    from rl_engine.backends.shared.triton.autotuning import KernelLauncher

RAW, ROUNDED, SELECTED = 1, 2, 3  # what `fold_kernel` makes of its summands
ALIGNED, ANYWHERE = Specialisation(), Specialisation(aligned=False, integers="odd")


def _fixed(_sizes: Any, _device: Any) -> dict[str, int]:
    return {"num_warps": 4}


toy = TunableKernel(outputs=("y_ptr",), fixed=_fixed, neutral={"num_warps": (4, 8)})


@toy
@triton.jit
def elementwise_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lane, mask=lane < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + lane, x * x + x * tl.sigmoid(x), mask=lane < n)


@toy
@triton.jit
def row_sum_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * n + lane, mask=lane < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + tl.program_id(0), tl.sum(x, 0))


@toy
@triton.jit
def row_max_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * n + lane, mask=lane < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + tl.program_id(0), tl.max(x, 0) + tl.sum((x > 0).to(tl.int32), 0))


@toy
@triton.jit
def scan_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * n + lane, mask=lane < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + lane, tl.cumsum(x, 0), mask=lane < n)


@toy
@triton.jit
def fold_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, ROWS: tl.constexpr, SQUARES: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row[:, None] * n + lane[None, :], mask=(lane < n)[None, :], other=0.0).to(tl.float32)
    if SQUARES == 1:
        x = x * x
    if SQUARES == 2:
        x = rounded_product(x, x)
    if SQUARES == 3:
        x = tl.where(x > 0, x * x, 0.0)
    tl.store(y_ptr + row, fold_columns(x, ROWS, BLOCK))


@toy
@triton.jit
def pairs_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, SQUARES: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lane, mask=lane < n, other=0.0).to(tl.float32)
    if SQUARES:
        x = x * x
    half: tl.constexpr = BLOCK // 2
    x = tl.trans(tl.reshape(x, (2, half)), (1, 0))  # partners are half a row apart
    tl.store(y_ptr + tl.arange(0, half), tl.sum(x, 1))


@toy
@triton.jit
def decay_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, CARRIED: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        x = tl.load(x_ptr + start + lane, mask=start + lane < n, other=0.0).to(tl.float32)
        # the next round adds to the product of this one, or this one does
        total = (total + x) * 0.9 if CARRIED else total * 0.9 + x
    tl.store(y_ptr + lane, total)


@toy
@triton.jit
def atomic_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + lane, tl.load(x_ptr + lane, mask=lane < n), mask=lane < n)


@toy
@triton.jit
def gemm_kernel(
    x_ptr, b_ptr, y_ptr, n, m,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.program_id(2), tl.cdiv(n, BLOCK_K), SPLIT):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        a = tl.load(x_ptr + row[:, None] * n + k[None, :], mask=(k < n)[None, :], other=0.0)
        b = tl.load(b_ptr + k[:, None] * m + column[None, :], mask=(k < n)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if SUM:
        tl.store(y_ptr + row, tl.sum(total, 1))
    else:
        tl.store(y_ptr + tl.program_id(2) * n * m + row[:, None] * m + column[None, :], total)


_USUAL: dict[str, Any] = {
    "BLOCK": 1024, "ROWS": 1, "SQUARES": 0, "CARRIED": False, "BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64, "SPLIT": 1,
    "PRECISION": "tf32", "SUM": False, "num_warps": 4, "dtype": torch.float32,
    "aligned": True, "n": 1000, "m": 1000,
}  # fmt: skip


def compiled(kernel: KernelLauncher, target: Target, given: dict[str, Any]) -> Any:
    """Compile a toy; ``given`` are its constants, options, ``dtype`` and ``aligned``, where they are not the usual."""
    named = {**_USUAL, **given}
    inputs = torch.empty(0, dtype=named["dtype"])
    output = inputs if kernel is atomic_kernel else torch.empty(0)
    values = {**named, "x_ptr": inputs, "b_ptr": inputs, "y_ptr": output}
    launch = Offline(
        kernel,
        {name: values[name] for name in kernel.fn.arg_names},
        {name: named[name] for name in OPTIONS if name in named},
    )
    return compile_offline(launch, target, ALIGNED if named["aligned"] else ANYWHERE)
