"""GRPO loss from logits: the declaration and the PyTorch operator."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rl_engine.backends.reference.dtypes import require_float
from rl_engine.backends.reference.loss.grpo_loss import Aggregation, GRPOLoss, Surrogate, check_grpo_loss, grpo_loss
from rl_engine.backends.reference.selected_logps import require_temperature, selected_logps
from rl_engine.backends.reference.token_ids import require_ids, validate_ids
from rl_engine.backends.spec import Case, InputMaker, Inputs, Tolerance, Traffic, operator

if TYPE_CHECKING:
    from rl_engine.backends.reference.kl import KLEstimator

_OP = "grpo_loss_from_logits"


def _inputs(
    make: InputMaker,
    sequences: int,
    tokens: int,
    vocab: int,
    masked: int = 20,
    ref_logps: int = 0,
) -> Inputs:
    """Make inputs of which ``masked`` percent of the tokens do not count; ``ref_logps`` instead of logits, where 1."""
    shape = (sequences, tokens)
    args = (
        make.normal(*shape, vocab, scale=0.5),
        None if ref_logps else make.normal(*shape, vocab, scale=0.5),
        make.integers(0, vocab, *shape),
        make.normal(*shape, scale=0.3, dtype=torch.float32) - math.log(vocab),
        make.normal(sequences, dtype=torch.float32),
        make.bernoulli(1 - masked / 100, *shape),
    )
    if not ref_logps:
        return Inputs(args, {"beta": 0.1})
    given = make.normal(*shape, scale=0.3, dtype=torch.float32) - math.log(vocab)
    return Inputs(args, {"beta": 0.1, "ref_logps": given})


def _traffic(
    itemsize: int,
    sequences: int,
    tokens: int,
    vocab: int,
    masked: int,
    ref_logps: int = 0,
    *,
    overwrite_logits: bool = False,
) -> Traffic:
    """Count logits only, of rows that all count: of masked ones nothing is read.

    Where the gradient may take their place, the backward's reads find them in the L2.
    """
    assert masked == 0, "speed is measured without masked rows"
    logits = itemsize * sequences * tokens * vocab
    return Traffic(forward=logits * (1 if ref_logps else 2), backward=logits * (1 if overwrite_logits else 2))


def check_grpo_loss_from_logits(
    policy_logits: torch.Tensor,
    ref_logits: torch.Tensor | None,
    action_ids: torch.Tensor,
    ref_logps: torch.Tensor | None,
    *,
    temperature: float,
) -> None:
    """Raise unless the logits fit the ids; what the loss itself asks for is `check_grpo_loss`'s."""
    require_ids(_OP, action_ids=action_ids)
    if policy_logits.dim() != 3 or policy_logits.shape[-1] == 0:
        raise ValueError(f"{_OP}: policy_logits are {list(policy_logits.shape)}; pass [sequences, tokens, vocab]")
    if action_ids.shape != policy_logits.shape[:2]:
        raise ValueError(
            f"{_OP}: action_ids are {list(action_ids.shape)}; pass one id a token, {list(policy_logits.shape[:2])}"
        )
    if ref_logits is not None and ref_logps is not None:
        raise ValueError(f"{_OP}: both ref_logits and ref_logps are given; pass at most one of them")
    if ref_logits is not None and ref_logits.shape != policy_logits.shape:
        raise ValueError(
            f"{_OP}: ref_logits are {list(ref_logits.shape)}; pass policy_logits' shape {list(policy_logits.shape)}"
        )
    require_temperature(_OP, temperature)


@operator(
    _OP,
    family="loss",
    contract="grpo_loss_from_logits.v1: log-probabilities of logp.v1, and of them grpo_loss.v2",
    inputs=_inputs,
    cases=(
        Case("tiny", {"sequences": 2, "tokens": 3, "vocab": 7}),
        Case("odd", {"sequences": 3, "tokens": 3, "vocab": 4099}),
        Case("empty-sequences", {"sequences": 0, "tokens": 4, "vocab": 8}),
        Case("gspo", {"sequences": 2, "tokens": 9, "vocab": 5}, {"surrogate": "gspo", "temperature": 0.7}),
        Case("in-place", {"sequences": 2, "tokens": 2, "vocab": 4099, "ref_logps": 1}, {"overwrite_logits": True}),
        Case("small", {"sequences": 8, "tokens": 64, "vocab": 32768, "masked": 0}, tags=frozenset({"speed"})),
        Case("thr", {"sequences": 32, "tokens": 256, "vocab": 151936, "masked": 0}, tags=frozenset({"speed"})),
        Case(
            "thr-fused",
            {"sequences": 32, "tokens": 256, "vocab": 151936, "masked": 0, "ref_logps": 1},
            {"overwrite_logits": True},
            tags=frozenset({"speed"}),
        ),
    ),
    tolerance=Tolerance(
        {"float32": 64, "float16": 8, "bfloat16": 8}, "sums over tokens of exponentials of rounded log-probabilities"
    ),
    rowwise=False,
    traffic=_traffic,
)
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

    Args:
        policy_logits: [sequences, tokens, vocab] of the policy that is trained; bf16, fp16, fp32 or fp64, any strides.
        ref_logits: the same shape, of the reference policy; None with ``ref_logps`` or without a KL; no gradient.
        action_ids: [sequences, tokens], int32 or int64. Where the mask is 0 they may be anything; elsewhere an id
            outside [0, vocab) makes the loss NaN, and its gradient row 0.
        old_logps: [sequences, tokens], of the policy that sampled; None takes the policy itself: a ratio of 1.
        advantages: [sequences], or [sequences, tokens]; no gradient.
        mask: [sequences, tokens], bool or number; where it is 0 neither logits nor ids are looked at.
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
        overwrite_logits: allows to put the gradient in the logits' place; not used here.
        validate: raise for ids out of range, at the price of waiting for the device.

    Returns:
        GRPOLoss of three scalars, fp32 (fp64 for fp64).

    Raises:
        ValueError: shapes disagree, beta without a reference, two references, temperature is not positive, an unknown
            word, options that exclude each other, or ``validate`` found an id out of range.
        TypeError: a tensor is not floating point, or action_ids are not int32 or int64.
    """
    del overwrite_logits
    require_float(_OP, policy_logits=policy_logits, **({} if ref_logits is None else {"ref_logits": ref_logits}))
    check_grpo_loss_from_logits(policy_logits, ref_logits, action_ids, ref_logps, temperature=temperature)
    check_grpo_loss(
        _OP, "action_ids", action_ids, old_logps=old_logps, advantages=advantages, mask=mask, ref_logps=ref_logps,
        has_reference=not (ref_logits is None and ref_logps is None), beta=beta, aggregation=aggregation, kl=kl,
        surrogate=surrogate, dual_clip=dual_clip, normalizer=normalizer,
    )  # fmt: skip
    use = mask != 0
    if validate:
        validate_ids(_OP, action_ids, policy_logits.shape[-1], use)
    if ref_logits is not None:
        ref_logps = selected_logps(ref_logits.detach(), action_ids, use, temperature)
    return grpo_loss(
        selected_logps(policy_logits, action_ids, use, temperature), old_logps, advantages, mask,
        ref_logps=ref_logps, clip_eps=clip_eps, clip_eps_high=clip_eps_high, beta=beta, kl=kl, aggregation=aggregation,
        surrogate=surrogate, dual_clip=dual_clip, normalizer=normalizer,
    )  # fmt: skip
