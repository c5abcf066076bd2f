"""GRPO loss from log-probabilities, with its gradient written where the loss is computed.

At most four launches forward and backward: count the unmasked tokens (only where the weight of a token needs it first),
tokens to sums and to the gradient for an incoming gradient of 1, finish, and a scaling that does nothing where that
gradient is 1. GSPO of sequences longer than a tile takes one more, for their ratios. A gradient computed in a pass of
its own would cost 8 bytes a token more, of 17. H200, both passes: 6.8 us at [64, 1024], 48.7 at [512, 16384].
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from rl_engine.backends.reference.loss.grpo_loss import (
    Aggregation,
    GRPOLoss,
    Surrogate,
    check_grpo_loss,
)
from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import pin_autotune, pinned_backward
from rl_engine.backends.shared.triton.compiler import unavailable
from rl_engine.backends.shared.triton.graph import differentiate, empty_like, graph_operator
from rl_engine.backends.shared.triton.loss import grpo_kernels as kernels
from rl_engine.backends.shared.triton.loss.grpo_batch import Batch
from rl_engine.backends.shared.triton.primitives.kl import KL_CODES
from rl_engine.backends.spec import implements

if TYPE_CHECKING:
    from rl_engine.backends.reference.kl import KLEstimator

_SURROGATES = {"grpo": kernels.GRPO.value, "gspo": kernels.GSPO.value, "cispo": kernels.CISPO.value}
_AGGREGATIONS = {
    "token_mean": kernels.TOKEN_MEAN.value,
    "sequence_mean": kernels.SEQUENCE_MEAN.value,
    "constant": kernels.CONSTANT.value,
}
_TENSORS, _OPTIONS = 6, 9  # arguments of `loss_and_gradient`


def loss_options(
    *,
    clip_eps: float,
    clip_eps_high: float | None,
    beta: float,
    dual_clip: float | None,
    normalizer: float | torch.Tensor | None,
    surrogate: Surrogate,
    kl: KLEstimator | None,
    aggregation: Aggregation,
) -> tuple[float, float, float, float, float, int, int, int]:
    """Return the numbers of `loss_and_gradient`, from ``low`` to ``aggregation``; ``kl`` is None without reference."""
    return (
        1.0 - clip_eps,
        1.0 + (clip_eps if clip_eps_high is None else clip_eps_high),
        float(beta),
        math.inf if dual_clip is None else float(dual_clip),
        1.0 if normalizer is None or isinstance(normalizer, torch.Tensor) else float(normalizer),
        _SURROGATES[surrogate],
        0 if kl is None else KL_CODES[kl],
        _AGGREGATIONS[aggregation],
    )


def divisor_and_terms(
    normalizer: torch.Tensor | None,
    low: float,
    high: float,
    beta: float,
    dual: float,
    divisor: float,
    surrogate: int,
    kl: int,
    aggregation: int,
) -> tuple[kernels.Divisor, kernels.Terms]:
    """Return the numbers of `loss_options`, and a normalizer on the device, as the kernels take them."""
    terms = kernels.Terms(low, high, dual, beta, surrogate, kl)
    return kernels.Divisor(aggregation, normalizer, divisor), terms


def loss_and_gradient(
    logps: torch.Tensor,
    old: torch.Tensor | None,
    ref: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    normalizer: torch.Tensor | None,
    low: float,
    high: float,
    beta: float,
    dual: float,
    divisor: float,
    surrogate: int,
    kl: int,
    aggregation: int,
    gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return loss, policy loss, KL, and the gradient by logps (empty if not asked for) but for a weight []."""
    dlogps = empty_like(logps) if gradient else torch.empty(0, dtype=logps.dtype, device=logps.device)
    if not logps.numel():
        loss, policy_loss, divergence, weight = (torch.zeros((), device=logps.device) for _ in range(4))
        return loss, policy_loss, divergence, dlogps, weight
    loss, policy_loss, divergence, weight = kernels.losses(
        Batch.of(logps, old, ref, advantages, mask),
        *divisor_and_terms(normalizer, low, high, beta, dual, divisor, surrogate, kl, aggregation),
        dlogps if gradient else None,
    )
    return loss, policy_loss, divergence, dlogps, weight


class _GRPOLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        pin_autotune(ctx)
        *losses, dlogps, weight = loss_and_gradient(*args)
        ctx.gradient = (dlogps, weight)
        ctx.save_for_backward(*args[:_TENSORS])  # for a second backward: the first takes ctx.gradient
        ctx.options = args[_TENSORS:]
        ctx.mark_non_differentiable(*losses[1:])
        return tuple(losses)

    @staticmethod
    @once_differentiable
    @pinned_backward
    def backward(ctx, dloss, *_others):
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            gradient = loss_and_gradient(*ctx.saved_tensors, *ctx.options)[3:]
        return kernels.scale(*gradient, dloss), *[None] * (_TENSORS + _OPTIONS - 1)


def _fake_forward(logps: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    loss, policy_loss, kl, weight = (torch.empty((), dtype=torch.float32, device=logps.device) for _ in range(4))
    dlogps = torch.empty(logps.shape if others[-1] else 0, dtype=logps.dtype, device=logps.device)
    return loss, policy_loss, kl, dlogps, weight


def _backward(dlogps: torch.Tensor, weight: torch.Tensor, dloss: torch.Tensor) -> torch.Tensor:
    """Return the gradient times weight and incoming gradient: of a copy, since a graph's operators change no input."""
    return kernels.scale(dlogps.clone(), weight, dloss)


_graph_forward = graph_operator("grpo_loss", loss_and_gradient, fake=_fake_forward)
_graph_backward = graph_operator("grpo_loss_backward", _backward, fake=empty_like, phase="backward")
differentiate(
    _graph_forward,
    lambda dlogps, weight, dloss, *_others: (
        _graph_backward(dlogps, weight, dloss), *[None] * (_TENSORS + _OPTIONS - 1),
    ),
    lambda _inputs, outputs: outputs[3:],
)  # fmt: skip


_door = operands.Door(
    "grpo_loss", "logps", "old_logps", "advantages", "ref_logps", "mask", "normalizer", any_dtype=("mask", "normalizer")
)


@implements("grpo_loss", backend_id="rlkernel.triton.grpo_loss", unavailable=unavailable)
def grpo_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    ref_logps: torch.Tensor | None = None,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    beta: float = 0.0,
    kl: KLEstimator = "k3",
    aggregation: Aggregation = "token_mean",
    surrogate: Surrogate = "grpo",
    dual_clip: float | None = None,
    normalizer: float | torch.Tensor | None = None,
) -> GRPOLoss:
    """Return the policy loss plus ``beta`` times the KL to a reference (Shao et al., arXiv:2402.03300, eq. 3).

    Formulae, words and conventions are those of `rl_engine.backends.reference.loss.grpo_loss.grpo_loss`. With a given
    ``normalizer`` the bits of a token's gradient depend on its own sequence only; the other aggregations divide by
    counts of the whole batch. Padding on the right changes no bit of loss or gradient.

    Args:
        logps: [sequences, tokens] of the policy that is trained, bf16, fp16 or fp32, any strides.
        old_logps: the same shape, of the policy that sampled; None for logps themselves; no gradient.
        advantages: [sequences] or [sequences, tokens]; no gradient.
        mask: the same shape as logps, bool or number; what stands where it is 0 reaches neither loss nor gradient.
        ref_logps: the same shape, of the reference policy; needed where beta is not 0; no gradient.
        clip_eps: how far the ratio may fall below 1 before its gradient stops.
        clip_eps_high: how far above 1; ``clip_eps`` where it is None.
        beta: weight of the KL.
        kl: the estimator, k1, k2, k3 or abs.
        aggregation: ``token_mean``, ``sequence_mean`` or ``constant``.
        surrogate: ``grpo``, ``gspo`` or ``cispo``.
        dual_clip: where the advantage is negative, the loss is at most this times its size; above 1.
        normalizer: what ``constant`` divides the sum by: a number, or a tensor [] on the device, any dtype, which the
            kernels read there. It is not checked there: that would wait for the device.

    Returns:
        GRPOLoss of three fp32 scalars.

    Raises:
        ValueError: shapes or devices disagree, beta without ref_logps, an unknown word, or options that exclude each
            other.
        TypeError: another dtype, or a tensor subclass.
    """
    on_device = normalizer if isinstance(normalizer, torch.Tensor) else None
    _door(logps, old_logps, advantages, ref_logps, mask, on_device)
    check_grpo_loss(
        "grpo_loss", "logps", logps, old_logps=old_logps, advantages=advantages, mask=mask, ref_logps=ref_logps,
        has_reference=ref_logps is not None, beta=beta, aggregation=aggregation, kl=kl, surrogate=surrogate,
        dual_clip=dual_clip, normalizer=normalizer,
    )  # fmt: skip
    needs_gradient = operands.grad_enabled(logps)
    tensors = (old_logps, ref_logps, advantages, mask, on_device)
    options = loss_options(
        clip_eps=clip_eps, clip_eps_high=clip_eps_high, beta=beta, dual_clip=dual_clip, normalizer=normalizer,
        surrogate=surrogate, kl=None if ref_logps is None else kl, aggregation=aggregation,
    )  # fmt: skip
    args: tuple[Any, ...] = (
        logps,
        *(None if one is None else one.detach() if one.requires_grad else one for one in tensors),
        *options,
        needs_gradient,
    )
    if torch.compiler.is_compiling():
        loss, policy_loss, divergence, _dlogps, _weight = _graph_forward(*args)
        return GRPOLoss(loss, policy_loss.detach(), divergence.detach())
    if needs_gradient:
        return GRPOLoss(*_GRPOLoss.apply(*args))
    return GRPOLoss(*loss_and_gradient(*args)[:3])
