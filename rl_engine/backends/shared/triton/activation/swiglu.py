"""SwiGLU, elementwise: y = (g * s) * u with s = 1 / (1 + exp(-g)), computed in fp32 and rounded once to g's dtype."""

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


@TunableKernel(
    outputs=("y_ptr",),
    data=("gate_ptr", "up_ptr"),
    dynamic=("n_rows", "n_cols"),
    fixed=elementwise.fixed,
    neutral=elementwise.NEUTRAL,
    admits=elementwise.admits,
    on=elementwise.ON,
)
@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def _swiglu_fwd_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    n_rows,
    n_cols,
    gate_stride,
    up_stride,
    y_stride,
    ONE_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, start, left = block_of_row(n_cols, ONE_ROW, BLOCK)
    lane = tl.arange(0, BLOCK)
    gate_ptr += row * gate_stride + start
    up_ptr += row * up_stride + start
    y_ptr += row * y_stride + start
    if left >= BLOCK:
        gate = tl.load(gate_ptr + lane).to(tl.float32)
        up = tl.load(up_ptr + lane).to(tl.float32)
        tl.store(y_ptr + lane, _swiglu(gate, up).to(y_ptr.dtype.element_ty))
    else:
        mask = lane < left
        gate = tl.load(gate_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + lane, _swiglu(gate, up).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu(gate, up):
    return gate * (1.0 / (1.0 + tl.exp(-gate))) * up


@triton.jit
def _swiglu_gradients(gate, up, dy):
    """Return (d_gate, d_up)."""
    s = 1.0 / (1.0 + tl.exp(-gate))
    return dy * up * s * tl.fma(gate, 1.0 - s, 1.0), dy * (gate * s)


@TunableKernel(
    outputs=("dgate_ptr", "dup_ptr"),
    data=("gate_ptr", "up_ptr", "dy_ptr"),
    dynamic=("n_rows", "n_cols"),
    fixed=elementwise.fixed,
    neutral=elementwise.NEUTRAL,
    admits=elementwise.admits,
    on=elementwise.ON,
)
@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def _swiglu_bwd_kernel(
    gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr,
    n_rows, n_cols, gate_stride, up_stride, dy_stride, out_stride,
    ONE_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, start, left = block_of_row(n_cols, ONE_ROW, BLOCK)
    lane = tl.arange(0, BLOCK)
    gate_ptr += row * gate_stride + start
    up_ptr += row * up_stride + start
    dy_ptr += row * dy_stride + start
    dgate_ptr += row * out_stride + start
    dup_ptr += row * out_stride + start
    if left >= BLOCK:
        gate = tl.load(gate_ptr + lane).to(tl.float32)
        up = tl.load(up_ptr + lane).to(tl.float32)
        dy = tl.load(dy_ptr + lane).to(tl.float32)
        dgate, dup = _swiglu_gradients(gate, up, dy)
        tl.store(dgate_ptr + lane, dgate.to(dgate_ptr.dtype.element_ty))
        tl.store(dup_ptr + lane, dup.to(dup_ptr.dtype.element_ty))
    else:
        mask = lane < left
        gate = tl.load(gate_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        dgate, dup = _swiglu_gradients(gate, up, dy)
        tl.store(dgate_ptr + lane, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
        tl.store(dup_ptr + lane, dup.to(dup_ptr.dtype.element_ty), mask=mask)


def _forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    y = empty_like(gate)
    if gate.numel():
        rows = elementwise.rows_of(gate, up, y)
        _swiglu_fwd_kernel[elementwise.grid](*rows.tensors, *rows.shape, *rows.strides, ONE_ROW=rows.one)
    return y


def _backward(gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dgate, dup = empty_like(gate), empty_like(gate)
    if gate.numel():
        rows = elementwise.rows_of(gate, up, dy, dgate, dup)
        strides = rows.strides[:4]  # both outputs have the same
        _swiglu_bwd_kernel[elementwise.grid](*rows.tensors, *rows.shape, *strides, ONE_ROW=rows.one)
    return dgate, dup


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        pin_autotune(ctx)
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)

    @staticmethod
    @once_differentiable
    @pinned_backward
    def backward(ctx, dy):
        return _backward(*ctx.saved_tensors, dy)


_graph_forward = graph_operator("swiglu", _forward, fake=empty_like)
_graph_backward = graph_operator(
    "swiglu_backward", _backward, fake=lambda gate, *_others: (empty_like(gate), empty_like(gate)), phase="backward"
)
differentiate(_graph_forward, _graph_backward, lambda inputs, _y: inputs)


_door = operands.Door("swiglu", "gate", "up")


@implements("swiglu", backend_id="rlkernel.triton.swiglu", unavailable=unavailable)
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``, computed in fp32 and rounded once.

    Args:
        gate: [...], bf16, fp16 or fp32, any strides (rows of neighbouring columns are read in place, so the two halves
            of one packed tensor need no copy).
        up: gate's shape, dtype and device, any strides.

    Returns:
        [...], gate's dtype, contiguous.

    Raises:
        TypeError: other or different dtypes, or a tensor subclass.
        ValueError: different shapes or devices, or a device that Triton does not run on.
    """
    _door(gate, up)
    if gate.shape != up.shape:
        raise ValueError(f"swiglu: gate is {list(gate.shape)}, up is {list(up.shape)}; pass equal shapes")
    if gate.dtype != up.dtype:
        raise TypeError(f"swiglu: gate is {gate.dtype}, up is {up.dtype}; pass equal dtypes")
    if torch.compiler.is_compiling():
        return _graph_forward(gate, up)
    return _SwiGLU.apply(gate, up) if operands.grad_enabled(gate, up) else _forward(gate, up)
