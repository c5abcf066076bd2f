"""SiLU, elementwise: y = x * s with s = 1 / (1 + exp(-x)), computed in fp32 and rounded once to x's dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import TunableKernel, pin_autotune, pinned_backward
from rl_engine.backends.shared.triton.compiler import unavailable
from rl_engine.backends.shared.triton.graph import differentiate, empty_like, graph_operator
from rl_engine.backends.shared.triton.primitives import elementwise
from rl_engine.backends.shared.triton.primitives.elementwise import block_of_row
from rl_engine.backends.spec import implements


@triton.jit
def _silu(x):
    return x * (1.0 / (1.0 + tl.exp(-x)))


@triton.jit
def _silu_slope(x):
    s = 1.0 / (1.0 + tl.exp(-x))
    return s * tl.fma(x, 1.0 - s, 1.0)


@TunableKernel(
    outputs=("y_ptr",),
    data=("x_ptr",),
    dynamic=("n_rows", "n_cols"),
    fixed=elementwise.fixed,
    neutral=elementwise.NEUTRAL,
    admits=elementwise.admits,
    on=elementwise.ON,
)
@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def _silu_fwd_kernel(x_ptr, y_ptr, n_rows, n_cols, x_stride, y_stride, ONE_ROW: tl.constexpr, BLOCK: tl.constexpr):
    row, start, left = block_of_row(n_cols, ONE_ROW, BLOCK)
    lane = tl.arange(0, BLOCK)
    x_ptr += row * x_stride + start
    y_ptr += row * y_stride + start
    if left >= BLOCK:
        x = tl.load(x_ptr + lane).to(tl.float32)
        tl.store(y_ptr + lane, _silu(x).to(y_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr + lane, mask=lane < left, other=0.0).to(tl.float32)
        tl.store(y_ptr + lane, _silu(x).to(y_ptr.dtype.element_ty), mask=lane < left)


@TunableKernel(
    outputs=("dx_ptr",),
    data=("x_ptr", "dy_ptr"),
    dynamic=("n_rows", "n_cols"),
    fixed=elementwise.fixed,
    neutral=elementwise.NEUTRAL,
    admits=elementwise.admits,
    on=elementwise.ON,
)
@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def _silu_bwd_kernel(
    x_ptr, dy_ptr, dx_ptr, n_rows, n_cols, x_stride, dy_stride, dx_stride, ONE_ROW: tl.constexpr, BLOCK: tl.constexpr
):
    row, start, left = block_of_row(n_cols, ONE_ROW, BLOCK)
    lane = tl.arange(0, BLOCK)
    x_ptr += row * x_stride + start
    dy_ptr += row * dy_stride + start
    dx_ptr += row * dx_stride + start
    if left >= BLOCK:
        x = tl.load(x_ptr + lane).to(tl.float32)
        dy = tl.load(dy_ptr + lane).to(tl.float32)
        tl.store(dx_ptr + lane, (dy * _silu_slope(x)).to(dx_ptr.dtype.element_ty))
    else:
        mask = lane < left
        x = tl.load(x_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + lane, (dy * _silu_slope(x)).to(dx_ptr.dtype.element_ty), mask=mask)


def _forward(x: torch.Tensor) -> torch.Tensor:
    y = empty_like(x)
    if x.numel():
        rows = elementwise.rows_of(x, y)
        _silu_fwd_kernel[elementwise.grid](*rows.tensors, *rows.shape, *rows.strides, ONE_ROW=rows.one)
    return y


def _backward(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    dx = empty_like(x)
    if x.numel():
        rows = elementwise.rows_of(x, dy, dx)
        _silu_bwd_kernel[elementwise.grid](*rows.tensors, *rows.shape, *rows.strides, ONE_ROW=rows.one)
    return dx


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        pin_autotune(ctx)
        ctx.save_for_backward(x)
        return _forward(x)

    @staticmethod
    @once_differentiable
    @pinned_backward
    def backward(ctx, dy):
        return _backward(*ctx.saved_tensors, dy)


_graph_forward = graph_operator("silu", _forward, fake=empty_like)
_graph_backward = graph_operator("silu_backward", _backward, fake=empty_like, phase="backward")
differentiate(_graph_forward, _graph_backward, lambda inputs, _y: inputs)


_door = operands.Door("silu", "x")


@implements("silu", backend_id="rlkernel.triton.silu", unavailable=unavailable)
def silu(x: torch.Tensor) -> torch.Tensor:
    """Return ``x * sigmoid(x)``, computed in fp32 and rounded once.

    Args:
        x: [...], bf16, fp16 or fp32, any strides (rows of neighbouring columns are read in place).

    Returns:
        [...], x's dtype, contiguous.

    Raises:
        TypeError: another dtype, or a tensor subclass.
        ValueError: a device that Triton does not run on.
    """
    _door(x)
    if torch.compiler.is_compiling():
        return _graph_forward(x)
    return _SiLU.apply(x) if operands.grad_enabled(x) else _forward(x)
