"""GRPO loss from log-probabilities: the declaration and the PyTorch operator."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from rl_engine.backends.reference.dtypes import require_float, wide
from rl_engine.backends.reference.kl import KLEstimator, estimate_kl
from rl_engine.backends.reference.words import require_word
from rl_engine.backends.spec import Case, InputMaker, Inputs, Tolerance, Traffic, operator

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
Surrogate = Literal["grpo", "gspo", "cispo"]


class GRPOLoss(NamedTuple):
    """Scalars of one loss: ``loss`` = ``policy_loss`` + beta * ``kl``. Only ``loss`` carries a gradient."""

    loss: torch.Tensor
    policy_loss: torch.Tensor
    kl: torch.Tensor


def _traffic(_itemsize: int, sequences: int, tokens: int, **_options: object) -> Traffic:
    """Count fp32 log-probabilities of three policies and a bool mask read, fp32 gradients written."""
    return Traffic(forward=sequences * tokens * 13, backward=sequences * tokens * 4)


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
    op: str,
    of: str,
    like: torch.Tensor,
    *,
    old_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    ref_logps: torch.Tensor | None,
    has_reference: bool,
    beta: float,
    aggregation: str,
    kl: str,
    surrogate: str,
    dual_clip: float | None,
    normalizer: float | torch.Tensor | None,
) -> None:
    """Raise ValueError for shapes, words or options that do not fit together; ``of`` names ``like``, one a token."""
    if like.dim() != 2:
        raise ValueError(f"{op}: {of} are {list(like.shape)}; pass [sequences, tokens]")
    for name, tensor in (("old_logps", old_logps), ("mask", mask), ("ref_logps", ref_logps)):
        if tensor is not None and tensor.shape != like.shape:
            raise ValueError(f"{op}: {name} is {list(tensor.shape)}; pass {of}' shape {list(like.shape)}")
    if advantages.shape not in (like.shape[:1], like.shape):
        raise ValueError(
            f"{op}: advantages are {list(advantages.shape)}; pass [{like.shape[0]}], one a sequence, or "
            f"{list(like.shape)}, one a token"
        )
    if beta and not has_reference:
        raise ValueError(f"{op}: beta is {beta} without ref_logps; pass the reference policy's log-probabilities")
    words = (("aggregation", aggregation, Aggregation), ("kl", kl, KLEstimator), ("surrogate", surrogate, Surrogate))
    for name, word, known in words:
        require_word(op, name, word, known)
    if dual_clip is not None and (surrogate == "cispo" or not dual_clip > 1):
        raise ValueError(f"{op}: dual_clip is {dual_clip} for {surrogate}; pass a number above 1, for grpo or gspo")
    _check_normalizer(op, aggregation, normalizer)


def _check_normalizer(op: str, aggregation: str, normalizer: float | torch.Tensor | None) -> None:
    if (aggregation == "constant") != (normalizer is not None):
        raise ValueError(
            f"{op}: aggregation is {aggregation!r}, normalizer is {normalizer}; pass one with 'constant', and "
            "only there"
        )
    if isinstance(normalizer, torch.Tensor):
        if normalizer.dim():
            raise ValueError(f"{op}: normalizer is {list(normalizer.shape)}; pass a tensor of no dimension")
    elif normalizer is not None and not normalizer > 0:
        raise ValueError(f"{op}: normalizer is {normalizer}; pass a positive number")


@operator(
    "grpo_loss",
    family="loss",
    contract=(
        "grpo_loss.v2: per sequence, sums fold neighbours inside tiles of 1024 tokens, tiles ascending; sequences fold"
        " neighbours inside tiles of 1024, tiles ascending; divisions of sums rounded to nearest; masked tokens are"
        " exact zeros; a gradient is (slope * (1 / divisor)), rounded to its dtype, * the incoming one, rounded again"
    ),
    inputs=_inputs,
    cases=(
        Case("tiny", {"sequences": 2, "tokens": 3}),
        Case("odd", {"sequences": 5, "tokens": 67}),
        Case("no-sequence", {"sequences": 0, "tokens": 4}),
        Case("sequence-mean", {"sequences": 3, "tokens": 9}, {"aggregation": "sequence_mean"}),
        Case("constant", {"sequences": 3, "tokens": 17}, {"aggregation": "constant", "normalizer": 7.0}),
        Case("gspo", {"sequences": 3, "tokens": 32}, {"surrogate": "gspo", "aggregation": "sequence_mean"}),
        Case("gspo-tiles", {"sequences": 2, "tokens": 1040}, {"surrogate": "gspo", "aggregation": "sequence_mean"}),
        Case("dual-clip", {"sequences": 4, "tokens": 20}, {"dual_clip": 1.5, "clip_eps_high": 0.28}),
        Case("cispo", {"sequences": 3, "tokens": 48}, {"surrogate": "cispo"}, tags=frozenset({"stop-gradient"})),
        Case("small", {"sequences": 64, "tokens": 1024}, tags=frozenset({"speed"})),
        Case("thr", {"sequences": 512, "tokens": 16384}, tags=frozenset({"speed"})),
    ),
    tolerance=Tolerance({"float32": 64}, "a balanced sum over tokens of exponentials that cancel in part"),
    dtypes=("float32",),
    rowwise=False,
    traffic=_traffic,
)
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

    With ``r = exp(logp - old_logp)``, ``c = clip(r, 1 - clip_eps, 1 + clip_eps_high)`` and advantage ``A``, a token's
    loss is

    - ``grpo``: ``-min(r * A, c * A)``, also of DAPO (arXiv:2503.14476) and Dr.GRPO (arXiv:2503.20783);
    - ``gspo``: the same with the sequence's ratio, ``exp`` of the mean of ``logp - old_logp`` over its unmasked tokens,
      in place of ``r``; a token's gradient is its own loss's, as if ``r`` were ``s * exp(logp - stop_gradient(logp))``
      (arXiv:2507.18071, eq. 5 and, for advantages that differ by token, the token form, eq. 13);
    - ``cispo``: ``-stop_gradient(c) * A * logp`` (arXiv:2506.13585, eq. 4). The paper and TRL bound the ratio from
      above only: clip_eps=1.0, and clip_eps_high=TRL's epsilon_high - 1. verl bounds both sides, as clip_eps says.

    With ``dual_clip``, where ``A < 0``, it is at most ``-dual_clip * A`` (Ye et al., arXiv:1912.09729, eq. 5).
    Its KL estimate, with ``d = ref_logp - logp``, is ``-d`` (k1), ``d**2 / 2`` (k2), ``exp(d) - d - 1`` (k3) or
    ``|d|`` (abs) (Schulman, "Approximating KL divergence"). As a loss, k1 ignores the reference: its gradient is 1
    whatever it says.

    With a given ``normalizer`` a token's gradient depends on its own sequence only, whatever the rest of the batch.

    Args:
        logps: [sequences, tokens] of the policy that is trained; bf16, fp16, fp32 or fp64, any strides.
        old_logps: the same shape, of the policy that sampled; None where that is the policy itself, whose ratio is then
            1, with a gradient; no gradient.
        advantages: [sequences], or [sequences, tokens]; no gradient.
        mask: the same shape as logps, bool or number; where it is 0 nothing is read into loss or gradient, whatever
            stands there, infinities and NaN included.
        ref_logps: the same shape, of the reference policy; needed where beta is not 0; no gradient.
        clip_eps: how far the ratio may fall below 1 before its gradient stops.
        clip_eps_high: how far above 1; ``clip_eps`` where it is None (DAPO raises it).
        beta: weight of the KL.
        kl: the estimator.
        aggregation: ``token_mean`` divides the sum over all unmasked tokens by their number; ``sequence_mean`` takes
            the mean over each sequence's unmasked tokens, then over sequences; ``constant`` divides the sum by
            ``normalizer``. Empty counts divide by 1. The KL is aggregated alike.
        surrogate: which policy loss.
        dual_clip: above 1, such as verl's clip_ratio_c of 3.0; for grpo and gspo.
        normalizer: positive number or tensor [], with ``constant`` only: sequences times the longest completion
            (Dr.GRPO), or the number of tokens of all ranks over the number of ranks (DAPO).

    Returns:
        GRPOLoss of three scalars, fp32 (fp64 for fp64).

    Raises:
        ValueError: shapes disagree, beta without ref_logps, an unknown word, or options that exclude each other.
        TypeError: a tensor is not floating point.
    """
    given = {"logps": logps, "old_logps": old_logps, "advantages": advantages, "ref_logps": ref_logps}
    require_float("grpo_loss", **{name: one for name, one in given.items() if one is not None})
    check_grpo_loss(
        "grpo_loss", "logps", logps, old_logps=old_logps, advantages=advantages, mask=mask, ref_logps=ref_logps,
        has_reference=ref_logps is not None, beta=beta, aggregation=aggregation, kl=kl, surrogate=surrogate,
        dual_clip=dual_clip, normalizer=normalizer,
    )  # fmt: skip
    use = mask != 0
    logp = torch.where(use, wide(logps), 0.0)
    old = logp.detach() if old_logps is None else torch.where(use, wide(old_logps.detach()), 0.0)
    advantage = wide(advantages.detach())
    advantage = torch.where(use, advantage if advantage.dim() == 2 else advantage.unsqueeze(-1), 0.0)
    log_ratio = logp - old
    if surrogate == "gspo":
        mean = log_ratio.detach().sum(-1, keepdim=True) / use.sum(-1, keepdim=True).clamp_min(1)
        log_ratio = logp - logp.detach() + mean
    high = clip_eps if clip_eps_high is None else clip_eps_high
    policy = _policy(logp, log_ratio.exp(), advantage, 1 - clip_eps, 1 + high, surrogate, dual_clip)

    def aggregate(values: torch.Tensor) -> torch.Tensor:
        values = torch.where(use, values, 0.0)
        if normalizer is not None:
            return values.sum() / normalizer
        if aggregation == "token_mean":
            return values.sum() / use.sum().clamp_min(1)
        return (values.sum(-1) / use.sum(-1).clamp_min(1)).sum() / max(1, values.shape[0])

    policy_loss = aggregate(policy)
    if ref_logps is None:
        return GRPOLoss(policy_loss, policy_loss.detach(), torch.zeros_like(policy_loss.detach()))
    d = torch.where(use, wide(ref_logps.detach()), 0.0) - logp
    divergence = aggregate(estimate_kl(d, kl))
    return GRPOLoss(policy_loss + beta * divergence, policy_loss.detach(), divergence.detach())


def _policy(
    logp: torch.Tensor,
    ratio: torch.Tensor,
    advantage: torch.Tensor,
    low: float,
    high: float,
    surrogate: Surrogate,
    dual_clip: float | None,
) -> torch.Tensor:
    """Return every token's policy loss."""
    clipped = ratio.clamp(low, high)
    if surrogate == "cispo":
        return -clipped.detach() * advantage * logp
    policy = -torch.minimum(ratio * advantage, clipped * advantage)
    if dual_clip is None:
        return policy
    bound = -dual_clip * advantage
    return torch.where((advantage < 0) & (policy > bound), bound, policy)
