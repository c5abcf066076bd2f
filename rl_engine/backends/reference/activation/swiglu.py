"""SwiGLU: the declaration and the PyTorch operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_engine.backends.reference.dtypes import require_float, wide
from rl_engine.backends.spec import Case, InputMaker, Inputs, Tolerance, Traffic, operator

if TYPE_CHECKING:
    import torch


def _inputs(make: InputMaker, rows: int, cols: int) -> Inputs:
    return Inputs((make.normal(rows, cols, scale=3.0), make.normal(rows, cols)), differentiable=(0, 1))


def _traffic(itemsize: int, rows: int, cols: int) -> Traffic:
    return Traffic(forward=3 * itemsize * rows * cols, backward=5 * itemsize * rows * cols)


@operator(
    "swiglu",
    family="activation",
    contract="swiglu.v1: (g * 1/(1 + exp(-g))) * u in fp32, rounded once",
    inputs=_inputs,
    cases=(
        Case("tiny", {"rows": 3, "cols": 5}),
        Case("odd", {"rows": 17, "cols": 181}),
        Case("empty", {"rows": 0, "cols": 8}),
        Case("small", {"rows": 64, "cols": 12288}, tags=frozenset({"speed"})),
        Case("thr", {"rows": 16384, "cols": 12288}, tags=frozenset({"speed"})),
        Case("thr-moe", {"rows": 131072, "cols": 768}, tags=frozenset({"speed"})),
    ),
    tolerance=Tolerance({"float32": 8, "float16": 1, "bfloat16": 1}, "exp, a division and four products in fp32"),
    traffic=_traffic,
)
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``, computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        gate: [...], bf16, fp16, fp32 or fp64, any strides.
        up: gate's shape and dtype, any strides.

    Returns:
        [...], gate's dtype.

    Raises:
        ValueError: the shapes differ.
        TypeError: the dtypes differ or are not floating point.
    """
    require_float("swiglu", gate=gate, up=up)
    if gate.shape != up.shape:
        raise ValueError(f"swiglu: gate is {list(gate.shape)}, up is {list(up.shape)}; pass equal shapes")
    if gate.dtype != up.dtype:
        raise TypeError(f"swiglu: gate is {gate.dtype}, up is {up.dtype}; pass equal dtypes")
    value = wide(gate)
    return (value * value.sigmoid() * wide(up)).to(gate.dtype)
