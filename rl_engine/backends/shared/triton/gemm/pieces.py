"""Pieces that the GEMM kernels share: the order of tiles, one ascending chain over K, segments of rows.

Every product is ``tl.dot(a, b, acc)``: the tensor core adds a group of 16 (8 of TF32) to the accumulator it is given,
so the whole of K is one chain, whatever the tile. ``acc += tl.dot(a, b)`` would be another sum: a chain a tile, added.
K is filled up with zeros to whole tiles; a group of zeros adds +0, which changes a chain only where it stands at -0
(an underflow), so `finished` ends every chain with one more +0.
"""

import triton
import triton.language as tl

# One chain over K for every element: warps and pipeline depth choose who computes and when a tile is loaded, the group
# in which order tiles come. Equal bytes on an H200 for 1 to 8 warps and 3 and 4 stages, bf16, fp16 and tf32.
NEUTRAL = {"num_warps": (4, 8), "num_stages": (2, 3, 4, 5, 6), "GROUP": (1, 4, 8, 16)}


@triton.jit
def tile_of(number, row_tiles, col_tiles, GROUP: tl.constexpr):
    """Return (row tile, column tile) of a number: bands of GROUP row tiles, so that the L2 holds what a wave reads."""
    band = number // (GROUP * col_tiles)
    height = tl.minimum(row_tiles - band * GROUP, GROUP)
    inside = number % (GROUP * col_tiles)
    return band * GROUP + inside % height, inside // height


@triton.jit
def aligned(size, ALIGNED: tl.constexpr):
    """Return a size of which the compiler knows that 16 divides it, where it does: masks then keep loads wide."""
    if ALIGNED:
        return size // 16 * 16
    return size


@triton.jit
def addresses(ptr, rows, cols, row_stride, col_stride, WIDE: tl.constexpr):
    """Return the addresses of a tile; lanes are 32-bit unless WIDE says that they reach further than 2^31."""
    if WIDE:
        rows, cols = rows.to(tl.int64), cols.to(tl.int64)
    return ptr + (rows * row_stride)[:, None] + (cols * col_stride)[None, :]


@triton.jit
def chain(
    a, b, acc, row_in, col_in, k, a_depth, b_depth,
    TAIL: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Continue ``acc`` [M, N] by products of the tiles at addresses a [M, BLOCK_K], b [BLOCK_K, N], ascending in K.

    Rows and columns outside, and the rest of K up to a whole tile, are zeros in both operands: they add nothing.
    """
    a_step = tl.full((), BLOCK_K, tl.int64) * a_depth
    b_step = tl.full((), BLOCK_K, tl.int64) * b_depth
    # without a tail the number of steps is spelled as persistent programs spell it: one bit class for both
    for _ in range(k // BLOCK_K if TAIL else tl.cdiv(k, BLOCK_K)):
        x = tl.load(a, mask=row_in[:, None], other=0.0)
        y = tl.load(b, mask=col_in[None, :], other=0.0)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
        a += a_step
        b += b_step
    if TAIL:
        inside = tl.arange(0, BLOCK_K) < k % BLOCK_K
        x = tl.load(a, mask=row_in[:, None] & inside[None, :], other=0.0)
        y = tl.load(b, mask=inside[:, None] & col_in[None, :], other=0.0)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
    return acc


@triton.jit
def finished(acc, bias_ptr, rows, cols, row_in, col_in, BY_ROWS: tl.constexpr):
    """Return the chains with a sign of zero that no padding of K changes, plus the bias of each column.

    BY_ROWS: the product is computed transposed, so the bias is one of each row.
    """
    acc += 0.0
    if bias_ptr is not None:
        if BY_ROWS:
            acc += tl.load(bias_ptr + rows, mask=row_in, other=0.0).to(tl.float32)[:, None]
        else:
            acc += tl.load(bias_ptr + cols, mask=col_in, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y)


@triton.jit
def segment_bounds(offsets_ptr, group, n_rows, LANES: tl.constexpr):
    """Return (first row, rows) of one group; offsets that leave [0, n_rows] or fall are made to stay and rise."""
    lane = tl.arange(0, LANES)
    offset = tl.load(offsets_ptr + lane, mask=lane < group + 2, other=0).to(tl.int64)
    offset = tl.minimum(tl.maximum(offset, 0), n_rows)
    start = tl.max(tl.where(lane < group + 1, offset, 0), 0)
    return start, (tl.max(offset, 0) - start).to(tl.int32)


@triton.jit
def segments(offsets_ptr, n_rows, n_groups, LANES: tl.constexpr):
    """Return (first row, end) of every segment [LANES]: number 0 lies before group 0, n_groups + 1 behind the last.

    These two belong to nobody. Wild offsets are made to stay in [0, n_rows] and to rise; lanes behind are empty.
    """
    lane = tl.arange(0, LANES)
    start = tl.load(offsets_ptr + lane - 1, mask=(lane > 0) & (lane < n_groups + 2), other=0).to(tl.int64)
    end = tl.load(offsets_ptr + lane, mask=lane < n_groups + 1, other=n_rows).to(tl.int64)
    start = tl.where(lane < n_groups + 2, tl.minimum(tl.maximum(start, 0), n_rows), n_rows)
    start = tl.associative_scan(start, 0, _larger)
    return start, tl.associative_scan(tl.minimum(tl.maximum(end, 0), n_rows), 0, _larger)


@triton.jit
def segment_of_tile(start, end, tile, LANES: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return (group, first row of the tile, end of its segment) of the row tile numbered ``tile`` over all `segments`.

    Groups of nobody are -1 and ``n_groups``. A tile behind the last gives an end of 0.
    """
    lane = tl.arange(0, LANES)
    tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    behind = tl.cumsum(tiles, 0)
    segment = tl.sum((behind <= tile).to(tl.int32), 0)
    before = tl.max(tl.where(behind <= tile, behind, 0), 0)
    first = tl.sum(tl.where(lane == segment, start, 0), 0) + (tile - before) * BLOCK_M
    return segment - 1, first, tl.sum(tl.where(lane == segment, end, 0), 0)
