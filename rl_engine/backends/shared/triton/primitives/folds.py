"""Sums in a fixed order: neighbours first, two values at a time, so that no layout can change the tree.

A plain ``tl.sum`` folds in the order of the layout, which warps, rows per program and even a pointer's alignment
change. Every step here adds exactly two values, and addition is commutative. Folding neighbours keeps the first steps
inside a thread: on an H200 it costs what ``tl.sum`` costs. Summands that are products must be made opaque to fusion
first (`rounded_product`), else the first step becomes a fused multiply-add in some layouts only.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def log2(n):
    """Return the exponent of a power of two."""
    return n.bit_length() - 1


@triton.jit
def fold_columns(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the sums of the rows of x [ROWS, COLS], COLS a power of two: [ROWS]."""
    for step in tl.static_range(log2(COLS)):
        x = tl.sum(tl.reshape(x, (ROWS, COLS >> (step + 1), 2)), 2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def fold_rows(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the sums of the columns of x [ROWS, COLS], ROWS a power of two: [COLS]."""
    for step in tl.static_range(log2(ROWS)):
        x = tl.sum(tl.reshape(x, (ROWS >> (step + 1), 2, COLS)), 1)
    return tl.reshape(x, (COLS,))


@triton.jit
def rounded_product(a, b):
    """Return a * b rounded to fp32, which no addition behind it can fuse with."""
    return tl.fma(a, b, tl.zeros_like(a))


@triton.jit
def minus_zero():
    """Return -0.0 [1]: the one value whose sum with any other is that other, bit for bit.

    Of a literal one Triton 3.6 makes +0.0: its constants equal to 0 become null values. (3.9 does not.)
    """
    return tl.full((1,), -(1 << 31), tl.int32).to(tl.float32, bitcast=True)
