"""GRPO loss from logits: `grpo_loss` on `logp`, bit for bit, whatever stands under the mask; one gradient to logits."""

from __future__ import annotations

import math

import pytest
import torch

from rl_engine.backends.reference.loss.grpo_loss import GRPOLoss
from rl_engine.backends.reference.loss.grpo_loss_from_logits import grpo_loss_from_logits as reference
from rl_engine.backends.shared.triton.logprob.logp import logp
from rl_engine.backends.shared.triton.loss.grpo_loss import grpo_loss
from rl_engine.backends.shared.triton.loss.grpo_loss_from_logits import grpo_loss_from_logits
from tests.support.ops_inputs import DEVICE, Maker, assert_same_bytes

BOTH = pytest.mark.parametrize("op", [reference, grpo_loss_from_logits], ids=["pytorch", "triton"])
VARIANTS = {
    "grpo": {},
    "dapo": {"clip_eps_high": 0.28, "aggregation": "constant", "normalizer": 9.0},
    "sequence-mean": {"aggregation": "sequence_mean", "dual_clip": 3.0, "kl": "k2"},
    "gspo": {"surrogate": "gspo", "aggregation": "sequence_mean"},
    "cispo": {"surrogate": "cispo", "clip_eps": 1.0, "clip_eps_high": 4.0},
    "warm": {"temperature": 0.7},
    "no-kl": {"beta": 0.0},
}


def _batch(vocab: int = 33, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    make = Maker(dtype)
    return {
        "policy_logits": make.normal(3, 5, vocab),
        "ref_logits": make.normal(3, 5, vocab),
        "action_ids": make.integers(0, vocab, 3, 5),
        "old_logps": make.normal(3, 5, scale=0.3, dtype=torch.float32) - math.log(vocab),
        "advantages": make.normal(3, dtype=torch.float32),
        "mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], device=DEVICE),
    }


def _loss_and_gradient(op, batch: dict[str, torch.Tensor], **options) -> tuple[GRPOLoss, torch.Tensor]:
    leaf = batch["policy_logits"].detach().requires_grad_()
    found = op(**{**batch, "policy_logits": leaf}, **options)
    (gradient,) = torch.autograd.grad(found.loss, leaf)
    return found, gradient


@pytest.mark.parametrize("vocab", [33, 4099])
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_the_loss_of_the_log_probabilities_bit_for_bit(variant: str, vocab: int) -> None:
    batch, options = _batch(vocab), {"beta": 0.1, **VARIANTS[variant]}
    found, gradient = _loss_and_gradient(grpo_loss_from_logits, batch, **options)
    leaf = batch["policy_logits"].requires_grad_()
    temperature = options.pop("temperature", 1.0)
    wanted = grpo_loss(
        logp(leaf, batch["action_ids"], temperature=temperature), batch["old_logps"], batch["advantages"],
        batch["mask"], ref_logps=logp(batch["ref_logits"], batch["action_ids"], temperature=temperature), **options,
    )  # fmt: skip
    for name, ours, theirs in zip(GRPOLoss._fields, found, wanted, strict=True):
        assert_same_bytes(ours, theirs.detach() if name == "loss" else theirs, name)
    (expected,) = torch.autograd.grad(wanted.loss, leaf)
    # zeros under the mask may differ in sign: there nothing is computed at all
    assert torch.equal(gradient, expected)
    assert_same_bytes(gradient[2], torch.zeros_like(gradient[2]), "a sequence without a token")


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradient_are_the_float64_references(variant: str) -> None:
    batch, options = _batch(), {"beta": 0.1, **VARIANTS[variant]}
    found, gradient = _loss_and_gradient(grpo_loss_from_logits, batch, **options)
    wide = {name: one.double() if one.is_floating_point() else one for name, one in batch.items()}
    wanted, expected = _loss_and_gradient(reference, wide, **options)
    assert found.loss.item() == pytest.approx(wanted.loss.item(), rel=2e-6, abs=1e-7)
    assert torch.allclose(gradient.double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@BOTH
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e4])
def test_b12_b13_junk_and_wild_ids_under_the_mask_reach_nothing(op, junk: float) -> None:
    batch = _batch()
    wanted, expected = _loss_and_gradient(op, batch, beta=0.1)
    use = batch["mask"] != 0
    for name in ("policy_logits", "ref_logits"):
        batch[name] = torch.where(use[..., None], batch[name], junk)
    batch["old_logps"] = torch.where(use, batch["old_logps"], junk)
    batch["action_ids"] = torch.where(use, batch["action_ids"], 2**40)
    found, gradient = _loss_and_gradient(op, batch, beta=0.1, validate=True)
    for name, ours, theirs in zip(GRPOLoss._fields, found, wanted, strict=True):
        assert_same_bytes(ours.detach(), theirs.detach(), name)
    assert torch.equal(gradient[use], expected[use])
    if op is grpo_loss_from_logits:
        assert_same_bytes(gradient, expected, "gradient")


def test_an_id_out_of_range_that_counts_makes_the_loss_nan_and_leaves_other_gradients_alone() -> None:
    batch = _batch()
    options = {"beta": 0.1, "aggregation": "constant", "normalizer": 4.0}
    _wanted, expected = _loss_and_gradient(grpo_loss_from_logits, batch, **options)
    batch["action_ids"][0, 1] = -1
    found, gradient = _loss_and_gradient(grpo_loss_from_logits, batch, **options)
    assert math.isnan(found.loss.item())
    others = torch.ones(3, 5, dtype=torch.bool, device=DEVICE)
    others[0, 1] = False
    assert_same_bytes(gradient[0, 1], torch.zeros_like(gradient[0, 1]), "gradient of the bad id")
    assert_same_bytes(gradient[others], expected[others], "other gradients")
    with pytest.raises(ValueError, match=r"grpo_loss_from_logits: 1 ids outside \[0, 33\), the first is -1"):
        grpo_loss_from_logits(**batch, validate=True)


def test_a_given_normalizer_makes_gradients_those_of_the_sequence_alone() -> None:
    batch, options = _batch(), {"beta": 0.1, "aggregation": "constant", "normalizer": 9.0}
    _found, whole = _loss_and_gradient(grpo_loss_from_logits, batch, **options)
    for row in range(3):
        alone = {name: one[row : row + 1] for name, one in batch.items()}
        _found, gradient = _loss_and_gradient(grpo_loss_from_logits, alone, **options)
        assert_same_bytes(gradient, whole[row : row + 1], f"sequence {row}")


def test_an_incoming_gradient_scales_and_a_second_backward_repeats() -> None:
    batch = _batch()
    leaf = batch["policy_logits"].requires_grad_()
    loss = grpo_loss_from_logits(**batch, beta=0.1).loss
    (once,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (again,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    assert_same_bytes(again, once, "second backward")
    (twice,) = torch.autograd.grad(loss, leaf, torch.tensor(2.0, device=DEVICE))
    assert torch.equal(twice, 2 * once)


@BOTH
def test_reference_log_probabilities_and_no_old_ones(op) -> None:
    batch = _batch()
    ref = logp(batch["ref_logits"], batch["action_ids"])
    wanted, _gradient = _loss_and_gradient(op, {**batch, "old_logps": None}, beta=0.1)
    found, _gradient = _loss_and_gradient(op, {**batch, "old_logps": None, "ref_logits": None}, beta=0.1, ref_logps=ref)
    assert found.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-5)
    mean = -(batch["advantages"][:2] * torch.tensor([5, 2], device=DEVICE)).sum() / 7
    assert found.policy_loss.item() == pytest.approx(mean.item(), rel=1e-5)


@BOTH
def test_mistakes_are_told(op) -> None:
    batch = _batch()
    name = "grpo_loss_from_logits"

    def call(**changes):
        return op(**{**batch, **changes})

    with pytest.raises(ValueError, match=rf"{name}: policy_logits are \[15, 33\]; pass \[sequences, tokens, vocab\]"):
        call(policy_logits=batch["policy_logits"].flatten(0, 1))
    with pytest.raises(ValueError, match=rf"{name}: action_ids are \[3, 4\]; pass one id a token, \[3, 5\]"):
        call(action_ids=batch["action_ids"][:, :4])
    with pytest.raises(ValueError, match=rf"{name}: both ref_logits and ref_logps are given"):
        call(ref_logps=batch["old_logps"])
    with pytest.raises(ValueError, match=rf"{name}: ref_logits are \[3, 5, 32\]; pass policy_logits' shape"):
        call(ref_logits=batch["ref_logits"][..., :32])
    with pytest.raises(ValueError, match=rf"{name}: old_logps is \[3, 4\]; pass action_ids' shape \[3, 5\]"):
        call(old_logps=batch["old_logps"][:, :4])
    with pytest.raises(ValueError, match=rf"{name}: beta is 0.1 without ref_logps"):
        call(ref_logits=None, beta=0.1)
    with pytest.raises(ValueError, match=rf"{name}: temperature is -1.0; pass a number above 0"):
        call(temperature=-1.0)
    with pytest.raises(TypeError, match=rf"{name}: action_ids are torch.bool; pass int32 or int64 ids"):
        call(action_ids=batch["mask"] != 0)
