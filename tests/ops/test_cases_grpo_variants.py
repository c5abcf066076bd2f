"""The GRPO loss's surrogates, aggregations and estimators: formulae of TRL and verl, float64, and bits to keep."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_engine.backends.reference.loss.grpo_loss import GRPOLoss
from rl_engine.backends.reference.loss.grpo_loss import grpo_loss as reference_loss
from rl_engine.backends.shared.triton.loss import grpo_kernels
from rl_engine.backends.shared.triton.loss import grpo_loss as triton_module
from rl_engine.backends.shared.triton.loss.grpo_loss import grpo_loss as triton_loss
from tests.support.ops_inputs import DEVICE, Maker, assert_same_bytes, odd_stride, packed, sliced, transposed

LOSSES = pytest.mark.parametrize("grpo_loss", [reference_loss, triton_loss], ids=["pytorch", "triton"])
Loss = Callable[..., GRPOLoss]
Token = Callable[..., torch.Tensor]
VARIANTS: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "sequence-mean": {"aggregation": "sequence_mean"},
    "constant": {"aggregation": "constant", "normalizer": 41.0},
    "dual-clip": {"dual_clip": 1.2, "clip_eps_high": 0.28},
    "gspo": {"surrogate": "gspo", "aggregation": "sequence_mean", "clip_eps": 0.02},
    "gspo-dual": {"surrogate": "gspo", "dual_clip": 1.01, "aggregation": "constant", "normalizer": 3.0},
    "gspo-token-mean": {"surrogate": "gspo"},
    "cispo": {"surrogate": "cispo", "clip_eps": 1.0, "clip_eps_high": 0.3},
    "k1": {"kl": "k1"},
    "k2": {"kl": "k2", "aggregation": "sequence_mean"},
    "abs": {"kl": "abs"},
}
EACH = pytest.mark.parametrize("variant", VARIANTS)
OUR_OWN = [name for name in VARIANTS if VARIANTS[name].get("aggregation") == "constant"]


class Problem:
    """Random inputs, the mask and the ratios such that every branch of the formulae is met."""

    def __init__(self, sequences: int, tokens: int, *, per_token: bool = False) -> None:
        make = Maker(torch.float32)
        self.logps = make.normal(sequences, tokens) - 2
        self.old, self.ref = (self.logps + make.normal(sequences, tokens, scale=0.4) for _ in range(2))
        self.advantages = make.normal(sequences, tokens) if per_token else make.normal(sequences)
        self.mask = make.bernoulli(0.8, sequences, tokens)
        self.mask[0] = False

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Problem:
        """Return the problem with every tensor [sequences, tokens] changed."""
        made = object.__new__(Problem)
        made.__dict__ = {name: change(one) if one.dim() == 2 else one for name, one in self.__dict__.items()}
        return made

    def pick(self, rows: list[int]) -> Problem:
        """Return the problem of these sequences."""
        made = object.__new__(Problem)
        made.__dict__ = {name: one[rows] for name, one in self.__dict__.items()}
        return made

    def run(self, grpo_loss: Loss, dloss: float = 1.0, **options: Any) -> tuple[GRPOLoss, torch.Tensor]:
        leaf = self.logps.detach().requires_grad_()
        found = grpo_loss(leaf, self.old, self.advantages, self.mask, **{"ref_logps": self.ref, "beta": 0.1, **options})
        (gradient,) = torch.autograd.grad(found.loss, leaf, torch.full_like(found.loss, dloss))
        return found, gradient


def _same(ours: tuple[GRPOLoss, torch.Tensor], theirs: tuple[GRPOLoss, torch.Tensor], what: str) -> None:
    for one, other, name in zip(ours[0], theirs[0], GRPOLoss._fields, strict=True):
        assert_same_bytes(one, other, f"{what}: {name}")
    assert_same_bytes(ours[1], theirs[1], f"{what}: gradient")


@EACH
@pytest.mark.parametrize("per_token", [False, True], ids=["per-sequence", "per-token"])
@pytest.mark.parametrize("shape", [(6, 67), (2, 1040)], ids=str)
def test_every_variant_is_the_float64_reference(variant: str, per_token: bool, shape: tuple[int, int]) -> None:
    problem = Problem(*shape, per_token=per_token)
    ours, gradient = problem.run(triton_loss, **VARIANTS[variant])
    problem.advantages = problem.advantages.double()
    wide = problem.map(lambda one: one.double() if one.is_floating_point() else one)
    exact, wanted = wide.run(reference_loss, **VARIANTS[variant])
    # 64 roundings, as the declared tolerance, of terms that cancel down to a tenth
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))
    assert (gradient[~problem.mask] == 0).all()


# TRL and verl, written out: per-token policy losses from logp, old and A [2, 1], and the mask of the worked case
LOGP = [[-1.0, -2.0, -0.5], [-0.7, -1.2, -3.0]]
OLD = [[-1.2, -1.9, -0.5], [-0.7, -1.6, -2.0]]
REF = [[-1.1, -2.2, -0.4], [-0.9, -1.2, -2.5]]
MASK = [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]


def _trl_clipped(logp: torch.Tensor, old: torch.Tensor, a: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
    coef_1 = torch.exp(logp - old)
    return -torch.min(coef_1 * a, torch.clamp(coef_1, 1 - 0.2, 1 + 0.28) * a)


def _trl_cispo(logp: torch.Tensor, old: torch.Tensor, a: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
    return -torch.clamp(torch.exp(logp - old), max=1.3).detach() * a * logp


def _verl_cispo(logp: torch.Tensor, old: torch.Tensor, a: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
    return -torch.clamp(torch.exp(logp - old), 1 - 0.2, 1 + 0.3).detach() * a * logp


def _verl_dual(logp: torch.Tensor, old: torch.Tensor, a: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
    ratio = torch.exp(logp - old)
    clipped = torch.maximum(-a * ratio, -a * torch.clamp(ratio, 1 - 0.2, 1 + 0.2))
    return torch.where(a < 0, torch.min(-a * 1.4, clipped), clipped)


def _verl_gspo(logp: torch.Tensor, old: torch.Tensor, a: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    lengths = mask.sum(-1).clamp(min=1)
    mean = ((logp - old) * mask).sum(-1) / lengths
    ratio = torch.exp(logp - logp.detach() + mean.detach().unsqueeze(-1))
    return torch.maximum(-a * ratio, -a * torch.clamp(ratio, 1 - 0.04, 1 + 0.04))


FORMULAE: dict[str, tuple[Token, dict[str, Any]]] = {
    "DAPO": (_trl_clipped, {"clip_eps_high": 0.28}),
    "TRL CISPO": (_trl_cispo, {"surrogate": "cispo", "clip_eps": 1.0, "clip_eps_high": 0.3}),
    "verl CISPO": (_verl_cispo, {"surrogate": "cispo", "clip_eps_high": 0.3}),
    "verl dual clip": (_verl_dual, {"dual_clip": 1.4}),
    "verl GSPO": (_verl_gspo, {"surrogate": "gspo", "clip_eps": 0.04}),
}
AGGREGATIONS: dict[str, tuple[Token, dict[str, Any]]] = {
    "token mean": (lambda token, mask: (token * mask).sum() / mask.sum(), {}),
    "TRL grpo": (
        lambda token, mask: ((token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean(),
        {"aggregation": "sequence_mean"},
    ),
    "TRL dr_grpo": (
        lambda token, mask: (token * mask).sum() / (token.shape[0] * 7),
        {"aggregation": "constant", "normalizer": 2 * 7},
    ),
}


@LOSSES
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("formula", FORMULAE)
def test_the_formulae_of_trl_and_verl(grpo_loss: Loss, formula: str, aggregation: str) -> None:
    (token, options), (aggregate, more) = FORMULAE[formula], AGGREGATIONS[aggregation]
    logp, old, ref, mask = (torch.tensor(one, dtype=torch.float64) for one in (LOGP, OLD, REF, MASK))
    a = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    logp.requires_grad_()
    kl = torch.exp(ref - logp) - (ref - logp) - 1
    wanted = aggregate(token(logp, old, a, mask) + 0.1 * kl, mask)
    (slope,) = torch.autograd.grad(wanted, logp)
    leaf = torch.tensor(LOGP, device=DEVICE).requires_grad_()
    rest = [torch.tensor(one, device=DEVICE) for one in (OLD, [1.0, -1.0], MASK, REF)]
    found = grpo_loss(leaf, *rest[:3], ref_logps=rest[3], beta=0.1, **options, **more)
    (gradient,) = torch.autograd.grad(found.loss, leaf)
    assert found.loss.item() == pytest.approx(wanted.item(), abs=2e-7)
    torch.testing.assert_close(gradient.cpu().double(), slope, rtol=0, atol=2e-7)


@LOSSES
def test_b14b_a_normalizer_of_as_many_tokens_is_the_token_mean(grpo_loss: Loss) -> None:
    args = [torch.tensor(one, device=DEVICE) for one in (LOGP, OLD, [1.0, -1.0], MASK)]
    options = {"ref_logps": torch.tensor(REF, device=DEVICE), "beta": 0.1, "aggregation": "constant"}
    for normalizer in (5.0, 5, torch.tensor(5, device=DEVICE)):
        assert grpo_loss(*args, normalizer=normalizer, **options).loss.item() == pytest.approx(0.24121785, abs=5e-8)


@LOSSES
@pytest.mark.parametrize("variant", ["token-mean", "gspo", "cispo", "dual-clip"])
def test_without_old_logps_the_ratio_is_one_and_has_a_gradient(grpo_loss: Loss, variant: str) -> None:
    problem = Problem(4, 37)
    problem.old = problem.logps
    given = problem.run(grpo_loss, **VARIANTS[variant])
    problem.old = None  # type: ignore[assignment]  # what is tested
    left_out = problem.run(grpo_loss, **VARIANTS[variant])
    _same(left_out, given, variant)
    assert (left_out[1][problem.mask] != 0).all()


@LOSSES
@EACH
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_junk_under_the_mask_reaches_nothing(grpo_loss: Loss, variant: str, value: float) -> None:
    problem = Problem(3, 33, per_token=True)
    clean = problem.map(lambda one: one if one is problem.mask else one.where(problem.mask, 0.0))
    dirty = problem.map(lambda one: one if one is problem.mask else one.where(problem.mask, value))
    _same(dirty.run(grpo_loss, **VARIANTS[variant]), clean.run(grpo_loss, **VARIANTS[variant]), str(value))


@EACH
@pytest.mark.parametrize("tokens", [67, 1000])
def test_padding_on_the_right_changes_no_bit(variant: str, tokens: int) -> None:
    problem = Problem(4, tokens)
    loss, gradient = problem.run(triton_loss, **VARIANTS[variant])
    for more in (1, 24, 1100):

        def padded(one: torch.Tensor, more: int = more) -> torch.Tensor:
            return torch.cat([one, one.new_full((4, more), 0 if one.dtype == torch.bool else math.nan)], 1)

        found, wide = problem.map(padded).run(triton_loss, **VARIANTS[variant])
        _same((found, wide[:, :tokens].contiguous()), (loss, gradient), f"{more} more")
        assert_same_bytes(wide[:, tokens:].contiguous(), torch.zeros(4, more, device=DEVICE), "gradient of padding")


@pytest.mark.parametrize("variant", OUR_OWN)
@pytest.mark.parametrize("tokens", [40, 1300])
def test_with_a_given_normalizer_a_sequences_gradient_is_its_own(variant: str, tokens: int) -> None:
    problem = Problem(9, tokens)
    _found, gradient = problem.run(triton_loss, **VARIANTS[variant])
    for rows in ([3], [5, 4, 3, 2, 1, 0, 8, 7, 6], [2] * 20):
        _found, alone = problem.pick(rows).run(triton_loss, **VARIANTS[variant])
        assert_same_bytes(alone, gradient[rows], f"sequences {rows}")


@EACH
@pytest.mark.parametrize("shape", [(5, 64), (3, 1300)], ids=str)
def test_a_second_backward_gives_the_bytes_of_the_first(variant: str, shape: tuple[int, int]) -> None:
    problem = Problem(*shape)
    leaf = problem.logps.requires_grad_()
    loss = triton_loss(
        leaf, problem.old, problem.advantages, problem.mask, ref_logps=problem.ref, beta=0.1, **VARIANTS[variant]
    ).loss
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    kept = first.clone()
    half = torch.full_like(loss, 0.5)
    (second,) = torch.autograd.grad(loss, leaf, half, retain_graph=True)
    (third,) = torch.autograd.grad(loss, leaf)
    assert_same_bytes(first, kept, "the first, after the others")
    assert_same_bytes(second, kept * 0.5, "half")
    assert_same_bytes(third, kept, "the third")
    assert len({one.data_ptr() for one in (first, second, third)}) == 3
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaf)


@LOSSES
@pytest.mark.parametrize("dloss", [0.0, -3.0, 0.1])
def test_an_incoming_gradient_scales_the_gradient(grpo_loss: Loss, dloss: float) -> None:
    _found, gradient = Problem(3, 50).run(grpo_loss)
    _found, scaled = Problem(3, 50).run(grpo_loss, dloss)
    # autograd scales terms before it subtracts them: a few roundings of the largest
    torch.testing.assert_close(scaled, gradient * dloss, rtol=0, atol=1e-6 * float(gradient.abs().max()))


def test_the_first_backward_does_not_mind_inputs_changed_since() -> None:
    problem = Problem(3, 50)
    _found, wanted = problem.run(triton_loss)
    leaf = problem.logps.requires_grad_()
    loss = triton_loss(leaf, problem.old, problem.advantages, problem.mask, ref_logps=problem.ref, beta=0.1).loss
    problem.old.zero_()
    assert_same_bytes(torch.autograd.grad(loss, leaf)[0], wanted, "gradient")


@pytest.mark.parametrize("variant", ["token-mean", "gspo-token-mean", "dual-clip"])
@pytest.mark.parametrize("shape", [(5, 67), (3, 1300)], ids=str)
def test_weights_before_and_after_the_tokens_give_the_same_bytes(
    variant: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(*shape)
    found = []
    for most in (0, 1 << 30):
        monkeypatch.setattr(grpo_kernels, "_DEFERRED", most)
        found.append([problem.run(triton_loss, dloss, **VARIANTS[variant]) for dloss in (1.0, 0.3)])
    for ours, theirs in zip(*found, strict=True):
        _same(ours, theirs, variant)


@EACH
@pytest.mark.parametrize("change", [sliced, transposed, packed, odd_stride], ids=lambda one: one.__name__)
def test_strides_change_no_bit(variant: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    problem = Problem(4, 32, per_token=True)  # whole 16-byte accesses, until the strides change
    wanted = problem.run(triton_loss, **VARIANTS[variant])
    _same(problem.map(change).run(triton_loss, **VARIANTS[variant]), wanted, change.__name__)


@EACH
def test_expanded_inputs_are_read_as_what_they_show(variant: str) -> None:
    problem = Problem(4, 1300, per_token=True)
    shown = problem.map(lambda one: one[:, :1].expand(4, 1300))
    copied = shown.map(lambda one: one.contiguous())
    _same(shown.run(triton_loss, **VARIANTS[variant]), copied.run(triton_loss, **VARIANTS[variant]), "columns")
    shown = problem.map(lambda one: one[1:2].expand(4, 1300))
    copied = shown.map(lambda one: one.contiguous())
    _same(shown.run(triton_loss, **VARIANTS[variant]), copied.run(triton_loss, **VARIANTS[variant]), "rows")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32], ids=str)
@EACH
def test_a_mask_of_any_dtype_gives_the_same_bytes(variant: str, dtype: torch.dtype) -> None:
    problem = Problem(4, 48)
    wanted = problem.run(triton_loss, **VARIANTS[variant])
    problem.mask = problem.mask.to(dtype)
    _same(problem.run(triton_loss, **VARIANTS[variant]), wanted, str(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32], ids=str)
def test_a_normalizer_on_the_device_gives_the_bytes_of_the_number(dtype: torch.dtype) -> None:
    problem = Problem(4, 48)
    wanted = problem.run(triton_loss, aggregation="constant", normalizer=77)
    given = torch.tensor(77, dtype=dtype, device=DEVICE)
    _same(problem.run(triton_loss, aggregation="constant", normalizer=given), wanted, str(dtype))


@EACH
def test_without_a_gradient_none_is_written(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(4, 48)
    wanted, _gradient = problem.run(triton_loss, **VARIANTS[variant])
    sizes = []

    def noted(*args: Any) -> Any:
        result = forward(*args)
        sizes.append(result[3].numel())
        return result

    forward = triton_module.loss_and_gradient
    monkeypatch.setattr(triton_module, "loss_and_gradient", noted)
    args = (problem.old, problem.advantages, problem.mask)
    options = {"ref_logps": problem.ref, "beta": 0.1, **VARIANTS[variant]}
    plain = triton_loss(problem.logps, *args, **options)
    with torch.no_grad():
        blocked = triton_loss(problem.logps.requires_grad_(), *args, **options)
    assert sizes == [0, 0]
    for found in (plain, blocked):
        for one, other, name in zip(found, wanted, GRPOLoss._fields, strict=True):
            assert_same_bytes(one, other, name)


@pytest.mark.parametrize("variant", ["gspo", "constant", "cispo"])
def test_a_compiled_variant_has_eagers_bytes(variant: str) -> None:
    problem = Problem(3, 40)
    torch._dynamo.reset()
    compiled = torch.compile(triton_loss, backend="aot_eager", fullgraph=True)
    for dloss in (1.0, 0.5):
        wanted = problem.run(triton_loss, dloss, **VARIANTS[variant])
        _same(problem.run(compiled, dloss, **VARIANTS[variant]), wanted, variant)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"surrogate": "ppo"}, "surrogate is 'ppo'; pass one of grpo, gspo, cispo"),
    ({"aggregation": "constant"}, "aggregation is 'constant', normalizer is None; pass one with 'constant'"),
    ({"normalizer": 3.0}, "aggregation is 'token_mean', normalizer is 3.0; pass one with 'constant', and only there"),
    ({"aggregation": "constant", "normalizer": 0.0}, "normalizer is 0.0; pass a positive number"),
    ({"aggregation": "constant", "normalizer": math.nan}, "normalizer is nan; pass a positive number"),
    ({"aggregation": "constant", "normalizer": torch.ones(1)}, r"normalizer is \[1\]; pass a tensor of no dimension"),
    ({"dual_clip": 1.0}, "dual_clip is 1.0 for grpo; pass a number above 1, for grpo or gspo"),
    ({"dual_clip": 3.0, "surrogate": "cispo"}, "dual_clip is 3.0 for cispo; pass a number above 1"),
    ({"kl": "k3+"}, "kl is 'k3\\+'; pass one of k1, k2, k3, abs"),
]


@LOSSES
@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message[:30] for _options, message in WRONG])
def test_options_that_exclude_each_other_are_refused(grpo_loss: Loss, options: dict[str, Any], message: str) -> None:
    moved = {name: one.to(DEVICE) if isinstance(one, torch.Tensor) else one for name, one in options.items()}
    with pytest.raises(ValueError, match=message):
        Problem(2, 3).run(grpo_loss, **moved)


@LOSSES
@pytest.mark.parametrize("shape", [(3,), (2, 2), (2, 1)], ids=str)
def test_advantages_are_one_a_sequence_or_one_a_token(grpo_loss: Loss, shape: tuple[int, ...]) -> None:
    problem = Problem(2, 3)
    problem.advantages = torch.ones(shape, device=DEVICE)
    with pytest.raises(ValueError, match=r"pass \[2\], one a sequence, or \[2, 3\], one a token"):
        problem.run(grpo_loss)
