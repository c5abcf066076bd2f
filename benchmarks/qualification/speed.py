"""What choices are worth: naive, fixed, the tuner's and an exhaustive search's launches of a phase, in turns."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.gemm.measure import NAIVE as NAIVE_TILES
from benchmarks.gemm.rows import NAIVE as NAIVE_TILE
from benchmarks.gemm.rows import TARGETS_US as GEMM_TARGETS_US
from benchmarks.operators import arguments
from benchmarks.operators.correctness import equal_bytes
from benchmarks.operators.launches import library_kernels
from benchmarks.operators.naive import naive_launches
from benchmarks.operators.targets import PHASES, is_throughput, phases
from benchmarks.operators.timing import Contender, launches_of, time_in_turns
from benchmarks.operators.tuners import NewTuner
from benchmarks.qualification.rows import SpeedRow
from rl_engine.backends import catalog
from rl_engine.backends.shared.triton.gemm import launch as gemm_launch
from rl_engine.backends.shared.triton.gemm import product
from rl_engine.errors import TrialUnavailableError
from rl_engine.platforms.tuning.decision import MARGIN, WINS, median_ratio, sample_rounds
from rl_engine.runtime.policy import autotune
from rl_engine.runtime.registry import get_op

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from benchmarks.operators.launches import Launch
    from benchmarks.operators.targets import Phase
    from benchmarks.operators.timing import Sampled
    from rl_engine.backends.shared.triton.launch_trial import LaunchTrial
    from rl_engine.backends.spec import Case, OpSpec
    from rl_engine.platforms.tuning.key import Candidate

_ROUGH, _FINE, _FINALISTS = 5, 9, 4  # samples of every selectable launch, and of the best few
_SETS = 4  # of arguments at the most
_Chosen = dict[tuple[str, tuple[tuple[str, Any], ...]], "Candidate"]  # by kernel and exact sizes


def cases() -> Iterator[tuple[OpSpec, Case, Phase]]:
    """Yield every timed case of every operator in the phases that have a target, decode sizes first."""
    found = []
    for spec in catalog.specs().values():
        for case in spec.cases:
            if "matrix" in case.tags:
                wanted = [phase for phase in PHASES if (case.name, phase) in GEMM_TARGETS_US]
            elif "speed" in case.tags:
                wanted = [phase for phase in phases(spec.name, case.name) if phase == "fwd" or spec.differentiable]
            else:
                continue
            found += [(spec, case, phase) for phase in wanted]
    yield from sorted(found, key=lambda one: is_throughput(one[1].name))


def measure(spec: OpSpec, case: Case, phase: Phase) -> SpeedRow:
    """Time one case in one phase; raises AssertionError where a choice changed a byte."""
    op = get_op(spec.name, "cuda", backend=f"rlkernel.triton.{spec.name}")
    overwrites = arguments.OVERWRITES in case.options
    made = arguments.make(spec, case)
    count = min(_SETS, arguments.sets_needed(case.name, max(1, _bytes_of(made))))
    sets = [made, *(arguments.make(spec, case, arguments.SEED + number) for number in range(1, count))]
    called = arguments.fed(op, lambda first: first.view_as(first)) if overwrites else op
    fixed = Contender(called, sets, around=_off, restores=overwrites)
    launches = launches_of(fixed, phase)
    notes: list[str] = []
    best, tuner = _search(launches, notes), NewTuner()
    contenders = {
        "naive": replace(fixed, around=_naive_tiles if "matrix" in case.tags else _naively),
        "fixed": fixed,
        "tuned": replace(fixed, around=tuner.on),
    }
    if best:
        contenders["best"] = replace(fixed, around=lambda: _forced(best))
    if not overwrites:
        _compare_bytes(spec, contenders)
    sampled = time_in_turns(contenders, phase)
    taken = [one for one in tuner.taken() if any(launch.has(one.key) for launch in launches)]  # not by another phase
    tuned = sorted({f"{one.key.kernel}: {one.winner}" for one in taken})
    row = _row(spec, case, phase, sampled, tuned, best)
    row.note = "; ".join(filter(None, (row.note, *notes)))
    return row


def _row(
    spec: OpSpec, case: Case, phase: Phase, sampled: Mapping[str, Sampled], tuned: list[str], best: _Chosen
) -> SpeedRow:
    fixed_us = sampled["fixed"].median_us
    if fixed_us is None:
        raise RuntimeError(f"the fixed launches could not be timed: {sampled['fixed'].reason}")
    searched = sorted({f"{kernel}: {chosen}" for (kernel, _sizes), chosen in best.items()})
    # launches that are the fixed ones are not told apart by noise
    tuned_us = sampled["tuned"].median_us if tuned else fixed_us
    best_us = fixed_us if not best else tuned_us if searched == tuned else sampled["best"].median_us
    reasons = [f"{name}: {one.reason}" for name, one in sampled.items() if one.reason]
    return SpeedRow(
        spec.name, case.name, phase, arguments.describe(case), sampled["naive"].median_us, fixed_us, tuned_us, best_us,
        verdict(sampled["tuned"], sampled["fixed"]) if tuned else "same launch", "; ".join(tuned), "; ".join(searched),
        "; ".join(reasons),
    )  # fmt: skip


def verdict(ours: Sampled, theirs: Sampled) -> str:
    """Return in words what paired samples say: a difference counts beyond 1%, and in nearly all rounds."""
    ratios = [one / other for one, other in zip(ours.samples_us, theirs.samples_us, strict=True)]
    if not ratios:
        return "not timed"
    ratio, needed = statistics.median(ratios), WINS * len(ratios)
    if ratio < 1 - MARGIN and sum(one < 1 for one in ratios) >= needed:
        return f"{1 - ratio:.1%} faster"
    if ratio > 1 + MARGIN and sum(one > 1 for one in ratios) >= needed:
        return f"{ratio - 1:.1%} slower"
    return "equal within the noise"


def _search(launches: list[Launch], notes: list[str]) -> _Chosen:
    """Return the fastest selectable candidate of every launch where it is not the fixed one."""
    found: _Chosen = {}
    for launch in launches:
        key = (launch.kernel.__name__, _key(launch.sizes))
        if key in found:
            continue
        trial = launch.trial()
        try:
            survivors = trial.qualify(launch.candidates()).survivors
            for candidate in survivors:
                trial.sample(candidate)  # lost: it pays for cold clocks and instruction caches
            rough = _ranked(survivors, trial, _ROUGH)
            fine = _ranked(tuple(dict.fromkeys((survivors[0], *list(rough)[:_FINALISTS]))), trial, _FINE)
        except TrialUnavailableError as error:
            notes.append(f"{key[0]} not searched: {error}")
            continue
        finally:
            trial.close()
        fastest = next(iter(fine))
        if fine[fastest] < 1 - MARGIN:
            found[key] = fastest
    return found


def _ranked(candidates: tuple[Candidate, ...], trial: LaunchTrial, rounds: int) -> dict[Candidate, float]:
    """Return the ratios of candidates that could be timed to the first one's time, the fastest first."""
    samples = sample_rounds(candidates, trial.sample, rounds, out_of_time=lambda: False)
    ratios = {one: median_ratio(one, candidates[0], samples) for one in samples}
    return dict(sorted(ratios.items(), key=lambda one: (one[1], one[0].options)))


def _key(sizes: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(sizes.items(), key=lambda one: one[0]))


@contextlib.contextmanager
def _off() -> Iterator[None]:
    with autotune("off"):
        yield


@contextlib.contextmanager
def _naively() -> Iterator[None]:
    with autotune("off"), naive_launches(library_kernels()):
        yield


@contextlib.contextmanager
def _naive_tiles() -> Iterator[None]:
    """Multiply by the one tile of batch-invariant GEMMs in use, whatever the sizes."""
    tile = NAIVE_TILES[NAIVE_TILE]

    def plan(*_sizes: Any, **_more: Any) -> Any:
        return tile.plan

    with (
        autotune("off"),
        mock.patch.object(product, "plan", plan),
        mock.patch.object(gemm_launch, "plan", plan),
        mock.patch.object(gemm_launch, "reads_descriptors", return_value=False),
        _declared({"_gemm_tiles_kernel": tile.options, "_gemm_groups_kernel": tile.options}),
    ):
        yield


@contextlib.contextmanager
def _declared(options: Mapping[str, Mapping[str, int]]) -> Iterator[None]:
    """Launch some kernels with given options."""
    with contextlib.ExitStack() as stack:
        for name, chosen in options.items():
            stack.enter_context(_ruled(name, lambda _sizes, _device, chosen=chosen: dict(chosen)))
        yield


@contextlib.contextmanager
def _forced(chosen: _Chosen) -> Iterator[None]:
    """Launch with what a search chose, and by the fixed rule where it chose nothing."""
    with autotune("off"), contextlib.ExitStack() as stack:
        for name in {kernel for kernel, _sizes in chosen}:
            declared = library_kernels()[name].declaration.fixed

            def rule(sizes: Any, identity: Any, name: str = name, declared: Any = declared) -> Any:
                found = chosen.get((name, _key(sizes)))
                return declared(sizes, identity) if found is None else dict(found.options)

            stack.enter_context(_ruled(name, rule))
        yield


@contextlib.contextmanager
def _ruled(name: str, rule: Any) -> Iterator[None]:
    kernel = library_kernels()[name]
    declared = kernel.declaration
    kernel.declaration = replace(declared, fixed=rule)
    try:
        yield
    finally:
        kernel.declaration = declared


def _compare_bytes(spec: OpSpec, contenders: Mapping[str, Contender]) -> None:
    """Compare outputs and gradients of the tuner's and the search's launches with those of the fixed ones."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    faults: list[str] = []
    for name in ("fixed", "tuned", "best"):
        if name in contenders:
            one = contenders[name]
            with one.around():
                found[name] = arguments.evaluate(one.call, one.sets[0]).tensors()
            equal_bytes(found[name], found["fixed"], f"the {name} launches", faults)
    assert not faults, f"{spec.name}: {'; '.join(faults)}"


def _bytes_of(inputs: Any) -> int:
    return sum(one.numel() * one.element_size() for one in arguments.tensors_of(inputs))
