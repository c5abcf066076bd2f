"""The gradient of an embedding's weight: for each row the sum of its tokens' dy, in the tokens' order, no atomics.

The tokens are sorted by their ids (`sort`), so that those of a vocabulary row are neighbours in ascending order: a
segment. Chunks of the segments longer than one chunk are summed first, each by a program of its own, so that an id that
half of all tokens share stays parallel; then every row of dw is written once: one with tokens by the program of its
segment's first position, one without, zeros, by the program of its group of rows. An accumulator needs the first alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.compiler import is_interpreter
from rl_engine.backends.shared.triton.embedding.sort import sorted_tokens
from rl_engine.backends.shared.triton.operands import INTERPRETED_TILE, power_of_two

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_engine.platforms.device import DeviceIdentity

CHUNK = tl.constexpr(32)  # tokens of one ascending chain: contract
PARTS = tl.constexpr(8)  # programs, at most, that share a block of columns of a segment longer than a chunk


def block_of(n_cols: int, most: int, device: DeviceIdentity) -> int:
    """Return the widest block, up to ``most``, that cuts a row without a rest; a masked one where all such are narrow.

    5120 columns are five blocks of 1024: one block of 8192 would be masked.
    """
    if is_interpreter(device.arch):
        return min(power_of_two(n_cols), INTERPRETED_TILE)
    whole = n_cols & -n_cols
    return min(whole, most) if whole >= 256 else min(power_of_two(n_cols), 1024)


def _fixed_sums(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    return {"BLOCK": block_of(sizes["COLS"], 2048, device), "num_warps": 4}


def _fixed_rows(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    """Return the sums' blocks, and 4096 elements a program that clears: nine rows in ten have no token."""
    sums = _fixed_sums(sizes, device)
    return {**sums, "ROWS": operands.rows_in_tile(sizes["vocab"], sums["BLOCK"], 4096, device)}


def _fixed_chunks(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    starts = INTERPRETED_TILE if is_interpreter(device.arch) else 512
    return {"STARTS": starts, "BLOCK": block_of(sizes["COLS"], 2048, device), "num_warps": 4}


def admits_blocks(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    """Let through blocks of a row's width or at least 512 columns, 4 to 32 elements a thread, 64 with all rows."""
    width, per_thread = power_of_two(sizes["COLS"]), launch["BLOCK"] // (32 * launch["num_warps"])
    return (
        min(width, 512) <= launch["BLOCK"] <= width
        and min(width // 128, 4) <= per_thread <= 32
        and launch.get("ROWS", 1) * per_thread <= 64
    )


@triton.jit
def _lower_bound(key_ptr, n_tokens, value):
    """Return how many of the sorted keys, at least one, are below ``value``, a number or a block of them."""
    low = value * 0
    size = n_tokens
    while size > 1:
        half = size // 2
        low = tl.where(tl.load(key_ptr + low + half - 1) < value, low + half, low)
        size -= half
    return low + (tl.load(key_ptr + low) < value).to(tl.int32)


@triton.jit
def _gradient_of(token, dy_ptr, dy_stride, col, used):
    return tl.load(dy_ptr + token.to(tl.int64) * dy_stride + col, mask=used).to(tl.float32)


@triton.jit
def _chain(total, order_ptr, dy_ptr, begin, end, dy_stride, col, used, UNROLL: tl.constexpr):
    """Return ``total`` and the gradients of the tokens at sorted positions [begin, end), one after the other."""
    # unrolled for loads in flight: a position's token and its row are two loads, one behind the other
    for position in tl.range(begin, end, loop_unroll_factor=UNROLL):
        total += _gradient_of(tl.load(order_ptr + position), dy_ptr, dy_stride, col, used)
    return total


@TunableKernel(
    outputs=("partial_ptr", "start_ptr"),
    data=("dy_ptr",),
    dynamic=("n_tokens",),
    fixed=_fixed_chunks,
    # a column's chain over the tokens of a chunk is one thread's, whichever columns share a program
    neutral={"STARTS": (256, 512, 1024), "BLOCK": (256, 512, 1024, 2048), "num_warps": (4, 8)},
    admits=admits_blocks,
)
@triton.jit(do_not_specialize=["n_tokens"])
def _embedding_chunks_kernel(
    key_ptr, order_ptr, dy_ptr, partial_ptr, start_ptr, n_tokens, vocab, dy_stride,
    COLS: tl.constexpr, STARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sums of the chunks of long segments, and, if asked, for each vocabulary row where its segment begins.

    Two pieces of work that need the sorted keys only, in one launch: a launch more costs about 1% of a backward. The
    program of a window of 32 sorted positions meets at most one segment longer than a chunk that begins there, and at
    most one later chunk of a segment from before it: two slots a window are enough, whatever the ids.
    """
    n_programs = tl.cdiv(n_tokens, CHUNK) * ((COLS + BLOCK - 1) // BLOCK)
    pid = tl.program_id(0)
    if start_ptr is not None:
        _write_starts(pid - n_programs, key_ptr, start_ptr, n_tokens, vocab, STARTS)
    if pid < n_programs:
        _write_chunks(pid, key_ptr, order_ptr, dy_ptr, partial_ptr, n_tokens, vocab, dy_stride, COLS, BLOCK)


@triton.jit
def _write_starts(number, key_ptr, start_ptr, n_tokens, vocab, STARTS: tl.constexpr):
    if number >= 0:
        row = number * STARTS + tl.arange(0, STARTS)
        tl.store(start_ptr + row, _lower_bound(key_ptr, n_tokens, row), mask=row <= vocab)


@triton.jit
def _write_chunks(
    pid, key_ptr, order_ptr, dy_ptr, partial_ptr, n_tokens, vocab, dy_stride, COLS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    n_blocks: tl.constexpr = (COLS + BLOCK - 1) // BLOCK
    window = pid // n_blocks
    edge = window * CHUNK
    col = (pid % n_blocks) * BLOCK + tl.arange(0, BLOCK)
    used = None
    if COLS % BLOCK != 0:
        used = col < COLS
    slot_ptr = partial_ptr + window.to(tl.int64) * (2 * COLS) + col
    lane = tl.arange(0, CHUNK)
    zeros = tl.zeros((BLOCK,), tl.float32)
    later, count = _later_chunk(key_ptr, n_tokens, edge, vocab, lane)
    if count > 0:
        chain = _chain(zeros, order_ptr, dy_ptr, later, later + count, dy_stride, col, used, 4)
        tl.store(slot_ptr, chain, mask=used)
    first = _first_chunk(key_ptr, n_tokens, edge, vocab, lane)
    if first >= 0:
        chain = _chain(zeros, order_ptr, dy_ptr, first, first + CHUNK, dy_stride, col, used, 4)
        tl.store(slot_ptr + COLS, chain, mask=used)


@triton.jit
def _first_chunk(key_ptr, n_tokens, edge, vocab, lane):
    """Return the position in the window from ``edge`` where a segment longer than a chunk begins, or -1."""
    position = edge + lane
    key = tl.load(key_ptr + position, mask=position < n_tokens, other=vocab)
    before = tl.load(key_ptr + position - 1, mask=(position > 0) & (position < n_tokens), other=-1)
    behind = tl.load(key_ptr + position + CHUNK, mask=position + CHUNK < n_tokens, other=-1)
    return tl.max(tl.where((key < vocab) & (key != before) & (key == behind), position, -1), 0)


@triton.jit
def _later_chunk(key_ptr, n_tokens, edge, vocab, lane):
    """Return where in the window from ``edge`` a segment from before it has a chunk begin, and its length, or 0."""
    begin, count = edge, 0
    key = tl.load(key_ptr + edge)
    if (tl.load(key_ptr + edge - 1, mask=edge > 0, other=-1) == key) & (key < vocab):
        begin = _lower_bound(key_ptr, n_tokens, key)
        begin += tl.cdiv(edge - begin, CHUNK) * CHUNK
        if begin < edge + CHUNK:
            same = tl.load(key_ptr + begin + lane, mask=begin + lane < n_tokens, other=-1) == key
            count = tl.sum(same.to(tl.int32), 0)
    return begin, count


@triton.jit
def _sum_of_chunks(partial_ptr, begin, n_chunks, col, used, COLS: tl.constexpr):
    """Return the sums of the chunks of the segment from ``begin``, added ascending."""
    slot_ptr = partial_ptr + (begin // CHUNK).to(tl.int64) * (2 * COLS) + col
    total = tl.load(slot_ptr + COLS, mask=used)
    for _chunk in tl.range(1, n_chunks, loop_unroll_factor=8):
        slot_ptr += 2 * COLS
        total += tl.load(slot_ptr, mask=used)
    return total


@triton.jit
def _neighbours(key_ptr, n_tokens, position, row):
    """Return how many positions before and behind hold ``row`` too, both at most 32."""
    lane = tl.arange(0, CHUNK)
    before, behind = position - 1 - lane, position + 1 + lane
    same_before = tl.load(key_ptr + before, mask=before >= 0, other=-1) == row
    same_behind = tl.load(key_ptr + behind, mask=behind < n_tokens, other=-1) == row
    return tl.sum(same_before.to(tl.int32), 0), tl.sum(same_behind.to(tl.int32), 0)


@triton.jit
def _write(row_ptr, old, total, scale, used, SCALED: tl.constexpr, ADD: tl.constexpr):
    if ADD:
        old = old.to(tl.float32)
        if SCALED:
            total = tl.fma(total, tl.full(total.shape, scale, tl.float32), old)
        else:
            total += old
    elif SCALED:
        total *= scale
    tl.store(row_ptr, total.to(row_ptr.dtype.element_ty), mask=used)


@triton.jit
def _write_sums(
    pid, key_ptr, order_ptr, dy_ptr, partial_ptr, to_ptr, n_tokens, vocab, dy_stride, to_stride, scale,
    SCALED: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write a row that has a token: its sum, or, where asked to ADD, what stood there and its sum.

    The program of a segment's first position works, others do not: but a segment longer than a chunk is cut into narrow
    parts for the programs of its first positions, as one of them would read hundreds of chunks' sums one after another.
    """
    n_blocks: tl.constexpr = (COLS + BLOCK - 1) // BLOCK
    part: tl.constexpr = max(BLOCK // PARTS, min(BLOCK, 256))
    position = pid // n_blocks
    left = (pid % n_blocks) * BLOCK
    # all that a row with one token needs is two loads away: these five, then the row of dy and the old one
    row = tl.load(key_ptr + position)
    far = tl.load(key_ptr + position - PARTS, mask=position >= PARTS, other=-1)
    before = tl.load(key_ptr + position - 1, mask=position > 0, other=-1)
    behind = tl.load(key_ptr + position + 1, mask=position + 1 < n_tokens, other=-1)
    token = tl.load(order_ptr + position)
    if (row < vocab) & (row != far):
        row_ptr = to_ptr + row.to(tl.int64) * to_stride
        n_before, n_behind = 0, 0
        if (row == before) | (row == behind):
            n_before, n_behind = _neighbours(key_ptr, n_tokens, position, row)
        if n_before + 1 + n_behind > CHUNK:
            if n_before * part < BLOCK:
                begin = position - n_before
                n_chunks = tl.cdiv(_lower_bound(key_ptr, n_tokens, row + 1) - begin, CHUNK)
                col = left + n_before * part + tl.arange(0, part)
                used = None
                if COLS % BLOCK != 0:
                    used = col < COLS
                old = tl.load(row_ptr + col, mask=used) if ADD else None
                total = _sum_of_chunks(partial_ptr, begin, n_chunks, col, used, COLS)
                _write(row_ptr + col, old, total, scale, used, SCALED, ADD)
        elif n_before == 0:
            col = left + tl.arange(0, BLOCK)
            used = None
            if COLS % BLOCK != 0:
                used = col < COLS
            old = tl.load(row_ptr + col, mask=used) if ADD else None
            # a chain begins at +0, which -0 does not survive
            total = tl.zeros((BLOCK,), tl.float32) + _gradient_of(token, dy_ptr, dy_stride, col, used)
            if n_behind > 0:
                # not unrolled: registers that few programs use would halve the programs of a multiprocessor
                end = position + 1 + n_behind
                total = _chain(total, order_ptr, dy_ptr, position + 1, end, dy_stride, col, used, 1)
            _write(row_ptr + col, old, total, scale, used, SCALED, ADD)


@triton.jit
def _clear(number, start_ptr, dw_ptr, vocab, COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write +0, whatever the scale, to those of a group of rows that have no token."""
    n_blocks: tl.constexpr = (COLS + BLOCK - 1) // BLOCK
    row = (number // n_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = (number % n_blocks) * BLOCK + tl.arange(0, BLOCK)
    there = row < vocab
    begin = tl.load(start_ptr + row, mask=there, other=0)
    end = tl.load(start_ptr + row + 1, mask=there, other=1)
    # one answer a row: the stores stay 16 bytes wide under this mask
    mask = (begin == end)[:, None]
    if COLS % BLOCK != 0:
        mask = mask & (col < COLS)[None, :]
    zeros = tl.zeros((ROWS, BLOCK), dw_ptr.dtype.element_ty)
    tl.store(dw_ptr + (row * COLS)[:, None] + col[None, :], zeros, mask=mask)


@TunableKernel(
    outputs=("dw_ptr",),
    data=("dy_ptr", "partial_ptr"),
    dynamic=("n_tokens",),
    fixed=_fixed_rows,
    # a column's sum over its tokens is one thread's, whichever columns share a program and whichever rows are cleared
    neutral={"ROWS": (1, 2, 4, 8, 16), "BLOCK": (256, 512, 1024, 2048, 4096), "num_warps": (4, 8)},
    admits=admits_blocks,
)
@triton.jit(do_not_specialize=["n_tokens"])
def _embedding_dw_kernel(
    key_ptr, order_ptr, start_ptr, dy_ptr, partial_ptr, dw_ptr, n_tokens, vocab, dy_stride, scale,
    SCALED: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write every row once: sums by sorted position first, as they wait for loads, then groups of rows are cleared.

    Programs by row alone wait for three loads, one behind the other, where a row has tokens, with few loads in flight:
    350 us on an H200 for 16,384 tokens of 4096 columns and 151,936 rows, which take 265 us to clear.
    """
    n_sums = n_tokens * ((COLS + BLOCK - 1) // BLOCK)
    pid = tl.program_id(0)
    if pid < n_sums:
        _write_sums(
            pid, key_ptr, order_ptr, dy_ptr, partial_ptr, dw_ptr, n_tokens, vocab, dy_stride, COLS, scale,
            SCALED, COLS, BLOCK, ADD=False,
        )  # fmt: skip
    else:
        _clear(pid - n_sums, start_ptr, dw_ptr, vocab, COLS, ROWS, BLOCK)


@TunableKernel(
    outputs=(),
    inout=("into_ptr",),
    data=("dy_ptr", "partial_ptr"),
    dynamic=("n_tokens",),
    fixed=_fixed_sums,
    neutral={"BLOCK": (256, 512, 1024, 2048, 4096), "num_warps": (4, 8)},  # as the dense gradient
    admits=admits_blocks,
)
@triton.jit(do_not_specialize=["n_tokens"])
def _embedding_add_kernel(
    key_ptr, order_ptr, dy_ptr, partial_ptr, into_ptr, n_tokens, vocab, dy_stride, into_stride, scale,
    SCALED: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _write_sums(
        tl.program_id(0), key_ptr, order_ptr, dy_ptr, partial_ptr, into_ptr, n_tokens, vocab, dy_stride, into_stride,
        scale, SCALED, COLS, BLOCK, ADD=True,
    )  # fmt: skip


def _by_tokens(meta: Mapping[str, Any]) -> tuple[int]:
    return (meta["n_tokens"] * -(-meta["COLS"] // meta["BLOCK"]),)


def _by_tokens_and_rows(meta: Mapping[str, Any]) -> tuple[int]:
    return ((meta["n_tokens"] + -(-meta["vocab"] // meta["ROWS"])) * -(-meta["COLS"] // meta["BLOCK"]),)


def _by_windows_and_starts(meta: Mapping[str, Any]) -> tuple[int]:
    windows = -(-meta["n_tokens"] // CHUNK.value) * -(-meta["COLS"] // meta["BLOCK"])
    return (windows + (0 if meta["start_ptr"] is None else -(-(meta["vocab"] + 1) // meta["STARTS"])),)


def _chunk_sums(
    keys: torch.Tensor, order: torch.Tensor, dy: torch.Tensor, vocab: int, starts: torch.Tensor | None
) -> torch.Tensor:
    """Return the sums of long segments' chunks; write to ``starts``, if given, where each row's segment begins."""
    n_tokens, n_cols = dy.shape
    partials = torch.empty(2 * -(-n_tokens // CHUNK.value), n_cols, dtype=torch.float32, device=dy.device)
    _embedding_chunks_kernel[_by_windows_and_starts](
        keys, order, dy, partials, starts, n_tokens, vocab, dy.stride(0), COLS=n_cols
    )
    return partials


def gradient(token_ids: torch.Tensor, dy: torch.Tensor, vocab: int, padding: int, scale: float) -> torch.Tensor:
    """Return the whole gradient of weight, every row written once."""
    shape = (vocab, dy.shape[-1])
    if not token_ids.numel():
        return torch.zeros(shape, dtype=dy.dtype, device=dy.device)
    dw = torch.empty(shape, dtype=dy.dtype, device=dy.device)
    dy = operands.as_rows(dy)
    keys, order = sorted_tokens(token_ids.reshape(-1), vocab, padding)
    starts = torch.empty(vocab + 1, dtype=torch.int32, device=dy.device)
    partials = _chunk_sums(keys, order, dy, vocab, starts)
    _embedding_dw_kernel[_by_tokens_and_rows](
        keys, order, starts, dy, partials, dw, len(dy), vocab, dy.stride(0), scale, SCALED=scale != 1.0, COLS=shape[1]
    )
    return dw


def add_gradient(into: torch.Tensor, token_ids: torch.Tensor, dy: torch.Tensor, padding: int, scale: float) -> None:
    """Add the gradient of weight to ``into``, in place, where a row has a token."""
    if token_ids.numel():
        vocab, n_cols = into.shape
        dy = operands.as_rows(dy)
        keys, order = sorted_tokens(token_ids.reshape(-1), vocab, padding)
        partials = _chunk_sums(keys, order, dy, vocab, None)
        _embedding_add_kernel[_by_tokens](
            keys, order, dy, partials, into, len(dy), vocab, dy.stride(0), into.stride(0), scale,
            SCALED=scale != 1.0, COLS=n_cols,
        )  # fmt: skip
