"""Trials from public bug reports (cases): log-probabilities, by the PyTorch reference and by the Triton operator."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from rl_engine.backends.reference.logprob.logp import logp as reference_logp
from rl_engine.backends.shared.triton.logprob.logp import logp as triton_logp
from tests.support.ops_inputs import DEVICE, ON_GPU, Maker, assert_same_bytes

LOGPS = pytest.mark.parametrize("logp", [reference_logp, triton_logp], ids=["pytorch", "triton"])
LogP = Callable[..., torch.Tensor]
HALVES = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]
CASE_BOUND = 1e-5  # of B58; a log-probability near -13 rounded to fp32 is off by 5e-7
PRINTED = 1e-6  # the case gives its values to seven digits


def _exact(logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    return torch.log_softmax(logits.double() / temperature, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _worst(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.detach().double() - exact.detach()).abs().max())


def _value(logp: LogP, row: list[float], target: int, **options: float) -> float:
    return logp(torch.tensor([row], device=DEVICE), torch.tensor([target], device=DEVICE), **options).item()


@LOGPS
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_b58_half_logits_give_fp32_log_probabilities_of_those_values(logp: LogP, dtype: torch.dtype) -> None:
    make = Maker(dtype)
    logits, targets = make.normal(4, 151936, scale=2.0), make.integers(0, 151936, 4)
    found = logp(logits, targets)
    assert found.dtype == torch.float32
    assert _worst(found, _exact(logits, targets)) <= CASE_BOUND


@LOGPS
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4, 1e6], ids=str)
def test_b58_rows_far_from_zero_keep_their_digits(logp: LogP, offset: float) -> None:
    make = Maker(torch.float32)
    logits, targets = make.normal(4, 5000, scale=2.0) + offset, make.integers(0, 5000, 4)
    logits.requires_grad_()
    found = logp(logits, targets)
    assert _worst(found, _exact(logits, targets)) <= CASE_BOUND
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    wide = logits.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(_exact(wide, targets).sum(), wide)
    # its values are at most 1: probabilities of exponents below 30, whose rounding is 30 * 6e-8
    assert _worst(gradient, exact) <= CASE_BOUND


@LOGPS
def test_b58_a_row_near_the_largest_number_of_fp32(logp: LogP) -> None:
    logits = torch.tensor([[3e38, 3e38, 0.0]], device=DEVICE, requires_grad=True)
    found = logp(logits, torch.tensor([0], device=DEVICE))
    assert found.item() == pytest.approx(-math.log(2), abs=PRINTED)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert gradient.tolist() == [[0.5, -0.5, 0.0]]


@LOGPS
def test_b58_temperature_divides_the_logits(logp: LogP) -> None:
    row = [0.0, 1.0, 2.0, 3.0]
    assert _value(logp, row, 3) == pytest.approx(-0.4401897, abs=PRINTED)
    assert _value(logp, row, 3, temperature=0.5) == pytest.approx(-0.1450780, abs=PRINTED)


@LOGPS
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.7])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_b58_any_temperature_and_dtype_is_the_fp64_result_with_its_gradient(
    logp: LogP, dtype: torch.dtype, temperature: float
) -> None:
    make = Maker(dtype)
    logits, targets, dy = make.normal(6, 70, scale=2.0), make.integers(0, 70, 6), make.normal(6, dtype=torch.float32)
    leaf, wide = logits.requires_grad_(), logits.detach().double().requires_grad_()
    found = logp(leaf, targets, temperature=temperature)
    exact = _exact(wide, targets, temperature)
    assert _worst(found, exact) <= CASE_BOUND
    (ours,) = torch.autograd.grad(found, leaf, dy)
    (wanted,) = torch.autograd.grad(exact, wide, dy.double())
    # one rounding to the logits' dtype, on top of fp32's own few
    allowed = torch.finfo(dtype).eps * wanted.abs() + CASE_BOUND * float(wanted.abs().max())
    assert ((ours.double() - wanted).abs() <= allowed).all()


@LOGPS
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_b58_temperature_one_is_no_temperature_bit_for_bit(logp: LogP, dtype: torch.dtype) -> None:
    make = Maker(dtype)
    logits, targets = make.normal(5, 33), make.integers(0, 33, 5)
    assert_same_bytes(logp(logits, targets, temperature=1.0), logp(logits, targets), "temperature 1")


@LOGPS
@pytest.mark.parametrize("vocab", [65535, 65536, 65537, 102400, 151936, 262144, 1048577])
def test_b67_a_vocabulary_above_one_block_is_the_fp64_result(logp: LogP, vocab: int) -> None:
    make = Maker(torch.float32)
    logits = make.normal(2, vocab, scale=2.0).requires_grad_()
    targets = torch.tensor([vocab - 1, vocab // 2], device=DEVICE)
    found = logp(logits, targets)
    # PyTorch's own sum over a million exponentials is longer chains than ours
    assert _worst(found, _exact(logits, targets)) <= (CASE_BOUND if logp is triton_logp else 10 * CASE_BOUND)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    wide = logits.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(_exact(wide, targets).sum(), wide)
    assert _worst(gradient, exact) <= CASE_BOUND


@LOGPS
@pytest.mark.parametrize("bad", [-1, 7, 2**31 - 1, 2**40, -(2**40)])
def test_an_id_out_of_range_gives_nan_and_a_zero_gradient_row_and_leaves_other_rows_alone(logp: LogP, bad: int) -> None:
    make = Maker(torch.float32)
    logits, targets = make.normal(4, 7).requires_grad_(), torch.tensor([3, bad, -100, 6], device=DEVICE)
    clean = targets.clone()
    clean[1:3] = 0
    found, good = logp(logits, targets), logp(logits, clean)
    assert torch.isnan(found).tolist() == [False, True, False, False]
    assert found[2].item() == 0.0
    assert_same_bytes(found[[0, 3]], good[[0, 3]], "the other rows")
    (gradient,) = torch.autograd.grad(found, logits, torch.ones(4, device=DEVICE))
    (wanted,) = torch.autograd.grad(good, logits, torch.ones(4, device=DEVICE))
    assert_same_bytes(gradient[[0, 3]], wanted[[0, 3]], "the other rows' gradients")
    assert_same_bytes(gradient[1:3], torch.zeros(2, 7, device=DEVICE), "gradients of the bad id and of padding")


@LOGPS
def test_int32_and_int64_ids_give_the_same_bytes(logp: LogP) -> None:
    make = Maker(torch.float32)
    logits, targets = make.normal(9, 50), make.integers(0, 50, 9)
    assert_same_bytes(logp(logits, targets.int()), logp(logits, targets), "int32")


@LOGPS
def test_logits_masked_with_minus_infinity_have_no_probability(logp: LogP) -> None:
    logits = torch.tensor([[1.0, -math.inf, 2.0], [-math.inf] * 3], device=DEVICE, requires_grad=True)
    found = logp(logits, torch.tensor([0, 0], device=DEVICE))
    assert found[0].item() == pytest.approx(-math.log1p(math.e), abs=PRINTED)
    assert math.isnan(found[1].item())
    (gradient,) = torch.autograd.grad(found[0], logits)
    assert gradient[0, 1].item() == 0.0
