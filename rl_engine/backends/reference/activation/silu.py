"""SiLU: the declaration and the PyTorch operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_engine.backends.reference.dtypes import require_float, wide
from rl_engine.backends.spec import Case, InputMaker, Inputs, Tolerance, Traffic, operator

if TYPE_CHECKING:
    import torch


def _inputs(make: InputMaker, rows: int, cols: int) -> Inputs:
    return Inputs((make.normal(rows, cols, scale=3.0),))


def _traffic(itemsize: int, rows: int, cols: int) -> Traffic:
    return Traffic(forward=2 * itemsize * rows * cols, backward=3 * itemsize * rows * cols)


@operator(
    "silu",
    family="activation",
    contract="silu.v1: x * 1/(1 + exp(-x)) in fp32, rounded once",
    inputs=_inputs,
    cases=(
        Case("tiny", {"rows": 3, "cols": 7}),
        Case("odd", {"rows": 17, "cols": 181}),
        Case("empty", {"rows": 0, "cols": 8}),
        Case("small", {"rows": 64, "cols": 12288}, tags=frozenset({"speed"})),
        Case("thr", {"rows": 16384, "cols": 12288}, tags=frozenset({"speed"})),
    ),
    tolerance=Tolerance({"float32": 8, "float16": 1, "bfloat16": 1}, "exp, a division and three products in fp32"),
    traffic=_traffic,
)
def silu(x: torch.Tensor) -> torch.Tensor:
    """Return ``x * sigmoid(x)``, computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        x: [...], bf16, fp16, fp32 or fp64, any strides.

    Returns:
        [...], x's dtype.

    Raises:
        TypeError: x has another dtype.
    """
    require_float("silu", x=x)
    value = wide(x)
    return (value * value.sigmoid()).to(x.dtype)
