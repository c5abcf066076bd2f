"""Rows that need no copy: a tensor [..., cols] whose leading axes merge into one stride, or into blocks of rows.

A block is what a slice leaves: the heads of a token in a packed qkv, or the positions of a sequence in ``x[:, :-1]``.
Row r then lies ``r // block * block_stride + r % block * stride`` elements behind the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


class Rows(NamedTuple):
    """Rows of neighbouring columns, and where each begins.

    Attributes:
        data: the tensor itself, or a contiguous copy.
        stride: elements from a row to the next one.
        block: rows of a block; 1 where there are no blocks.
        block_stride: elements from a block to the next one, divided by ``unit``.
        unit: 16 or 1, so that the compiler knows whether blocks keep rows aligned; 0 where there are no blocks.
    """

    data: torch.Tensor
    stride: int
    block: int = 1
    block_stride: int = 0
    unit: int = 0


def rows_of(x: torch.Tensor) -> Rows:
    """Return x [..., cols] as rows, copied only where columns do not neighbour or two strides do not do."""
    n_cols = x.shape[-1]
    if x.is_contiguous():
        return Rows(x, n_cols)
    axes: list[tuple[int, int]] = []  # (size, stride), innermost first
    for size, stride in zip(x.shape[-2::-1], x.stride()[-2::-1], strict=True):
        if axes and stride == axes[-1][0] * axes[-1][1]:
            axes[-1] = (size * axes[-1][0], axes[-1][1])
        elif size != 1:
            axes.append((size, stride))
    if (x.stride(-1) != 1 and n_cols != 1) or len(axes) > 2:  # rows, and blocks of rows
        return Rows(x.contiguous(), n_cols)
    if len(axes) < 2:
        return Rows(x, axes[0][1] if axes else n_cols)
    (block, stride), (_blocks, block_stride) = axes
    unit = 1 if block_stride % 16 else 16
    return Rows(x, stride, block, block_stride // unit, unit)


@triton.jit
def row_offset(row, stride, block, block_stride, UNIT: tl.constexpr):
    """Return where int64 rows begin, as `Rows` says."""
    if UNIT == 0:
        return row * stride
    else:  # an early return alone would be compiled in both cases
        outer = row // block
        return outer * block_stride * UNIT + (row - outer * block) * stride


@triton.jit
def load_tile(rows, inside, col, N_COLS: tl.constexpr, TILE: tl.constexpr):
    """Return the columns ``col`` of rows of pointers [R, 1] in fp32, zero where there are none: [R, TILE]."""
    return tl.load(rows + col[None, :], mask=_inside(inside, col, N_COLS, TILE), other=0.0).to(tl.float32)


@triton.jit
def store_tile(rows, inside, col, values, N_COLS: tl.constexpr, TILE: tl.constexpr):
    """Store what `load_tile` would load, in the pointers' dtype."""
    mask = _inside(inside, col, N_COLS, TILE)
    tl.store(rows + col[None, :], values.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def load_columns(ptr, col, N_COLS: tl.constexpr, TILE: tl.constexpr):
    """Return one row's columns in fp32: [1, TILE]."""
    if N_COLS % TILE == 0:
        return tl.load(ptr + col).to(tl.float32)[None, :]
    else:
        return tl.load(ptr + col, mask=col < N_COLS, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _inside(inside, col, N_COLS: tl.constexpr, TILE: tl.constexpr):
    """Return the mask of a tile; whole tiles need none along their columns, where it would narrow the accesses."""
    if N_COLS % TILE == 0:
        return inside[:, None]
    else:
        return inside[:, None] & (col < N_COLS)[None, :]
