"""The log-sum-exp of a row of logits, the one piece of code behind every log-probability, so all have the same bits.

Chunks of `CHUNK` columns from column 0: the exact maximum m and the sum of exp2((z - m) * log2(e)), folded neighbours
first; chunks merged in ascending order. A chunk that is narrower, or cut off by the end of the row, is padded with
exact zeros, which change no partial sum, so short rows use narrow tiles. Measured on an H200, one program a row:
[8192, 128256] bf16 takes 514 us with 4,096 columns (the limit is 489), 536 with fixed lanes folded once, 577 with
sub-chunks of 256; chunks can also be shared out over programs, lanes cannot.
"""

import triton
import triton.language as tl

from rl_engine.backends.shared.triton.primitives.folds import fold_columns, rounded_product

CHUNK = tl.constexpr(4096)  # columns of one fold: contract
LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finite_or_zero(m):
    """Return m, or 0 where it is -inf: a row or chunk without a finite logit must not compute inf - inf."""
    return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def scaled(z, inverse_temperature, SCALED: tl.constexpr):
    """Return z times the inverse temperature, rounded; z itself, bit for bit, where the temperature is 1."""
    return rounded_product(z, tl.full(z.shape, inverse_temperature, tl.float32)) if SCALED else z


@triton.jit
def chunk_statistics(z, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the maximum m and the sum of exp(z - m) of each row of chunk z [ROWS, COLS]."""
    m = tl.max(z, 1)
    return m, fold_columns(tl.exp2((z - finite_or_zero(m)[:, None]) * LOG2E), ROWS, COLS)


@triton.jit
def merge(m, s, m_chunk, s_chunk):
    """Return the running maximum and sum of rows, m and s, after one more chunk; (-inf, 0) changes nothing."""
    m_new = tl.maximum(m, m_chunk)
    base = finite_or_zero(m_new)
    kept = rounded_product(s_chunk, tl.exp2((m_chunk - base) * LOG2E))
    return m_new, tl.fma(s, tl.exp2((m - base) * LOG2E), kept)


@triton.jit
def merge_chunk(m, s, z, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Merge chunk z [ROWS, COLS] into the running maximum and sum of its rows, m and s [ROWS]."""
    m_chunk, s_chunk = chunk_statistics(z, ROWS, COLS)
    return merge(m, s, m_chunk, s_chunk)


@triton.jit
def merge_chunks(m, s, z, CHUNKS: tl.constexpr, COLS: tl.constexpr):
    """Merge neighbouring chunks z [CHUNKS, COLS] of one row, ascending, into its running maximum and sum, m and s [1].

    Warps exchange once for all of them; one chunk at a time they would for each.
    """
    m_chunks, s_chunks = chunk_statistics(z, CHUNKS, COLS)
    for chunk in tl.static_range(CHUNKS):
        m, s = merge(m, s, _element(m_chunks, chunk, CHUNKS), _element(s_chunks, chunk, CHUNKS))
    return m, s


@triton.jit
def _element(x, index: tl.constexpr, SIZE: tl.constexpr):
    """Return element ``index`` of fp32 x [SIZE], as [1]: picked by a sum of integers, which no order can change."""
    bits = tl.where(tl.arange(0, SIZE) == index, x.to(tl.int32, bitcast=True), 0)
    return tl.sum(tl.reshape(bits, (1, SIZE)), 1).to(tl.float32, bitcast=True)


@triton.jit
def log_probability(z, m, log2_sum):
    """Return (z - m) - ln(s): m first, since m + ln(s) has lost the digits of ln(s) where m is large."""
    return (z - m) - rounded_product(log2_sum, tl.full(log2_sum.shape, _LN2, tl.float32))


@triton.jit
def probability(z, m, log2_sum):
    """Return exp(z - m) / s."""
    return tl.exp2(tl.fma(z - m, tl.full(z.shape, LOG2E, tl.float32), -log2_sum))
