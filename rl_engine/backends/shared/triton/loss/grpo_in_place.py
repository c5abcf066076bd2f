"""GRPO loss from logits whose gradient takes the logits' place, which then needs no memory of its own.

A program writes the gradient of one row in the same loop that gathers the statistics of its next row: memory is read
and written at once, and both passes' arithmetic hides under it. [8192, 151936] bf16 takes an H200 1.91 ms so and 2.91
with one pass after the other. What is read again comes from the L2 in part only: 264 rows of 304 kB are on their way,
and 132, which would fit, wait for themselves too long (2.2 ms).
A token's gradient must depend on nothing that later tokens say, so GSPO, whose ratio is a sequence's, cannot do it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.loss.grpo_batch import Batch, Counts, count
from rl_engine.backends.shared.triton.loss.grpo_kernels import (
    CONSTANT,
    Divisor,
    Terms,
    losses,
    safe_ratio,
    token_loss,
    token_weight,
)
from rl_engine.backends.shared.triton.operands import power_of_two
from rl_engine.backends.shared.triton.primitives.folds import rounded_product
from rl_engine.backends.shared.triton.primitives.logsumexp import (
    CHUNK,
    log_probability,
    merge_chunks,
    probability,
    scaled,
)
from rl_engine.backends.shared.triton.resources import Needs
from rl_engine.backends.shared.triton.rows.logp_kernels import chosen_logits, counted_rows
from rl_engine.platforms import device

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_engine.platforms.device import DeviceIdentity

_BLOCK = 8192  # elements of a step of the rescaling
_IN_FLIGHT = 2  # programs a multiprocessor, each with a row
_PROGRAMS = 8  # of the rescaling, a multiprocessor


def _fixed(sizes: Mapping[str, Any], _device: DeviceIdentity) -> dict[str, int]:
    """Return up to 2 chunks at a time, 64 elements a thread, and 3 stages: 64 kB in flight a program."""
    chunks = min(2, power_of_two(-(-sizes["n_cols"] // sizes["COLS"])))
    return {"CHUNKS": chunks, "STAGES": 3, "num_warps": max(1, chunks * sizes["COLS"] // 2048)}


def _admits(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    """Let through 16 to 64 elements a thread."""
    return 16 <= launch["CHUNKS"] * sizes["COLS"] // (32 * launch["num_warps"]) <= 64


def _needs(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> Needs:
    """Return the shared memory of the tiles of two rows that are on their way."""
    tile = launch["CHUNKS"] * sizes["COLS"] * sizes["z_ptr"]
    return Needs(shared_bytes=2 * (launch["STAGES"] - 1) * tile)


@triton.jit
def _row_statistics(
    z_row, counted, n_cols, inverse_temperature, SCALED: tl.constexpr, CHUNKS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Return the maximum and the sum of exp(z - maximum) of one row, [1] each, as every log-probability has them.

    Of a row that does not count nothing is read, and what is returned means nothing.
    """
    m = tl.full((1,), -float("inf"), tl.float32)
    s = tl.zeros((1,), tl.float32)
    whole = n_cols // (CHUNKS * COLS) * (CHUNKS * COLS)
    for start in tl.range(0, whole, CHUNKS * COLS, num_stages=STAGES):
        col = start + _columns(CHUNKS, COLS)
        z = tl.load(z_row + col, mask=_all(counted, CHUNKS, COLS), other=0.0).to(tl.float32)
        m, s = merge_chunks(m, s, scaled(z, inverse_temperature, SCALED), CHUNKS, COLS)
    if whole < n_cols:
        col = whole + _columns(CHUNKS, COLS)
        used = _all(counted, CHUNKS, COLS) & (col < n_cols)
        z = tl.load(z_row + col, mask=used, other=-float("inf")).to(tl.float32)
        m, s = merge_chunks(m, s, scaled(z, inverse_temperature, SCALED), CHUNKS, COLS)
    return m, s


@triton.jit
def _overwrite_row(
    z_row, next_row, m, log2_sum, c, counted, next_counted, n_cols, inverse_temperature,
    SCALED: tl.constexpr, CHUNKS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a row over its logits as if no column were chosen; return the next row's statistics."""
    next_m = tl.full((1,), -float("inf"), tl.float32)
    next_s = tl.zeros((1,), tl.float32)
    whole = n_cols // (CHUNKS * COLS) * (CHUNKS * COLS)
    # a logit is overwritten by what was computed of it, so after it was read; what is fetched ahead lies elsewhere
    for start in tl.range(0, whole, CHUNKS * COLS, num_stages=STAGES):
        col = start + _columns(CHUNKS, COLS)
        used = _all(counted, CHUNKS, COLS)
        next_z = tl.load(next_row + col, mask=_all(next_counted, CHUNKS, COLS), other=0.0).to(tl.float32)
        z = scaled(tl.load(z_row + col, mask=used, other=0.0).to(tl.float32), inverse_temperature, SCALED)
        dz = c * (0.0 - probability(z, m, log2_sum))
        tl.store(z_row + col, dz.to(z_row.dtype.element_ty))
        next_m, next_s = merge_chunks(next_m, next_s, scaled(next_z, inverse_temperature, SCALED), CHUNKS, COLS)
    if whole < n_cols:
        col = whole + _columns(CHUNKS, COLS)
        inside = col < n_cols
        used = _all(counted, CHUNKS, COLS) & inside
        next_used = _all(next_counted, CHUNKS, COLS) & inside
        next_z = tl.load(next_row + col, mask=next_used, other=-float("inf")).to(tl.float32)
        z = scaled(tl.load(z_row + col, mask=used, other=0.0).to(tl.float32), inverse_temperature, SCALED)
        dz = c * (0.0 - probability(z, m, log2_sum))
        tl.store(z_row + col, dz.to(z_row.dtype.element_ty), mask=inside)
        next_m, next_s = merge_chunks(next_m, next_s, scaled(next_z, inverse_temperature, SCALED), CHUNKS, COLS)
    return next_m, next_s


@triton.jit
def _columns(CHUNKS: tl.constexpr, COLS: tl.constexpr):
    """Return the columns of a tile [CHUNKS, COLS]: neighbouring chunks of one row."""
    return (tl.arange(0, CHUNKS) * COLS)[:, None] + tl.arange(0, COLS)[None, :]


@triton.jit
def _all(flag, CHUNKS: tl.constexpr, COLS: tl.constexpr):
    """Return a mask of a tile that is one answer everywhere, which leaves accesses as wide as without."""
    return tl.full((CHUNKS, COLS), flag, tl.int32) != 0


@triton.jit
def _one(x):
    """Return the element of x [1], 32 bits: a scalar takes on the layout of a tile, a tensor would give it its own."""
    return tl.sum(x.to(tl.int32, bitcast=True), 0).to(x.dtype, bitcast=True)


@triton.jit
def _chosen(target_ptr, mask_ptr, row, n_rows, n_cols):
    """Return a row's target, whether it is there and not masked, and whether its target is a column besides."""
    target, active = counted_rows(target_ptr, mask_ptr, row, row < n_rows, None)
    return target, active, active & (target >= 0) & (target < n_cols)


@TunableKernel(
    outputs=("logp_ptr",),
    inout=("z_ptr",),
    data=("old_ptr", "ref_ptr", "advantage_ptr"),
    dynamic=("n_rows", "n_seqs", "n_tokens", "n_parts"),
    fixed=_fixed,
    # chunk width is contract; chunks are merged in ascending order however many a program holds
    neutral={"CHUNKS": (1, 2, 4), "STAGES": (2, 3, 4), "num_warps": (4, 8, 16)},
    admits=_admits,
    needs=_needs,
)
@triton.jit(do_not_specialize=["n_rows", "n_seqs", "n_tokens", "n_parts"])
def _grpo_in_place_kernel(
    z_ptr, target_ptr, mask_ptr, old_ptr, ref_ptr, advantage_ptr, count_ptr, total_ptr, normalizer_ptr, logp_ptr,
    n_rows, n_seqs, n_tokens, n_cols, n_parts, z_stride, inverse_temperature, low, high, dual, beta, normalizer,
    SCALED: tl.constexpr, SURROGATE: tl.constexpr, DUAL: tl.constexpr, KL: tl.constexpr, AGGREGATION: tl.constexpr,
    PER_TOKEN: tl.constexpr, COLS: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write each token's log-probability, and over its logits the gradient for an incoming gradient of 1."""
    row = tl.full((1,), tl.program_id(0), tl.int64)
    _target, _active, counted = _chosen(target_ptr, mask_ptr, row, n_rows, n_cols)
    z_row = z_ptr + tl.full((), tl.program_id(0), tl.int64) * z_stride
    m, s = _row_statistics(
        z_row, _one(counted.to(tl.int32)), n_cols, inverse_temperature, SCALED, CHUNKS, COLS, STAGES
    )  # fmt: skip
    for number in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row = tl.full((1,), number, tl.int64)
        z_row = z_ptr + tl.full((), number, tl.int64) * z_stride
        target, active, counted = _chosen(target_ptr, mask_ptr, row, n_rows, n_cols)
        chosen = chosen_logits(z_row + tl.zeros((1,), tl.int64), target, active, n_cols, inverse_temperature, SCALED)
        log2_sum = tl.log2(s)
        logp = tl.where(active, log_probability(chosen, m, log2_sum), 0.0)
        tl.store(logp_ptr + row, logp)
        seq = row // n_tokens
        old = logp if old_ptr is None else tl.load(old_ptr + row).to(tl.float32)
        ref = tl.load(ref_ptr + row).to(tl.float32) if KL else logp
        advantage = tl.load(advantage_ptr + (row if PER_TOKEN else seq)).to(tl.float32)
        own = tl.full((1,), 1.0, tl.float32)
        if count_ptr is not None:
            own = tl.maximum(tl.load(count_ptr + seq), 1).to(tl.float32)
        weight = token_weight(own, n_seqs, total_ptr, n_parts, normalizer_ptr, normalizer, AGGREGATION)
        safe, ratio = safe_ratio(logp, old, active)
        _policy, _kl, slope = token_loss(
            safe, ratio, ref, advantage, active, low, high, dual, beta, SURROGATE, DUAL, KL
        )
        c = rounded_product(slope, weight)
        if SCALED:
            c = c * inverse_temperature
        next_row = row + tl.num_programs(0)
        _target, _active, next_counted = _chosen(target_ptr, mask_ptr, next_row, n_rows, n_cols)
        # of a row that does not count p is 0, and with it every gradient, whatever its statistics
        base = tl.where(counted, m, 0.0)
        log2_sum = tl.where(counted, log2_sum, float("inf"))
        c = tl.where(counted, c, 0.0)
        tl.debug_barrier()  # every thread has read the chosen logit before the first one writes to the row
        m, s = _overwrite_row(
            z_row, z_row + tl.num_programs(0).to(tl.int64) * z_stride, _one(base), _one(log2_sum), _one(c),
            _one(counted.to(tl.int32)), _one(next_counted.to(tl.int32)), n_cols, inverse_temperature,
            SCALED, CHUNKS, COLS, STAGES,
        )  # fmt: skip
        tl.debug_barrier()  # behind what wrote all columns as if none were chosen: a compare less an element
        dz = c * (1.0 - probability(chosen, base, log2_sum))
        tl.store(z_row + target, dz.to(z_ptr.dtype.element_ty), mask=counted)


def may_overwrite(logits: torch.Tensor) -> bool:
    """Return whether gradients can take the place of ``logits`` [sequences, tokens, vocab]: rows apart, no leaf."""
    if logits.is_leaf or not logits.numel():
        return False
    rows = operands.as_rows(logits)
    return rows.data_ptr() == logits.data_ptr() and (len(rows) == 1 or rows.stride(0) >= rows.shape[1])


def loss_in_place(
    logits: torch.Tensor,
    action_ids: torch.Tensor,
    old: torch.Tensor | None,
    ref: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    temperature: float,
    divisor: Divisor,
    terms: Terms,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return loss, policy loss and KL, fp32 []; ``logits`` hold their gradient afterwards. See `may_overwrite`."""
    z = operands.as_rows(logits)
    logps = torch.empty(action_ids.shape, dtype=torch.float32, device=logits.device)
    batch = Batch.of(logps, old, ref, advantages, mask)
    counts = Counts() if divisor.kind == CONSTANT.value else count(batch)
    rows = (action_ids, mask, old, ref, advantages)
    programs = min(len(z), _IN_FLIGHT * device.for_launch(z.get_device()).sm_count)
    _grpo_in_place_kernel[(programs,)](
        z, *(None if one is None else one.contiguous() for one in rows), counts.sequences, counts.parts,
        divisor.tensor, logps, len(z), *logps.shape, z.shape[1], counts.n_parts, z.stride(0), 1.0 / temperature,
        terms.low, terms.high, terms.dual, terms.beta, divisor.number,
        SCALED=temperature != 1.0, SURROGATE=terms.surrogate, DUAL=terms.dual != math.inf, KL=terms.kl,
        AGGREGATION=divisor.kind, PER_TOKEN=advantages.dim() == 2, COLS=min(power_of_two(z.shape[1]), CHUNK.value),
    )  # fmt: skip
    return losses(batch, divisor, terms, None)[:3]


def _fixed_rescale(_sizes: Mapping[str, Any], _device: DeviceIdentity) -> dict[str, int]:
    return {"num_warps": 8}


@TunableKernel(
    outputs=(),
    inout=("z_ptr",),
    data=("dloss_ptr",),
    dynamic=("n_rows",),
    fixed=_fixed_rescale,
    neutral={"num_warps": (4, 8, 16)},  # no sum at all
)
@triton.jit(do_not_specialize=["n_rows"])
def _grpo_rescale_kernel(z_ptr, dloss_ptr, n_rows, n_cols, z_stride, BLOCK: tl.constexpr):
    """Multiply rows by the incoming gradient; nothing is read where that is 1, the usual."""
    dloss = tl.load(dloss_ptr).to(tl.float32)
    if dloss != 1.0:
        for number in range(tl.program_id(0), n_rows, tl.num_programs(0)):
            z_row = z_ptr + tl.full((1,), number, tl.int64) * z_stride
            for start in range(0, n_cols, BLOCK):
                col = start + tl.arange(0, BLOCK)
                z = tl.load(z_row + col, mask=col < n_cols, other=0.0).to(tl.float32)
                tl.store(z_row + col, (z * dloss).to(z_ptr.dtype.element_ty), mask=col < n_cols)


def rescale(gradient: torch.Tensor, dloss: torch.Tensor) -> None:
    """Multiply a gradient that took the place of logits by the incoming one, in place."""
    rows = operands.as_rows(gradient)
    programs = min(len(rows), _PROGRAMS * device.for_launch(rows.get_device()).sm_count)
    _grpo_rescale_kernel[(programs,)](rows, dloss, *rows.shape, rows.stride(0), BLOCK=_BLOCK)
