"""Streams around a measurement (cases B18, B78): after the caller's, the caller's after it, nobody else's."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from benchmarks.operators.launches import Launch, recorded
from rl_engine.backends.shared.triton.autotuning import KernelLauncher
from rl_engine.backends.shared.triton.launch_trial import LaunchTrial
from rl_engine.backends.shared.triton.plan import Plans
from rl_engine.platforms.tuning.key import Candidate
from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import MemoryStore
from rl_engine.platforms.tuning.timer import GraphTimer
from rl_engine.runtime.policy import autotune
from tests.support.faults import only_record
from tests.support.ops_inputs import Maker, triton_op
from tests.support.ops_launches import new_process
from tests.support.ops_toys import Stopwatch, add_one

pytestmark = pytest.mark.gpu

N = 1 << 20
SILU_OF_3 = 2.857722  # the case's value
SLEEP_CYCLES = 20_000_000  # about 10 ms
LONG_SLEEP_CYCLES = 1_000_000_000  # about half a second
EXPECTED_REJECTIONS = ("same launch as", "failed: OutOfResources")


def _late_threes(x: torch.Tensor) -> None:
    """Fill x with 3, after a while, on the current stream; until then it holds 100."""
    torch.cuda._sleep(SLEEP_CYCLES)
    x.fill_(3.0)


def _silu_on(stream: torch.cuda.Stream, x: torch.Tensor) -> torch.Tensor:
    silu = triton_op("silu")
    x.fill_(100.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), autotune("on"):
        _late_threes(x)
        out = silu(x).clone()
    stream.synchronize()
    return out


def _unexpected(record: TuningRecord) -> list[str]:
    return [one.reason for one in record.rejections if not one.reason.startswith(EXPECTED_REJECTIONS)]


@pytest.mark.parametrize(("repeats", "clock"), [(50, "fake"), (3, "real")])
def test_b18_a_first_launch_reads_what_its_stream_wrote(
    repeats: int, clock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if clock == "fake":
        Stopwatch(monkeypatch)
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream()]
    x = torch.empty(N, device="cuda")
    for number in range(repeats):
        store = MemoryStore()
        with new_process(store) as tuner:
            out = _silu_on(streams[number % len(streams)], x)
            assert tuner.report().counts["tuned"] == 1
        low, high = (value.item() for value in out.aminmax())
        assert low == high == pytest.approx(SILU_OF_3, abs=1e-6), f"repeat {number}"
        assert _unexpected(only_record(store)) == []


def test_b18_streams_of_four_threads_each_get_their_own_values(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch)
    inputs = [torch.zeros(N + 16 * number, device="cuda") for number in range(4)]
    torch.cuda.synchronize()
    with new_process(MemoryStore()):

        def act(number: int) -> list[float]:
            found = []
            with torch.cuda.stream(torch.cuda.Stream()), autotune("on"):
                for call in range(10):
                    torch.cuda._sleep(SLEEP_CYCLES // 10)
                    inputs[number].fill_(float(10 * number + call))
                    found.append(add_one(inputs[number]).clone())
                torch.cuda.current_stream().synchronize()
            return [value for one in found for value in one.unique().tolist()]

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(act, range(4))) == [
                [float(10 * number + call + 1) for call in range(10)] for number in range(4)
            ]


def test_trials_run_on_a_stream_of_their_own_and_the_launch_on_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch)
    seen: dict[bool, set[int]] = {True: set(), False: set()}
    run = KernelLauncher._run

    def noted(self: KernelLauncher, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        seen[bool(args)].add(torch.cuda.current_stream().cuda_stream)  # a trial names every argument
        run(self, grid, args, kwargs)

    monkeypatch.setattr(KernelLauncher, "_run", noted)
    mine, x = torch.cuda.Stream(), torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    with new_process(MemoryStore()), autotune("on"), torch.cuda.stream(mine):
        for _call in range(2):
            add_one(x)
        assert torch.cuda.current_stream() == mine
    torch.cuda.synchronize()
    assert seen[True] == {mine.cuda_stream}
    assert seen[False]
    assert mine.cuda_stream not in seen[False]


@pytest.mark.parametrize("error", [KeyboardInterrupt, AttributeError])
def test_after_an_exception_the_callers_stream_waits_for_what_the_trial_still_runs(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(trial: LaunchTrial, _candidate: Candidate) -> float:
        with torch.cuda.stream(trial._side):
            torch.cuda._sleep(LONG_SLEEP_CYCLES)
            slept.record()
        raise error

    slept, done, x = torch.cuda.Event(), torch.cuda.Event(), torch.zeros(N, device="cuda")
    with autotune("off"):
        add_one(x)  # loaded: a module that is loaded may wait for the whole card
    torch.cuda.synchronize()
    monkeypatch.setattr(LaunchTrial, "sample", interrupted)
    monkeypatch.setattr(Plans, "make", lambda *_launch: None)  # proving a plan compares bytes, and so waits
    with new_process(MemoryStore()), autotune("on"):
        with pytest.raises(error) if error is KeyboardInterrupt else contextlib.nullcontext():
            add_one(x)
        done.record()
        assert not slept.query(), "the trial's stream was waited for, or did not sleep long enough to tell"
        assert not done.query(), "the caller's stream did not wait"
        done.synchronize()
        assert slept.query()


def test_a_hot_launch_waits_for_no_other_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch)
    other, x, awake = torch.cuda.Stream(), torch.zeros(N, device="cuda"), torch.cuda.Event()
    with new_process(MemoryStore()), autotune("on"):
        add_one(x)
        add_one(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            torch.cuda._sleep(LONG_SLEEP_CYCLES)
            awake.record()
        for _call in range(20):
            y = add_one(x)
        torch.cuda.current_stream().synchronize()
        assert not awake.query(), "a hot launch waited for the whole card"
    torch.cuda.synchronize()
    assert y.unique().tolist() == [1.0]


def _microseconds(launch: Callable[[int], None], rotation: int) -> float:
    """Return the median time of a launch in 30 replays of a graph, with ``rotation`` argument sets in turn."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(rotation):
            launch(number)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _replay in range(33):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / rotation)
    return statistics.median(times[3:])


def _independent(launch: Launch, candidates: list[Candidate], rotation: int) -> dict[Candidate, float]:
    sets = [
        [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in launch.args] for _number in range(rotation)
    ]
    return {
        one: _microseconds(
            lambda number, one=one: launch.kernel[launch.grid](*sets[number], **launch.kwargs, **dict(one.options)),
            rotation,
        )
        for one in candidates
    }


def test_b78_the_chosen_launch_is_within_3_percent_of_the_best_of_a_long_measurement() -> None:
    make, store = Maker(torch.float32), MemoryStore()
    x, weight = make.normal(4096, 4096), make.normal(4096)  # 64 MiB in, 64 out: more than the L2
    with new_process(store), autotune("on"), recorded() as launches:
        triton_op("rms_norm")(x, weight)
    record = only_record(store)
    assert record.evidence.cache == "cold"
    truth = _independent(launches[0], list(record.screening), rotation=4)
    best = min(truth.values())
    assert truth[record.winner] <= 1.03 * best, f"{record.winner}: {truth[record.winner]:.1f}, best {best:.1f} us"
    ranked = {one: statistics.median(times) for one, times in record.screening.items()}
    clear = [(fast, slow) for fast, slow in itertools.permutations(truth, 2) if truth[slow] > 1.15 * truth[fast]]
    wrong = [(str(fast), str(slow)) for fast, slow in clear if ranked[fast] >= ranked[slow]]
    assert wrong == [], "pairs that differ by 15% were ranked the other way round"


def test_b78_a_slow_host_is_not_taken_for_a_slow_launch() -> None:
    x = torch.zeros(64, device="cuda")

    def launch(_number: int) -> None:
        x.add_(1)

    def hesitate(number: int) -> None:
        if not torch.cuda.is_current_stream_capturing():
            time.sleep(0.005)  # so one launch seems to take a whole graph's time
        launch(number)

    with torch.cuda.stream(torch.cuda.Stream()):
        launch(0)
        samples = {call: GraphTimer().prepare(call, 1) for call in (launch, hesitate)}
        times = {call: statistics.median(sample() for _round in range(15)) for call, sample in samples.items()}
    assert times[hesitate] <= 1.5 * times[launch], f"{times[hesitate]:.2f} us, not {times[launch]:.2f}"
