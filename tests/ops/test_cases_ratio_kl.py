"""Trials from public bug reports (cases) and by hand: policy ratio and KL, by PyTorch and by the Triton operator."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from rl_engine.backends.reference.kl import estimate_kl
from rl_engine.backends.reference.loss.ratio_kl import RatioKL
from rl_engine.backends.reference.loss.ratio_kl import ratio_kl as reference_ratio_kl
from rl_engine.backends.shared.triton.logprob.logp import logp as triton_logp
from rl_engine.backends.shared.triton.loss.ratio_kl import ratio_kl as triton_ratio_kl
from tests.support.ops_inputs import DEVICE, ON_GPU, Maker, assert_same_bytes

BOTH = pytest.mark.parametrize("ratio_kl", [reference_ratio_kl, triton_ratio_kl], ids=["pytorch", "triton"])
Operator = Callable[..., RatioKL]
JUNK = (math.nan, math.inf, -math.inf, 1e4)
WILD = (-100, 7, 2**31 - 1, -1)


def _tensor(values: object, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def _batch(vocab: int = 7, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    make = Maker(dtype)
    policy, ref = make.normal(2, 4, vocab, scale=2.0), make.normal(2, 4, vocab, scale=2.0)
    mask = _tensor([[1, 1, 0, 0], [1, 0, 1, 0]], torch.bool)
    return policy.requires_grad_(), ref, make.integers(0, vocab, 2, 4), mask, make.normal(2, 4, dtype=torch.float32) - 2


def _gradient(found: RatioKL, policy: torch.Tensor) -> torch.Tensor:
    weights = Maker(torch.float32, seed=5)
    pairs = [(one, weights.normal(*one.shape)) for one in found]
    (made,) = torch.autograd.grad([one for one, _dy in pairs], policy, [dy for _one, dy in pairs])
    return made


@BOTH
@pytest.mark.parametrize("ids", [WILD, (7,) * 4, (2**40,) * 4], ids=str)
def test_b13_wild_ids_under_the_mask_reach_nothing(ratio_kl: Operator, ids: tuple[int, ...]) -> None:
    policy, ref, clean, mask, old = _batch()
    wild = torch.where(mask, clean, _tensor(ids, torch.int64))
    found, wanted = ratio_kl(policy, ref, wild, mask, old, validate=True), ratio_kl(policy, ref, clean, mask, old)
    for name, ours, theirs in zip(RatioKL._fields, found, wanted, strict=True):
        assert_same_bytes(ours, theirs, name)
    assert found.ratio[~mask].tolist() == [1.0] * 4
    assert found.kl[~mask].tolist() == [0.0] * 4
    ours, theirs = _gradient(found, policy), _gradient(wanted, policy)
    assert_same_bytes(ours, theirs, "gradient")
    assert_same_bytes(ours[~mask], torch.zeros(4, 7, device=DEVICE), "gradient under the mask")


@BOTH
@pytest.mark.parametrize("bad", [-1, 7, 2**31 - 1, -100])
def test_b13_b57_a_wild_id_that_counts_gives_nan_and_a_zero_gradient_row(ratio_kl: Operator, bad: int) -> None:
    policy, ref, ids, mask, old = _batch()
    wanted = ratio_kl(policy, ref, ids, mask, old)
    wild = ids.clone()
    wild[1, 2] = bad
    found = ratio_kl(policy, ref, wild, mask, old)
    others = torch.ones_like(mask)
    others[1, 2] = False
    for name, ours, theirs in zip(RatioKL._fields, found, wanted, strict=True):
        assert math.isnan(ours[1, 2].item())
        assert_same_bytes(ours[others], theirs[others], name)
    ours, theirs = _gradient(found, policy), _gradient(wanted, policy)
    if ratio_kl is triton_ratio_kl:  # autograd of the reference multiplies a zero by NaN
        assert_same_bytes(ours[1, 2], torch.zeros(7, device=DEVICE), "gradient of the bad id")
        assert_same_bytes(ours[others], theirs[others], "other gradients")
    with pytest.raises(ValueError, match=rf"ratio_kl: 1 ids outside \[0, 7\), the first is {bad}; mask or fix them"):
        ratio_kl(policy, ref, wild, mask, old, validate=True)


@BOTH
@pytest.mark.parametrize("junk", JUNK)
def test_b12_junk_under_the_mask_reaches_neither_results_nor_gradients(ratio_kl: Operator, junk: float) -> None:
    policy, ref, ids, mask, old = _batch()
    wanted = ratio_kl(policy, ref, ids, mask, old)
    spoiled = [
        torch.where(mask if one.dim() == 2 else mask.unsqueeze(-1), one.detach(), junk) for one in (policy, ref, old)
    ]
    dirty = spoiled[0].requires_grad_()
    found = ratio_kl(dirty, spoiled[1], ids, mask, spoiled[2])
    for name, ours, theirs in zip(RatioKL._fields, found, wanted, strict=True):
        assert_same_bytes(ours, theirs, name)
    ours, theirs = _gradient(found, dirty), _gradient(wanted, policy)
    if ratio_kl is triton_ratio_kl:
        assert_same_bytes(ours, theirs, "gradient")
    else:
        assert torch.equal(ours[mask], theirs[mask])


@BOTH
@pytest.mark.parametrize(("kl", "value", "slope"), [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", 0.1065307, 0.3934693)])
def test_b55_each_estimator_at_one_token(ratio_kl: Operator, kl: str, value: float, slope: float) -> None:
    # two logits z and 0 with log-probability -1 at the first, the reference's is -1.5: d = -0.5
    z = math.log(math.exp(-1.0) / (1.0 - math.exp(-1.0)))
    policy = _tensor([[z, 0.0]]).requires_grad_()
    ids, mask = _tensor([0], torch.int64), _tensor([1])
    found = ratio_kl(policy, None, ids, mask, ref_logps=_tensor([-1.5]), kl=kl)
    assert found.kl.item() == pytest.approx(value, rel=2e-6)
    (gradient,) = torch.autograd.grad(found.kl, policy)
    p = math.exp(-1.0)
    assert gradient.tolist()[0] == pytest.approx([slope * (1 - p), slope * -(1 - p)], rel=2e-6)


@pytest.mark.parametrize(
    "magnitude", [0.0, 1e-30, 1e-8, 1e-5, 1e-4, 3e-4, 1e-2, 0.3, 0.4999, 0.5, 0.5001, 1.0, 5.0, 20.0]
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_k3_keeps_its_digits_near_zero(magnitude: float, sign: float) -> None:
    logp = triton_logp(torch.zeros(1, 2, device=DEVICE), _tensor([0], torch.int64))
    ref = logp + sign * magnitude
    d = ref.double() - logp.double()
    policy = torch.zeros(1, 2, device=DEVICE, requires_grad=True)
    found = triton_ratio_kl(policy, None, _tensor([0], torch.int64), _tensor([1]), ref_logps=ref)
    exact = estimate_kl(d, "k3").item()
    assert found.kl.item() == pytest.approx(exact, rel=4e-7 if magnitude < 0.5 else 2e-6, abs=0.0)
    (gradient,) = torch.autograd.grad(found.kl, policy)
    assert gradient[0, 0].item() == pytest.approx(-0.5 * torch.expm1(d).item(), rel=1e-6, abs=0.0)


@pytest.mark.parametrize("vocab", [7, 5000, 9001])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_policy_compared_with_itself_has_ratio_one_and_no_divergence(vocab: int, temperature: float) -> None:
    policy, _ref, ids, mask, _old = _batch(vocab, torch.float16)
    old = triton_logp(policy.detach(), ids, temperature=temperature)
    found = triton_ratio_kl(policy, policy.detach().clone(), ids, mask, old, temperature=temperature)
    assert_same_bytes(found.ratio, torch.ones_like(old), "ratio")
    assert_same_bytes(found.kl, torch.zeros_like(old), "kl")
    lazy = triton_ratio_kl(policy, None, ids, mask, None, ref_logps=old, temperature=temperature)
    assert_same_bytes(lazy.ratio, found.ratio, "without old log-probabilities")
    (ours,) = torch.autograd.grad(lazy.ratio.sum(), policy)
    (theirs,) = torch.autograd.grad(triton_logp(policy, ids, temperature=temperature)[mask].sum(), policy)
    assert_same_bytes(ours[mask], theirs[mask], "gradient of a ratio of 1: that of the log-probability")


@BOTH
def test_reference_log_probabilities_stand_for_reference_logits(ratio_kl: Operator) -> None:
    policy, ref, ids, mask, old = _batch()
    ref_logps = triton_logp(ref, ids)
    found, wanted = ratio_kl(policy, None, ids, mask, old, ref_logps=ref_logps), ratio_kl(policy, ref, ids, mask, old)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    if ratio_kl is triton_ratio_kl:
        assert_same_bytes(found.kl, wanted.kl, "kl")


def test_one_gradient_alone_is_not_spoiled_by_the_other_output() -> None:
    policy, ref, ids, mask, old = _batch()
    found = triton_ratio_kl(policy, ref, ids, mask, old - 200.0)
    assert torch.isinf(found.ratio[mask]).all()
    (gradient,) = torch.autograd.grad(found.kl.sum(), policy)
    wanted = triton_ratio_kl(policy, ref, ids, mask, old)
    (expected,) = torch.autograd.grad(wanted.kl.sum(), policy)
    assert_same_bytes(gradient, expected, "gradient of the KL alone")


def test_only_the_policy_gets_a_gradient() -> None:
    policy, ref, ids, mask, old = _batch()
    found = triton_ratio_kl(policy, ref.requires_grad_(), ids, mask, old.requires_grad_())
    (found.ratio.sum() + found.kl.sum()).backward()
    assert policy.grad is not None
    assert ref.grad is None
    assert old.grad is None


@BOTH
def test_mistakes_are_told(ratio_kl: Operator) -> None:
    policy, ref, ids, mask, old = _batch()
    with pytest.raises(ValueError, match=r"ratio_kl: pass exactly one of ref_logits and ref_logps"):
        ratio_kl(policy, None, ids, mask, old)
    with pytest.raises(ValueError, match=r"ratio_kl: pass exactly one of ref_logits and ref_logps"):
        ratio_kl(policy, ref, ids, mask, old, ref_logps=old)
    with pytest.raises(
        ValueError, match=r"ratio_kl: ref_logits are \[2, 4, 6\]; pass policy_logits' shape \[2, 4, 7\]"
    ):
        ratio_kl(policy, ref[..., :6], ids, mask, old)
    with pytest.raises(ValueError, match=r"ratio_kl: old_logps is \[8\]; pass one value a token, \[2, 4\]"):
        ratio_kl(policy, ref, ids, mask, old.reshape(-1))
    with pytest.raises(ValueError, match=r"ratio_kl: kl is 'k4'; pass one of k1, k2, k3, abs"):
        ratio_kl(policy, ref, ids, mask, old, kl="k4")
    with pytest.raises(ValueError, match=r"ratio_kl: temperature is 0.0; pass a number above 0"):
        ratio_kl(policy, ref, ids, mask, old, temperature=0.0)
    with pytest.raises(TypeError, match=r"ratio_kl: action_ids are torch.float32; pass int32 or int64 ids"):
        ratio_kl(policy, ref, ids.float(), mask, old)
    with pytest.raises(TypeError, match=r"ratio_kl: ref_logits is torch.int64; pass bfloat16, float16"):
        ratio_kl(policy, ref.long(), ids, mask, old)


@pytest.mark.skipif(not ON_GPU, reason="peak memory of a GPU")
def test_memory_beside_the_gradient_is_sixteen_bytes_a_token() -> None:
    rows, vocab = 2048, 32768
    make = Maker(torch.bfloat16)
    policy, ref = make.normal(rows, vocab).requires_grad_(), make.normal(rows, vocab)
    ids, mask = make.integers(0, vocab, rows), make.bernoulli(0.8, rows)
    triton_ratio_kl(policy, ref, ids, mask)  # where tuning is on, the first call measures, into copies
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = triton_ratio_kl(policy, ref, ids, mask)
    # ratio, KL and its slope, norm of 2, and log-probabilities of 2 that go before the call returns
    assert torch.cuda.max_memory_allocated() - before <= rows * 7 * 4 + 8 * 512
    assert torch.cuda.memory_allocated() - before <= rows * 5 * 4 + 8 * 512
    del found
