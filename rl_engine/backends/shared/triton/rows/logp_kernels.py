"""Kernels of the log-probabilities of one token a row: whole rows a program, or single chunks and a merge of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.primitives.logsumexp import (
    CHUNK,
    chunk_statistics,
    log_probability,
    merge,
    merge_chunk,
    scaled,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_engine.platforms.device import DeviceIdentity

_UNROLL = tl.constexpr(8)  # chunks whose statistics are fetched at once while merging


def fixed_rows(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    """Return one chunk of one row at a time with 2 warps, or as many short rows as make up a chunk with 4.

    Exchanges between warps bound the time: [8192, 151936] bf16 takes 587 us with 2 warps, 607 with 4, 772 with 8.
    """
    rows = operands.rows_in_tile(sizes["n_rows"], sizes["COLS"], CHUNK.value, device)
    return {"ROWS": rows, "num_warps": 2 if sizes["COLS"] == CHUNK.value else 4}


def admits_rows(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    """Let through 2 to 64 elements a thread."""
    return 2 <= launch["ROWS"] * sizes["COLS"] // (32 * launch["num_warps"]) <= 64


def fixed_chunks(_sizes: Mapping[str, Any], _device: DeviceIdentity) -> dict[str, int]:
    """Return one chunk a program."""
    return {"CHUNKS": 1, "num_warps": 2}


def _fixed_merge(_sizes: Mapping[str, Any], _device: DeviceIdentity) -> dict[str, int]:
    return {"ROWS": 32, "num_warps": 1}  # a row a thread


@triton.jit
def _statistics(
    z_rows, active, n_cols, inverse_temperature, SCALED: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Return the maximum and the sum of exp(z - maximum) of rows; of rows that are not active nothing is read."""
    m = tl.full((ROWS,), -float("inf"), tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    needed = tl.max(active.to(tl.int32), 0)
    if EVEN:
        for start in range(0, n_cols * needed, COLS):
            z = _chunk(z_rows, active, start, n_cols, inverse_temperature, SCALED, COLS)
            m, s = merge_chunk(m, s, z, ROWS, COLS)
    else:
        whole = n_cols // COLS * COLS  # in this spelling the compiler sees that it is a multiple: wide loads
        for start in range(0, whole * needed, COLS):
            z = tl.load(
                z_rows[:, None] + (start + tl.arange(0, COLS))[None, :], mask=active[:, None], other=-float("inf")
            )
            m, s = merge_chunk(m, s, scaled(z.to(tl.float32), inverse_temperature, SCALED), ROWS, COLS)
        if whole < n_cols * needed:
            z = _chunk(z_rows, active, whole, n_cols, inverse_temperature, SCALED, COLS)
            m, s = merge_chunk(m, s, z, ROWS, COLS)
    return m, s


@triton.jit
def _chunk(z_rows, active, start, n_cols, inverse_temperature, SCALED: tl.constexpr, COLS: tl.constexpr):
    """Return a chunk of scaled logits in fp32, -inf behind the row's end and in rows that are not active."""
    col = start + tl.arange(0, COLS)
    mask = active[:, None] & (col < n_cols)[None, :]
    z = tl.load(z_rows[:, None] + col[None, :], mask=mask, other=-float("inf"))
    return scaled(z.to(tl.float32), inverse_temperature, SCALED)


@triton.jit
def counted_rows(target_ptr, mask_ptr, row, used, ignore_index):
    """Return the rows' targets, and which rows count: not ignored, not masked."""
    target = tl.load(target_ptr + row, mask=used, other=0).to(tl.int64)
    active = used
    if ignore_index is not None:
        active = active & (target != ignore_index)
    if mask_ptr is not None:
        active = active & (tl.load(mask_ptr + row, mask=used, other=0) != 0)
    return target, active


@triton.jit
def chosen_logits(z_rows, target, active, n_cols, inverse_temperature, SCALED: tl.constexpr):
    """Return the targets' scaled logits; NaN where a row does not count or its id is none."""
    valid = active & (target >= 0) & (target < n_cols)
    z = tl.load(z_rows + tl.where(valid, target, 0), mask=valid, other=float("nan"))
    return scaled(z.to(tl.float32), inverse_temperature, SCALED)


@triton.jit
def _tensor(z_ptr, z_stride, other_ptr, other_stride):
    """Return which tensor of logits the program is for, 0 or 1, its pointer and its row stride."""
    which = tl.program_id(1).to(tl.int64)
    if other_ptr is not None:
        z_ptr = tl.where(which == 0, z_ptr, other_ptr)
        z_stride = tl.where(which == 0, z_stride, other_stride)
    return which, z_ptr, z_stride


@triton.jit
def _store(logp_ptr, norm_ptr, which, row, used, active, chosen, m, s, n_rows):
    """Write log-probabilities [tensors, rows], 0 where a row does not count, and the first's statistics [2, rows]."""
    log2_sum = tl.log2(s)
    logp = tl.where(active, log_probability(chosen, m, log2_sum), 0.0)
    tl.store(logp_ptr + which * n_rows + row, logp, mask=used)
    first = used & (tl.full(row.shape, which, tl.int64) == 0)
    tl.store(norm_ptr + row, m, mask=first)
    tl.store(norm_ptr + n_rows + row, log2_sum, mask=first)


@TunableKernel(
    outputs=("logp_ptr", "norm_ptr"),
    data=("z_ptr", "other_ptr"),
    dynamic=("n_rows",),
    fixed=fixed_rows,
    # chunk width is contract; which rows share a program and how many warps work on them changes no sum
    neutral={"ROWS": (1, 2, 4, 16, 64, 256), "num_warps": (2, 4, 8, 16)},
    admits=admits_rows,
)
@triton.jit(do_not_specialize=["n_rows"])
def _selected_logps_kernel(
    z_ptr, other_ptr, target_ptr, mask_ptr, logp_ptr, norm_ptr,
    n_rows, n_cols, z_stride, other_stride, ignore_index, inverse_temperature,
    SCALED: tl.constexpr, EVEN: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    which, z_ptr, z_stride = _tensor(z_ptr, z_stride, other_ptr, other_stride)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    used = row < n_rows
    target, active = counted_rows(target_ptr, mask_ptr, row, used, ignore_index)
    z_rows = z_ptr + row * z_stride
    chosen = chosen_logits(z_rows, target, active, n_cols, inverse_temperature, SCALED)
    m, s = _statistics(z_rows, active, n_cols, inverse_temperature, SCALED, EVEN, ROWS, COLS)
    _store(logp_ptr, norm_ptr, which, row, used, active, chosen, m, s, n_rows)


@TunableKernel(
    outputs=("part_ptr",),
    data=("z_ptr", "other_ptr"),
    dynamic=("n_rows",),
    fixed=fixed_chunks,
    neutral={"CHUNKS": (1, 2, 4), "num_warps": (2, 4, 8)},  # as above
)
@triton.jit(do_not_specialize=["n_rows", "n_chunks"])
def _chunk_statistics_kernel(
    z_ptr, other_ptr, target_ptr, mask_ptr, part_ptr,
    n_rows, n_cols, n_chunks, z_stride, other_stride, ignore_index, inverse_temperature,
    SCALED: tl.constexpr, COLS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Write maxima and sums of single chunks to part_ptr [tensors, 2, chunks, rows]."""
    which, z_ptr, z_stride = _tensor(z_ptr, z_stride, other_ptr, other_stride)
    groups = tl.cdiv(n_chunks, CHUNKS)
    row = (tl.program_id(0) // groups).to(tl.int64) + tl.arange(0, 1)
    active = row < n_rows
    if target_ptr is not None:
        _target, active = counted_rows(target_ptr, mask_ptr, row, active, ignore_index)
    z_row, n_parts = z_ptr + row * z_stride, n_chunks.to(tl.int64) * n_rows
    part_ptr += which * 2 * n_parts
    for step in range(CHUNKS):
        chunk = (tl.program_id(0) % groups) * CHUNKS + step
        z = _chunk(z_row, active, chunk * COLS, n_cols, inverse_temperature, SCALED, COLS)
        m, s = chunk_statistics(z, 1, COLS)
        slot = chunk + tl.arange(0, 1)
        part = part_ptr + slot.to(tl.int64) * n_rows + row
        tl.store(part, m, mask=active & (slot < n_chunks))
        tl.store(part + n_parts, s, mask=active & (slot < n_chunks))


@TunableKernel(
    outputs=("logp_ptr", "norm_ptr"),
    dynamic=("n_rows",),
    fixed=_fixed_merge,
    neutral={"ROWS": (1, 4, 32), "num_warps": (1, 2)},  # rows do not meet
    warm=True,
)
@triton.jit(do_not_specialize=["n_rows", "n_chunks"])
def _merge_kernel(
    part_ptr, z_ptr, other_ptr, target_ptr, mask_ptr, logp_ptr, norm_ptr,
    n_rows, n_cols, n_chunks, z_stride, other_stride, ignore_index, inverse_temperature,
    SCALED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of rows in ascending order."""
    which, z_ptr, z_stride = _tensor(z_ptr, z_stride, other_ptr, other_stride)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    used = row < n_rows
    target, active = counted_rows(target_ptr, mask_ptr, row, used, ignore_index)
    chosen = chosen_logits(z_ptr + row * z_stride, target, active, n_cols, inverse_temperature, SCALED)
    m = tl.full((ROWS,), -float("inf"), tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    n_parts = n_chunks.to(tl.int64) * n_rows
    part_ptr += which * 2 * n_parts
    for first in range(0, n_chunks, _UNROLL):
        for step in tl.static_range(_UNROLL):  # their loads are in flight together
            chunk = tl.full((ROWS,), first + step, tl.int64)
            mask = active & (chunk < n_chunks)
            part = part_ptr + chunk * n_rows + row
            m_chunk = tl.load(part, mask=mask, other=-float("inf"))
            s_chunk = tl.load(part + n_parts, mask=mask, other=0.0)
            m, s = merge(m, s, m_chunk, s_chunk)
    _store(logp_ptr, norm_ptr, which, row, used, active, chosen, m, s, n_rows)


by_rows = _selected_logps_kernel
by_chunks = _chunk_statistics_kernel
merged = _merge_kernel
