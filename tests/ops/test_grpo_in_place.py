"""GRPO loss from logits whose gradient takes their place: the bytes of the ordinary one, nothing else overwritten."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_engine.backends.reference.loss.grpo_loss import GRPOLoss
from rl_engine.backends.shared.triton.loss.grpo_loss_from_logits import grpo_loss_from_logits
from tests.support.ops_inputs import DEVICE, ON_GPU, Maker, assert_same_bytes

SEQUENCES, TOKENS = 3, 5
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"beta": 0.1},
    "no reference": {"ref_logits": None},
    "one policy": {"old_logps": None},
    "sequence mean": {"aggregation": "sequence_mean", "dual_clip": 3.0, "kl": "k1", "beta": 0.2},
    "constant": {"aggregation": "constant", "normalizer": 9.0, "clip_eps_high": 0.28},
    "cispo": {"surrogate": "cispo", "clip_eps": 1.0, "clip_eps_high": 4.0},
    "warm": {"temperature": 0.7, "beta": 0.1},
}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda memory: memory[:, :, 8:-8].clone(),
    "rows apart": lambda memory: memory[:, :, 8:-8],
    "unaligned": lambda memory: memory[:, :, 3:-13],
}
# the interpreter takes seconds for more than one chunk of columns
CALLS = [(variant, 33, layout) for variant in VARIANTS for layout in LAYOUTS]
CALLS += [(variant, 4099, "contiguous") for variant in ("grpo", "warm")]
CALLS += [("grpo", 8203, "contiguous")]  # a whole tile, and a rest
if ON_GPU:
    CALLS += [(variant, 151_936, layout) for variant in VARIANTS for layout in LAYOUTS]


def _batch(vocab: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    make = Maker(dtype)
    batch = {
        "policy_logits": make.normal(SEQUENCES, TOKENS, vocab + 16),
        "ref_logits": make.normal(SEQUENCES, TOKENS, vocab),
        "action_ids": make.integers(0, vocab, SEQUENCES, TOKENS),
        "old_logps": make.normal(SEQUENCES, TOKENS, scale=0.3, dtype=torch.float32) - math.log(vocab),
        "advantages": make.normal(SEQUENCES, dtype=torch.float32),
        "mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], device=DEVICE),
    }
    batch["action_ids"][0, 1] = vocab  # an id that is none: a row of zeros
    batch["policy_logits"][1, 3] = float("nan")  # under the mask
    return batch


def _differentiate(
    logits: torch.Tensor, batch: dict[str, Any], *, dloss: float = 1.0, **options: Any
) -> tuple[GRPOLoss, torch.Tensor, torch.Tensor]:
    """Return the losses, the gradient by ``logits``, and what the operator was given, afterwards."""
    leaf = logits.detach().requires_grad_()
    given = leaf.view_as(leaf)
    found = grpo_loss_from_logits(**{**batch, "policy_logits": given, **options})
    (gradient,) = torch.autograd.grad(found.loss, leaf, torch.tensor(dloss, device=DEVICE))
    return found, gradient, given.detach()


@pytest.mark.parametrize(("variant", "vocab", "layout"), CALLS)
def test_losses_and_gradient_have_the_bytes_of_the_ordinary_ones(variant: str, vocab: int, layout: str) -> None:
    batch = _batch(vocab)
    ordinary, wanted, _logits = _differentiate(
        LAYOUTS[layout](batch["policy_logits"]).clone(), batch, **VARIANTS[variant]
    )
    logits = LAYOUTS[layout](batch["policy_logits"])
    found, gradient, given = _differentiate(logits, batch, overwrite_logits=True, **VARIANTS[variant])
    for name, ours, theirs in zip(GRPOLoss._fields, found, ordinary, strict=True):
        assert_same_bytes(ours, theirs, name)
    assert_same_bytes(gradient, wanted, "gradient")
    assert gradient.data_ptr() == given.data_ptr()
    assert_same_bytes(given, wanted, "what the logits hold")
    assert float(gradient.abs().max()) > 0
    assert not gradient[0, 1].any()
    assert not gradient[batch["mask"] == 0].any()


@pytest.mark.parametrize("layout", ["rows apart", "unaligned"])
def test_what_lies_between_the_rows_is_not_touched(layout: str) -> None:
    batch = _batch(33)
    before, logits = batch["policy_logits"].clone(), LAYOUTS[layout](batch["policy_logits"])
    gaps = torch.ones_like(before, dtype=torch.bool)
    LAYOUTS[layout](gaps).fill_(False)
    _differentiate(logits, batch, overwrite_logits=True)
    assert_same_bytes(batch["policy_logits"][gaps], before[gaps], "gaps")


@pytest.mark.parametrize("case", ["gspo", "a leaf", "expanded", "no gradient"])
def test_logits_that_cannot_hold_their_gradient_are_left_alone(case: str) -> None:
    batch = _batch(33)
    logits = LAYOUTS["contiguous"](batch["policy_logits"])
    leaf = logits[:1].expand(SEQUENCES, -1, -1) if case == "expanded" else logits
    before = leaf.clone()
    leaf = leaf.detach().requires_grad_(case != "no gradient")
    given = leaf if case == "a leaf" else leaf.view_as(leaf)
    options = {"surrogate": "gspo"} if case == "gspo" else {}
    found = grpo_loss_from_logits(**{**batch, "policy_logits": given, **options}, overwrite_logits=True)
    if found.loss.requires_grad:
        (gradient,) = torch.autograd.grad(found.loss, leaf)
        assert gradient.data_ptr() != leaf.data_ptr()
    assert_same_bytes(leaf, before, "logits")


def test_an_incoming_gradient_scales_it_and_by_a_power_of_two_exactly() -> None:
    batch = _batch(33)
    for dloss in (0.25, 2.0, 3.0):
        logits = LAYOUTS["contiguous"](batch["policy_logits"])
        _losses, wanted, _logits = _differentiate(logits.clone(), batch, dloss=dloss)
        _losses, gradient, _logits = _differentiate(logits, batch, dloss=dloss, overwrite_logits=True)
        if dloss == 3.0:
            torch.testing.assert_close(gradient, wanted, rtol=2**-22, atol=1e-45)
        else:
            assert_same_bytes(gradient, wanted, f"times {dloss}")


def test_a_second_backward_says_that_its_tensor_was_written_to() -> None:
    batch = _batch(33)
    leaf = LAYOUTS["contiguous"](batch["policy_logits"]).requires_grad_()
    loss = grpo_loss_from_logits(**{**batch, "policy_logits": leaf * 1}, overwrite_logits=True).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_node_that_saved_the_logits_says_that_they_were_written_to() -> None:
    batch = _batch(33)
    leaf = LAYOUTS["contiguous"](batch["policy_logits"]).requires_grad_()
    logits = leaf.exp()  # keeps its result for its backward
    loss = grpo_loss_from_logits(**{**batch, "policy_logits": logits}, overwrite_logits=True).loss
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
