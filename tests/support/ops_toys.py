"""Small kernels with nothing to hide, and clocks that say what a test wants: for trials of the launch adapter."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from rl_engine.backends.shared.triton.autotuning import TunableKernel, pin_autotune, pinned_backward
from rl_engine.backends.shared.triton.launch_trial import LaunchTrial
from rl_engine.platforms.tuning.key import Candidate

BLOCKS = (256, 512, 1024)


def fixed_block(_sizes: Any, _device: Any) -> dict[str, int]:
    return {"BLOCK": 1024, "num_warps": 4}


def by_blocks(meta: Any) -> tuple[int]:
    return (-(-meta["n"] // meta["BLOCK"]),)


@TunableKernel(outputs=(), inout=("x_ptr",), dynamic=("n",), fixed=fixed_block, neutral={"BLOCK": BLOCKS})
@triton.jit(do_not_specialize=["n"])
def inc_kernel(x_ptr, n, BLOCK: tl.constexpr):
    """Add 1 to every element, in place."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + lane, tl.load(x_ptr + lane, mask=lane < n) + 1, mask=lane < n)


@TunableKernel(outputs=("y_ptr",), data=("x_ptr",), dynamic=("n",), fixed=fixed_block, neutral={"BLOCK": BLOCKS})
@triton.jit(do_not_specialize=["n"])
def add_one_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """y = x + 1."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + lane, tl.load(x_ptr + lane, mask=lane < n) + 1, mask=lane < n)


@TunableKernel(outputs=(), inout=("sum_ptr",), dynamic=("n",), fixed=fixed_block, neutral={"BLOCK": BLOCKS})
@triton.jit(do_not_specialize=["n"])
def acc_kernel(x_ptr, sum_ptr, n, BLOCK: tl.constexpr):
    """Add the elements to sum_ptr; integers, so that no order of atomics matters."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(sum_ptr, tl.sum(tl.load(x_ptr + lane, mask=lane < n, other=0), 0))


def accumulate(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of integers; the accumulator is cleared at every call, whatever is tuned."""
    out = torch.empty(1, dtype=x.dtype, device=x.device).zero_()
    acc_kernel[by_blocks](x, out, x.numel())
    return out


@TunableKernel(outputs=("y_ptr",), fixed=lambda _sizes, _device: {"PART": 0}, neutral={"PART": (1, 2)}, dynamic=("n",))
@triton.jit(do_not_specialize=["n"])
def part_kernel(y_ptr, n, BLOCK: tl.constexpr, PART: tl.constexpr):
    """Write all elements, or only the first half, or only the second."""
    lane = tl.arange(0, BLOCK)
    mask = lane < n
    if PART == 1:
        mask = mask & (lane < n // 2)
    if PART == 2:
        mask = mask & (lane >= n // 2)
    tl.store(y_ptr + lane, lane.to(tl.float32), mask=mask)


@TunableKernel(outputs=("y_ptr",), dynamic=("n",), fixed=lambda _sizes, _device: {"PART": 0}, neutral={"PART": (1,)})
@triton.jit(do_not_specialize=["n"])
def nudged_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, PART: tl.constexpr):
    """y = x + (1 + PART) / 2^20: of x from 1 to 2, half precision shows neither."""
    lane = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lane, mask=lane < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + lane, (x + (1 + PART) * 9.5367431640625e-07).to(y_ptr.dtype.element_ty), mask=lane < n)


@TunableKernel(
    outputs=("y_ptr",), dynamic=("n",), fixed=lambda _sizes, _device: {"BLOCK": 1024}, neutral={"BLOCK": (512,)}
)
@triton.jit(do_not_specialize=["n"])
def keyed_kernel(x_ptr, extra_ptr, y_ptr, n, stride, scale, flag, BLOCK: tl.constexpr):
    """A kernel with an argument of every kind."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lane * stride, mask=lane < n)
    tl.store(y_ptr + lane, x, mask=lane < n)


class Doubled(torch.autograd.Function):
    """x -> x + 1 forward, dy -> dy + 1 backward: wrong as a gradient, plain as a trace of which launch ran."""

    @staticmethod
    def forward(ctx, x):
        pin_autotune(ctx)
        return add_one(x)

    @staticmethod
    @pinned_backward
    def backward(ctx, dy):
        return add_one(dy.contiguous())


class Unpinned(torch.autograd.Function):
    """The same by an author who forgot to pin."""

    @staticmethod
    def forward(ctx, x):
        return add_one(x)

    @staticmethod
    @pinned_backward
    def backward(ctx, dy):
        return add_one(dy.contiguous())


def add_one(x: torch.Tensor) -> torch.Tensor:
    """Return x + 1."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    add_one_kernel[by_blocks](x, y, x.numel())
    return y


class Stopwatch:
    """Says how long launches take, and counts how often it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **fastest: int) -> None:
        self.samples = 0

        def sample(_trial: LaunchTrial, candidate: Candidate) -> float:
            self.samples += 1
            return 1.0 if fastest.items() <= dict(candidate.options).items() else 2.0

        monkeypatch.setattr(LaunchTrial, "sample", sample)
