"""Trials from public bug reports (cases): the GRPO loss, by the PyTorch reference and by the Triton operator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_engine.backends.reference.loss.group_advantages import group_advantages as reference_advantages
from rl_engine.backends.reference.loss.grpo_loss import GRPOLoss
from rl_engine.backends.reference.loss.grpo_loss import grpo_loss as reference_loss
from rl_engine.backends.shared.triton.loss.group_advantages import group_advantages as triton_advantages
from rl_engine.backends.shared.triton.loss.grpo_loss import grpo_loss as triton_loss
from tests.support.ops_inputs import DEVICE, Maker, assert_same_bytes

LOSSES = pytest.mark.parametrize("grpo_loss", [reference_loss, triton_loss], ids=["pytorch", "triton"])
ADVANTAGES = pytest.mark.parametrize(
    "advantages_of", [reference_advantages, triton_advantages], ids=["pytorch", "triton"]
)
Loss = Callable[..., GRPOLoss]
PRINTED = 5e-8  # the worked case gives eight decimals; the loss is summed from five tokens
JUNK = [-math.inf, math.inf, math.nan, 1e4, -1e4, 3e38]

LOGP = [[-1.0, -2.0, -0.5], [-0.7, -1.2, -3.0]]
OLD = [[-1.2, -1.9, -0.5], [-0.7, -1.6, -2.0]]
REF = [[-1.1, -2.2, -0.4], [-0.9, -1.2, -2.5]]
MASK = [[True, True, False], [True, True, True]]
TOKEN_MEAN, SEQUENCE_MEAN = 0.24121785, 0.02580816
GRADIENT = [[0.00190325, -0.17734209, 0.0], [0.20362538, 0.29836494, -0.01297442]]


def _tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


class Case:
    """The worked case B14b, with changes."""

    def __init__(self, **changes: Any) -> None:
        self.logp = _tensor(LOGP).requires_grad_()
        self.old, self.ref, self.mask = _tensor(OLD), _tensor(REF), _tensor(MASK)
        self.advantages = _tensor([1.0, -1.0])
        self.options = {"beta": 0.1, "kl": "k3", "clip_eps": 0.2, **changes}

    def plant(self, value: float, *names: str) -> Case:
        """Put ``value`` where the mask is off."""
        with torch.no_grad():
            for name in names:
                getattr(self, name)[~self.mask] = value
        return self

    def run(self, grpo_loss: Loss) -> tuple[GRPOLoss, torch.Tensor]:
        found = grpo_loss(self.logp, self.old, self.advantages, self.mask, ref_logps=self.ref, **self.options)
        (gradient,) = torch.autograd.grad(found.loss, self.logp)
        return found, gradient


def _close(ours: torch.Tensor, wanted: Any, within: float = PRINTED) -> None:
    torch.testing.assert_close(ours.detach(), _tensor(wanted), rtol=0, atol=within)


@LOSSES
def test_b14b_the_worked_case(grpo_loss: Loss) -> None:
    found, gradient = Case().run(grpo_loss)
    _close(found.loss, TOKEN_MEAN)
    _close(gradient, GRADIENT)


@LOSSES
def test_b54_token_mean_and_sequence_mean_are_two_losses_and_the_first_is_the_default(grpo_loss: Loss) -> None:
    _close(Case(aggregation="token_mean").run(grpo_loss)[0].loss, TOKEN_MEAN)
    _close(Case(aggregation="sequence_mean").run(grpo_loss)[0].loss, SEQUENCE_MEAN)
    assert Case().run(grpo_loss)[0].loss.item() == Case(aggregation="token_mean").run(grpo_loss)[0].loss.item()


@LOSSES
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_b54_sequences_of_very_different_lengths_give_the_fp64_formula(grpo_loss: Loss, aggregation: str) -> None:
    make = Maker(torch.float32)
    lengths = _tensor([1, 130, 0, 67, 2])
    mask = torch.arange(130, device=DEVICE) < lengths.unsqueeze(1)
    logp, old = make.normal(5, 130, scale=0.2) - 1, make.normal(5, 130, scale=0.2) - 1
    advantages = make.normal(5)
    found = grpo_loss(logp, old, advantages, mask, aggregation=aggregation)
    ratio = (logp.double() - old.double()).exp()
    gain, capped = (r * advantages.double().unsqueeze(1) for r in (ratio, ratio.clamp(0.8, 1.2)))
    token = torch.where(mask, -torch.minimum(gain, capped), 0.0)
    means = {"token_mean": token.sum() / lengths.sum(), "sequence_mean": (token.sum(1) / lengths.clamp_min(1)).mean()}
    exact = means[aggregation]
    # 200 roundings of fp32 in a balanced sum of terms up to 3
    assert found.loss.item() == pytest.approx(exact.item(), abs=1e-6)


@LOSSES
@pytest.mark.parametrize("value", JUNK, ids=str)
@pytest.mark.parametrize("names", [("logp",), ("old",), ("ref",), ("logp", "old", "ref")], ids="+".join)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_b12_junk_under_the_mask_reaches_neither_loss_nor_gradient(
    grpo_loss: Loss, value: float, names: tuple[str, ...], aggregation: str, kl: str
) -> None:
    clean, wanted = Case(aggregation=aggregation, kl=kl).plant(0.0, *names).run(grpo_loss)
    found, gradient = Case(aggregation=aggregation, kl=kl).plant(value, *names).run(grpo_loss)
    for ours, theirs, what in zip(found, clean, GRPOLoss._fields, strict=True):
        assert_same_bytes(ours, theirs, what)
    assert_same_bytes(gradient, wanted, "gradient")
    assert gradient[0, 2].item() == 0.0
    if (aggregation, kl) == ("token_mean", "k3"):
        _close(found.loss, TOKEN_MEAN)


@LOSSES
def test_b12_random_values_under_random_masks_change_no_bit(grpo_loss: Loss) -> None:
    make = Maker(torch.float32)
    logp, old, ref = (make.normal(4, 70) for _ in range(3))
    advantages, mask = make.normal(4), make.bernoulli(0.5, 4, 70)

    def outcome(junk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        planted = [torch.where(mask, one, junk) for one in (logp, old, ref)]
        leaf = planted[0].requires_grad_()
        loss = grpo_loss(leaf, planted[1], advantages, mask, ref_logps=planted[2], beta=0.2).loss
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    loss, gradient = outcome(torch.zeros(4, 70, device=DEVICE))
    assert (gradient[~mask] == 0).all()
    for scale in (1.0, 100.0, 1e30):
        again = outcome(make.normal(4, 70, scale=scale))
        assert_same_bytes(again[0], loss, f"loss under junk of scale {scale}")
        assert_same_bytes(again[1], gradient, f"gradient under junk of scale {scale}")


@LOSSES
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32, torch.uint8], ids=str)
def test_b12_a_mask_of_any_dtype_says_the_same(grpo_loss: Loss, dtype: torch.dtype) -> None:
    case = Case().plant(math.nan, "logp")
    case.mask = case.mask.to(dtype)
    found, gradient = case.run(grpo_loss)
    _close(found.loss, TOKEN_MEAN)
    _close(gradient, GRADIENT)


@LOSSES
def test_an_unmasked_nan_stays_visible_in_loss_and_gradient(grpo_loss: Loss) -> None:
    case = Case()
    with torch.no_grad():
        case.logp[1, 1] = math.nan
    found, gradient = case.run(grpo_loss)
    assert math.isnan(found.loss.item())
    assert torch.isnan(gradient).tolist() == [[False] * 3, [False, True, False]]


@LOSSES
def test_b52_the_denominator_counts_only_tokens_under_the_effective_mask(grpo_loss: Loss) -> None:
    # with ratio 1 a token's loss is -advantage: rows of losses 1 and 2
    zeros = torch.zeros(2, 4, device=DEVICE)
    effective = _tensor([[0, 0, 0, 0], [1, 1, 0, 0]])
    assert grpo_loss(zeros, zeros, _tensor([-1.0, -2.0]), effective).loss.item() == 2.0


@LOSSES
@pytest.mark.parametrize("kept", [1, 2, 5, 64, 1030])
def test_b52_constant_losses_have_that_mean_whatever_share_is_masked(grpo_loss: Loss, kept: int) -> None:
    zeros = torch.zeros(3, 1030, device=DEVICE)
    mask = (torch.arange(1030, device=DEVICE) < kept).expand(3, 1030)
    assert grpo_loss(zeros, zeros, torch.full((3,), -2.0, device=DEVICE), mask).loss.item() == 2.0


@LOSSES
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_b52_no_token_at_all_gives_zero_loss_and_gradient(grpo_loss: Loss, aggregation: str) -> None:
    case = Case(aggregation=aggregation)
    case.mask = torch.zeros_like(case.mask)
    found, gradient = case.plant(math.inf, "logp").run(grpo_loss)
    assert found.loss.item() == 0.0
    assert_same_bytes(gradient, torch.zeros(2, 3, device=DEVICE), "gradient")


@LOSSES
def test_b55_the_kl_is_averaged_under_the_mask(grpo_loss: Loss) -> None:
    with_kl, _gradient = Case().plant(1e4, "logp", "ref").run(grpo_loss)
    without, _gradient = Case(beta=0.0).plant(1e4, "logp", "ref").run(grpo_loss)
    d = [ref - logp for rows in zip(LOGP, REF, MASK, strict=True) for logp, ref, use in zip(*rows, strict=True) if use]
    k3 = sum(math.expm1(one) - one for one in d) / len(d)
    assert with_kl.loss.item() - without.loss.item() == pytest.approx(0.1 * k3, abs=PRINTED)
    assert with_kl.kl.item() == pytest.approx(k3, abs=PRINTED)
    assert with_kl.policy_loss.item() == without.policy_loss.item() == pytest.approx(without.loss.item(), abs=PRINTED)


@LOSSES
@pytest.mark.parametrize(("kl", "value", "slope"), [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", 0.1065307, 0.3934693)])
def test_b55_each_estimator_has_its_value_and_gradient(grpo_loss: Loss, kl: str, value: float, slope: float) -> None:
    logp = _tensor([[-1.0]]).requires_grad_()
    found = grpo_loss(
        logp, logp.detach(), _tensor([0.0]), _tensor([[True]]), ref_logps=_tensor([[-1.5]]), beta=1.0, kl=kl
    )
    (gradient,) = torch.autograd.grad(found.loss, logp)
    assert found.kl.item() == pytest.approx(value, abs=PRINTED)
    assert gradient.item() == pytest.approx(slope, abs=PRINTED)


@LOSSES
def test_b55_k1_as_a_loss_ignores_the_reference_in_its_gradient(grpo_loss: Loss) -> None:
    _found, gradient = Case(kl="k1").run(grpo_loss)
    elsewhere = Case(kl="k1")
    elsewhere.ref = elsewhere.ref * 3 - 1
    assert_same_bytes(elsewhere.run(grpo_loss)[1], gradient, "gradient under another reference")


@LOSSES
@pytest.mark.parametrize("d", [1e-4, -1e-4, 1e-3, 0.1, -0.499, 0.5, -0.501, 2.0, -5.0])
def test_b55_k3_keeps_its_digits_where_it_is_small(grpo_loss: Loss, d: float) -> None:
    # PyTorch's operator subtracts numbers that are almost equal: it has the digits in fp64 only
    dtype = torch.float32 if grpo_loss is triton_loss else torch.float64
    logp, ref = torch.zeros(1, 1, device=DEVICE, dtype=dtype, requires_grad=True), _tensor([[d]]).to(dtype)
    nothing = torch.zeros(1, device=DEVICE, dtype=dtype)
    found = grpo_loss(logp, logp.detach(), nothing, _tensor([[True]]), ref_logps=ref, beta=1.0)
    (gradient,) = torch.autograd.grad(found.loss, logp)
    d = ref.item()  # as fp32 has it
    exact = sum(d**n / math.factorial(n) for n in range(2, 40))
    assert found.kl.item() == pytest.approx(exact, rel=1e-6)
    assert gradient.item() == pytest.approx(-math.expm1(d), rel=1e-6)


@ADVANTAGES
def test_groups_given_by_boundaries_have_the_bytes_of_equal_groups(advantages_of: Callable[..., torch.Tensor]) -> None:
    rewards = Maker(torch.float32).normal(24)
    equal = advantages_of(rewards, samples_per_prompt=6)
    boundaries = torch.arange(0, 25, 6, device=DEVICE)
    for dtype in (torch.int32, torch.int64):
        found = advantages_of(rewards, group_boundaries=boundaries.to(dtype))
        assert_same_bytes(found, equal, f"boundaries of {dtype}")


@ADVANTAGES
@pytest.mark.parametrize("sizes", [[1, 0, 7, 1500], [3], [0, 0, 2], [1024, 1025, 1]], ids=str)
def test_groups_of_any_size_have_mean_zero_and_deviation_one(
    advantages_of: Callable[..., torch.Tensor], sizes: list[int]
) -> None:
    # PyTorch's operator adds one reward after the other: thousands of fp32 roundings, so it is judged in fp64
    dtype = torch.float32 if advantages_of is triton_advantages else torch.float64
    rewards = (Maker(torch.float32).normal(sum(sizes)) + 1e3).to(dtype)
    boundaries = torch.tensor([0, *sizes], device=DEVICE).cumsum(0)
    found = advantages_of(rewards, group_boundaries=boundaries)
    for start, end in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
        group = rewards[start:end].double()
        if end > start:
            exact = (group - group.mean()) / group.std(correction=0).clamp_min(1e-6)
            # the mean of rewards near 1000 is rounded to 6e-5, the deviation is 1
            torch.testing.assert_close(found[start:end].double(), exact, rtol=1e-4, atol=1e-4)


@ADVANTAGES
@pytest.mark.parametrize("reward", [0.0, 1.0, -3.5, 1e4, 0.1, 0.7, 1 / 3, -123.456, 1e-40])
def test_a_group_of_equal_rewards_gets_zeros(advantages_of: Callable[..., torch.Tensor], reward: float) -> None:
    rewards = torch.full((84,), reward, device=DEVICE)
    for samples in (1, 3, 4, 6, 7, 12, 21, 84):
        assert (advantages_of(rewards, samples_per_prompt=samples) == 0).all()


@ADVANTAGES
def test_advantages_carry_no_gradient_and_keep_their_bits(advantages_of: Callable[..., torch.Tensor]) -> None:
    rewards = Maker(torch.float32).normal(40).requires_grad_()
    found = advantages_of(rewards, samples_per_prompt=8)
    assert not found.requires_grad
    assert_same_bytes(advantages_of(rewards[16:24], samples_per_prompt=8), found[16:24], "a group alone")


def _trl(r: torch.Tensor) -> torch.Tensor:
    return (r - r.mean()) / (torch.nan_to_num(r.std()) + 1e-4)


CONVENTIONS: dict[str, tuple[Callable[..., torch.Tensor], dict[str, Any]]] = {
    "TRL": (_trl, {"std": "sample", "eps_mode": "add", "eps": 1e-4}),
    "Dr.GRPO": (lambda r: r - r.mean(), {"std": "none"}),
    "population, added": (lambda r: (r - r.mean()) / (r.std(correction=0) + 1e-2), {"eps_mode": "add", "eps": 1e-2}),
    "sample, at least": (
        lambda r: (r - r.mean()) / torch.nan_to_num(r.std()).clamp_min(0.5),
        {"std": "sample", "eps": 0.5},
    ),
}


@pytest.mark.filterwarnings("ignore:std\\(\\). degrees of freedom is <= 0")  # of torch's std of one value
@ADVANTAGES
@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("sizes", [[6, 6, 6], [1, 8, 64, 65, 3, 1030], [1, 1]], ids=str)
def test_advantages_follow_the_conventions_of_their_users(
    advantages_of: Callable[..., torch.Tensor], convention: str, sizes: list[int]
) -> None:
    formula, options = CONVENTIONS[convention]
    rewards = Maker(torch.float32).normal(sum(sizes)) * 0.3 + 1
    wanted = torch.cat([formula(group.double()) for group in rewards.split(sizes)])
    boundaries = torch.tensor([0, *sizes], device=DEVICE).cumsum(0)
    found = advantages_of(rewards, group_boundaries=boundaries, **options)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    if len(set(sizes)) == 1:
        equal = advantages_of(rewards, samples_per_prompt=sizes[0], **options)
        assert_same_bytes(equal, found, "groups of equal size")


@ADVANTAGES
@pytest.mark.parametrize("std", ["population", "sample", "none"])
@pytest.mark.parametrize("eps_mode", ["max", "add"])
def test_a_single_sample_and_equal_rewards_get_zeros(
    advantages_of: Callable[..., torch.Tensor], std: str, eps_mode: str
) -> None:
    for samples in (1, 3, 7):
        rewards = torch.full((21,), 0.7, device=DEVICE)
        assert (advantages_of(rewards, samples_per_prompt=samples, std=std, eps_mode=eps_mode) == 0).all()


@ADVANTAGES
@pytest.mark.parametrize(("options", "message"), [
    ({"std": "ddof1"}, "std is 'ddof1'; pass one of population, sample, none"),
    ({"eps_mode": "plus"}, "eps_mode is 'plus'; pass one of max, add"),
])  # fmt: skip
def test_words_that_say_nothing_are_refused(
    advantages_of: Callable[..., torch.Tensor], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"group_advantages: {message}"):
        advantages_of(torch.ones(4, device=DEVICE), samples_per_prompt=2, **options)
