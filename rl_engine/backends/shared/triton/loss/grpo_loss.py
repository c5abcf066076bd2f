"""GRPO loss from log-probabilities: tokens to per-sequence sums and an unscaled gradient, then one program finishes.

Three launches for forward and backward. The gradient of a token is computed where its loss is, from values already
in registers; backward multiplies it by its sequence's weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from rl_engine.backends.reference.loss.grpo_loss import Aggregation, GRPOLoss, KLEstimator, check_grpo_loss
from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import TunableKernel, pin_autotune, pinned_backward
from rl_engine.backends.shared.triton.compiler import is_interpreter, unavailable
from rl_engine.backends.shared.triton.graph import differentiate, graph_operator
from rl_engine.backends.shared.triton.operands import as_rows, power_of_two
from rl_engine.backends.shared.triton.primitives.folds import fold_columns, rounded_product
from rl_engine.backends.spec import implements

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_engine.platforms.device import DeviceIdentity

_TILE = 1024  # tokens of one fold, and sequences of one fold: contract
_KL = {"k1": 1, "k2": 2, "k3": 3}


def _fixed(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    most, programs = (1 << 18, 1) if is_interpreter(device.arch) else (1024, device.sm_count)
    return {"SEQS": operands.rows_a_program(sizes["n_seqs"], most // sizes["TILE"], programs), "num_warps": 4}


def _admits(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    """Let through 1 to 16 tokens a thread."""
    return 1 <= launch["SEQS"] * sizes["TILE"] // (32 * launch["num_warps"]) <= 16


def _fixed_finish(sizes: Mapping[str, Any], _device: DeviceIdentity) -> dict[str, int]:
    return {"num_warps": max(1, min(8, sizes["TILE"] // 128))}


@triton.jit
def _tokens(row_ptr, stride, seq, used, start, n_tokens, TILE: tl.constexpr):
    """Return the values of one tile of tokens of the sequences' rows, 0 outside."""
    col = start + tl.arange(0, TILE)
    mask = used[:, None] & (col < n_tokens)[None, :]
    return tl.load(row_ptr + (seq * stride)[:, None] + col[None, :], mask=mask, other=0)


@triton.jit
def _kl_and_slope(d, KL: tl.constexpr):
    """Return a KL estimate of d = ref - logp, and its derivative by logp."""
    if KL == 1:
        return -d, tl.full(d.shape, 1.0, tl.float32)
    if KL == 2:
        return rounded_product(d * 0.5, d), -d
    # exp(d) - d - 1 and 1 - exp(d) lose every digit near 0: there the series, in Horner's form (|d| < 1/2: 2e-9)
    tail = tl.fma(d, 1.0 / 9.0, 1.0)
    for n in tl.static_range(8, 2, -1):
        tail = tl.fma(d * (1.0 / n), tail, 1.0)
    near = rounded_product(d * d * 0.5, tail)
    slope = -rounded_product(d, tl.fma(d * 0.5, tail, 1.0))
    growth = tl.exp(d)
    close = tl.abs(d) < 0.5
    return tl.where(close, near, growth - d - 1.0), tl.where(close, slope, 1.0 - growth)


@TunableKernel(
    outputs=("policy_ptr", "kl_ptr", "count_ptr", "slope_ptr"),
    data=("logp_ptr", "old_ptr", "ref_ptr", "advantage_ptr"),
    dynamic=("n_seqs", "n_tokens", "logp_stride", "old_stride", "ref_stride", "mask_stride"),
    fixed=_fixed,
    neutral={"SEQS": (1, 4, 16, 64, 256), "num_warps": (4, 8)},  # a sequence's sums are folds of two values at a time
    admits=_admits,
)
@triton.jit(do_not_specialize=["n_seqs", "n_tokens", "logp_stride", "old_stride", "ref_stride", "mask_stride"])
def _grpo_tokens_kernel(
    logp_ptr, old_ptr, ref_ptr, advantage_ptr, mask_ptr, policy_ptr, kl_ptr, count_ptr, slope_ptr,
    n_seqs, n_tokens, logp_stride, old_stride, ref_stride, mask_stride, low, high, beta,
    KL: tl.constexpr, TILE: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64) * SEQS + tl.arange(0, SEQS)
    used = seq < n_seqs
    advantage = tl.load(advantage_ptr + seq, mask=used, other=0.0).to(tl.float32)[:, None]
    policy_sum = tl.zeros((SEQS,), tl.float32)
    kl_sum = tl.zeros((SEQS,), tl.float32)
    count = tl.zeros((SEQS,), tl.int32)
    for start in range(0, n_tokens, TILE):
        active = _tokens(mask_ptr, mask_stride, seq, used, start, n_tokens, TILE) != 0
        logp = _tokens(logp_ptr, logp_stride, seq, used, start, n_tokens, TILE).to(tl.float32)
        old = _tokens(old_ptr, old_stride, seq, used, start, n_tokens, TILE).to(tl.float32)
        # before exp, not after: infinities and NaN under the mask must reach neither the loss nor the gradient
        logp = tl.where(active, logp, 0.0)
        ratio = tl.exp(logp - tl.where(active, old, 0.0))
        gain = ratio * advantage
        capped = tl.minimum(tl.maximum(ratio, low), high) * advantage
        unclipped = (gain <= capped) | (gain != gain)  # NaN keeps its gradient, as it keeps its loss
        policy = tl.where(unclipped, -gain, -capped)
        slope = tl.where(unclipped, -gain, 0.0)
        policy_sum += fold_columns(tl.where(active, policy, 0.0), SEQS, TILE)
        count += tl.sum(active.to(tl.int32), 1)  # integers: any order
        if KL:
            ref = _tokens(ref_ptr, ref_stride, seq, used, start, n_tokens, TILE).to(tl.float32)
            kl, kl_slope = _kl_and_slope(tl.where(active, ref, 0.0) - logp, KL)
            kl_sum += fold_columns(tl.where(active, kl, 0.0), SEQS, TILE)
            slope = tl.fma(tl.full(slope.shape, beta, tl.float32), kl_slope, slope)
        col = start + tl.arange(0, TILE)
        tl.store(
            slope_ptr + (seq * n_tokens)[:, None] + col[None, :],
            tl.where(active, slope, 0.0),
            mask=used[:, None] & (col < n_tokens)[None, :],
        )
    tl.store(policy_ptr + seq, policy_sum, mask=used)
    tl.store(kl_ptr + seq, kl_sum, mask=used)
    tl.store(count_ptr + seq, count, mask=used)


@TunableKernel(
    outputs=("loss_ptr", "weight_ptr"),
    dynamic=("n_seqs",),
    fixed=_fixed_finish,
    neutral={"num_warps": (1, 4, 8)},
    warm=True,
)
@triton.jit(do_not_specialize=["n_seqs"])
def _grpo_finish_kernel(
    policy_ptr, kl_ptr, count_ptr, loss_ptr, weight_ptr, n_seqs, beta, TOKEN_MEAN: tl.constexpr, TILE: tl.constexpr
):
    """Write loss, policy loss and KL to loss_ptr [3], and what a token of each sequence weighs to weight_ptr."""
    lane = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.int64)
    for start in range(0, n_seqs, TILE):
        total += tl.load(count_ptr + start + lane, mask=start + lane < n_seqs, other=0).to(tl.int64)
    tokens = tl.maximum(tl.sum(total, 0), 1).to(tl.float32)
    policy = tl.zeros((1,), tl.float32)
    kl = tl.zeros((1,), tl.float32)
    for start in range(0, n_seqs, TILE):
        seq = start + lane
        mask = seq < n_seqs
        count = tl.load(count_ptr + seq, mask=mask, other=0)
        own = tl.maximum(count, 1).to(tl.float32)
        policy_part = tl.load(policy_ptr + seq, mask=mask, other=0.0)
        kl_part = tl.load(kl_ptr + seq, mask=mask, other=0.0)
        if TOKEN_MEAN:
            weight = tl.zeros_like(own) + 1.0 / tokens
        else:
            policy_part = policy_part / own
            kl_part = kl_part / own
            weight = 1.0 / (own * n_seqs.to(tl.float32))
        tl.store(weight_ptr + seq, weight, mask=mask)
        policy += fold_columns(tl.reshape(policy_part, (1, TILE)), 1, TILE)
        kl += fold_columns(tl.reshape(kl_part, (1, TILE)), 1, TILE)
    divisor = tokens if TOKEN_MEAN else n_seqs.to(tl.float32)
    policy = policy / divisor
    kl = kl / divisor
    one = tl.arange(0, 1)
    tl.store(loss_ptr + one, tl.fma(tl.full((1,), beta, tl.float32), kl, policy))
    tl.store(loss_ptr + 1 + one, policy)
    tl.store(loss_ptr + 2 + one, kl)


@TunableKernel(
    outputs=("dlogp_ptr",),
    data=("slope_ptr", "weight_ptr", "dloss_ptr"),
    dynamic=("n_seqs", "n_tokens"),
    fixed=_fixed,
    neutral={"SEQS": (1, 4, 16, 64, 256), "num_warps": (4, 8)},  # no sum at all
    admits=_admits,
)
@triton.jit(do_not_specialize=["n_seqs", "n_tokens"])
def _grpo_bwd_kernel(
    slope_ptr, weight_ptr, dloss_ptr, dlogp_ptr, n_seqs, n_tokens, TILE: tl.constexpr, SEQS: tl.constexpr
):
    seq = tl.program_id(0).to(tl.int64) * SEQS + tl.arange(0, SEQS)
    used = seq < n_seqs
    weight = tl.load(weight_ptr + seq, mask=used, other=0.0) * tl.load(dloss_ptr)
    for start in range(0, n_tokens, TILE):
        slope = _tokens(slope_ptr, n_tokens, seq, used, start, n_tokens, TILE)
        col = start + tl.arange(0, TILE)
        tl.store(
            dlogp_ptr + (seq * n_tokens)[:, None] + col[None, :],
            (slope * weight[:, None]).to(dlogp_ptr.dtype.element_ty),
            mask=used[:, None] & (col < n_tokens)[None, :],
        )


_by_sequences = operands.blocks("n_seqs", "SEQS")


def _forward(
    logps: torch.Tensor,
    old: torch.Tensor,
    ref: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    low: float,
    high: float,
    beta: float,
    kl: int,
    token_mean: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (loss, policy loss, KL) [3], the unscaled gradient [sequences, tokens], the weights [sequences]."""
    n_seqs, n_tokens = logps.shape
    device = logps.device
    if not logps.numel():
        return (
            torch.zeros(3, device=device),
            torch.zeros(logps.shape, device=device),
            torch.zeros(n_seqs, device=device),
        )
    policy_sum, kl_sum, weight = (torch.empty(n_seqs, dtype=torch.float32, device=device) for _ in range(3))
    count = torch.empty(n_seqs, dtype=torch.int32, device=device)
    slope = torch.empty(logps.shape, dtype=torch.float32, device=device)
    losses = torch.empty(3, dtype=torch.float32, device=device)
    logps, old, mask = as_rows(logps), as_rows(old), as_rows(mask)
    ref = None if ref is None else as_rows(ref)
    _grpo_tokens_kernel[_by_sequences](
        logps, old, ref, advantages.contiguous(), mask, policy_sum, kl_sum, count, slope, n_seqs, n_tokens,
        logps.stride(0), old.stride(0), 0 if ref is None else ref.stride(0), mask.stride(0), low, high, beta,
        KL=kl, TILE=min(power_of_two(n_tokens), _TILE),
    )  # fmt: skip
    _grpo_finish_kernel[(1,)](
        policy_sum, kl_sum, count, losses, weight, n_seqs, beta,
        TOKEN_MEAN=token_mean, TILE=min(power_of_two(n_seqs), _TILE),
    )  # fmt: skip
    return losses, slope, weight


def _backward(slope: torch.Tensor, weight: torch.Tensor, dloss: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    n_seqs, n_tokens = slope.shape
    dlogps = torch.empty(slope.shape, dtype=dtype, device=slope.device)
    if slope.numel():
        _grpo_bwd_kernel[_by_sequences](
            slope, weight, dloss.contiguous(), dlogps, n_seqs, n_tokens, TILE=min(power_of_two(n_tokens), _TILE)
        )
    return dlogps


class _GRPOLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logps, *options):
        pin_autotune(ctx)
        losses, slope, weight = _forward(logps, *options)
        ctx.save_for_backward(slope, weight)
        ctx.dtype = logps.dtype
        loss, policy_loss, divergence = losses.clone().unbind(0)
        ctx.mark_non_differentiable(policy_loss, divergence)
        return loss, policy_loss, divergence

    @staticmethod
    @once_differentiable
    @pinned_backward
    def backward(ctx, dloss, *_others):
        return (_backward(*ctx.saved_tensors, dloss, ctx.dtype), *[None] * 9)


def _fake_forward(logps: torch.Tensor, *_others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = ((3,), tuple(logps.shape), (logps.shape[0],))
    losses, slope, weight = (torch.empty(shape, dtype=torch.float32, device=logps.device) for shape in shapes)
    return losses, slope, weight


_graph_forward = graph_operator("grpo_loss", _forward, fake=_fake_forward)
_graph_backward = graph_operator(
    "grpo_loss_backward",
    _backward,
    fake=lambda slope, _weight, _dloss, dtype: torch.empty(slope.shape, dtype=dtype, device=slope.device),
    phase="backward",
)
differentiate(
    _graph_forward,
    lambda slope, weight, dtype, dlosses, *_others: (_graph_backward(slope, weight, dlosses[0], dtype), *[None] * 9),
    lambda inputs, outputs: (*outputs[1:], inputs[0].dtype),
)


@implements("grpo_loss", backend_id="rlkernel.triton.grpo_loss", unavailable=unavailable)
def grpo_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    ref_logps: torch.Tensor | None = None,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    beta: float = 0.0,
    kl: KLEstimator = "k3",
    aggregation: Aggregation = "token_mean",
) -> GRPOLoss:
    """Return the clipped policy loss plus ``beta`` times the KL to a reference (Shao et al., arXiv:2402.03300, eq. 3).

    Formulae, words and conventions are those of `rl_engine.backends.reference.loss.grpo_loss.grpo_loss`.

    Args:
        logps: [sequences, tokens] of the policy that is trained, bf16, fp16 or fp32.
        old_logps: the same shape, of the policy that sampled; no gradient.
        advantages: [sequences]; no gradient.
        mask: the same shape as logps, bool or number; what stands where it is 0 reaches neither loss nor gradient.
        ref_logps: the same shape, of the reference policy; needed where beta is not 0; no gradient.
        clip_eps: how far the ratio may fall below 1 before its gradient stops.
        clip_eps_high: how far above 1; ``clip_eps`` where it is None.
        beta: weight of the KL.
        kl: the estimator, k1, k2 or k3.
        aggregation: ``token_mean`` or ``sequence_mean``.

    Returns:
        GRPOLoss of three fp32 scalars.

    Raises:
        ValueError: shapes or devices disagree, beta without ref_logps, or an unknown word.
        TypeError: another dtype, or a tensor subclass.
    """
    given = {"logps": logps, "old_logps": old_logps, "advantages": advantages, "ref_logps": ref_logps}
    operands.require_tensors("grpo_loss", **given, mask=mask)
    operands.require_floats("grpo_loss", **given)
    check_grpo_loss(logps, old_logps, advantages, mask, ref_logps, beta=beta, aggregation=aggregation, kl=kl)
    high = clip_eps if clip_eps_high is None else clip_eps_high
    ref = None if ref_logps is None else ref_logps.detach()
    options = (
        old_logps.detach(), ref, advantages.detach(), mask, 1.0 - clip_eps, 1.0 + high, beta,
        0 if ref is None else _KL[kl], aggregation == "token_mean",
    )  # fmt: skip
    if torch.compiler.is_compiling():
        loss, policy_loss, divergence = _graph_forward(logps, *options)[0].unbind(0)
        return GRPOLoss(loss, policy_loss.detach(), divergence.detach())
    if operands.grad_enabled(logps):
        return GRPOLoss(*_GRPOLoss.apply(logps, *options))
    return GRPOLoss(*_forward(logps, *options)[0].clone().unbind(0))
