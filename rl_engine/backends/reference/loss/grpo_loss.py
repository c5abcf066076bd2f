"""GRPO loss from log-probabilities: the declaration and the PyTorch operator."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

from rl_engine.backends.reference.dtypes import require_float, wide
from rl_engine.backends.spec import Case, InputMaker, Inputs, Tolerance, operator

Aggregation = Literal["token_mean", "sequence_mean"]
KLEstimator = Literal["k1", "k2", "k3"]


class GRPOLoss(NamedTuple):
    """Scalars of one loss: ``loss`` = ``policy_loss`` + beta * ``kl``. Only ``loss`` carries a gradient."""

    loss: torch.Tensor
    policy_loss: torch.Tensor
    kl: torch.Tensor


def _inputs(make: InputMaker, sequences: int, tokens: int) -> Inputs:
    shape = (sequences, tokens)
    args = (
        make.normal(*shape, dtype=torch.float32) - 2.0,
        make.normal(*shape, dtype=torch.float32) - 2.0,
        make.normal(sequences, dtype=torch.float32),
        make.bernoulli(0.8, *shape),
    )
    return Inputs(args, {"ref_logps": make.normal(*shape, dtype=torch.float32) - 2.0, "beta": 0.1})


def check_grpo_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    ref_logps: torch.Tensor | None,
    *,
    beta: float,
    aggregation: str,
    kl: str,
) -> None:
    """Raise ValueError for shapes or words that do not fit together."""
    if logps.dim() != 2:
        raise ValueError(f"grpo_loss: logps are {list(logps.shape)}; pass [sequences, tokens]")
    for name, tensor in (("old_logps", old_logps), ("mask", mask), ("ref_logps", ref_logps)):
        if tensor is not None and tensor.shape != logps.shape:
            raise ValueError(f"grpo_loss: {name} is {list(tensor.shape)}; pass logps' shape {list(logps.shape)}")
    if advantages.shape != logps.shape[:1]:
        raise ValueError(f"grpo_loss: advantages are {list(advantages.shape)}; pass [{logps.shape[0]}], one a sequence")
    if beta and ref_logps is None:
        raise ValueError(f"grpo_loss: beta is {beta} without ref_logps; pass the reference policy's log-probabilities")
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"grpo_loss: aggregation is {aggregation!r}; pass one of {', '.join(get_args(Aggregation))}")
    if kl not in get_args(KLEstimator):
        raise ValueError(f"grpo_loss: kl is {kl!r}; pass one of {', '.join(get_args(KLEstimator))}")


@operator(
    "grpo_loss",
    family="loss",
    contract=(
        "grpo_loss.v1: per sequence, sums fold neighbours inside tiles of 1024 tokens, tiles ascending; sequences fold"
        " neighbours inside tiles of 1024, tiles ascending; masked tokens are exact zeros"
    ),
    inputs=_inputs,
    cases=(
        Case("tiny", {"sequences": 2, "tokens": 3}),
        Case("odd", {"sequences": 5, "tokens": 67}),
        Case("sequence-mean", {"sequences": 3, "tokens": 9}, {"aggregation": "sequence_mean"}),
        Case("small", {"sequences": 64, "tokens": 1024}, tags=frozenset({"speed"})),
        Case("thr", {"sequences": 512, "tokens": 16384}, tags=frozenset({"speed"})),
    ),
    tolerance=Tolerance({"float32": 64}, "a balanced sum over tokens of exponentials that cancel in part"),
    dtypes=("float32",),
    rowwise=False,
)
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

    A token's loss is ``-min(r * A, clip(r, 1 - clip_eps, 1 + clip_eps_high) * A)`` with ``r = exp(logp - old_logp)``;
    its KL estimate, with ``d = ref_logp - logp``, is ``-d`` (k1), ``d**2 / 2`` (k2) or ``exp(d) - d - 1`` (k3)
    (Schulman, "Approximating KL divergence"). As a loss, k1 ignores the reference: its gradient is 1 whatever it says.

    Args:
        logps: [sequences, tokens] of the policy that is trained; bf16, fp16, fp32 or fp64, any strides.
        old_logps: the same shape, of the policy that sampled; no gradient.
        advantages: [sequences]; no gradient.
        mask: the same shape as logps, bool or number; where it is 0 nothing is read into loss or gradient, whatever
            stands there, infinities and NaN included.
        ref_logps: the same shape, of the reference policy; needed where beta is not 0; no gradient.
        clip_eps: how far the ratio may fall below 1 before its gradient stops.
        clip_eps_high: how far above 1; ``clip_eps`` where it is None (DAPO, arXiv:2503.14476, raises it).
        beta: weight of the KL.
        kl: the estimator.
        aggregation: ``token_mean`` divides the sum over all unmasked tokens by their number; ``sequence_mean`` takes
            the mean over each sequence's unmasked tokens, then over sequences. Empty counts divide by 1.

    Returns:
        GRPOLoss of three scalars, fp32 (fp64 for fp64).

    Raises:
        ValueError: shapes disagree, beta without ref_logps, or an unknown word.
        TypeError: a tensor is not floating point.
    """
    require_float("grpo_loss", logps=logps, old_logps=old_logps, advantages=advantages)
    check_grpo_loss(logps, old_logps, advantages, mask, ref_logps, beta=beta, aggregation=aggregation, kl=kl)
    use = mask != 0
    logp = torch.where(use, wide(logps), 0.0)
    old = torch.where(use, wide(old_logps.detach()), 0.0)
    advantage = wide(advantages.detach()).unsqueeze(-1)
    ratio = (logp - old).exp()
    high = clip_eps if clip_eps_high is None else clip_eps_high
    policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_eps, 1 + high) * advantage)
    policy_loss = _aggregate(torch.where(use, policy, 0.0), use, aggregation)
    if ref_logps is None:
        return GRPOLoss(policy_loss, policy_loss.detach(), torch.zeros_like(policy_loss.detach()))
    d = torch.where(use, wide(ref_logps.detach()), 0.0) - logp
    estimate = {"k1": lambda: -d, "k2": lambda: d.square() / 2, "k3": lambda: d.expm1() - d}[kl]()
    divergence = _aggregate(torch.where(use, estimate, 0.0), use, aggregation)
    return GRPOLoss(policy_loss + beta * divergence, policy_loss.detach(), divergence.detach())


def _aggregate(values: torch.Tensor, use: torch.Tensor, aggregation: Aggregation) -> torch.Tensor:
    if aggregation == "token_mean":
        return values.sum() / use.sum().clamp_min(1)
    return (values.sum(-1) / use.sum(-1).clamp_min(1)).sum() / max(1, values.shape[0])
