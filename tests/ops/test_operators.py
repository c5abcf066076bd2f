"""Every declared operator, at every declared case, against its float64 reference; memory, layouts, special values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from rl_engine.backends import catalog
from rl_engine.backends.spec import Inputs, OpSpec
from rl_engine.platforms import device
from rl_engine.platforms.device import DeviceIdentity
from rl_engine.runtime.policy import autotune
from tests.support.ops_inputs import (
    DTYPES,
    LAYOUTS,
    ON_GPU,
    Outcome,
    Sample,
    assert_same,
    assert_same_bytes,
    flat,
    incoming,
    map_tensors,
    of_cases,
    run,
    run_sample,
    samples,
    tensors_of,
    to_double,
    triton_op,
)

GRADCHECK_ELEMENTS = 600  # every element is moved twice, and the whole reference runs each time
# Where a gradient is the small difference of large terms, no arithmetic in fp32 keeps digits of the difference: its
# error is judged by the size of the terms.
CANCELLING = {
    ("rms_norm", "one", "gradient of argument 0"): "of one column: dy*w*rstd - x*rstd^3*(dy*w*x) leaves eps/(x^2 + eps)"
}


def _terms(inputs: Inputs, dy: torch.Tensor) -> float:
    """Return the largest first term of rms_norm's dx."""
    x, weight = (to_double(arg) for arg in inputs.args)
    return float((dy.double() * weight * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).abs().max())


def _reference(sample: Sample, inputs: Inputs) -> Outcome:
    """Return the float64 reference's outcome for the same values and the same incoming gradients."""
    native = flat(sample.spec.reference(*_leaves(inputs), **inputs.kwargs))
    dy = incoming(native)
    return run(
        sample.spec.reference,
        map_tensors(inputs, to_double),
        differentiate=sample.spec.differentiable,
        gradients=lambda _outputs: tuple(None if one is None else one.double() for one in dy),
    )


def _leaves(inputs: Inputs) -> list[torch.Tensor]:
    return [
        arg.detach().requires_grad_() if number in inputs.differentiable else arg
        for number, arg in enumerate(inputs.args)
    ]


def _allowed(sample: Sample, name: str, inputs: Inputs, ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the error that the spec's tolerance allows in one tensor.

    Epsilons of the operator's dtype, each of the size that the result's own dtype gives it (an fp32 result of fp16
    inputs has fp32's), relative to the largest magnitude of the tensor.
    """
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    if (sample.spec.name, sample.case.name, name) in CANCELLING:
        (dy,) = incoming(flat(sample.spec.reference(*_leaves(inputs), **inputs.kwargs)))
        assert dy is not None, "rms_norm's output carries a gradient"
        largest = _terms(inputs, dy)
    return sample.spec.tolerance.epsilons[sample.dtype] * torch.finfo(ours.dtype).eps * largest


@pytest.mark.parametrize("sample", samples(), ids=str)
def test_outputs_and_gradients_are_the_float64_references_within_the_declared_tolerance(sample: Sample) -> None:
    inputs = sample.inputs()
    ours = run_sample(triton_op(sample.spec.name), sample, inputs)
    exact = dict(_reference(sample, inputs).tensors())
    assert [name for name, _tensor in ours.tensors()] == list(exact)
    for name, tensor in ours.tensors():
        error = (tensor.double() - exact[name]).abs()
        worst = float(error.max()) if error.numel() else 0.0
        assert worst <= _allowed(sample, name, inputs, tensor, exact[name]), f"{name}: {worst}"  # NaN fails too


@pytest.mark.parametrize("sample", samples(), ids=str)
def test_shapes_and_dtypes_are_the_references_and_results_are_contiguous(sample: Sample) -> None:
    inputs = sample.inputs()
    outcome = run_sample(triton_op(sample.spec.name), sample, inputs)
    ours = dict(outcome.tensors())
    reference = dict(run_sample(sample.spec.reference, sample, inputs).tensors())
    assert {name: (one.shape, one.dtype) for name, one in ours.items()} == {
        name: (one.shape, one.dtype) for name, one in reference.items()
    }
    assert all(one.is_contiguous() for one in outcome.outputs)
    for number, gradient in outcome.gradients.items():  # autograd copies one that lies otherwise than its parameter
        assert gradient.is_contiguous() or gradient.stride() == inputs.args[number].stride()


@pytest.mark.parametrize("sample", samples(of_cases("odd")), ids=str)
def test_allocations_of_the_package_were_poisoned(sample: Sample, poisoned: list[str]) -> None:
    # the tests beside this one prove nothing about unwritten memory if the fixture misses
    run_sample(triton_op(sample.spec.name), sample)
    owners = tuple(f"rl_engine.backends.shared.triton.{folder}." for folder in (sample.spec.family, "rows"))
    assert any(module.startswith(owners) for module in poisoned)


@pytest.mark.parametrize("spec", [one for one in catalog.specs().values() if one.differentiable], ids=lambda s: s.name)
def test_the_references_gradients_are_its_numerical_ones(spec: OpSpec) -> None:
    checked = 0
    for sample in samples(lambda one: one.spec is spec and one.dtype == "float32"):
        if "stop-gradient" in sample.case.tags:  # by definition not the derivative
            continue
        inputs = map_tensors(sample.inputs(), to_double)
        elements = sum(inputs.args[number].numel() for number in inputs.differentiable)
        if not 0 < elements <= GRADCHECK_ELEMENTS:
            continue

        def outputs(*args: torch.Tensor, kwargs: Mapping[str, object] = inputs.kwargs) -> list[torch.Tensor]:
            return [output for output in flat(spec.reference(*args, **kwargs)) if output.requires_grad]

        assert torch.autograd.gradcheck(outputs, _leaves(inputs))
        checked += 1
    assert checked


def _layout_samples() -> list[Sample]:
    return samples(lambda sample: sample.case.name in ("tiny", "odd", "warm", "sequence-mean"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sample", _layout_samples(), ids=str)
def test_any_layout_gives_the_bytes_of_contiguous_copies_and_stays_as_it_was(sample: Sample, layout: str) -> None:
    change, op = LAYOUTS[layout], triton_op(sample.spec.name)
    inputs = map_tensors(sample.inputs(), change)
    # the memory as it was, what lies between the elements included
    before = {name: one.untyped_storage().clone() for name, one in tensors_of(inputs).items()}
    sent: list[torch.Tensor] = []

    def gradients(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
        made = tuple(None if dy is None else change(dy) for dy in incoming(outputs))
        sent.extend(dy for dy in made if dy is not None)
        before.update({f"dy {number}": dy.untyped_storage().clone() for number, dy in enumerate(sent)})
        return made

    ours = run(op, inputs, differentiate=sample.spec.differentiable, gradients=gradients)
    copies = map_tensors(inputs, lambda tensor: tensor.contiguous().clone())
    kept = [dy.contiguous().clone() for dy in sent]
    plain = run(
        op,
        copies,
        differentiate=sample.spec.differentiable,
        gradients=lambda outputs: tuple(kept.pop(0) if one.requires_grad else None for one in outputs),
    )
    assert_same(ours, plain, layout)
    after = {**tensors_of(inputs), **{f"dy {number}": dy for number, dy in enumerate(sent)}}
    for name, storage in before.items():
        now = torch.tensor([], dtype=torch.uint8, device=after[name].device).set_(after[name].untyped_storage())
        was = torch.tensor([], dtype=torch.uint8, device=after[name].device).set_(storage)
        assert torch.equal(now, was), f"{name} was written to"


@pytest.mark.parametrize("sample", samples(of_cases("empty")), ids=str)
def test_zero_rows_give_empty_outputs_and_zero_gradients_of_what_rows_share(sample: Sample) -> None:
    inputs = sample.inputs()
    ours = run_sample(triton_op(sample.spec.name), sample, inputs)
    assert all(output.numel() == 0 for output in ours.outputs)
    for number, gradient in ours.gradients.items():
        assert_same_bytes(gradient, torch.zeros_like(inputs.args[number]), f"gradient of argument {number}")


@pytest.mark.parametrize("sample", samples(of_cases("tiny")), ids=str)
def test_a_card_that_does_not_say_what_it_is_gives_the_same_bytes(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(_index: int) -> DeviceIdentity:
        raise RuntimeError("no such device")

    inputs, op = sample.inputs(), triton_op(sample.spec.name)
    with autotune("off"):
        known = run_sample(op, sample, inputs)
        monkeypatch.setattr(device, "identify", silent)
        assert_same(run_sample(op, sample, inputs), known, "an unknown card")


SPECIAL = [math.nan, math.inf, -math.inf, -0.0, 1e-40, 65504.0]


@pytest.mark.parametrize("value", [*SPECIAL, -65504.0] if ON_GPU else SPECIAL)
@pytest.mark.parametrize(
    "sample", samples(lambda one: one.case.name == "odd" and (ON_GPU or one.dtype == "float32")), ids=str
)
def test_special_values_come_out_as_from_the_reference(sample: Sample, value: float) -> None:
    inputs = sample.inputs()
    for argument in range(len(inputs.args)):
        if not inputs.args[argument].is_floating_point():
            continue
        planted = inputs.args[argument].clone()
        planted.view(-1)[:: max(1, planted.numel() // 3)] = value
        args = tuple(planted if number == argument else arg for number, arg in enumerate(inputs.args))
        special = replace(inputs, args=args)
        ours = dict(run_sample(triton_op(sample.spec.name), sample, special).tensors())
        reference = dict(run_sample(sample.spec.reference, sample, special).tensors())
        for name, tensor in ours.items():
            wanted = reference[name]
            # autograd multiplies a zero slope by an infinite factor, and so may give NaN where a limit exists
            judged = ~torch.isnan(wanted) if name.startswith("gradient") else torch.ones_like(wanted).bool()
            for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(kind(tensor)[judged], kind(wanted)[judged]), f"{argument}, {name}: {kind.__name__}"
            finite = torch.isfinite(wanted)
            largest = float(wanted[finite].abs().max()) if finite.any() else 0.0
            # both sides round, the reference in PyTorch's own fp32
            allowed = 2 * sample.spec.tolerance.epsilons[sample.dtype] * torch.finfo(tensor.dtype).eps * largest
            assert ((tensor - wanted)[finite].abs() <= allowed).all(), f"argument {argument}, {name}"


@pytest.mark.parametrize("sample", samples(of_cases("odd" if ON_GPU else "tiny")), ids=str)
def test_many_runs_give_the_same_bytes(sample: Sample) -> None:
    inputs, op = sample.inputs(), triton_op(sample.spec.name)
    first = run_sample(op, sample, inputs)
    for number in range(1, 20 if ON_GPU else 3):  # the interpreter has no races
        assert_same(run_sample(op, sample, inputs), first, f"run {number}")


@pytest.mark.parametrize("sample", samples(of_cases("tiny", "odd")), ids=str)
def test_a_call_without_autograd_gives_the_same_bytes(sample: Sample) -> None:
    inputs, op = sample.inputs(), triton_op(sample.spec.name)
    plain = run(op, inputs, differentiate=False)
    assert not any(output.requires_grad for output in plain.outputs)
    with_gradients = run_sample(op, sample, inputs)
    assert_same(plain, Outcome(with_gradients.outputs, {}), "no_grad")


def test_every_dtype_of_this_device_is_covered() -> None:
    seen = {sample.dtype for sample in samples()}
    assert seen == (set(DTYPES) if torch.cuda.is_available() else {"float32", "float16"})
