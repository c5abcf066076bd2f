"""Trials from public bug reports (cases): RMSNorm and SwiGLU, by the PyTorch and by the Triton operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rl_engine.backends.reference.activation.swiglu import swiglu as reference_swiglu
from rl_engine.backends.reference.norm.rms_norm import rms_norm as reference_rms_norm
from rl_engine.backends.shared.triton.activation.swiglu import swiglu as triton_swiglu
from rl_engine.backends.shared.triton.norm.rms_norm import rms_norm as triton_rms_norm
from rl_engine.platforms import device
from rl_engine.platforms.device import DeviceIdentity
from tests.support.ops_inputs import DEVICE, LAYOUTS, ON_GPU, Maker, assert_same_bytes

RMS_NORMS = pytest.mark.parametrize("rms_norm", [reference_rms_norm, triton_rms_norm], ids=["pytorch", "triton"])
SWIGLUS = pytest.mark.parametrize("swiglu", [reference_swiglu, triton_swiglu], ids=["pytorch", "triton"])
Norm = Callable[..., torch.Tensor]

DX = [[-0.486864, -0.243432, 0.0, 0.243432], [-0.076681, -0.031370, 0.013942, 0.059254]]
DW = [6.064784, 10.557770, 17.117827, 25.744956]
DW_OF_ONES = [1.123246, 1.640014, 2.156782, 2.673550]
PRINTED = 1e-6  # the case gives its values to six decimals
FP32 = 1e-5  # rows of at most 1000 columns: a few hundred roundings of 6e-8 in dw's chains


def _b09() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(1.0, 9.0, device=DEVICE).view(2, 4).requires_grad_()
    return x, torch.ones(4, device=DEVICE, requires_grad=True)


def _close(ours: torch.Tensor, wanted: object, *, within: float) -> None:
    torch.testing.assert_close(ours.cpu().double(), torch.tensor(wanted).double(), rtol=within, atol=within)


@RMS_NORMS
def test_b09_a_sliced_gradient_gives_the_cases_values_and_stays_as_it_was(rms_norm: Norm) -> None:
    x, weight = _b09()
    memory = torch.arange(16.0, device=DEVICE).view(2, 8)
    dy, before = memory[:, ::2], memory.clone()
    dx, dw = torch.autograd.grad(rms_norm(x, weight), (x, weight), dy)
    _close(dx, DX, within=PRINTED)
    _close(dw, DW, within=PRINTED)
    assert_same_bytes(memory, before, "the memory under dy")


@RMS_NORMS
def test_b09_the_expanded_gradient_of_a_sum_gives_the_cases_values(rms_norm: Norm) -> None:
    x, weight = _b09()
    rms_norm(x, weight).sum().backward()
    assert weight.grad is not None, "a leaf"
    _close(weight.grad, DW_OF_ONES, within=PRINTED)


@RMS_NORMS
@pytest.mark.parametrize("dy_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
def test_b09_any_strides_of_x_and_gradient_give_fp64_autograds_gradients(
    rms_norm: Norm, x_layout: str, dy_layout: str
) -> None:
    make = Maker(torch.float32)
    x, weight = LAYOUTS[x_layout](make.normal(6, 10)), make.normal(10)
    dy = LAYOUTS[dy_layout](make.normal(6, 10))
    _check_gradients(rms_norm, x, weight, dy)


@RMS_NORMS
@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0), (2, 0, 1)], ids=str)
def test_b09_permuted_tensors_of_rank_three_give_fp64_autograds_gradients(
    rms_norm: Norm, axes: tuple[int, int, int]
) -> None:
    make = Maker(torch.float32)
    x, dy = (make.normal(2, 3, 4).permute(axes) for _ in range(2))
    _check_gradients(rms_norm, x, make.normal(x.shape[-1]), dy)


def _check_gradients(rms_norm: Norm, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> None:
    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    def gradients(norm: Norm, double: bool) -> tuple[torch.Tensor, ...]:
        leaves = [(one.double() if double else one).detach().requires_grad_() for one in (x, weight)]
        return torch.autograd.grad(norm(*leaves), leaves, dy.double() if double else dy)

    for ours, exact in zip(gradients(rms_norm, double=False), gradients(plain, double=True), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=FP32, atol=FP32 * float(exact.abs().max()))


def _dw(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    dx, dw = torch.autograd.grad(triton_rms_norm(x, weight), (x, weight), dy)
    return dx, dw


def _fake_card(sm_count: int) -> DeviceIdentity:
    arch = device.identify(0).arch if ON_GPU else "sm_90"
    return DeviceIdentity("cuda", "a card", arch, sm_count)


@pytest.mark.parametrize("shape", [(4096, 1000), (257, 33), (96, 8200)] if ON_GPU else [(130, 20), (40, 300)], ids=str)
def test_b65_the_weights_gradient_does_not_know_the_number_of_multiprocessors(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    make = Maker(torch.float32)
    x, weight, dy = make.normal(*shape), make.normal(shape[1]), make.normal(*shape)
    dx, dw = _dw(x, weight, dy)
    for sm_count in (1, 108, 132):
        monkeypatch.setattr(device, "identify", lambda _index, count=sm_count: _fake_card(count))
        again = _dw(x, weight, dy)
        assert_same_bytes(again[0], dx, f"dx with {sm_count} multiprocessors")
        assert_same_bytes(again[1], dw, f"dw with {sm_count} multiprocessors")
    exact = (dy.double() * x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)).sum(0)
    assert float((dw.double() - exact).abs().max() / exact.abs().max()) <= FP32  # the case's own bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32], ids=str)
def test_b65_the_weights_gradient_is_the_same_from_run_to_run(dtype: torch.dtype) -> None:
    make = Maker(dtype)
    shape = (4096, 1000) if ON_GPU else (100, 20)
    x, weight, dy = make.normal(*shape), make.normal(shape[1]), make.normal(*shape)
    _dx, first = _dw(x, weight, dy)
    for run in range(19 if ON_GPU else 4):
        assert_same_bytes(_dw(x, weight, dy)[1], first, f"run {run}")


def test_b65_rows_without_gradient_behind_the_others_leave_the_weights_gradient_as_it_is() -> None:
    # the contract's tree hangs on row numbers: padding behind adds zeros and missing leaves only
    make = Maker(torch.float32)
    x, weight, dy = make.normal(70, 20), make.normal(20), make.normal(70, 20)
    zeros = torch.zeros(50, 20, device=DEVICE)
    padded = _dw(torch.cat((x, make.normal(50, 20))), weight, torch.cat((dy, zeros)))
    assert_same_bytes(padded[1], _dw(x, weight, dy)[1], "dw")


@RMS_NORMS
@pytest.mark.parametrize("hidden", [8191, 8192, 8193, 65537])
def test_b67_a_hidden_size_above_one_block_is_the_fp64_result(rms_norm: Norm, hidden: int) -> None:
    make = Maker(torch.float32)
    _check_gradients(rms_norm, make.normal(2, hidden), make.normal(hidden), make.normal(2, hidden))
    x, weight = make.normal(2, hidden), make.normal(hidden)
    exact = reference_rms_norm(x.double(), weight.double())
    assert float((rms_norm(x, weight).double() - exact).abs().max() / exact.abs().max()) <= 1e-6  # 16 eps of fp32


def _b73(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    gate = torch.tensor([[1.0, -1.0, 0.0]], device=DEVICE, dtype=dtype, requires_grad=True)
    up = torch.tensor([[2.0, 3.0, 4.0]], device=DEVICE, dtype=dtype, requires_grad=True)
    return gate, up


@SWIGLUS
def test_b73_swiglu_gives_the_cases_values(swiglu: Norm) -> None:
    gate, up = _b73()
    out = swiglu(gate, up)
    dgate, dup = torch.autograd.grad(out, (gate, up), torch.ones_like(out))
    _close(out[0], [1.462117, -0.806824, 0.0], within=PRINTED)
    _close(dgate[0], [1.855341, 0.216988, 2.0], within=PRINTED)
    _close(dup[0], [0.731059, -0.268941, 0.0], within=PRINTED)


@SWIGLUS
@pytest.mark.parametrize("shape", [(3, 5), (1, 5), (3, 1), (7, 64), (2, 3, 5), (33, 130)], ids=str)
@pytest.mark.parametrize("layout", ["halves", *LAYOUTS])
def test_b73_every_row_has_autograds_gradient_whatever_the_strides(
    swiglu: Norm, shape: tuple[int, ...], layout: str
) -> None:
    make = Maker(torch.float32)
    if layout == "halves":
        packed = make.normal(*shape[:-1], 2 * shape[-1])
        gate, up = packed[..., : shape[-1]], packed[..., shape[-1] :]
    else:
        gate, up = (LAYOUTS[layout](make.normal(*shape)) for _ in range(2))
    dy = make.normal(*shape)

    def outcome(op: Norm, *values: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [one.detach().requires_grad_() for one in values]
        out = op(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, dy))

    exact = outcome(reference_swiglu, gate.double(), up.double(), dy=dy.double())
    for ours, wanted in zip(outcome(swiglu, gate, up, dy=dy), exact, strict=True):
        # 8 epsilons of fp32, the spec's tolerance
        torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=8 * 1.2e-7 * float(wanted.abs().max()))
