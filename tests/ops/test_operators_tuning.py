"""Tuning never changes a byte: off, measured, remembered, replayed, or told lies by the clock."""

from __future__ import annotations

import inspect
import random
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.operators.launches import library_kernels
from rl_engine.backends import catalog
from rl_engine.backends.shared.triton import launch_trial
from rl_engine.backends.shared.triton.launch_trial import LaunchTrial
from rl_engine.backends.shared.triton.qualification import GateResult
from rl_engine.backends.spec import OpSpec
from rl_engine.platforms.tuning.key import Candidate
from rl_engine.platforms.tuning.store import FileStore, MemoryStore
from rl_engine.runtime.policy import autotune
from tests.support.ops_inputs import ON_GPU, Sample, assert_same, of_cases, run_sample, samples, triton_op
from tests.support.ops_launches import new_process

ADVERSARY_SEEDS = 10 if ON_GPU else 6  # of each operator: 50 and more in all
MEASURED = ("tiny", "odd") if ON_GPU else ("tiny",)  # cases that a real clock measures: odd ones take minutes there
DTYPE = "bfloat16" if ON_GPU else "float32"  # or the only one of an operator: measuring takes seconds a launch
SPECS = list(catalog.specs().values())


@pytest.mark.parametrize(
    "sample",
    samples(lambda one: one.case.name in MEASURED and one.dtype in (DTYPE, one.spec.dtypes[-1])),
    ids=str,
)
def test_off_measured_remembered_and_replayed_launches_give_the_same_bytes(sample: Sample, tmp_path: Path) -> None:
    op, inputs, store = triton_op(sample.spec.name), sample.inputs(), FileStore(tmp_path / "cache")
    with autotune("off"):
        fixed = run_sample(op, sample, inputs)
    with new_process(store) as tuner, autotune("on"):
        assert_same(run_sample(op, sample, inputs), fixed, "measured")
        counts = tuner.report().counts
        assert counts["tuned"] == len(tuner.report().selections) > 0
        assert_same(run_sample(op, sample, inputs), fixed, "remembered")
        assert tuner.report().counts == counts
    assert len(store.digests()) == counts["tuned"]
    for mode in ("on", "replay"):
        with new_process(store) as tuner, autotune(mode):
            assert_same(run_sample(op, sample, inputs), fixed, f"replayed under {mode}")
            assert tuner.report().counts == {"replayed": len(store.digests())}
            assert {one.source for one in tuner.report().selections} == {"disk"}


# a card admits one launch alone of the tiny matrix product
ADVERSARY = samples(lambda one: one.case.name == ("odd" if ON_GPU else "tiny") and one.dtype == "float32")


@pytest.mark.parametrize("sample", ADVERSARY, ids=str)
def test_a_clock_that_lies_changes_no_byte(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let chance choose among all candidates: without the byte gate, which would hide one that differs."""
    op, inputs = triton_op(sample.spec.name), sample.inputs()
    with autotune("off"):
        fixed = run_sample(op, sample, inputs)
    monkeypatch.setattr(launch_trial, "gate", lambda _launch, ones, **_repeats: GateResult(ones, (), 0, ()))
    winners = defaultdict(set)
    for seed in range(ADVERSARY_SEEDS):

        def lie(_trial: LaunchTrial, candidate: Candidate, seed: int = seed) -> float:
            return random.Random(f"{sample} {seed} {candidate}").uniform(1.0, 10.0)

        monkeypatch.setattr(LaunchTrial, "sample", lie)
        store = MemoryStore()
        for _process in ("measures", "replays"):
            with new_process(store) as tuner, autotune("on"):
                assert_same(run_sample(op, sample, inputs), fixed, f"seed {seed}")
                for selection in tuner.report().selections:
                    winners[selection.kernel].add(selection.winner)
    assert max(map(len, winners.values())) > 1, "the lies never moved a choice, so nothing was tested"


def test_clocks_lie_to_every_operator_and_often() -> None:
    assert {sample.spec.name for sample in ADVERSARY} == {spec.name for spec in SPECS}
    assert len(ADVERSARY) * ADVERSARY_SEEDS >= 50


@pytest.mark.parametrize("name", sorted(library_kernels()))
def test_kernels_are_private_and_named_as_such(name: str) -> None:
    assert name.startswith("_")
    assert name.endswith("_kernel")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_operator_has_a_triton_implementation_a_tiny_case_and_a_whole_docstring(spec: OpSpec) -> None:
    implementations = [one for one in catalog.implementations().values() if one.op == spec.name]
    ids = {one.backend_id for one in implementations}
    assert ids >= {f"rlkernel.pytorch.{spec.name}", f"rlkernel.triton.{spec.name}"}
    tiny = [case for case in spec.cases if case.name == "tiny"]
    assert len(tiny) == 1
    assert spec.tolerance.reason
    assert set(spec.tolerance.epsilons) == set(spec.dtypes)
    for implementation in implementations:
        text = inspect.getdoc(implementation.call) or ""
        missing = [section for section in ("Args:", "Returns:", "Raises:") if f"\n{section}\n" not in text]
        assert not missing, f"{implementation.backend_id}: docstring without {', '.join(missing)}"
        names = inspect.signature(implementation.call).parameters
        unexplained = [name for name in names if f"    {name}:" not in text]
        assert not unexplained, f"{implementation.backend_id}: docstring without {', '.join(unexplained)}"


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_implementations_take_the_same_arguments_as_the_reference(spec: OpSpec) -> None:
    wanted = [(one.name, one.kind, one.default) for one in inspect.signature(spec.reference).parameters.values()]
    for implementation in catalog.implementations().values():
        if implementation.op == spec.name:
            signature = inspect.signature(implementation.call)
            assert [(one.name, one.kind, one.default) for one in signature.parameters.values()] == wanted


def test_tiny_cases_are_small_enough_for_the_interpreter() -> None:
    assert all(tensor.numel() <= 256 for sample in samples(of_cases("tiny")) for tensor in sample.inputs().args)
