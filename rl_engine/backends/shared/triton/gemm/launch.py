"""From tensors to a launch: which path and tile the rule says, operands swapped or not, strides and flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_engine.backends.shared.triton.compiler import interpreted
from rl_engine.backends.shared.triton.descriptors import describable, lies_transposed
from rl_engine.backends.shared.triton.distinct import Ready
from rl_engine.backends.shared.triton.gemm.persistent import persistent
from rl_engine.backends.shared.triton.gemm.rule import (
    INTERPRETED,
    LEAST,
    Plan,
    Precision,
    dot_precision,
    parts,
    persistent_programs,
    plan,
    reads_descriptors,
)
from rl_engine.backends.shared.triton.gemm.segments import ENTRY, by_table, table
from rl_engine.backends.shared.triton.gemm.tiles import groups, tiles
from rl_engine.backends.shared.triton.operands import power_of_two
from rl_engine.platforms import device

if TYPE_CHECKING:
    from rl_engine.platforms.device import DeviceIdentity

_INTERPRETED = interpreted(tiles.fn)  # whatever device is known: its tile decides NumPy's order of sums
_REACH = 1 << 31  # elements that 32-bit lanes of a tile get to
_BATCHED = 3  # axes
_ROWS = 64  # of a tile from which a segment's tiles are worth a table


def ready(
    found: Plan,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    precision: Precision,
    *,
    bias: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
) -> Ready:
    """Return the launch that writes ``start + a @ b + bias`` to ``out`` in a given way.

    Args:
        found: path and tile; described only where all three matrices can be.
        a: [m, k] or [batch, m, k].
        b: [k, n] or [batch, k, n].
        out: [m, n] or [batch, m, n], not empty; its elements do not overlap.
        precision: of fp32 operands.
        bias: [n], contiguous, without a batch, with rows of neighbours in ``out``.
        start: what the chains begin with, of ``out``'s shape and strides; it may be ``out``. None for zeros.
    """
    card = identify(a)
    if found.swapped:
        a, b, out, start = b.mT, a.mT, out.mT, turned(start)
    if found.described:
        return _persistent(a, b, out, bias, start, found, card)
    batches = len(a) if a.dim() == _BATCHED else 1
    return _tiles(a, b, out, found, dot_precision(precision, card), bias=bias, start=start, batches=batches)


def multiply_as(
    found: Plan,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    precision: Precision,
    *,
    bias: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    **options: int,
) -> None:
    """Compute a product in a given way: arguments as in `ready`, ``options`` as in its `Ready.launch`."""
    ready(found, a, b, out, precision, bias=bias, start=start).launch(**options)


def multiply_segments(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, precision: Precision
) -> None:
    """Write ``a[r] @ b[g]`` to ``out`` for the rows r of segment g, zeros for rows of none.

    Args:
        a: [rows, k].
        b: [groups, k, n].
        offsets: [groups + 1]: segment g is rows offsets[g] to offsets[g + 1].
        out: [rows, n], contiguous.
        precision: of fp32 operands.
    """
    if not out.numel():
        return
    card = identify(a)
    rows, n_groups, k, n = len(a), *b.shape
    block_m, block_n, block_k = _segment_tile(rows, n_groups, n, k, precision, card)
    tile = Plan(block_m, block_n, block_k, described=True)
    if block_m >= _ROWS and reads_descriptors(precision, card) and _stacked(a, b, out, tile):
        multiply_by_table(a, b, offsets, out, tile, card)
        return
    grid = ((rows // block_m + n_groups + 2) * -(-n // block_n),)
    groups[grid](
        a, b, offsets, out, rows, n, k, n_groups, *a.stride(), *b.stride(), out.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, TAIL=k % block_k != 0, N_ALIGNED=n % LEAST == 0,
        WIDE=_is_wide(block_m, block_n, block_k, a.stride(), b.stride()[1:], (out.stride(0), 1)),
        LANES=power_of_two(n_groups + 3), PRECISION=dot_precision(precision, card),
    )  # fmt: skip


def _stacked(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, tile: Plan) -> bool:
    """Return whether a, out, and b as one matrix can be described, and no tile of b reaches into the next group."""
    n_groups, k, n = b.shape
    if lies_transposed(a) or not (describable(a) and describable(out)):
        return False
    if max(len(a), n_groups * max(k, n)) >= _REACH:  # rows are numbered by 32 bits
        return False
    if lies_transposed(b):  # columns are neighbours of the next group's: more of them are computed, and not stored
        return b.mT.is_contiguous() and k * b.element_size() % LEAST == 0
    return b.is_contiguous() and k % tile.block_k == 0 and n * b.element_size() % LEAST == 0


def multiply_by_table(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, tile: Plan, card: DeviceIdentity
) -> None:
    """Do as `multiply_segments` through descriptors, for operands that fit them (`_stacked`)."""
    rows, n_groups, k, n = len(a), *b.shape
    row_tiles = rows // tile.block_m + n_groups + 2  # at the most: a tile that is not full for every segment
    entries = torch.empty((1 + row_tiles) * ENTRY, dtype=torch.int32, device=a.device)
    lanes = power_of_two(n_groups + 3)
    table[(row_tiles,)](offsets, entries, out, rows, n, n_groups, out.stride(0), LANES=lanes, BLOCK_M=tile.block_m)
    turned_b = lies_transposed(b)
    stacked = b.mT.reshape(n_groups * n, k) if turned_b else b.reshape(n_groups * k, n)
    grid = (min(row_tiles * -(-n // tile.block_n), card.sm_count),)
    by_table[grid](
        a, stacked.mT if turned_b else stacked, out, entries, rows, n, k, n if turned_b else k, out.stride(0),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, B_T=turned_b, N_ALIGNED=n % LEAST == 0,
        PARTS=parts(tile, out.element_size()), PRECISION=None,
    )  # fmt: skip


def multiply_depths(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
    precision: Precision,
    *,
    start: torch.Tensor | None = None,
) -> None:
    """Write ``start[g] + a[:, s] @ b[s]`` to ``out[g]``, s the rows of segment g: a weight's gradient.

    Args:
        a: [m, rows].
        b: [rows, n].
        offsets: [groups + 1].
        out: [groups, m, n].
        precision: of fp32 operands.
        start: of ``out``'s shape and strides; it may be ``out``. None for zeros.
    """
    if not out.numel():
        return
    if lies_transposed(out):
        a, b, out, start = b.mT, a.mT, out.mT, turned(start)
    card = identify(a)
    found = plan(*out.shape[1:], a.shape[1], precision, card, describable=False)
    if found.swapped:
        a, b, out, start = b.mT, a.mT, out.mT, turned(start)
    told = dot_precision(precision, card)
    _tiles(a, b, out, found, told, start=start, offsets=offsets, batches=len(out)).launch()


def identify(tensor: torch.Tensor) -> DeviceIdentity:
    """Return the card that a tensor's products run on."""
    return INTERPRETED if _INTERPRETED else device.for_launch(tensor.get_device())


def turned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a matrix, if there is one, with its axes exchanged."""
    return None if tensor is None else tensor.mT


def _persistent(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, start: torch.Tensor | None,
    found: Plan, card: DeviceIdentity,
) -> Ready:  # fmt: skip
    (m, n), k = out.shape, a.shape[1]
    blocks = {
        "BLOCK_M": found.block_m, "BLOCK_N": found.block_n, "BLOCK_K": found.block_k,
        "A_T": lies_transposed(a), "B_T": lies_transposed(b), "C_T": lies_transposed(out),
        "PARTS": parts(found, out.element_size()), "BIAS_BY_ROWS": found.swapped, "PRECISION": None,
    }  # fmt: skip
    grid = (persistent_programs(m, n, found, card),)
    return Ready(persistent, grid, (a, b, bias, start, out, m, n, k, *out.stride()), blocks)


def _tiles(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, found: Plan, precision: str | None, *,
    batches: int, bias: torch.Tensor | None = None, start: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> Ready:  # fmt: skip
    (m, n), k = out.shape[-2:], a.shape[-1]
    grid = (-(-m // found.block_m) * -(-n // found.block_n) * batches,)
    sides = [one.stride()[-2:] for one in (a, b, out)]
    steps = [one.stride(0) if one.dim() == _BATCHED else 0 for one in (a, b, out)]
    strides = [number for side, step in zip(sides, steps, strict=True) for number in (*side, step)]
    blocks = {
        "BLOCK_M": found.block_m, "BLOCK_N": found.block_n, "BLOCK_K": found.block_k,
        "TAIL": offsets is not None or k % found.block_k != 0, "M_ALIGNED": m % LEAST == 0, "N_ALIGNED": n % LEAST == 0,
        "WIDE": _is_wide(found.block_m, found.block_n, found.block_k, *sides), "BIAS_BY_ROWS": found.swapped,
        "LANES": 1 if offsets is None else power_of_two(len(offsets)), "PRECISION": precision,
    }  # fmt: skip
    return Ready(tiles, grid, (a, b, bias, start, offsets, out, m, n, k, *strides), blocks)


def _segment_tile(
    rows: int, n_groups: int, n: int, k: int, precision: Precision, card: DeviceIdentity
) -> tuple[int, int, int]:
    """Return the tile of a grouped product: few rows a segment take low tiles, which are not computed transposed."""
    each = rows // max(1, n_groups)
    found = plan(max(1, each), n, k, precision, card, describable=False)
    if found.swapped:
        return found.block_n, found.block_m, found.block_k
    whole = plan(rows, n, k, precision, card, describable=False)
    return min(whole.block_m, 128), whole.block_n if whole.block_m <= 128 else 128, whole.block_k


def _is_wide(block_m: int, block_n: int, block_k: int, *sides: Any) -> bool:
    reaches = zip(((block_m, block_k), (block_k, block_n), (block_m, block_n)), sides, strict=True)
    return any(sum(block * stride for block, stride in zip(*one, strict=True)) >= _REACH for one in reaches)
