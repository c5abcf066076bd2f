"""RMSNorm's casting modes against the modules that users bring weights of, as Hugging Face writes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rl_engine.backends.reference.norm.rms_norm import CastingMode
from rl_engine.backends.reference.norm.rms_norm import rms_norm as reference_rms_norm
from rl_engine.backends.shared.triton.norm import rms_norm as module
from tests.support.ops_inputs import DEVICE, ON_GPU, Maker, assert_same_bytes

Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
RMS_NORMS = pytest.mark.parametrize("rms_norm", [reference_rms_norm, module.rms_norm], ids=["pytorch", "triton"])
NARROW = torch.bfloat16 if ON_GPU else torch.float16
EPS = 1e-6
ROWS, HIDDEN = 64, 96


def _llama(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what LlamaRMSNorm.forward does, and Qwen2's and Qwen3's: transformers, models/llama/modeling_llama.py."""
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + EPS)
    return weight * hidden_states.to(input_dtype)


def _gemma(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what GemmaRMSNorm.forward does: transformers, models/gemma/modeling_gemma.py."""
    output = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    output = output * (1.0 + weight.float())
    return output.type_as(x)


THEIRS: dict[CastingMode, Norm] = {"llama": _llama, "gemma": _gemma}
MODES = pytest.mark.parametrize("mode", THEIRS)


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = Maker(dtype)
    return make.normal(ROWS, HIDDEN), make.normal(HIDDEN), make.normal(ROWS, HIDDEN)


def _gradients(norm: Norm, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [one.detach().requires_grad_() for one in (x, weight)]
    return torch.autograd.grad(norm(*leaves), leaves, dy)


def _differ(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.dtype == theirs.dtype
    return float((ours != theirs).float().mean())


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).abs().mean())


@MODES
@RMS_NORMS
def test_outputs_are_hugging_faces_bits_but_where_a_sums_order_tips_a_rounding(rms_norm: Norm, mode: str) -> None:
    x, weight, _dy = _inputs(NARROW)
    theirs = THEIRS[mode](x, weight)
    assert _differ(rms_norm(x, weight, casting_mode=mode), theirs) < 0.01
    others = {"none", *THEIRS} - {mode}
    assert all(_differ(rms_norm(x, weight, casting_mode=one), theirs) > 0.1 for one in others)


@MODES
@RMS_NORMS
def test_in_fp32_outputs_and_gradients_are_hugging_faces(rms_norm: Norm, mode: str) -> None:
    x, weight, dy = _inputs(torch.float32)
    ours = (
        rms_norm(x, weight, casting_mode=mode),
        *_gradients(lambda *leaves: rms_norm(*leaves, casting_mode=mode), x, weight, dy),
    )
    theirs = THEIRS[mode](x, weight), *_gradients(THEIRS[mode], x, weight, dy)
    for one, wanted in zip(ours, theirs, strict=True):
        # 64 rows and 96 columns: sums of two orders, a few roundings of 6e-8 apart
        torch.testing.assert_close(one, wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()))


@MODES
def test_in_16_bits_gradients_are_those_of_fp32_rounded_once(mode: str) -> None:
    x, weight, dy = _inputs(NARROW)
    dx, _dw = _gradients(lambda *leaves: module.rms_norm(*leaves, casting_mode=mode), x, weight, dy)
    exact, _dw = _gradients(THEIRS[mode], x.float(), weight.float(), dy.float())
    assert _differ(dx, exact.to(NARROW)) < 0.01


def test_llamas_weight_gradient_sums_the_rounded_rows() -> None:
    x, weight, dy = _inputs(NARROW)
    weight = weight.float()  # so that its gradient is not rounded to 16 bits
    _dx, dw = _gradients(lambda *leaves: module.rms_norm(*leaves, casting_mode="llama"), x, weight, dy)
    rounded = (dy.double() * _llama(x, torch.ones_like(x)).double()).sum(0)
    as_they_were = (dy.double() * _llama(x.float(), torch.ones_like(weight)).double()).sum(0)
    assert _error(dw, rounded) < 0.05 * _error(dw, as_they_were)


def test_without_16_bits_there_is_nothing_to_round_for_llama() -> None:
    x, weight, dy = _inputs(torch.float32)
    for one, plain in zip(
        _gradients(lambda *leaves: module.rms_norm(*leaves, casting_mode="llama"), x, weight, dy),
        _gradients(module.rms_norm, x, weight, dy),
        strict=True,
    ):
        assert_same_bytes(one, plain, "fp32")


@RMS_NORMS
def test_a_wider_weight_leaves_the_result_in_xs_dtype(rms_norm: Norm) -> None:
    x, weight, _dy = _inputs(NARROW)
    wide = weight.float() * 1.001
    ours = rms_norm(x, wide, casting_mode="llama")
    assert _differ(ours, _llama(x, wide).to(NARROW)) < 0.01  # Hugging Face's own result is fp32


@pytest.mark.parametrize("mode", ["llama", "gemma"])
def test_a_compiled_call_has_the_bytes_of_an_eager_one(mode: str) -> None:
    torch._dynamo.reset()
    x, weight, dy = _inputs(NARROW)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return module.rms_norm(x, weight, casting_mode=mode)

    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    assert_same_bytes(compiled(x, weight), norm(x, weight), "output")
    for ours, eager in zip(_gradients(compiled, x, weight, dy), _gradients(norm, x, weight, dy), strict=True):
        assert_same_bytes(ours, eager, "gradient")


@RMS_NORMS
def test_an_unknown_mode_is_refused_with_the_known_ones(rms_norm: Norm) -> None:
    x = torch.ones(2, 3, device=DEVICE)
    with pytest.raises(ValueError, match="rms_norm: casting_mode is 'hf'; pass one of 'none', 'llama', 'gemma'"):
        rms_norm(x, x[0], casting_mode="hf")
