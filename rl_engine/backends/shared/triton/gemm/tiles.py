"""GEMM by tiles read through pointers: any strides, a batch axis, segments of rows; a program an output tile."""

from __future__ import annotations

import triton
import triton.language as tl

from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.gemm import rule
from rl_engine.backends.shared.triton.gemm.pieces import (
    NEUTRAL,
    addresses,
    aligned,
    chain,
    finished,
    segment_bounds,
    segment_of_tile,
    segments,
    tile_of,
)


@TunableKernel(
    outputs=("c_ptr",),
    data=("a_ptr", "b_ptr", "bias_ptr"),
    dynamic=("m", "n", "k"),
    fixed=rule.launch,
    neutral=NEUTRAL,
    admits=rule.admits,
    needs=rule.needs,
)
@triton.jit(do_not_specialize=["m", "n", "k"])
def _gemm_tiles_kernel(
    a_ptr, b_ptr, bias_ptr, start_ptr, offsets_ptr, c_ptr,
    m, n, k, a_row, a_depth, a_batch, b_depth, b_col, b_batch, c_row, c_col, c_batch,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TAIL: tl.constexpr, M_ALIGNED: tl.constexpr, N_ALIGNED: tl.constexpr, WIDE: tl.constexpr,
    BIAS_BY_ROWS: tl.constexpr, LANES: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """C = start + A B + bias: of the whole of K, or (offsets given) in batch g of the rows of K in segment g."""
    row_tiles, col_tiles = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    number = tl.program_id(0)  # the batch too counts on this axis: another holds 65,535 programs at the most
    batch = (number // (row_tiles * col_tiles)).to(tl.int64)
    row_tile, col_tile = tile_of(number % (row_tiles * col_tiles), row_tiles, col_tiles, GROUP)
    first_row, first_col = row_tile.to(tl.int64) * BLOCK_M, col_tile.to(tl.int64) * BLOCK_N
    row, col, depth = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    rows, cols = row_tile * BLOCK_M + row, col_tile * BLOCK_N + col
    row_in, col_in = rows < aligned(m, M_ALIGNED), cols < aligned(n, N_ALIGNED)
    a_ptr += batch * a_batch + first_row * a_row
    b_ptr += batch * b_batch + first_col * b_col
    if offsets_ptr is not None:
        start, length = segment_bounds(offsets_ptr, batch, k, LANES)
        a_ptr += start * a_depth
        b_ptr += start * b_depth
    else:
        length = k
    c = addresses(c_ptr + batch * c_batch + first_row * c_row + first_col * c_col, row, col, c_row, c_col, WIDE)
    inside = row_in[:, None] & col_in[None, :]
    if start_ptr is not None:  # of c's strides
        before = start_ptr + batch * c_batch + first_row * c_row + first_col * c_col
        acc = tl.load(addresses(before, row, col, c_row, c_col, WIDE), mask=inside, other=0.0)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    a = addresses(a_ptr, row, depth, a_row, a_depth, WIDE)
    b = addresses(b_ptr, depth, col, b_depth, b_col, WIDE)
    acc = chain(a, b, acc, row_in, col_in, length, a_depth, b_depth, TAIL, PRECISION, BLOCK_K)
    acc = finished(acc, bias_ptr, rows, cols, row_in, col_in, BIAS_BY_ROWS)
    tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=inside)


@TunableKernel(
    outputs=("c_ptr",),
    data=("a_ptr", "b_ptr"),
    dynamic=("m", "n", "k", "n_groups"),
    fixed=rule.launch,
    neutral=NEUTRAL,
    admits=rule.admits,
    needs=rule.needs,
)
@triton.jit(do_not_specialize=["m", "n", "k", "n_groups"])
def _gemm_groups_kernel(
    a_ptr, b_ptr, offsets_ptr, c_ptr,
    m, n, k, n_groups, a_row, a_depth, b_group, b_depth, b_col, c_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TAIL: tl.constexpr, N_ALIGNED: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr,
    PRECISION: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """C[r] = A[r] B[g] for the rows r of segment g; rows of no segment are zeros."""
    row_tiles = m // BLOCK_M + n_groups + 2  # at the most: a tile that is not full for every segment
    row_tile, col_tile = tile_of(tl.program_id(0), row_tiles, tl.cdiv(n, BLOCK_N), GROUP)
    starts, ends = segments(offsets_ptr, m, n_groups, LANES)
    group, first_row, end = segment_of_tile(starts, ends, row_tile, LANES, BLOCK_M)
    if first_row >= end:
        return
    row, col, depth = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    first_col = col_tile.to(tl.int64) * BLOCK_N
    cols = col_tile * BLOCK_N + col
    row_in, col_in = first_row + row < end, cols < aligned(n, N_ALIGNED)
    of_nobody = (group < 0) | (group >= n_groups)
    length = tl.where(of_nobody, 0, k)
    a = addresses(a_ptr + first_row * a_row, row, depth, a_row, a_depth, WIDE)
    b_ptr += tl.where(of_nobody, 0, group).to(tl.int64) * b_group + first_col * b_col
    b = addresses(b_ptr, depth, col, b_depth, b_col, WIDE)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = chain(a, b, acc, row_in, col_in, length, a_depth, b_depth, TAIL, PRECISION, BLOCK_K)
    acc = finished(acc, None, row, cols, row_in, col_in, BY_ROWS=False)
    c = addresses(c_ptr + first_row * c_row + first_col, row, col, c_row, 1, WIDE)
    tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=row_in[:, None] & col_in[None, :])


tiles = _gemm_tiles_kernel
groups = _gemm_groups_kernel
