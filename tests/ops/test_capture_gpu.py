"""First launches inside a CUDA graph's capture (cases B02, B64): the capture holds, and nothing else happens."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_engine.backends import catalog
from rl_engine.backends.shared.triton.autotuning import KernelLauncher
from rl_engine.backends.shared.triton.launch_trial import LaunchTrial
from rl_engine.platforms import autotuner
from rl_engine.platforms.tuning.store import MemoryStore
from rl_engine.runtime.policy import autotune
from tests.support.ops_inputs import Outcome, Sample, assert_same, assert_same_bytes, flat, samples, triton_op
from tests.support.ops_launches import forget, new_process
from tests.support.ops_toys import Stopwatch, add_one, add_one_kernel

pytestmark = pytest.mark.gpu

N = 5000
SPECS = [one.name for one in catalog.specs().values()]


class WatchedStore(MemoryStore):
    """Counts every call."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        super().__init__()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if callable(found) and not name.startswith("_"):
            super().__getattribute__("calls").append(name)
        return found


def _sample(name: str) -> Sample:
    return samples(lambda one: one.spec.name == name and one.case.name == "odd" and one.dtype == one.spec.dtypes[-1])[0]


def _captured(act: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = act()
    return graph, result


class Watch:
    """What a capture must not do: make a trial, or call the store. And which options it launched with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trials = 0
        self.blocks: list[int] = []
        make, run = LaunchTrial.__init__, KernelLauncher._run

        def init(trial: LaunchTrial, *args: Any, **kwargs: Any) -> None:
            self.trials += 1
            make(trial, *args, **kwargs)

        def noted(kernel: KernelLauncher, grid: Any, args: Any, kwargs: Any) -> None:
            self.blocks += [kwargs["BLOCK"]] if args and "BLOCK" in kwargs else []
            run(kernel, grid, args, kwargs)

        monkeypatch.setattr(LaunchTrial, "__init__", init)
        monkeypatch.setattr(KernelLauncher, "_run", noted)


def _replays_right(graph: torch.cuda.CUDAGraph, x: torch.Tensor, y: torch.Tensor) -> None:
    for number in range(3):
        x.copy_(torch.arange(N, device="cuda") * (number + 0.5))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bytes(y, x + 1, f"replay {number}")


def _loaded(x: torch.Tensor) -> None:
    with autotune("off"):
        add_one(x)  # a capture can launch only what was loaded before
    torch.cuda.synchronize()


def test_b02_an_unknown_key_is_captured_fixed_missed_and_tuned_by_the_eager_call_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed, store, watch = Stopwatch(monkeypatch, BLOCK=256), WatchedStore(), Watch(monkeypatch)
    x = torch.zeros(N, device="cuda")
    _loaded(x)
    with new_process(store) as tuner, autotune("on"):
        graph, y = _captured(lambda: add_one(x))
        assert (timed.samples, watch.trials, store.calls, watch.blocks[-1]) == (0, 0, [], 1024)
        assert tuner.report().counts == {"missed": 1}
        assert [key.kernel for key in autotuner.missed()] == ["add_one_kernel"]
        _replays_right(graph, x, y)
        assert torch.equal(add_one(x), x + 1)
        assert (tuner.report().counts["tuned"], watch.blocks[-1]) == (1, 256)
        assert autotuner.missed() == ()
        _replays_right(graph, x, y)


def test_b02_a_key_known_on_disk_alone_is_captured_fixed_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch, BLOCK=256)
    store, x = WatchedStore(), torch.zeros(N, device="cuda")
    _loaded(x)
    with new_process(store), autotune("on"):
        add_one(x)
    torch.cuda.synchronize()
    watch = Watch(monkeypatch)
    for mode in ("on", "replay"):
        with new_process(store) as tuner, autotune(mode):
            store.calls.clear()
            graph, y = _captured(lambda: add_one(x))
            assert (watch.trials, store.calls, watch.blocks[-1]) == (0, [], 1024)
            assert len(autotuner.missed()) == 1
            _replays_right(graph, x, y)
            add_one(x)
            assert (tuner.report().counts["replayed"], watch.blocks[-1]) == (1, 256)
        watch.trials = 0


def test_b02_a_settled_key_is_captured_with_its_winner_and_outlives_the_tuner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Stopwatch(monkeypatch, BLOCK=256)
    store, x = WatchedStore(), torch.zeros(N, device="cuda")
    with new_process(store) as tuner, autotune("on"):
        add_one(x)
        torch.cuda.synchronize()
        store.calls.clear()
        watch = Watch(monkeypatch)
        graph, y = _captured(lambda: add_one(x))
        assert (watch.trials, store.calls, watch.blocks) == (0, [], [])  # its plan launched it
        assert [one.plan.tuned for one in add_one_kernel._settled.values()] == [(256,)]
        assert tuner.report().missed == ()
    forget()
    gc.collect()
    _replays_right(graph, x, y)


@pytest.mark.parametrize("name", SPECS)
def test_b64_fixed_tuned_and_captured_launches_have_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch, num_warps=8)
    sample, op = _sample(name), triton_op(name)
    inputs = sample.inputs()

    def act() -> tuple[torch.Tensor, ...]:
        return flat(op(*inputs.args, **inputs.kwargs))

    with autotune("off"):
        fixed = Outcome(act(), {})
    torch.cuda.synchronize()

    def replayed() -> Outcome:
        graph, outputs = _captured(act)
        for output in outputs:
            output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        return Outcome(tuple(output.clone() for output in outputs), {})

    with new_process(MemoryStore()) as tuner, autotune("on"):
        assert_same(replayed(), fixed, "captured cold")
        assert tuner.report().counts.keys() == {"missed"}
        assert_same(Outcome(act(), {}), fixed, "tuned")
        torch.cuda.synchronize()
        assert_same(replayed(), fixed, "captured warm")
        assert tuner.report().missed == ()


@pytest.mark.parametrize("name", [name for name in SPECS if catalog.specs()[name].rowwise])
def test_b64_five_rows_of_a_batch_captured_at_eight_have_their_eager_bytes(name: str) -> None:
    sample, op = _sample(name), triton_op(name)
    inputs = sample.inputs(rows=8)
    by_row = [isinstance(arg, torch.Tensor) and arg.shape[0] == 8 for arg in inputs.args]
    args = [arg[:5].clone() if mine else arg for arg, mine in zip(inputs.args, by_row, strict=True)]
    with autotune("off"):
        eager = flat(op(*args, **inputs.kwargs))
        op(*inputs.args, **inputs.kwargs)
        torch.cuda.synchronize()
        graph, outputs = _captured(lambda: flat(op(*inputs.args, **inputs.kwargs)))
    graph.replay()
    torch.cuda.synchronize()
    for padded, own in zip(outputs, eager, strict=True):
        assert_same_bytes(padded[:5], own, name)


def test_a_capture_in_another_thread_and_a_measurement_here_both_succeed() -> None:
    x, other = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")
    _loaded(x)
    capturing, measured, captured = threading.Event(), threading.Event(), []

    def capture() -> None:
        graph = torch.cuda.CUDAGraph()
        with autotune("off"), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            first = add_one(other)
            capturing.set()
            measured.wait(timeout=60)
            twice = add_one(first)
        captured.append((graph, twice))

    thread = threading.Thread(target=capture)
    thread.start()
    assert capturing.wait(timeout=60)
    try:
        with new_process(MemoryStore()) as tuner, autotune("on"):
            y = add_one(x)  # with its real clock: graphs of its own, on this thread
            counts = tuner.report().counts
    finally:
        measured.set()
        thread.join(timeout=60)
    assert counts["tuned"] == 1, counts
    assert "warning" not in counts
    assert y.unique().tolist() == [1.0]
    ((graph, twice),) = captured
    other.fill_(5.0)
    graph.replay()
    torch.cuda.synchronize()
    assert twice.unique().tolist() == [7.0]


def test_garbage_collected_during_a_capture_breaks_neither_it_nor_its_replay() -> None:
    x = torch.zeros(N, device="cuda")
    with new_process(MemoryStore()) as tuner, autotune("on"):
        add_one(x)  # compiles candidates that lose
        assert tuner.report().counts["tuned"] == 1
        torch.cuda.synchronize()

        def act() -> torch.Tensor:
            first = add_one(x)
            gc.collect()
            return add_one(first)

        graph, y = _captured(act)
    forget()
    gc.collect()
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert y.unique().tolist() == [value + 2]
