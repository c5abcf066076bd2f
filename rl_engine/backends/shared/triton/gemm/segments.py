"""GEMM over segments of rows by persistent programs: a table of tiles, then tiles through tensor descriptors.

Where segments begin is known on the device alone. A first kernel writes down where every row tile lies and whose it is,
so that persistent programs find their next tile by three loads, and the host waits for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.gemm import rule
from rl_engine.backends.shared.triton.gemm.persistent import b_block, halves
from rl_engine.backends.shared.triton.gemm.pieces import NEUTRAL, aligned, finished, segment_of_tile, segments, tile_of

if TYPE_CHECKING:
    from collections.abc import Mapping

ENTRY = tl.constexpr(4)  # numbers of a table's row: group, first row, end of its segment, and one that nobody reads
_CLEARED = tl.constexpr(256)  # columns of rows of nobody that are set to zero at a time


def _a_block(meta: Mapping[str, Any]) -> list[int]:
    return [meta["BLOCK_M"], meta["BLOCK_K"]]


@TunableKernel(
    outputs=("table_ptr", "c_ptr"),
    dynamic=("m", "n", "n_groups"),
    fixed=lambda _sizes, _device: {"num_warps": 1},  # H200, 128 groups: 30% faster than 4
    neutral={"num_warps": (1, 2, 4, 8)},
)
@triton.jit(do_not_specialize=["m", "n", "n_groups"])
def _gemm_segment_table_kernel(
    offsets_ptr, table_ptr, c_ptr, m, n, n_groups, c_row, LANES: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Write the table: first, how many row tiles come before the groups' own, and those; then every tile. Clear others.

    Others are the rows of nobody.
    """
    tile = tl.program_id(0)
    starts, ends = segments(offsets_ptr, m, n_groups, LANES)
    if tile == 0:
        lane = tl.arange(0, LANES)
        tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
        owned = (lane > 0) & (lane <= n_groups)
        tl.store(table_ptr, tl.sum(tl.where(lane == 0, tiles, 0), 0).to(tl.int32))
        tl.store(table_ptr + 1, tl.sum(tl.where(owned, tiles, 0), 0).to(tl.int32))
        tl.store(table_ptr + 2 + tl.arange(0, 2), tl.zeros((2,), tl.int32))
    group, row, end = segment_of_tile(starts, ends, tile, LANES, BLOCK_M)
    entry = table_ptr + (1 + tile) * ENTRY
    tl.store(entry, group)
    tl.store(entry + 1, row.to(tl.int32))
    tl.store(entry + 2, end.to(tl.int32))
    tl.store(entry + 3, 0)
    if (row < end) & ((group < 0) | (group >= n_groups)):
        rows, lane = row + tl.arange(0, BLOCK_M), tl.arange(0, _CLEARED)
        nothing = tl.zeros((BLOCK_M, _CLEARED), c_ptr.dtype.element_ty)
        for first in range(0, n, _CLEARED):
            cols = first + lane
            tl.store(c_ptr + (rows * c_row)[:, None] + cols[None, :], nothing, mask=(rows < end)[:, None] & (cols < n))


@TunableKernel(
    outputs=("c_ptr",),
    data=("a_ptr", "b_ptr"),
    dynamic=("m", "n", "k"),
    descriptors={"a_ptr": _a_block, "b_ptr": b_block},
    fixed=rule.launch,
    neutral=NEUTRAL,
    admits=rule.admits,
    needs=rule.needs,
)
@triton.jit(do_not_specialize=["m", "n", "k"])
def _gemm_segments_kernel(
    a_ptr, b_ptr, c_ptr, table_ptr, m, n, k, b_group, c_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    B_T: tl.constexpr, N_ALIGNED: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """C[r] = A[r] B[g] for the rows r of segment g. B lies in memory as one matrix, g from its row g * b_group on.

    Tiles are stored under a mask: the last one of a segment must not write the rows behind it, and a branch for the
    others is more than Triton 3.6 can make one loop of.
    """
    first, row_tiles = tl.load(table_ptr), tl.load(table_ptr + 1)
    col_tiles = tl.cdiv(n, BLOCK_N)
    for number in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=True):
        row_tile, col_tile = tile_of(number, row_tiles, col_tiles, GROUP)
        entry = table_ptr + (1 + first + row_tile) * ENTRY
        start, row, end = tl.load(entry) * b_group, tl.load(entry + 1), tl.load(entry + 2)
        col = col_tile * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(tl.cdiv(k, BLOCK_K)):
            depth = step * BLOCK_K
            a = a_ptr.load([row, depth])
            if B_T:
                b = b_ptr.load([start + col, depth]).T
            else:
                b = b_ptr.load([start + depth, col])
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        acc = finished(acc, None, row, col, row, col, BY_ROWS=False)
        _store_rows(c_ptr, row, col, end, aligned(n, N_ALIGNED), c_row, acc, PARTS, BLOCK_M, BLOCK_N)


@triton.jit
def _store_rows(c_ptr, row, col, end, n, c_row, acc, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store the rows of a tile before ``end``, in PARTS of its columns: each passes through shared memory."""
    if PARTS == 1:
        _store_part(c_ptr, row, col, end, n, c_row, acc, BLOCK_M, BLOCK_N)
    else:
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        _store_rows(c_ptr, row, col, end, n, c_row, left, PARTS // 2, BLOCK_M, BLOCK_N // 2)
        _store_rows(c_ptr, row, col + BLOCK_N // 2, end, n, c_row, right, PARTS // 2, BLOCK_M, BLOCK_N // 2)


@triton.jit
def _store_part(c_ptr, row, col, end, n, c_row, part, BLOCK_M: tl.constexpr, COLS: tl.constexpr):
    rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, COLS)
    inside = (rows < end)[:, None] & (cols < n)[None, :]
    at = c_ptr + (rows.to(tl.int64) * c_row)[:, None] + cols[None, :]
    tl.store(at, part.to(c_ptr.dtype.element_ty), mask=inside)


table = _gemm_segment_table_kernel
by_table = _gemm_segments_kernel
