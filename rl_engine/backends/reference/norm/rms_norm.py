"""RMSNorm: the declaration and the PyTorch operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch

from rl_engine.backends.reference.dtypes import require_float, wide
from rl_engine.backends.spec import Case, InputMaker, Inputs, Tolerance, Traffic, operator

if TYPE_CHECKING:
    from collections.abc import Sequence

CastingMode = Literal["none", "llama", "gemma"]
_CASTING_MODES = get_args(CastingMode)


def _inputs(make: InputMaker, rows: int, hidden: int, heads: int = 0, stride: int = 0) -> Inputs:
    """Make x [rows, hidden], or a slice that needs no copy.

    Args:
        make: the caller's.
        rows: of x.
        hidden: their length.
        heads: where given, x is [rows, heads, hidden], cut from rows of more heads, as q from a packed qkv.
        stride: where given, what one row takes in memory, as of kv_a beside its rotary part.
    """
    x = make.normal(rows, heads + 2, hidden)[:, 1:-1] if heads else make.normal(rows, stride or hidden)[:, :hidden]
    return Inputs((x, make.normal(hidden)), differentiable=(0, 1))


def _traffic(itemsize: int, rows: int, hidden: int, heads: int = 0, stride: int = 0, **_options: object) -> Traffic:
    """Count x, dy, y and dx, fp32 rstd, the weight and its gradient, and fp32 sums of 128 groups of rows, read back."""
    del stride  # what lies between the rows is not read
    rows *= heads or 1
    elements, sums = rows * hidden, 8 * hidden * min(-(-rows // 128), 128)
    return Traffic(
        forward=2 * itemsize * elements + 4 * rows,
        backward=3 * itemsize * elements + 4 * rows + 2 * itemsize * hidden + sums,
    )


def check_rms_norm(x: torch.Tensor, weight: torch.Tensor, casting_mode: str) -> None:
    """Raise ValueError unless ``weight`` is [hidden] for ``x`` [..., hidden], hidden at least 1, and the mode known."""
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"rms_norm: x is {_shape(x)}; pass [..., hidden] with hidden of at least 1")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight is {_shape(weight)}, x is {_shape(x)}; pass weight of shape [{x.shape[-1]}]"
        )
    if casting_mode not in _CASTING_MODES:
        raise ValueError(
            f"rms_norm: casting_mode is {casting_mode!r}; pass one of {', '.join(map(repr, _CASTING_MODES))}"
        )


@operator(
    "rms_norm",
    family="norm",
    contract=(
        "rms_norm.v1: row sums fold neighbours over the row padded with zeros to a power of two;"
        " rstd = rsqrt(fma(sum, fp32(1/H), eps)); y = x * rstd * w in fp32, rounded once;"
        " dw = ascending fma chains over leaves of 32 rows, leaves folded neighbours first;"
        " casting_mode llama: x * rstd rounded to x's dtype, in y and in dw; gemma: w + 1 in fp32 in place of w"
    ),
    inputs=_inputs,
    cases=(
        Case("tiny", {"rows": 3, "hidden": 8}),
        Case("odd", {"rows": 37, "hidden": 181}),
        Case("one", {"rows": 2, "hidden": 1}),
        Case("wide", {"rows": 3, "hidden": 20000}),
        Case("heads", {"rows": 11, "hidden": 24, "heads": 4}),
        Case("llama", {"rows": 37, "hidden": 40}, {"casting_mode": "llama"}),
        Case("gemma", {"rows": 37, "hidden": 40}, {"casting_mode": "gemma"}),
        Case("strided", {"rows": 35, "hidden": 24, "stride": 40}),
        Case("many", {"rows": 8500, "hidden": 1030}, tags=frozenset({"gpu"})),  # enough for the fused backward
        Case("empty", {"rows": 0, "hidden": 8}),
        Case("small", {"rows": 64, "hidden": 4096}, tags=frozenset({"speed"})),
        Case("thr", {"rows": 16384, "hidden": 4096}, tags=frozenset({"speed"})),
        Case("thr-wide", {"rows": 16384, "hidden": 8192}, tags=frozenset({"speed"})),
        Case("qk-small", {"rows": 2560, "hidden": 128}, tags=frozenset({"speed"})),
        Case("qk-thr", {"rows": 655360, "hidden": 128}, tags=frozenset({"speed"})),
        Case("kv_a", {"rows": 16384, "hidden": 512, "stride": 576}, tags=frozenset({"speed"})),
    ),
    tolerance=Tolerance({"float32": 16, "float16": 2, "bfloat16": 2}, "a balanced sum of hidden squares, rsqrt"),
    traffic=_traffic,
)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, casting_mode: CastingMode = "none"
) -> torch.Tensor:
    """Return ``x / sqrt(mean(x**2, -1) + eps) * weight``, computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        x: [..., hidden], bf16, fp16, fp32 or fp64, any strides.
        weight: [hidden], any of these dtypes; it may be wider than x.
        eps: added to the mean square (Zhang and Sennrich, arXiv:1910.07467).
        casting_mode: what is rounded, and what the weight is. "none": as above. "llama": the normalised x is rounded to
            x's dtype before weight multiplies it, as in Hugging Face's LlamaRMSNorm and Qwen's (which return the wider
            dtype of the two; this returns x's). "gemma": 1 + weight multiplies, as in GemmaRMSNorm.

    Returns:
        [..., hidden], x's dtype.

    Raises:
        ValueError: weight's shape is not [hidden], hidden is 0, or an unknown casting_mode.
        TypeError: a dtype is not floating point.
    """
    require_float("rms_norm", x=x, weight=weight)
    check_rms_norm(x, weight, casting_mode)
    value, scale = wide(x), wide(weight)
    normal = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    if casting_mode == "llama":
        normal = wide(normal.to(x.dtype))
    elif casting_mode == "gemma":
        scale = 1.0 + scale
    return (normal * scale).to(x.dtype)


def _shape(tensor: torch.Tensor) -> Sequence[int]:
    return list(tensor.shape)
