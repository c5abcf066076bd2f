"""Deterministic GEMM: the declaration and the PyTorch operator."""

from __future__ import annotations

import itertools
from typing import Any, Literal, get_args

import torch

from rl_engine.backends.reference.accumulate import AddInto
from rl_engine.backends.reference.dtypes import require_float, wide
from rl_engine.backends.spec import Case, InputMaker, Inputs, Tolerance, Traffic, operator

InputPrecision = Literal["ieee", "tf32"]
_INPUT_PRECISIONS = get_args(InputPrecision)
_MATRIX = 2  # axes


def _inputs(
    make: InputMaker, rows: int, inner: int, cols: int, batch: int = 0, groups: int = 0, weight: int = 0, bias: int = 0,
    accumulate: int = 0,
) -> Inputs:  # fmt: skip
    """Make a [rows, inner] and b [inner, cols], a batch of both or one b a group; a weight is [cols, inner].mT."""
    if batch:
        return Inputs((make.normal(batch, rows, inner), make.normal(batch, inner, cols)), differentiable=(0, 1))
    lead = (groups,) if groups else ()
    a = make.normal(rows, inner)
    b = make.normal(*lead, cols, inner).mT if weight else make.normal(*lead, inner, cols)
    kwargs: dict[str, Any] = {}
    if groups:
        starts = torch.arange(groups + 1) * rows // groups
        kwargs["offsets"] = starts.to(a.device)
    if accumulate:
        kwargs["accumulate_into"] = make.normal(*lead, inner, cols, dtype=torch.float32)
    args = (a, b, make.normal(cols)) if bias else (a, b)
    return Inputs(args, kwargs, differentiable=tuple(range(len(args))))


def _traffic(
    itemsize: int, rows: int, inner: int, cols: int, batch: int = 0, groups: int = 0, **_options: object
) -> Traffic:
    """Count a, b and their product once a pass; backward reads dy and both, and writes two gradients."""
    times, weights = max(batch, 1), max(batch, groups, 1)
    forward = itemsize * (times * rows * (inner + cols) + weights * inner * cols)
    flops = 2 * times * rows * inner * cols
    # two products, each of which reads dy: dx from b, db from a
    return Traffic(forward=forward, backward=2 * forward, forward_flops=flops, backward_flops=2 * flops)


def _speed(name: str, rows: int, inner: int, cols: int, **more: int) -> Case:
    sizes = {"rows": rows, "inner": inner, "cols": cols, "weight": 1, **more}
    return Case(name, sizes, tags=frozenset({"speed", "matrix"}))


def check_det_gemm(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor | None,
    out_dtype: torch.dtype | None, input_precision: str, accumulate_into: torch.Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError for shapes, TypeError for dtypes that do not fit; see `det_gemm`."""
    if b.dtype != a.dtype:
        raise TypeError(f"det_gemm: a is {a.dtype}, b is {b.dtype}; pass equal dtypes")
    if out_dtype not in (None, a.dtype, torch.float32):
        raise TypeError(f"det_gemm: out_dtype is {out_dtype}; pass None, {a.dtype} or float32")
    if input_precision not in _INPUT_PRECISIONS:
        raise ValueError(f"det_gemm: input_precision is {input_precision!r}; pass 'ieee' or 'tf32'")
    if a.dim() == 0 or b.dim() < _MATRIX or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"det_gemm: a is {list(a.shape)}, b is {list(b.shape)}; pass a [..., K] and b [..., K, N]")
    if offsets is None:
        if b.dim() > _MATRIX and a.shape[:-2] != b.shape[:-2]:
            raise ValueError(
                f"det_gemm: a is {list(a.shape)}, b is {list(b.shape)}; pass equal leading axes, or b [K, N]"
            )
    else:
        _check_offsets(a, b, offsets)
    if bias is not None and (b.dim() > _MATRIX or bias.shape != b.shape[-1:]):
        raise ValueError(
            f"det_gemm: bias is {list(bias.shape)}, b is {list(b.shape)}; pass bias [{b.shape[-1]}] with b [K, N]"
        )
    if accumulate_into is not None:
        _check_accumulator(accumulate_into, b)


def _check_offsets(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> None:
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"det_gemm: offsets are {offsets.dtype}; pass int32 or int64")
    if a.dim() != _MATRIX or b.dim() != _MATRIX + 1:
        raise ValueError(
            f"det_gemm: a is {list(a.shape)}, b is {list(b.shape)}; with offsets pass a [rows, K] and b [groups, K, N]"
        )
    if offsets.shape != (len(b) + 1,) or not offsets.is_contiguous():
        raise ValueError(
            f"det_gemm: offsets are {list(offsets.shape)}, b is {list(b.shape)}; pass [{len(b) + 1}], contiguous"
        )


def _check_accumulator(into: torch.Tensor, b: torch.Tensor) -> None:
    if into.dtype not in (torch.float32, wide(b).dtype):
        raise TypeError(f"det_gemm: accumulate_into is {into.dtype}; pass float32, which the sums are kept in")
    if into.shape != b.shape or not (into.is_contiguous() or into.mT.is_contiguous()):
        raise ValueError(
            f"det_gemm: accumulate_into is {list(into.shape)} with strides {into.stride()}, b is {list(b.shape)};"
            " pass b's shape, contiguous as it is or with its last axes exchanged"
        )
    if into.requires_grad:
        raise ValueError("det_gemm: accumulate_into requires a gradient; pass its .detach()")


@operator(
    "det_gemm",
    family="gemm",
    contract=(
        "det_gemm.v1: one fp32 chain an element, ascending over groups of K (16 of bf16 and fp16, 8 of tf32, 1 fused"
        " multiply-add of ieee fp32) padded with zeros, begun with +0 or with accumulate_into; bias added in fp32;"
        " rounded once; bits depend on K and on the element's row of a and column of b only; da = dy b^T, db = a^T dy"
        " and dbias = 1^T dy are such products of dy rounded to a's dtype"
    ),
    inputs=_inputs,
    cases=(
        Case("tiny", {"rows": 3, "inner": 8, "cols": 5}),
        Case("odd", {"rows": 37, "inner": 83, "cols": 41}),
        Case("one", {"rows": 2, "inner": 1, "cols": 1}),
        Case("weight", {"rows": 19, "inner": 32, "cols": 24, "weight": 1}),
        Case("bias", {"rows": 19, "inner": 32, "cols": 24, "bias": 1}),
        Case("wide-out", {"rows": 19, "inner": 32, "cols": 24}, {"out_dtype": torch.float32}),
        Case("batch", {"rows": 5, "inner": 24, "cols": 16, "batch": 3}),
        Case("groups", {"rows": 50, "inner": 24, "cols": 16, "groups": 4}),
        Case("experts", {"rows": 300, "inner": 64, "cols": 72, "groups": 3}),
        Case("accumulate", {"rows": 32, "inner": 24, "cols": 16, "accumulate": 1}),
        Case("accumulate-groups", {"rows": 50, "inner": 24, "cols": 16, "groups": 3, "accumulate": 1}),
        Case("empty", {"rows": 0, "inner": 8, "cols": 5}),
        _speed("m1-qkv", 1, 4096, 6144),
        _speed("m16-gate-up", 16, 4096, 24576),
        _speed("m64-down", 64, 12288, 4096),
        _speed("m128-o", 128, 4096, 4096),
        _speed("small", 128, 4096, 6144),
        _speed("thr-qkv", 8192, 4096, 6144),
        _speed("thr", 16384, 4096, 24576),
        _speed("thr-down", 16384, 12288, 4096),
        _speed("thr-square", 8192, 8192, 8192),
        _speed("thr-70b", 8192, 8192, 57344),
        _speed("thr-q-b", 8192, 1536, 24576),
        _speed("thr-32b", 4096, 5120, 51200),
        _speed("thr-moe", 131072, 2048, 1536, groups=128),
    ),
    tolerance=Tolerance({"float32": 16, "float16": 1, "bfloat16": 1}, "chains of K products in fp32, one rounding"),
    traffic=_traffic,
)
def det_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    offsets: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    input_precision: InputPrecision = "ieee",
    accumulate_into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``a @ b + bias``, computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        a: [..., M, K], or [..., K] with b [K, N]: bf16, fp16, fp32 or fp64, any strides.
        b: [K, N], [..., K, N] with a's leading axes, or [groups, K, N] with offsets; a's dtype.
        bias: [N], with b [K, N] only.
        offsets: [groups + 1], int32 or int64, rising: row r of a [rows, K] is multiplied by b[g] where
            offsets[g] <= r < offsets[g + 1]; rows of no group give zeros.
        out_dtype: a's dtype (None) or float32.
        input_precision: "ieee" or "tf32": what a card may round fp32 operands to; here both are "ieee".
        accumulate_into: b's shape, fp32, contiguous as it is or with its last axes exchanged: backward adds b's
            gradient to it, in place, and b gets none.

    Returns:
        [..., M, N].

    Raises:
        ValueError: shapes that do not fit, or another input_precision.
        TypeError: dtypes that differ or are not floating point.
    """
    require_float("det_gemm", a=a, b=b)
    check_det_gemm(a, b, bias, offsets, out_dtype, input_precision, accumulate_into)
    x, y = wide(a), wide(b)
    if accumulate_into is not None:
        y = AddInto.apply(y, accumulate_into)  # type: ignore[no-untyped-call]  # torch
    out = x @ y if offsets is None else _segments(x, y, offsets)
    out = out if bias is None else out + wide(bias)
    # fp64 stays fp64: the ground truth of an fp32 result
    return out if a.dtype == torch.float64 else out.to(out_dtype or a.dtype)


def _segments(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    bounds = offsets.clamp(0, len(a)).cummax(0).values.tolist()
    pieces = [a[: bounds[0]] @ torch.zeros_like(b[0])]
    pieces += [a[start:end] @ b[group] for group, (start, end) in enumerate(itertools.pairwise(bounds))]
    return torch.cat([*pieces, a[bounds[-1] :] @ torch.zeros_like(b[0])])
