"""Embedding lookup: the declaration and the PyTorch operator."""

from __future__ import annotations

import torch

from rl_engine.backends.reference.accumulate import AddInto
from rl_engine.backends.reference.dtypes import require_float, wide
from rl_engine.backends.reference.token_ids import require_ids, validate_ids
from rl_engine.backends.spec import Case, InputMaker, Inputs, Tolerance, Traffic, operator

_THR = {"rows": 16384, "vocab": 151936, "hidden": 4096}


def _inputs(make: InputMaker, rows: int, vocab: int, hidden: int, accumulate: int = 0) -> Inputs:
    args = (make.integers(0, vocab, rows), make.normal(vocab, hidden))
    kwargs = {"accumulate_into": make.normal(vocab, hidden)} if accumulate else {}
    return Inputs(args, kwargs, differentiable=(1,))


def _traffic(
    itemsize: int, rows: int, vocab: int, hidden: int, accumulate: int = 0, **_options: float | None
) -> Traffic:
    """Return int64 ids and rows read, rows written; the gradient written whole, or its rows with a token both ways."""
    ids, tokens = 8 * rows, itemsize * rows * hidden
    backward = tokens + 2 * itemsize * min(rows, vocab) * hidden if accumulate else tokens + itemsize * vocab * hidden
    return Traffic(forward=2 * tokens + ids, backward=backward + (0 if accumulate else ids))


def check_embedding(
    token_ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None, accumulate_into: torch.Tensor | None
) -> int:
    """Return the row that gets no gradient, counted from 0, or -1 for none.

    Raises:
        ValueError: weight is not [vocab, hidden] with both at least 1, padding_idx names none of its rows, or
            accumulate_into has another shape, overlaps itself or requires a gradient.
        TypeError: ids are not int32 or int64, or accumulate_into is neither fp32 nor of weight's dtype.
    """
    require_ids("embedding", token_ids=token_ids)
    if weight.dim() != 2 or not weight.numel():
        raise ValueError(f"embedding: weight is {list(weight.shape)}; pass [vocab, hidden], both at least 1")
    vocab = weight.shape[0]
    if padding_idx is not None and not -vocab <= padding_idx < vocab:
        raise ValueError(f"embedding: padding_idx is {padding_idx}; pass a row of weight, in [{-vocab}, {vocab})")
    if accumulate_into is not None:
        _check_accumulator(accumulate_into, weight)
    return -1 if padding_idx is None else padding_idx % vocab


def _check_accumulator(into: torch.Tensor, weight: torch.Tensor) -> None:
    if into.shape != weight.shape:
        raise ValueError(
            f"embedding: accumulate_into is {list(into.shape)}, weight is {list(weight.shape)}; pass equal shapes"
        )
    if into.dtype not in (weight.dtype, torch.float32):
        raise TypeError(f"embedding: accumulate_into is {into.dtype}; pass float32 or weight's {weight.dtype}")
    vocab, hidden = into.shape
    if (hidden > 1 and into.stride(1) != 1) or (vocab > 1 and into.stride(0) < hidden):
        raise ValueError(
            f"embedding: accumulate_into has strides {into.stride()}; pass rows of neighbouring columns that do not"
            " overlap"
        )
    if into.requires_grad:
        raise ValueError("embedding: accumulate_into requires a gradient; pass its .detach()")


@operator(
    "embedding",
    family="embedding",
    contract=(
        "embedding.v1: y = w[id], bit for bit, or fp32(w[id]) * fp32(scale) rounded once; NaN outside the vocabulary;"
        " dw of a row = its tokens' dy in ascending order, cut into chunks of 32 ranks, each an ascending fp32 chain"
        " from +0, chunk sums added ascending, times fp32(scale) unless that is 1, rounded once; accumulated:"
        " fp32(old) + sum, or fma(sum, scale, old), rounded once, rows with a token only"
    ),
    inputs=_inputs,
    cases=(
        Case("tiny", {"rows": 5, "vocab": 7, "hidden": 16}),
        Case("odd", {"rows": 37, "vocab": 97, "hidden": 181}),
        Case("one", {"rows": 3, "vocab": 1, "hidden": 1}),
        Case("hot", {"rows": 200, "vocab": 3, "hidden": 24}),
        Case("two-blocks", {"rows": 1100, "vocab": 40, "hidden": 8}),  # of the sort
        Case("scaled", {"rows": 60, "vocab": 40, "hidden": 24}, {"scale": 1.625, "padding_idx": 2}),
        Case("accumulate", {"rows": 150, "vocab": 3, "hidden": 520, "accumulate": 1}),
        Case("empty", {"rows": 0, "vocab": 5, "hidden": 8}),
        Case("small", {"rows": 64, "vocab": 151936, "hidden": 4096}, tags=frozenset({"speed"})),
        Case("thr", _THR, tags=frozenset({"speed"})),
        Case("thr-accum", {**_THR, "accumulate": 1}, tags=frozenset({"speed"})),
    ),
    tolerance=Tolerance(
        {"float32": 8, "float16": 1, "bfloat16": 1}, "a copy; chains of 32 of at most a few hundred rows, one rounding"
    ),
    traffic=_traffic,
)
def embedding(
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    *,
    padding_idx: int | None = None,
    scale: float = 1.0,
    accumulate_into: torch.Tensor | None = None,
    validate: bool = False,
) -> torch.Tensor:
    """Return ``weight[token_ids] * scale``, computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        token_ids: [...], int32 or int64, any strides. An id outside [0, vocab) gives a row of NaN and no gradient.
        weight: [vocab, hidden], bf16, fp16, fp32 or fp64, any strides.
        padding_idx: a row that is looked up as any other and gets no gradient; negative ones count from the end.
        scale: factor of every row, 1.0 for none.
        accumulate_into: [vocab, hidden], fp32 or weight's dtype: backward adds weight's gradient to it, in place,
            and weight itself gets none.
        validate: raise for ids out of range, at the price of waiting for the device.

    Returns:
        [..., hidden], weight's dtype.

    Raises:
        ValueError: weight is not [vocab, hidden], padding_idx is none of its rows, accumulate_into does not fit, or
            ``validate`` found an id out of range.
        TypeError: weight is not floating point, ids are not int32 or int64, or accumulate_into has another dtype.
    """
    require_float("embedding", weight=weight)
    padding = check_embedding(token_ids, weight, padding_idx, accumulate_into)
    vocab = weight.shape[0]
    if validate:
        validate_ids("embedding", token_ids, vocab)
    # wide before the lookup: PyTorch sums repeated rows in the table's dtype, and bf16 stops growing at 256
    table = wide(weight)
    if accumulate_into is not None:
        table = AddInto.apply(table, accumulate_into)  # type: ignore[no-untyped-call]  # torch
    inside = (token_ids >= 0) & (token_ids < vocab)
    rows = table[torch.where(inside, token_ids, 0).long()]
    if scale != 1.0:  # a product, even by 1, gives NaN the bits of the device's own
        rows = rows * scale
    rows = torch.where((token_ids == padding).unsqueeze(-1), rows.detach(), rows)
    return torch.where(inside.unsqueeze(-1), rows, float("nan")).to(weight.dtype)
