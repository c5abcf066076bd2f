"""GRPO loss from logits: `logp`'s log-probabilities, `grpo_loss`'s kernels over tokens, and one pass back to logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from rl_engine.backends.reference.loss.grpo_loss import Aggregation, GRPOLoss, Surrogate, check_grpo_loss
from rl_engine.backends.reference.loss.grpo_loss_from_logits import check_grpo_loss_from_logits
from rl_engine.backends.reference.token_ids import validate_ids
from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import pin_autotune, pinned_backward
from rl_engine.backends.shared.triton.compiler import unavailable
from rl_engine.backends.shared.triton.graph import differentiate, empty_like, graph_operator
from rl_engine.backends.shared.triton.loss.grpo_in_place import loss_in_place, may_overwrite, rescale
from rl_engine.backends.shared.triton.loss.grpo_loss import divisor_and_terms, loss_and_gradient, loss_options
from rl_engine.backends.shared.triton.rows.logits_gradient import logits_gradient
from rl_engine.backends.shared.triton.rows.selected_logps import selected_logps
from rl_engine.backends.spec import implements

if TYPE_CHECKING:
    from rl_engine.backends.reference.kl import KLEstimator

_OP = "grpo_loss_from_logits"
_ARGUMENTS = 18  # of `_forward`


def _forward(
    policy_logits: torch.Tensor,
    ref_logits: torch.Tensor | None,
    action_ids: torch.Tensor,
    old: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    normalizer: torch.Tensor | None,
    temperature: float,
    low: float,
    high: float,
    beta: float,
    dual: float,
    divisor: float,
    surrogate: int,
    kl: int,
    aggregation: int,
    gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return loss, policy loss, KL, the gradient by log-probabilities but for a weight [], and the policy's norm."""
    found = selected_logps(policy_logits, action_ids, mask=mask, other=ref_logits, temperature=temperature)
    ref = ref_logps if ref_logits is None else found.reference
    losses = loss_and_gradient(
        found.logps, old, ref, advantages, mask, normalizer,
        low, high, beta, dual, divisor, surrogate, kl, aggregation, gradient,
    )  # fmt: skip
    return *losses, found.norm


def _forward_in_place(
    policy_logits: torch.Tensor,
    ref_logits: torch.Tensor | None,
    action_ids: torch.Tensor,
    old: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    normalizer: torch.Tensor | None,
    temperature: float,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return loss, policy loss, KL of `_forward`'s arguments; the gradient by the logits lies in them."""
    if ref_logits is not None:
        ref_logps = selected_logps(ref_logits, action_ids, mask=mask, temperature=temperature).logps
    return loss_in_place(
        policy_logits, action_ids, old, ref_logps, advantages, mask, temperature,
        *divisor_and_terms(normalizer, *options[:-1]),
    )  # fmt: skip


def _backward(
    policy_logits: torch.Tensor,
    action_ids: torch.Tensor,
    mask: torch.Tensor,
    dlogps: torch.Tensor,
    weight: torch.Tensor,
    norm: torch.Tensor,
    temperature: float,
    dloss: torch.Tensor,
) -> torch.Tensor:
    return logits_gradient(
        policy_logits, action_ids, norm, (dloss, dlogps), weight=weight, mask=mask, temperature=temperature
    )


class _GRPOLossFromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        pin_autotune(ctx)
        loss, policy_loss, divergence, *gradient = _forward(*args)
        ctx.save_for_backward(args[0], args[2], args[6], *gradient)
        ctx.temperature = args[8]
        ctx.mark_non_differentiable(policy_loss, divergence)
        return loss, policy_loss, divergence

    @staticmethod
    @once_differentiable
    @pinned_backward
    def backward(ctx, dloss, *_others):
        return _backward(*ctx.saved_tensors, ctx.temperature, dloss), *[None] * (_ARGUMENTS - 1)


class _GRPOLossInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        pin_autotune(ctx)
        loss, policy_loss, divergence = _forward_in_place(*args)
        ctx.save_for_backward(args[0])  # the gradient by now
        ctx.mark_non_differentiable(policy_loss, divergence)
        return loss, policy_loss, divergence

    @staticmethod
    @once_differentiable
    @pinned_backward
    def backward(ctx, dloss, *_others):
        (gradient,) = ctx.saved_tensors
        rescale(gradient, dloss)
        return gradient.detach(), *[None] * (_ARGUMENTS - 1)


def _fake_forward(
    policy_logits: torch.Tensor, _ref_logits: torch.Tensor | None, action_ids: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, ...]:
    scalars, shape = [()] * 3, tuple(action_ids.shape)
    shapes = (*scalars, shape if others[-1] else (0,), (), (2, *shape))
    return tuple(torch.empty(one, dtype=torch.float32, device=policy_logits.device) for one in shapes)


_graph_forward = graph_operator(_OP, _forward, fake=_fake_forward)
_graph_backward = graph_operator(f"{_OP}_backward", _backward, fake=empty_like, phase="backward")
differentiate(
    _graph_forward,
    lambda logits, ids, mask, dlogps, weight, norm, temperature, dloss, *_others: (
        _graph_backward(logits, ids, mask, dlogps, weight, norm, temperature, dloss),
        *[None] * (_ARGUMENTS - 1),
    ),
    lambda inputs, outputs: (inputs[0], inputs[2], inputs[6], *outputs[3:], inputs[8]),
)


_door = operands.Door(
    _OP, "policy_logits", "ref_logits", "old_logps", "advantages", "ref_logps", "action_ids", "mask", "normalizer",
    any_dtype=("action_ids", "mask", "normalizer"),
)  # fmt: skip


@implements(_OP, backend_id=f"rlkernel.triton.{_OP}", unavailable=unavailable)
def grpo_loss_from_logits(
    policy_logits: torch.Tensor,
    ref_logits: torch.Tensor | None,
    action_ids: torch.Tensor,
    old_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    ref_logps: torch.Tensor | None = None,
    temperature: float = 1.0,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    beta: float = 0.0,
    kl: KLEstimator = "k3",
    aggregation: Aggregation = "token_mean",
    surrogate: Surrogate = "grpo",
    dual_clip: float | None = None,
    normalizer: float | torch.Tensor | None = None,
    overwrite_logits: bool = False,
    validate: bool = False,
) -> GRPOLoss:
    """Return operator ``grpo_loss`` of the log-probabilities of ``action_ids`` under ``policy_logits / temperature``.

    Bit for bit what ``grpo_loss`` gives for the log-probabilities of ``logp``, without a second pass over the logits.
    Options are those of `rl_engine.backends.reference.loss.grpo_loss.grpo_loss`.

    Args:
        policy_logits: [sequences, tokens, vocab] of the policy that is trained; bf16, fp16 or fp32; rows of
            neighbouring columns are read in place. Rows of masked tokens are not read, except in the forward of no more
            tokens than the card has multiprocessors.
        ref_logits: the same shape, of the reference policy; None with ``ref_logps`` or without a KL; no gradient.
        action_ids: [sequences, tokens], int32 or int64. Where the mask is 0 they may be anything; elsewhere an id
            outside [0, vocab) makes the loss NaN, and its gradient row 0; nothing is read out of bounds.
        old_logps: [sequences, tokens], of the policy that sampled; None takes the policy itself: a ratio of 1.
        advantages: [sequences], or [sequences, tokens]; no gradient.
        mask: [sequences, tokens], bool or number.
        ref_logps: [sequences, tokens], of the reference policy, instead of its logits.
        temperature: positive; 1.0 leaves the logits as they are, bit for bit.
        clip_eps: as for ``grpo_loss``, and so are all that follow.
        clip_eps_high: see there.
        beta: see there.
        kl: see there.
        aggregation: see there.
        surrogate: see there.
        dual_clip: see there.
        normalizer: see there.
        overwrite_logits: where autograd needs a gradient, the forward puts it in the logits' place: 4 bytes moved a
            bf16 logit instead of 6, and no tensor of their size. GSPO's, a leaf's, or one inside ``torch.compile`` gets
            memory of its own. The bits are the same for an incoming gradient of 1, the usual, and of any positive power
            of 2; another one rounds a second time. A second backward raises RuntimeError, as for any tensor that was
            written in place.
        validate: raise for ids out of range, at the price of waiting for the device.

    Returns:
        GRPOLoss of three fp32 scalars; the gradient by ``policy_logits`` has their dtype.

    Raises:
        ValueError: shapes or devices disagree, beta without a reference, two references, temperature is not positive,
            an unknown word, options that exclude each other, or ``validate`` found an id out of range.
        TypeError: another dtype, or a tensor subclass.
    """
    on_device = normalizer if isinstance(normalizer, torch.Tensor) else None
    _door(policy_logits, ref_logits, old_logps, advantages, ref_logps, action_ids, mask, on_device)
    check_grpo_loss_from_logits(policy_logits, ref_logits, action_ids, ref_logps, temperature=temperature)
    has_reference = not (ref_logits is None and ref_logps is None)
    check_grpo_loss(
        _OP, "action_ids", action_ids, old_logps=old_logps, advantages=advantages, mask=mask, ref_logps=ref_logps,
        has_reference=has_reference, beta=beta, aggregation=aggregation, kl=kl, surrogate=surrogate,
        dual_clip=dual_clip, normalizer=normalizer,
    )  # fmt: skip
    if validate:
        validate_ids(_OP, action_ids, policy_logits.shape[-1], mask != 0)
    needs_gradient = operands.grad_enabled(policy_logits)
    options = loss_options(
        clip_eps=clip_eps, clip_eps_high=clip_eps_high, beta=beta, dual_clip=dual_clip, normalizer=normalizer,
        surrogate=surrogate, kl=kl if has_reference else None, aggregation=aggregation,
    )  # fmt: skip
    tensors = (ref_logits, action_ids, old_logps, ref_logps, advantages, mask, on_device)
    args: tuple[Any, ...] = (
        policy_logits, *(None if one is None else one.detach() for one in tensors), temperature, *options,
        needs_gradient,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        loss, policy_loss, divergence, *_gradient = _graph_forward(*args)
        return GRPOLoss(loss, policy_loss.detach(), divergence.detach())
    if needs_gradient:
        in_place = overwrite_logits and surrogate != "gspo" and may_overwrite(policy_logits)
        return GRPOLoss(*(_GRPOLossInPlace if in_place else _GRPOLossFromLogits).apply(*args))
    return GRPOLoss(*_forward(*args)[:3])
