"""GRPO loss from logits whose gradient takes the logits' place: a row is read, and read again from the L2.

Two passes and a gradient of its own move 6 bytes a bf16 logit, this moves 4 and allocates none. One program a
multiprocessor, each with one row at a time: 132 rows of 304 kB stay in an H200's L2 of 60 MB until they are read again.
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
from rl_engine.backends.shared.triton.primitives.logsumexp import CHUNK, log_probability, merge_chunks, scaled
from rl_engine.backends.shared.triton.rows.logits_gradient import gradient_tile
from rl_engine.backends.shared.triton.rows.logp_kernels import chosen_logits, counted_rows
from rl_engine.platforms import device

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_engine.platforms.device import DeviceIdentity

_BLOCK = 8192  # elements of a step of the rescaling
_PROGRAMS = 8  # of the rescaling, a multiprocessor


def _fixed(sizes: Mapping[str, Any], _device: DeviceIdentity) -> dict[str, int]:
    """Return up to 8 chunks at a time and up to 16 warps: 64 kB in flight a multiprocessor, 64 elements a thread."""
    chunks = min(8, power_of_two(-(-sizes["n_cols"] // sizes["COLS"])))
    return {"CHUNKS": chunks, "STAGES": 1, "num_warps": max(1, min(16, chunks * sizes["COLS"] // 2048))}


def _admits(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    """Let through 16 to 64 elements a thread."""
    return 16 <= launch["CHUNKS"] * sizes["COLS"] // (32 * launch["num_warps"]) <= 64


@triton.jit
def _tile(z_row, start, n_cols, inverse_temperature, SCALED: tl.constexpr, CHUNKS: tl.constexpr, COLS: tl.constexpr):
    """Return [CHUNKS, COLS] scaled logits of a row in fp32, -inf behind its end."""
    col = start + (tl.arange(0, CHUNKS) * COLS)[:, None] + tl.arange(0, COLS)[None, :]
    z = tl.load(z_row[:, None] + col, mask=col < n_cols, other=-float("inf"))
    return scaled(z.to(tl.float32), inverse_temperature, SCALED)


@triton.jit
def _row_statistics(
    z_row, n_cols, inverse_temperature, SCALED: tl.constexpr, CHUNKS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Return the maximum and the sum of exp(z - maximum) of one row, [1] each, as every log-probability has them."""
    m = tl.full((1,), -float("inf"), tl.float32)
    s = tl.zeros((1,), tl.float32)
    whole = n_cols // (CHUNKS * COLS) * (CHUNKS * COLS)
    col = (tl.arange(0, CHUNKS) * COLS)[:, None] + tl.arange(0, COLS)[None, :]
    for start in tl.range(0, whole, CHUNKS * COLS, num_stages=STAGES):
        z = tl.load(z_row[:, None] + start + col).to(tl.float32)
        m, s = merge_chunks(m, s, scaled(z, inverse_temperature, SCALED), CHUNKS, COLS)
    if whole < n_cols:
        z = _tile(z_row, whole, n_cols, inverse_temperature, SCALED, CHUNKS, COLS)
        m, s = merge_chunks(m, s, z, CHUNKS, COLS)
    return m, s


@triton.jit
def _overwrite_row(
    z_row, m, log2_sum, c, target, counted, n_cols, inverse_temperature, SCALED: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one row over its logits, 0 where the row does not count; then nothing is read."""
    whole = n_cols // BLOCK * BLOCK
    for start in tl.range(0, whole, BLOCK, num_stages=STAGES):
        col = start + tl.arange(0, BLOCK)
        z_ptrs = z_row[:, None] + col[None, :]
        z = tl.load(z_ptrs, mask=counted[:, None], other=0.0).to(tl.float32)
        dz = gradient_tile(scaled(z, inverse_temperature, SCALED), m, log2_sum, c, target, counted, col)
        tl.store(z_ptrs, dz.to(z_row.dtype.element_ty))
    if whole < n_cols:
        col = whole + tl.arange(0, BLOCK)
        z_ptrs, inside = z_row[:, None] + col[None, :], (col < n_cols)[None, :]
        z = tl.load(z_ptrs, mask=counted[:, None] & inside, other=0.0).to(tl.float32)
        dz = gradient_tile(scaled(z, inverse_temperature, SCALED), m, log2_sum, c, target, counted, col)
        tl.store(z_ptrs, dz.to(z_row.dtype.element_ty), mask=inside)


@TunableKernel(
    outputs=("logp_ptr",),
    inout=("z_ptr",),
    data=("old_ptr", "ref_ptr", "advantage_ptr"),
    dynamic=("n_rows", "n_seqs", "n_tokens", "n_parts"),
    fixed=_fixed,
    # chunk width is contract; chunks are merged in ascending order however many a program holds
    neutral={"CHUNKS": (1, 2, 4, 8, 16), "STAGES": (1, 2, 3, 4), "num_warps": (4, 8, 16)},
    admits=_admits,
)
@triton.jit(do_not_specialize=["n_rows", "n_seqs", "n_tokens", "n_parts"])
def _grpo_in_place_kernel(
    z_ptr, target_ptr, mask_ptr, old_ptr, ref_ptr, advantage_ptr, count_ptr, total_ptr, normalizer_ptr, logp_ptr,
    n_rows, n_seqs, n_tokens, n_cols, n_parts, z_stride, inverse_temperature, low, high, dual, beta, normalizer,
    SCALED: tl.constexpr, SURROGATE: tl.constexpr, DUAL: tl.constexpr, KL: tl.constexpr, AGGREGATION: tl.constexpr,
    PER_TOKEN: tl.constexpr, COLS: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write each token's log-probability, and over its logits the gradient for an incoming gradient of 1."""
    for number in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row = tl.full((1,), number, tl.int64)
        target, active = counted_rows(target_ptr, mask_ptr, row, row < n_rows, None)
        counted = active & (target >= 0) & (target < n_cols)
        z_row = z_ptr + row * z_stride
        chosen = chosen_logits(z_row, target, active, n_cols, inverse_temperature, SCALED)
        read = tl.where(tl.max(counted.to(tl.int32), 0) > 0, n_cols, 0)
        m, s = _row_statistics(z_row, read, inverse_temperature, SCALED, CHUNKS, COLS, STAGES)
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
        tl.debug_barrier()  # every thread has read the row before the first one writes to it
        _overwrite_row(
            z_row,
            m,
            log2_sum,
            c,
            target.to(tl.int32),
            counted,
            n_cols,
            inverse_temperature,
            SCALED,
            CHUNKS * COLS,
            STAGES,
        )


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
    programs = min(len(z), device.for_launch(z.get_device()).sm_count)
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
