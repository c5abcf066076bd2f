"""Kernels of the GRPO loss: tokens to sums and gradient, one program that finishes, and a scaling of the gradient."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.compiler import is_interpreter
from rl_engine.backends.shared.triton.loss.grpo_batch import (
    TILE,
    Batch,
    Counts,
    admits_tiles,
    as_sixteens,
    by_tiles,
    count,
    fixed_tiles,
    load_tokens,
    log_ratio_sums,
    log_ratios,
    merge_tiles,
    place,
    token_count,
)
from rl_engine.backends.shared.triton.operands import INTERPRETED_TILE, power_of_two
from rl_engine.backends.shared.triton.primitives.folds import fold_columns, log2, rounded_product
from rl_engine.backends.shared.triton.primitives.kl import kl_and_slope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_engine.platforms.device import DeviceIdentity

GRPO, GSPO, CISPO = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TOKEN_MEAN, SEQUENCE_MEAN, CONSTANT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_DEFERRED = 1 << 19  # tokens up to which a pass over the gradient costs less than a launch that counts


@triton.jit
def _constant(normalizer_ptr, normalizer):
    """Return the normalizer that the caller gave: a number, or a tensor on the device."""
    if normalizer_ptr is None:
        divisor = normalizer
    else:
        divisor = tl.load(normalizer_ptr).to(tl.float32)
    return divisor


@triton.jit
def token_weight(own, n_seqs, total_ptr, n_parts, normalizer_ptr, normalizer, AGGREGATION: tl.constexpr):
    """Return what a token counts in sequences with ``own`` unmasked tokens, at least 1; 1 where no total is given."""
    if AGGREGATION == SEQUENCE_MEAN:
        weight = tl.div_rn(1.0, own * n_seqs.to(tl.float32))
    elif AGGREGATION == CONSTANT:
        weight = tl.div_rn(1.0, tl.zeros_like(own) + _constant(normalizer_ptr, normalizer))
    elif total_ptr is not None:
        weight = tl.div_rn(1.0, tl.zeros_like(own) + token_count(total_ptr, n_parts))
    else:
        weight = tl.full(own.shape, 1.0, tl.float32)
    return weight


@triton.jit
def _policy_and_slope(logp, ratio, advantage, low, high, dual, SURROGATE: tl.constexpr, DUAL: tl.constexpr):
    """Return a token's policy loss and its derivative by logp: [sequences, tile] each."""
    # NaN keeps its gradient, as it keeps its loss: a plain minimum or maximum would take the other operand
    clipped = tl.maximum(ratio, low, propagate_nan=tl.PropagateNan.ALL)
    clipped = tl.minimum(clipped, high, propagate_nan=tl.PropagateNan.ALL)
    capped = clipped * advantage
    if SURROGATE == CISPO:
        policy = rounded_product(-capped, logp)
        slope = -capped
    else:
        gain = ratio * advantage
        unclipped = (gain <= capped) | (gain != gain)
        policy = tl.where(unclipped, -gain, -capped)
        slope = tl.where(unclipped, -gain, 0.0)
    if DUAL:  # where A < 0 the loss stops at -dual * A
        bound = -dual * advantage
        beyond = (advantage < 0) & (policy > bound)
        policy = tl.where(beyond, bound, policy)
        slope = tl.where(beyond, 0.0, slope)
    return policy, slope


@triton.jit
def safe_ratio(logp, old, active):
    """Return logp and the ratio exp(logp - old), as 0 and 1 where not ``active``."""
    logp = tl.where(active, logp, 0.0)
    return logp, tl.exp(logp - tl.where(active, old, 0.0))


@triton.jit
def token_loss(
    logp, ratio, ref, advantage, active, low, high, dual, beta, SURROGATE: tl.constexpr, DUAL: tl.constexpr,
    KL: tl.constexpr,
):  # fmt: skip
    """Return policy loss and KL of tokens and the derivative of their loss by logp; all 0 where not ``active``.

    There logp is 0 and the ratio 1 already, see `safe_ratio`.
    """
    policy, slope = _policy_and_slope(logp, ratio, tl.where(active, advantage, 0.0), low, high, dual, SURROGATE, DUAL)
    kl = tl.zeros_like(policy)
    if KL:
        kl, kl_slope = kl_and_slope(tl.where(active, ref, 0.0) - logp, KL)
        if KL == 1:  # the one slope that is not 0 where d is
            kl_slope = tl.where(active, kl_slope, 0.0)
        slope = tl.fma(tl.full(slope.shape, beta, tl.float32), kl_slope, slope)
    return policy, kl, slope


@triton.jit
def _fold_two(x, y, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return `fold_columns` of x and of y, with half the exchanges between threads."""
    both = tl.join(x, y)
    for step in tl.static_range(log2(COLS)):
        both = tl.sum(tl.reshape(both, (ROWS, COLS >> (step + 1), 2, 2)), 2)
    return tl.split(tl.reshape(both, (ROWS, 2)))


@TunableKernel(
    outputs=("policy_ptr", "kl_ptr", "tile_count_ptr", "dlogp_ptr"),
    data=("logp_ptr", "old_ptr", "ref_ptr", "advantage_ptr", "log_ratio_ptr"),
    dynamic=(
        "n_seqs", "n_tokens", "n_parts", "logp_stride", "old_stride", "ref_stride", "advantage_stride", "mask_stride",
    ),
    fixed=fixed_tiles,
    neutral={"SEQS": (1, 2, 4, 16, 64), "num_warps": (4, 8)},  # a tile's sums are folds of two values at a time
    admits=admits_tiles,
)  # fmt: skip
@triton.jit(
    do_not_specialize=[
        "n_seqs", "n_tokens", "n_parts", "logp_stride", "old_stride", "ref_stride", "advantage_stride", "mask_stride",
    ]
)  # fmt: skip
def _grpo_tokens_kernel(
    logp_ptr, old_ptr, ref_ptr, advantage_ptr, mask_ptr, count_ptr, total_ptr, log_ratio_ptr, normalizer_ptr,
    policy_ptr, kl_ptr, tile_count_ptr, dlogp_ptr,
    n_seqs, n_tokens, n_parts, logp_stride, old_stride, ref_stride, advantage_stride, mask_stride,
    low, high, dual, beta, normalizer,
    SURROGATE: tl.constexpr, DUAL: tl.constexpr, KL: tl.constexpr, AGGREGATION: tl.constexpr, PER_TOKEN: tl.constexpr,
    ALIGNED: tl.constexpr, TILE: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """Write each tile's sums of policy loss and KL, [tiles, n_seqs], its count, and the gradient, where asked for.

    Where no counts are given, a sequence is one tile, which counts itself, or the weight of a token is left to the
    scaling.
    """
    n_tokens = as_sixteens(n_tokens, ALIGNED)
    tile, seq, used, col = place(n_seqs, n_tokens, TILE, SEQS)
    inside = used[:, None] & (col < n_tokens)[None, :]
    # every load before the first sum: behind its barriers they would wait in turn
    active = load_tokens(mask_ptr, mask_stride, seq, inside, col, ALIGNED) != 0
    logp = load_tokens(logp_ptr, logp_stride, seq, inside, col, ALIGNED).to(tl.float32)
    old = logp
    ref = logp
    if old_ptr is not None:
        old = load_tokens(old_ptr, old_stride, seq, inside, col, ALIGNED).to(tl.float32)
    if KL:
        ref = load_tokens(ref_ptr, ref_stride, seq, inside, col, ALIGNED).to(tl.float32)
    if PER_TOKEN:
        advantage = load_tokens(advantage_ptr, advantage_stride, seq, inside, col, ALIGNED).to(tl.float32)
    else:
        advantage = tl.load(advantage_ptr + seq, mask=used, other=0.0).to(tl.float32)[:, None]
    if count_ptr is not None:
        count = tl.load(count_ptr + seq, mask=used, other=0)
    else:
        count = tl.sum(active.to(tl.int32), 1)  # integers: any order
    own = tl.maximum(count, 1).to(tl.float32)
    weight = token_weight(own, n_seqs, total_ptr, n_parts, normalizer_ptr, normalizer, AGGREGATION)
    # Infinities and NaN under the mask must reach neither loss nor gradient, so they are replaced before anything is
    # computed, by values for which all that follows is 0; `rounded_product` makes -0 of them 0
    if SURROGATE == GSPO:
        if log_ratio_ptr is not None:
            log_ratio = merge_tiles(log_ratio_ptr, seq, used, n_seqs, tl.cdiv(n_tokens, TILE), SEQS)
        else:
            log_ratio = log_ratio_sums(logp, old, active, SEQS, TILE)
        ratio = tl.where(active, tl.exp(tl.div_rn(log_ratio, own))[:, None], 1.0)
        logp = tl.where(active, logp, 0.0)
    else:
        logp, ratio = safe_ratio(logp, old, active)
    policy, kl, slope = token_loss(logp, ratio, ref, advantage, active, low, high, dual, beta, SURROGATE, DUAL, KL)
    part = tile.to(tl.int64) * n_seqs + seq
    if KL:
        policy_sum, kl_sum = _fold_two(policy, kl, SEQS, TILE)
        tl.store(kl_ptr + part, kl_sum, mask=used)
    else:
        policy_sum = fold_columns(policy, SEQS, TILE)
    tl.store(policy_ptr + part, policy_sum, mask=used)
    if tile_count_ptr is not None:
        tl.store(tile_count_ptr + part, count, mask=used)
    if dlogp_ptr is not None:
        dlogp = rounded_product(slope, tl.broadcast_to(weight[:, None], (SEQS, TILE))).to(dlogp_ptr.dtype.element_ty)
        tl.store(dlogp_ptr + (seq * n_tokens)[:, None] + col[None, :], dlogp, mask=inside)


def _fixed_finish(sizes: Mapping[str, Any], _device: DeviceIdentity) -> dict[str, int]:
    return {"num_warps": max(1, min(8, sizes["TILE"] // 64))}


@TunableKernel(
    outputs=("loss_ptr", "policy_loss_ptr", "kl_loss_ptr", "weight_ptr"),
    data=("policy_ptr", "kl_ptr"),
    dynamic=("n_seqs", "n_tiles", "n_count_tiles"),
    fixed=_fixed_finish,
    neutral={"num_warps": (1, 4, 8)},  # folds of two values at a time
    warm=True,
)
@triton.jit(do_not_specialize=["n_seqs", "n_tiles", "n_count_tiles"])
def _grpo_finish_kernel(
    policy_ptr, kl_ptr, count_ptr, normalizer_ptr, loss_ptr, policy_loss_ptr, kl_loss_ptr, weight_ptr,
    n_seqs, n_tiles, n_count_tiles, beta, normalizer,
    AGGREGATION: tl.constexpr, DEFERRED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write loss, policy loss, KL (0 where kl_ptr is None) and what gradients still have to be multiplied by."""
    policy = tl.zeros((1,), tl.float32)
    kl = tl.zeros((1,), tl.float32)
    tokens = tl.zeros((1,), tl.int64)
    for start in range(0, n_seqs, TILE):
        seq = start + tl.arange(0, TILE)
        used = seq < n_seqs
        policy_sum = merge_tiles(policy_ptr, seq, used, n_seqs, n_tiles, TILE)
        kl_sum = tl.zeros((TILE,), tl.float32)
        if kl_ptr is not None:
            kl_sum = merge_tiles(kl_ptr, seq, used, n_seqs, n_tiles, TILE)
        if count_ptr is not None:
            count = merge_tiles(count_ptr, seq, used, n_seqs, n_count_tiles, TILE)
            tokens += tl.sum(count.to(tl.int64), 0)  # integers: any order
            if AGGREGATION == SEQUENCE_MEAN:
                own = tl.maximum(count, 1).to(tl.float32)
                policy_sum = tl.div_rn(policy_sum, own)
                kl_sum = tl.div_rn(kl_sum, own)
        policy_part, kl_part = _fold_two(tl.reshape(policy_sum, (1, TILE)), tl.reshape(kl_sum, (1, TILE)), 1, TILE)
        policy += policy_part
        kl += kl_part
    if AGGREGATION == TOKEN_MEAN:
        divisor = tl.maximum(tokens, 1).to(tl.float32)
    elif AGGREGATION == SEQUENCE_MEAN:
        divisor = tl.zeros((1,), tl.float32) + n_seqs.to(tl.float32)
    else:
        divisor = tl.zeros((1,), tl.float32) + _constant(normalizer_ptr, normalizer)
    policy = tl.div_rn(policy, divisor)
    kl = tl.div_rn(kl, divisor)
    loss = policy
    if kl_ptr is not None:
        loss = tl.fma(tl.full((1,), beta, tl.float32), kl, policy)
    one = tl.arange(0, 1)
    tl.store(loss_ptr + one, loss)
    tl.store(policy_loss_ptr + one, policy)
    tl.store(kl_loss_ptr + one, kl)
    tl.store(weight_ptr + one, tl.div_rn(1.0, divisor) if DEFERRED else tl.full((1,), 1.0, tl.float32))


class Divisor(NamedTuple):
    """What sums are divided by: ``kind`` says what; a given one is ``tensor`` [] or, where that is None, ``number``."""

    kind: int
    tensor: torch.Tensor | None
    number: float


class Terms(NamedTuple):
    """What a token's loss is made of: bounds of its ratio, dual clip, weight of the KL, codes of the two formulae."""

    low: float
    high: float
    dual: float
    beta: float
    surrogate: int
    kl: int


def losses(
    batch: Batch, divisor: Divisor, terms: Terms, dlogps: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return loss, policy loss, KL and weight, fp32 []; write to dlogps, if given, the gradient but for the weight.

    Where counting would cost more than a pass over the gradient, a token mean's weight comes after its tokens.
    """
    n_seqs, n_tokens = batch.logps.shape
    whole, by_sequence = batch.n_tiles == 1, terms.surrogate == GSPO.value
    weighs, token_mean = dlogps is not None, divisor.kind == TOKEN_MEAN.value
    counted = not whole and (by_sequence or (weighs and divisor.kind == SEQUENCE_MEAN.value))
    deferred = (
        dlogps is not None and token_mean and not counted
        and dlogps.dtype == torch.float32 and dlogps.numel() <= _DEFERRED
    )  # fmt: skip
    counted = counted or (weighs and token_mean and not deferred)
    counts = count(batch) if counted else Counts()
    tile_counts = None if counted or divisor.kind == CONSTANT.value else batch.scratch(torch.int32)
    log_ratio = log_ratios(batch) if by_sequence and not whole else None
    policy_sum, kl_sum = batch.scratch(), batch.scratch() if terms.kl else None
    rows = (batch.logps, batch.old, batch.ref, batch.advantages, batch.mask)
    _grpo_tokens_kernel[by_tiles](
        *rows, counts.sequences, counts.parts, log_ratio, divisor.tensor, policy_sum, kl_sum, tile_counts, dlogps,
        n_seqs, n_tokens, counts.n_parts, *(0 if one is None else one.stride(0) for one in rows),
        terms.low, terms.high, terms.dual, terms.beta, divisor.number,
        SURROGATE=terms.surrogate, DUAL=terms.dual != math.inf, KL=terms.kl, AGGREGATION=divisor.kind,
        PER_TOKEN=batch.advantages.dim() == 2, ALIGNED=batch.aligned, TILE=batch.tile,
    )  # fmt: skip
    first = torch.empty((), dtype=torch.float32, device=policy_sum.device)
    scalars = (first, *(torch.empty_like(first) for _ in range(3)))
    _grpo_finish_kernel[(1,)](
        policy_sum, kl_sum, counts.sequences if counted else tile_counts, divisor.tensor, *scalars,
        n_seqs, batch.n_tiles, 1 if counted else batch.n_tiles, terms.beta, divisor.number,
        AGGREGATION=divisor.kind, DEFERRED=deferred, TILE=min(power_of_two(n_seqs), TILE),
    )  # fmt: skip
    loss, policy_loss, divergence, weight = scalars
    return loss, policy_loss, divergence, weight


def _fixed_scale(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    if is_interpreter(device.arch):
        return {"BLOCK": INTERPRETED_TILE, "num_warps": 4}
    return {"BLOCK": 8192 if sizes["n"] >= 8192 * device.sm_count else 1024, "num_warps": 4}


def _by_blocks(meta: Mapping[str, Any]) -> tuple[int]:
    return (-(-meta["n"] // meta["BLOCK"]),)


@TunableKernel(
    outputs=(),
    inout=("dlogp_ptr",),
    data=("weight_ptr", "dloss_ptr"),
    dynamic=("n",),
    fixed=_fixed_scale,
    neutral={"BLOCK": (1024, 4096, 8192), "num_warps": (4, 8)},  # no sum at all
)
@triton.jit(do_not_specialize=["n"])
def _grpo_scale_kernel(dlogp_ptr, weight_ptr, dloss_ptr, n, BLOCK: tl.constexpr):
    """Multiply the gradient by weight and incoming gradient, in place; nothing is read where both are 1, the usual."""
    weight = tl.load(weight_ptr)
    dloss = tl.load(dloss_ptr).to(tl.float32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    dlogp_ptr += start
    if (weight != 1.0) | (dloss != 1.0):
        if n - start >= BLOCK:
            dlogp = tl.load(dlogp_ptr + lane).to(tl.float32)
            tl.store(dlogp_ptr + lane, (dlogp * weight * dloss).to(dlogp_ptr.dtype.element_ty))
        else:
            dlogp = tl.load(dlogp_ptr + lane, mask=lane < n - start, other=0.0).to(tl.float32)
            dlogp = (dlogp * weight * dloss).to(dlogp_ptr.dtype.element_ty)
            tl.store(dlogp_ptr + lane, dlogp, mask=lane < n - start)


def scale(dlogps: torch.Tensor, weight: torch.Tensor, dloss: torch.Tensor) -> torch.Tensor:
    """Multiply the gradient by what it lacks and by the loss's incoming one, in place, and return it."""
    if dlogps.numel():
        _grpo_scale_kernel[_by_blocks](dlogps, weight, dloss, dlogps.numel())
    return dlogps
