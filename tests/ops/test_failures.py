"""Candidates that do not compile, load, run, repeat or end: each costs once, and none costs the call."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_engine.backends.shared.triton import distinct, qualification
from rl_engine.backends.shared.triton.launch_trial import LaunchTrial
from rl_engine.platforms.tuning.key import Candidate
from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import FileStore
from rl_engine.runtime.policy import autotune
from tests.support.faults import (
    FAILURES,
    FakeCompiler,
    Warnings,
    after_launches,
    failing,
    forget_failures,
    only_record,
    rejections,
)
from tests.support.ops_inputs import DEVICE, ON_GPU
from tests.support.ops_launches import new_process
from tests.support.ops_toys import Stopwatch, add_one, add_one_kernel, by_blocks, inc_kernel
from tests.support.processes import environment, start

N = 1000
FIXED, SMALL, MIDDLE = ("BLOCK=1024 num_warps=4", "BLOCK=256 num_warps=4", "BLOCK=512 num_warps=4")


@pytest.fixture(autouse=True)
def _no_known_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_failures(monkeypatch, add_one_kernel, inc_kernel)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "cache")


def _x(size: int = N, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(size, device=DEVICE).to(dtype)


def _check(x: torch.Tensor) -> None:
    assert torch.equal(add_one(x), x + 1)


@pytest.mark.parametrize("where", ["compile", "load"])
@pytest.mark.parametrize("failure", FAILURES)
def test_b28_a_candidate_that_fails_is_rejected_and_the_others_go_on(
    failure: str, where: str, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch, BLOCK=512)
    compiler = FakeCompiler(monkeypatch)
    setattr(compiler, f"on_{where}", failing(FAILURES[failure], BLOCK=256))
    with new_process(store) as tuner, autotune("on"):
        _check(_x())
        assert tuner.report().selections[0].winner == MIDDLE
        assert tuner.report().counts == {"rejected": 1, "tuned": 1}
    assert rejections(only_record(store)).keys() == {SMALL}
    assert rejections(only_record(store))[SMALL].startswith(f"failed: {failure}: ")
    assert Candidate.of(BLOCK=256, num_warps=4) not in only_record(store).screening


@pytest.mark.parametrize("failure", FAILURES)
def test_b28_a_candidate_that_fails_when_it_runs_is_rejected(
    failure: str, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch, BLOCK=512)
    after_launches(monkeypatch, failing(FAILURES[failure], BLOCK=256))
    with new_process(store) as tuner, autotune("on"):
        _check(_x())
        assert tuner.report().selections[0].winner == MIDDLE
    assert rejections(only_record(store))[SMALL].startswith(f"failed: {failure}: ")


def test_b28_a_candidate_that_fails_only_while_it_is_timed_does_not_win(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {256: 0}

    def fail_late(asked: Mapping[str, Any]) -> None:
        runs[asked["BLOCK"]] = runs.get(asked["BLOCK"], 0) + 1
        if runs[256] > 2 * qualification.REPEATS:  # on the live and on the perturbed inputs
            raise FAILURES["RuntimeError"]()

    runs[256] = 0 if ON_GPU else 2 * (qualification.REPEATS - 1)  # the interpreter runs each once
    after_launches(monkeypatch, lambda asked: fail_late(asked) if asked["BLOCK"] == 256 else None)
    with new_process(store), autotune("on"):
        _check(_x())
    assert only_record(store).winner != Candidate.of(BLOCK=256, num_warps=4)
    assert Candidate.of(BLOCK=256, num_warps=4) not in only_record(store).screening
    assert SMALL not in rejections(only_record(store)), "it passed the byte gate"


@pytest.mark.parametrize("failure", FAILURES)
def test_b28_where_all_candidates_fail_the_fixed_launch_stays_and_they_are_remembered(
    failure: str, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, compiler = Stopwatch(monkeypatch), FakeCompiler(monkeypatch)
    compiler.on_compile = lambda asked: None if asked["BLOCK"] == 1024 else failing(FAILURES[failure])(asked)
    with new_process(store), autotune("on"):
        _check(_x())
    assert (str(only_record(store).winner), timed.samples) == (FIXED, 0)
    assert rejections(only_record(store)).keys() == {SMALL, MIDDLE}
    assert (only_record(store).screening, only_record(store).final) == ({}, {})  # no failure became a time
    with new_process(store) as tuner, autotune("on"):
        _check(_x())
        assert tuner.report().counts == {"replayed": 1}
    assert len(compiler.asked) == 3


@pytest.mark.parametrize("where", ["compile", "load", "run"])
@pytest.mark.parametrize("failure", FAILURES)
def test_b28_a_fixed_launch_that_fails_raises_its_own_error_and_leaves_nothing(
    failure: str, where: str, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, warnings, broken = FakeCompiler(monkeypatch), Warnings(), failing(FAILURES[failure], BLOCK=1024)
    compiler.on_compile = broken if where == "compile" else compiler.on_compile
    compiler.on_load = broken if where == "load" else compiler.on_load
    after_launches(monkeypatch, broken, trials=None)
    with new_process(store) as tuner, autotune("on"):
        for _call in range(2):
            with pytest.raises(type(FAILURES[failure]())):
                add_one(_x())
        assert len(warnings.of(tuner)) == 1
        assert failure in warnings.of(tuner)[0]
        assert tuner.report().counts == {"warning": 1, "fixed": 1}
    assert store.digests() == ()


@pytest.mark.parametrize("time_us", [math.inf, -math.inf, math.nan, 0.0, -1.0])
def test_b28_a_candidate_without_a_time_never_wins(
    time_us: float, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sample(_trial: LaunchTrial, candidate: Candidate) -> float:
        return {256: time_us, 512: 3.0, 1024: 2.0}[dict(candidate.options)["BLOCK"]]

    monkeypatch.setattr(LaunchTrial, "sample", sample)
    with new_process(store), autotune("on"):
        _check(_x())
    assert str(only_record(store).winner) == FIXED
    assert Candidate.of(BLOCK=256, num_warps=4) not in only_record(store).screening


@pytest.mark.parametrize("time_us", [math.inf, math.nan])
def test_b28_where_nothing_can_be_timed_the_fixed_launch_runs_and_nothing_is_kept(
    time_us: float, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaunchTrial, "sample", lambda _trial, _candidate: time_us)
    warnings = Warnings()
    with new_process(store) as tuner, autotune("on"):
        for _call in range(3):
            _check(_x())
        assert warnings.of(tuner) == ["add_one_kernel is not tuned: the fixed launch could not be timed"]
    assert store.digests() == ()


def _once_in(period: int) -> Callable[[Mapping[str, Any]], None]:
    launches = iter(range(10**6))

    def spoil(asked: Mapping[str, Any]) -> None:
        if asked["BLOCK"] == 256 and next(launches) % period == period - 1:
            asked["y_ptr"].view(-1)[7] = 0.5

    return spoil


@pytest.mark.parametrize(("period", "reason"), [(1, "not_bit_exact"), (2, "unstable"), (4, "unstable")])
def test_b26_bytes_that_differ_always_or_from_run_to_run_are_rejected_however_fast(
    period: int, reason: str, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch, BLOCK=256)
    after_launches(monkeypatch, _once_in(period))
    monkeypatch.setattr(LaunchTrial, "qualify", _as_on_a_card(LaunchTrial.qualify))
    with new_process(store), autotune("on"):
        _check(_x())
    assert rejections(only_record(store)) == {SMALL: reason}
    assert str(only_record(store).winner) != SMALL


def _as_on_a_card(qualify: Callable[..., Any]) -> Callable[..., Any]:
    """Repeat launches as a card does; the interpreter, which is slow and repeats itself, does not."""

    def repeated(trial: LaunchTrial, candidates: tuple[Candidate, ...]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            gate = qualification.gate
            patch.setattr(
                "rl_engine.backends.shared.triton.launch_trial.gate",
                lambda launch, found, repeats: gate(launch, found, repeats=4),
            )
            return qualify(trial, candidates)

    return repeated


def test_b28_a_fixed_launch_that_does_not_repeat_its_bytes_is_not_tuned(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = iter(range(10**6))
    monkeypatch.setattr(LaunchTrial, "qualify", _as_on_a_card(LaunchTrial.qualify))
    after_launches(monkeypatch, lambda asked: asked["y_ptr"].view(-1)[:1].fill_(float(next(count))))
    warnings = Warnings()
    with new_process(store) as tuner, autotune("on"):
        _check(_x())
        text = "add_one_kernel is not tuned: the fixed launch gives different bytes from run to run"
        assert warnings.of(tuner) == [text]
    assert store.digests() == ()


def test_b80_a_failing_candidate_is_compiled_once_for_ten_sizes_and_never_where_a_record_exists(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch, BLOCK=512)
    compiler, sizes = FakeCompiler(monkeypatch), [2**power for power in range(10)]
    compiler.on_compile = failing(FAILURES["OutOfResources"], BLOCK=256)
    with new_process(store) as tuner, autotune("on"):
        for size in sizes:
            _check(_x(size))
        assert tuner.report().counts == {"rejected": 10, "tuned": 10}
    assert compiler.count(BLOCK=256) == 1
    assert compiler.count(BLOCK=512) == 10  # Triton itself remembers what it compiled
    for digest in store.digests():
        record = TuningRecord.from_json(store.load(digest) or "")
        assert rejections(record)[SMALL].startswith("failed: OutOfResources: out of resource: shared memory")
    compiler.asked.clear()
    forget_failures(monkeypatch, add_one_kernel)
    with new_process(store) as tuner, autotune("on"):
        for size in sizes:
            _check(_x(size))
        assert tuner.report().counts == {"replayed": 10}
    assert compiler.asked == []


def test_b80_another_signature_tries_a_candidate_that_failed_again(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch)
    compiler = FakeCompiler(monkeypatch)
    compiler.on_compile = failing(FAILURES["OutOfResources"], BLOCK=256)
    with new_process(store), autotune("on"):
        _check(_x())
        _check(_x(dtype=torch.float16))
    assert compiler.count(BLOCK=256) == 2


def test_a_compile_that_hangs_is_given_up_and_tried_for_no_other_signature(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch, BLOCK=512)
    monkeypatch.setattr(distinct, "COMPILE_PATIENCE_S", 0.2)
    compiler, release = FakeCompiler(monkeypatch), threading.Event()
    compiler.on_compile = lambda asked: release.wait() and None if asked["BLOCK"] == 256 else None
    try:
        with new_process(store) as tuner, autotune("on"):
            began_s = time.monotonic()
            _check(_x())
            first_s = time.monotonic() - began_s
            _check(_x(4 * N))
            _check(_x(dtype=torch.float16))
            assert tuner.report().counts == {"rejected": 3, "tuned": 3}
            assert {one.winner for one in tuner.report().selections} == {MIDDLE}
        assert compiler.count(BLOCK=256) == 1
        assert compiler.count(BLOCK=512) == 3
        assert 0.2 <= first_s < 5
        for digest in store.digests():
            record = TuningRecord.from_json(store.load(digest) or "")
            assert rejections(record) == {SMALL: "failed: AbandonedError: did not end in 0.2 s"}
        assert all(thread.daemon for thread in compiler.threads)
    finally:
        release.set()


EXIT_WHILE_A_COMPILE_HANGS = """
import sys, threading, time
import pytest, torch
from rl_engine.backends.shared.triton import distinct
from rl_engine.backends.shared.triton.launch_trial import LaunchTrial
from tests.support.faults import FakeCompiler
from tests.support.ops_toys import add_one
distinct.COMPILE_PATIENCE_S = 0.2
compiler = FakeCompiler(pytest.MonkeyPatch())
compiler.on_compile = lambda asked: time.sleep(600) if asked["BLOCK"] == 256 else None
x = torch.zeros(1000, device="cuda" if torch.cuda.is_available() else "cpu")
found = add_one(x).unique().tolist()
print(found, [thread.name for thread in threading.enumerate() if thread.name.startswith("rl_kernel")], flush=True)
"""


def test_a_process_ends_promptly_although_a_compile_hangs(tmp_path: Path) -> None:
    env = environment(RL_KERNEL_AUTOTUNE="1", RL_KERNEL_AUTOTUNE_CACHE_DIR=str(tmp_path / "cache"))
    process = start(EXIT_WHILE_A_COMPILE_HANGS, env=env)
    assert process.stdout is not None, "a pipe"
    try:
        line = process.stdout.readline()
        done_s = time.monotonic()
        rest, errors = process.communicate(timeout=60)
        took_s = time.monotonic() - done_s
    finally:
        process.kill()
    assert line == "[1.0] ['rl_kernel compile']\n", errors
    assert (process.returncode, rest) == (0, "")
    assert took_s < 10  # Python's own end, torch's included; the compile would take ten minutes


@pytest.mark.parametrize("broken", ["qualify", "sample", "close", "__init__"])
def test_a_fault_of_the_tuner_costs_one_warning_and_training_goes_on(
    broken: str, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_args: Any, **_kwargs: Any) -> None:
        faults.append(broken)
        raise AttributeError(f"'NoneType' object has no attribute 'shape' ({broken})")

    faults: list[str] = []
    monkeypatch.setattr(LaunchTrial, broken, fault)
    warnings = Warnings()
    with new_process(store) as tuner, autotune("on"):
        for _step in range(3):
            _check(_x())
            x = _x()
            inc_kernel[by_blocks](x, N)
            assert torch.equal(x, _x() + 1)
        assert [text.split(" (")[0] for text in warnings.of(tuner)] == [
            f"{name} runs fixed: the tuner failed, please report it" for name in ("add_one_kernel", "inc_kernel")
        ]
    assert len(faults) == 2  # once a key
    assert store.digests() == ()


def test_a_fault_inside_a_compile_thread_is_one_of_the_tuner_not_of_a_candidate(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCompiler(monkeypatch).on_compile = failing(lambda: AttributeError("no such thing"), BLOCK=256)
    warnings = Warnings()
    with new_process(store) as tuner, autotune("on"):
        _check(_x())
        _check(_x())
        (text,) = warnings.of(tuner)
    assert text.endswith("please report it (AttributeError: no such thing)")
    assert store.digests() == ()
