"""GEMM by persistent programs: tiles come and go through tensor descriptors made on the host (TMA on NVIDIA cards)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.gemm import rule
from rl_engine.backends.shared.triton.gemm.pieces import NEUTRAL, addresses, finished, tile_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def _a_block(meta: Mapping[str, Any]) -> list[int]:
    block = [meta["BLOCK_M"], meta["BLOCK_K"]]
    return block[::-1] if meta["A_T"] else block


def b_block(meta: Mapping[str, Any]) -> list[int]:
    """Return the block of B's descriptor."""
    block = [meta["BLOCK_K"], meta["BLOCK_N"]]
    return block[::-1] if meta["B_T"] else block


def _c_block(meta: Mapping[str, Any]) -> list[int]:
    block = [meta["BLOCK_M"], meta["BLOCK_N"] // meta["PARTS"]]
    return block[::-1] if meta["C_T"] else block


@TunableKernel(
    outputs=("c_ptr",),
    data=("a_ptr", "b_ptr", "bias_ptr"),
    dynamic=("m", "n", "k"),
    descriptors={"a_ptr": _a_block, "b_ptr": b_block, "c_ptr": _c_block},
    fixed=rule.launch,
    neutral=NEUTRAL,
    admits=rule.admits,
    needs=rule.needs,
)
@triton.jit(do_not_specialize=["m", "n", "k"])
def _gemm_persistent_kernel(
    a_ptr, b_ptr, bias_ptr, start_ptr, c_ptr, m, n, k, start_row, start_col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    A_T: tl.constexpr, B_T: tl.constexpr, C_T: tl.constexpr, PARTS: tl.constexpr,
    BIAS_BY_ROWS: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """C = start + A B + bias; _T: memory holds it transposed. Descriptors read zeros and write nothing outside."""
    row_tiles, col_tiles = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for number in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=start_ptr is None):
        row_tile, col_tile = tile_of(number, row_tiles, col_tiles, GROUP)
        row, col = row_tile * BLOCK_M, col_tile * BLOCK_N
        rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        if start_ptr is not None:
            inside = (rows < m)[:, None] & (cols < n)[None, :]
            acc = tl.load(addresses(start_ptr, rows, cols, start_row, start_col, WIDE=True), mask=inside, other=0.0)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(tl.cdiv(k, BLOCK_K)):
            depth = step * BLOCK_K
            if A_T:
                a = a_ptr.load([depth, row]).T
            else:
                a = a_ptr.load([row, depth])
            if B_T:
                b = b_ptr.load([col, depth]).T
            else:
                b = b_ptr.load([depth, col])
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        acc = finished(acc, bias_ptr, rows, cols, rows < m, cols < n, BIAS_BY_ROWS)
        _store(c_ptr, row, col, acc, C_T, PARTS, BLOCK_M, BLOCK_N)


@triton.jit
def _store(c_ptr, row, col, acc, C_T: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a tile in PARTS of its columns: a part's memory is free again while the next one is converted."""
    if PARTS == 1:
        _store_part(c_ptr, row, col, acc, C_T)
    else:
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        if PARTS == 2:
            _store_part(c_ptr, row, col, left, C_T)
            _store_part(c_ptr, row, col + BLOCK_N // 2, right, C_T)
        else:
            first, second = halves(left, BLOCK_M, BLOCK_N // 2)
            _store_part(c_ptr, row, col, first, C_T)
            _store_part(c_ptr, row, col + BLOCK_N // 4, second, C_T)
            third, fourth = halves(right, BLOCK_M, BLOCK_N // 2)
            _store_part(c_ptr, row, col + BLOCK_N // 2, third, C_T)
            _store_part(c_ptr, row, col + BLOCK_N * 3 // 4, fourth, C_T)


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLS // 2)), (0, 2, 1)))


@triton.jit
def _store_part(c_ptr, row, col, part, C_T: tl.constexpr):
    part = part.to(c_ptr.dtype)
    if C_T:
        c_ptr.store([col, row], part.T)
    else:
        c_ptr.store([row, col], part)


persistent = _gemm_persistent_kernel
