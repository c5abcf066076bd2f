"""Policy ratio and KL to a reference policy, token by token from logits: the declaration and the PyTorch operator."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_engine.backends.reference.dtypes import require_float, wide
from rl_engine.backends.reference.kl import KLEstimator, estimate_kl
from rl_engine.backends.reference.selected_logps import require_temperature, selected_logps
from rl_engine.backends.reference.token_ids import require_ids, validate_ids
from rl_engine.backends.reference.words import require_word
from rl_engine.backends.spec import Case, InputMaker, Inputs, Tolerance, Traffic, operator


class RatioKL(NamedTuple):
    """``ratio`` = exp(logp - old_logp) and the ``kl`` estimate, both fp32 and one a token."""

    ratio: torch.Tensor
    kl: torch.Tensor


def _inputs(make: InputMaker, rows: int, vocab: int, masked: int = 20) -> Inputs:
    """Make inputs of which ``masked`` percent of the tokens do not count."""
    args = (
        make.normal(rows, vocab, scale=2.0),
        make.normal(rows, vocab, scale=2.0),
        make.integers(0, vocab, rows),
        make.bernoulli(1 - masked / 100, rows),
        make.normal(rows, dtype=torch.float32) - 4.0,
    )
    return Inputs(args)


def _traffic(itemsize: int, rows: int, vocab: int, masked: int) -> Traffic:
    """Count logits only, of rows that all count: of masked ones nothing is read."""
    assert masked == 0, "speed is measured without masked rows"
    return Traffic(forward=2 * itemsize * rows * vocab, backward=2 * itemsize * rows * vocab)


def check_ratio_kl(
    policy_logits: torch.Tensor,
    ref_logits: torch.Tensor | None,
    action_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    *,
    temperature: float,
    kl: str,
) -> None:
    """Raise unless the shapes fit together and exactly one of ``ref_logits`` and ``ref_logps`` is given."""
    require_ids("ratio_kl", action_ids=action_ids)
    if policy_logits.dim() == 0 or policy_logits.shape[-1] == 0:
        raise ValueError(
            f"ratio_kl: policy_logits are {list(policy_logits.shape)}; pass [..., vocab] with vocab of at least 1"
        )
    if (ref_logits is None) == (ref_logps is None):
        raise ValueError("ratio_kl: pass exactly one of ref_logits and ref_logps")
    if ref_logits is not None and ref_logits.shape != policy_logits.shape:
        raise ValueError(
            f"ratio_kl: ref_logits are {list(ref_logits.shape)}; pass policy_logits' shape {list(policy_logits.shape)}"
        )
    tokens = policy_logits.shape[:-1]
    given = {
        "action_ids": action_ids, "attention_mask": attention_mask, "old_logps": old_logps, "ref_logps": ref_logps,
    }  # fmt: skip
    for name, tensor in given.items():
        if tensor is not None and tensor.shape != tokens:
            raise ValueError(f"ratio_kl: {name} is {list(tensor.shape)}; pass one value a token, {list(tokens)}")
    require_temperature("ratio_kl", temperature)
    require_word("ratio_kl", "kl", kl, KLEstimator)


@operator(
    "ratio_kl",
    family="loss",
    contract=(
        "ratio_kl.v1: log-probabilities of logp.v1; ratio = exp(logp - old_logp); d = ref_logp - logp; k3 is its"
        " Taylor series to the ninth power, d*d/2 * (1 + d/3 * (1 + ...)), where |d| < 1/2, else exp(d) - d - 1"
    ),
    inputs=_inputs,
    cases=(
        Case("tiny", {"rows": 3, "vocab": 7}),
        Case("odd", {"rows": 5, "vocab": 4099}),
        Case("k1", {"rows": 3, "vocab": 5}, {"kl": "k1"}),
        Case("k2", {"rows": 3, "vocab": 5}, {"kl": "k2", "temperature": 0.7}),
        Case("empty", {"rows": 0, "vocab": 8}),
        Case("small", {"rows": 64, "vocab": 151936, "masked": 0}, tags=frozenset({"speed"})),
        Case("thr", {"rows": 4096, "vocab": 151936, "masked": 0}, tags=frozenset({"speed"})),
    ),
    tolerance=Tolerance(
        {"float32": 32, "float16": 32, "bfloat16": 32},
        "log-probabilities near -15 are rounded by 8 eps; exp passes it on",
    ),
    traffic=_traffic,
)
def ratio_kl(
    policy_logits: torch.Tensor,
    ref_logits: torch.Tensor | None,
    action_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    old_logps: torch.Tensor | None = None,
    *,
    ref_logps: torch.Tensor | None = None,
    temperature: float = 1.0,
    kl: KLEstimator = "k3",
    validate: bool = False,
) -> RatioKL:
    """Return the ratio to the policy that sampled and the KL estimate to a reference, of every token.

    With ``logp`` the log-probability of a token under ``policy_logits / temperature``: ``ratio = exp(logp -
    old_logp)`` (Schulman et al., arXiv:1707.06347), and with ``d = ref_logp - logp`` the estimate is ``-d`` (k1),
    ``d**2 / 2`` (k2), ``exp(d) - d - 1`` (k3) or ``abs(d)`` (Schulman, "Approximating KL divergence"). Only
    ``policy_logits`` get a gradient.

    Args:
        policy_logits: [..., vocab], bf16, fp16, fp32 or fp64, any strides.
        ref_logits: the same shape, of the reference policy; None where ``ref_logps`` are given.
        action_ids: [...], int32 or int64. An id outside [0, vocab) gives NaN and a zero gradient row; nothing is read
            out of bounds.
        attention_mask: [...], bool or number; where it is 0, ratio is 1, KL 0 and the gradient row 0, whatever stands
            there.
        old_logps: [...], of the policy that sampled; None takes the policy itself: a ratio of 1 that has a gradient.
        ref_logps: [...], log-probabilities of the reference policy instead of its logits.
        temperature: positive; 1.0 leaves the logits as they are, bit for bit.
        kl: the estimator.
        validate: raise for ids out of range, at the price of waiting for the device.

    Returns:
        RatioKL of two tensors [...], fp32 (fp64 for fp64).

    Raises:
        ValueError: shapes disagree, not exactly one reference, temperature is not positive, an unknown estimator, or
            ``validate`` found an id out of range.
        TypeError: a tensor is not floating point, or action_ids are not int32 or int64.
    """
    floats = {"ref_logits": ref_logits, "old_logps": old_logps, "ref_logps": ref_logps}
    require_float("ratio_kl", policy_logits=policy_logits, **{n: one for n, one in floats.items() if one is not None})
    check_ratio_kl(
        policy_logits, ref_logits, action_ids, attention_mask, old_logps, ref_logps, temperature=temperature, kl=kl
    )
    use = attention_mask != 0
    if validate:
        validate_ids("ratio_kl", action_ids, policy_logits.shape[-1], use)
    logp = selected_logps(policy_logits, action_ids, use, temperature)
    if ref_logits is not None:
        ref_logps = selected_logps(ref_logits.detach(), action_ids, use, temperature)
    assert ref_logps is not None, "check_ratio_kl asks for one of the two"
    old = logp.detach() if old_logps is None else torch.where(use, wide(old_logps.detach()), 0.0)
    d = torch.where(use, wide(ref_logps.detach()), 0.0) - logp
    return RatioKL((logp - old).exp(), torch.where(use, estimate_kl(d, kl), 0.0))
