"""RMSNorm: the declaration and the PyTorch operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_engine.backends.reference.dtypes import require_float, wide
from rl_engine.backends.spec import Case, InputMaker, Inputs, Tolerance, operator

if TYPE_CHECKING:
    from collections.abc import Sequence


def _inputs(make: InputMaker, rows: int, hidden: int) -> Inputs:
    return Inputs((make.normal(rows, hidden), make.normal(hidden)), differentiable=(0, 1))


def check_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise ValueError unless ``weight`` is [hidden] for ``x`` [..., hidden] and hidden is at least 1."""
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"rms_norm: x is {_shape(x)}; pass [..., hidden] with hidden of at least 1")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight is {_shape(weight)}, x is {_shape(x)}; pass weight of shape [{x.shape[-1]}]"
        )


@operator(
    "rms_norm",
    family="norm",
    contract=(
        "rms_norm.v1: row sums fold neighbours over the row padded with zeros to a power of two;"
        " rstd = rsqrt(fma(sum, fp32(1/H), eps)); y = x * rstd * w in fp32, rounded once;"
        " dw = ascending fma chains over leaves of 32 rows, leaves folded neighbours first"
    ),
    inputs=_inputs,
    cases=(
        Case("tiny", {"rows": 3, "hidden": 8}),
        Case("odd", {"rows": 37, "hidden": 181}),
        Case("one", {"rows": 2, "hidden": 1}),
        Case("wide", {"rows": 3, "hidden": 20000}),
        Case("empty", {"rows": 0, "hidden": 8}),
        Case("small", {"rows": 64, "hidden": 4096}, tags=frozenset({"speed"})),
        Case("thr", {"rows": 16384, "hidden": 4096}, tags=frozenset({"speed"})),
        Case("thr-wide", {"rows": 16384, "hidden": 8192}, tags=frozenset({"speed"})),
        Case("thr-qk", {"rows": 655360, "hidden": 128}, tags=frozenset({"speed"})),
    ),
    tolerance=Tolerance({"float32": 16, "float16": 2, "bfloat16": 2}, "a balanced sum of hidden squares, rsqrt"),
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return ``x / sqrt(mean(x**2, -1) + eps) * weight``, computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        x: [..., hidden], bf16, fp16, fp32 or fp64, any strides.
        weight: [hidden], any of these dtypes; it may be wider than x.
        eps: added to the mean square (Zhang and Sennrich, arXiv:1910.07467).

    Returns:
        [..., hidden], x's dtype.

    Raises:
        ValueError: weight's shape is not [hidden], or hidden is 0.
        TypeError: a dtype is not floating point.
    """
    require_float("rms_norm", x=x, weight=weight)
    check_rms_norm(x, weight)
    value = wide(x)
    rstd = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (value * rstd * wide(weight)).to(x.dtype)


def _shape(tensor: torch.Tensor) -> Sequence[int]:
    return list(tensor.shape)
