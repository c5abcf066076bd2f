"""Embedding: y = w[id], or fp32(w[id]) * scale rounded once; the gradient of w is in `gradient`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from rl_engine.backends.reference.embedding.embedding import check_embedding
from rl_engine.backends.reference.token_ids import validate_ids
from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import TunableKernel, pin_autotune, pinned_backward
from rl_engine.backends.shared.triton.compiler import is_interpreter, unavailable
from rl_engine.backends.shared.triton.embedding.gradient import (
    add_gradient,
    admits_blocks,
    block_of,
    gradient,
)
from rl_engine.backends.shared.triton.graph import differentiate, graph_operator
from rl_engine.backends.spec import implements

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_engine.platforms.device import DeviceIdentity


def _fixed_tokens(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    """Return 4096 elements a program, and fewer where multiprocessors would stay idle."""
    n_tokens, n_cols = sizes["n_tokens"], sizes["COLS"]
    block = block_of(n_cols, 2048 if n_tokens * n_cols >= 2048 * 8 * device.sm_count else 1024, device)
    most, programs = (operands.INTERPRETED_TILE, 1) if is_interpreter(device.arch) else (4096, 8 * device.sm_count)
    rows = operands.rows_a_program(n_tokens, most // block, programs)
    return {"ROWS": rows, "BLOCK": block, "num_warps": 8 if rows * block >= 4096 else 4}


@TunableKernel(
    outputs=("out_ptr",),
    data=("weight_ptr",),
    dynamic=("n_tokens",),
    fixed=_fixed_tokens,
    neutral={"ROWS": (1, 2, 4), "BLOCK": (16, 64, 256, 512, 1024, 2048, 4096), "num_warps": (4, 8)},  # no sum at all
    admits=admits_blocks,
)
@triton.jit(do_not_specialize=["n_tokens"])
def _embedding_fwd_kernel(
    id_ptr, weight_ptr, out_ptr, n_tokens, vocab, id_stride, weight_stride, scale,
    SCALED: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n_blocks: tl.constexpr = (COLS + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // n_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) % n_blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = token < n_tokens
    row = tl.load(id_ptr + token * id_stride, mask=inside, other=-1).to(tl.int64)
    # masks that are equal along a row leave 16-byte accesses whole; masks of columns only where a block is not
    known, written = ((row >= 0) & (row < vocab))[:, None], inside[:, None]
    if COLS % BLOCK != 0:
        known, written = known & (col < COLS)[None, :], written & (col < COLS)[None, :]
    w = tl.load(weight_ptr + (row * weight_stride)[:, None] + col[None, :], mask=known, other=float("nan"))
    if SCALED:
        w = (w.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * COLS)[:, None] + col[None, :], w, mask=written)


def _by_tiles(meta: Mapping[str, Any]) -> tuple[int]:
    return (-(-meta["n_tokens"] // meta["ROWS"]) * -(-meta["COLS"] // meta["BLOCK"]),)


def _forward(weight: torch.Tensor, token_ids: torch.Tensor, padding: int, scale: float) -> torch.Tensor:
    """Return the rows; ``padding`` is for backward alone."""
    vocab, n_cols = weight.shape
    out = torch.empty((*token_ids.shape, n_cols), dtype=weight.dtype, device=weight.device)
    if token_ids.numel():
        table, ids = operands.as_rows(weight), token_ids.reshape(-1)
        _embedding_fwd_kernel[_by_tiles](
            ids, table, out, len(ids), vocab, ids.stride(0), table.stride(0), scale, SCALED=scale != 1.0, COLS=n_cols
        )
    return out


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, token_ids, padding, scale, into):
        pin_autotune(ctx)
        ctx.save_for_backward(token_ids)
        ctx.options = (weight.shape[0], padding, scale)
        ctx.into = into  # not saved: a saved tensor must not change, and every backward changes this one
        return _forward(weight, token_ids, padding, scale)

    @staticmethod
    @once_differentiable
    @pinned_backward
    def backward(ctx, dy):
        (token_ids,) = ctx.saved_tensors
        dw = None
        if ctx.into is None:
            dw = gradient(token_ids, dy, *ctx.options)
        else:
            add_gradient(ctx.into, token_ids, dy, *ctx.options[1:])
        return dw, None, None, None, None


def _fake_forward(weight: torch.Tensor, token_ids: torch.Tensor, _padding: int, _scale: float) -> torch.Tensor:
    return torch.empty((*token_ids.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device)


_graph_forward = graph_operator("embedding", _forward, fake=_fake_forward)
_graph_backward = graph_operator(
    "embedding_backward",
    gradient,
    fake=lambda _ids, dy, vocab, *_options: torch.empty((vocab, dy.shape[-1]), dtype=dy.dtype, device=dy.device),
    phase="backward",
)
differentiate(
    _graph_forward,
    lambda token_ids, vocab, padding, scale, dy: (
        _graph_backward(token_ids, dy, vocab, padding, scale),
        None,
        None,
        None,
    ),
    lambda inputs, _out: (inputs[1], inputs[0].shape[0], *inputs[2:]),
)


def _eager(
    weight: torch.Tensor, token_ids: torch.Tensor, padding: int, scale: float, into: torch.Tensor | None
) -> torch.Tensor:
    if operands.grad_enabled(weight):
        return _Embedding.apply(weight, token_ids, padding, scale, into)
    return _forward(weight, token_ids, padding, scale)


_door = operands.Door("embedding", "token_ids", "weight", "accumulate_into", any_dtype=("token_ids",))


@implements("embedding", backend_id="rlkernel.triton.embedding", unavailable=unavailable)
def embedding(
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    *,
    padding_idx: int | None = None,
    scale: float = 1.0,
    accumulate_into: torch.Tensor | None = None,
    validate: bool = False,
) -> torch.Tensor:
    """Return ``weight[token_ids] * scale``; without a scale the rows' own bits, else fp32 products rounded once.

    The gradient of a row is the sum over its tokens in ascending order, in fp32, rounded once: its bits depend on
    those tokens' gradients alone, not on where other tokens stand, on grid or card.

    Args:
        token_ids: [...], int32 or int64, any strides. An id outside [0, vocab) gives a row of NaN and no gradient;
            nothing is read or written out of bounds.
        weight: [vocab, hidden], bf16, fp16 or fp32; rows of neighbouring columns are read in place, others copied.
        padding_idx: a row that is looked up as any other and gets no gradient; negative ones count from the end.
        scale: factor of every row, 1.0 for none.
        accumulate_into: [vocab, hidden], fp32 or weight's dtype, on weight's device, rows of neighbouring columns:
            backward adds weight's gradient to it, in place, and weight itself gets none. Rows without a token are
            neither read nor written. It breaks a graph of torch.compile.
        validate: raise for ids out of range, at the price of waiting for the device.

    Returns:
        [..., hidden], weight's dtype, contiguous.

    Raises:
        ValueError: weight is not [vocab, hidden], padding_idx is none of its rows, accumulate_into does not fit,
            devices disagree, or ``validate`` found an id out of range.
        TypeError: a tensor subclass, weight of another dtype, ids that are not int32 or int64, or accumulate_into of
            another dtype.
    """
    _door(token_ids, weight, accumulate_into)
    padding = check_embedding(token_ids, weight, padding_idx, accumulate_into)
    if validate:
        validate_ids("embedding", token_ids, weight.shape[0])
    if not torch.compiler.is_compiling():
        return _eager(weight, token_ids, padding, float(scale), accumulate_into)
    if accumulate_into is not None:  # backward writes to it, which no graph may hold: the graph breaks here
        return torch.compiler.disable(_eager)(weight, token_ids, padding, float(scale), accumulate_into)
    return _graph_forward(weight, token_ids, padding, float(scale))
