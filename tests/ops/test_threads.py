"""Threads and forks around first launches: right results, one measurement a key, a device for every compile thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_engine.backends.shared.triton import compiler, distinct
from rl_engine.backends.shared.triton.bits import BitClass
from rl_engine.backends.shared.triton.distinct import Failures, LaunchSite, one_kernel
from rl_engine.platforms.tuning.key import Candidate
from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import MemoryStore
from rl_engine.runtime.policy import autotune
from tests.support.faults import FakeCompiler, forget_failures
from tests.support.ops_inputs import DEVICE, ON_GPU, assert_same, run_sample, samples, triton_op
from tests.support.ops_launches import new_process
from tests.support.ops_toys import Stopwatch, add_one, add_one_kernel, by_blocks, inc_kernel
from tests.support.processes import environment, run

THREADS = 16
N = 1000


def _together(act: Callable[[int], Any]) -> list[Any]:
    """Run ``act`` in 16 threads that start at once; return what each gave, or raise what one raised."""
    barrier = threading.Barrier(THREADS)

    def started(number: int) -> Any:
        barrier.wait(timeout=60)
        return act(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(started, range(THREADS)))


@pytest.mark.parametrize("mode", ["off", "on"])
def test_sixteen_threads_in_other_orders_get_the_serial_bytes_and_measure_each_key_once(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch)
    chosen = samples(
        lambda one: one.case.name == "tiny" and one.dtype == "float32" and one.spec.name in ("silu", "swiglu", "logp")
    )
    prepared = [(sample, triton_op(sample.spec.name), sample.inputs()) for sample in chosen]
    with autotune("off"):
        serial = [run_sample(op, sample, inputs) for sample, op, inputs in prepared]
    store = MemoryStore()
    with new_process(store) as tuner:

        def act(number: int) -> None:
            with autotune(mode):
                for step in range(len(prepared)):
                    index = (number + step) % len(prepared)
                    sample, op, inputs = prepared[index]
                    assert_same(run_sample(op, sample, inputs), serial[index], f"thread {number}, {sample}")

        _together(act)
        keys = {
            record.key.digest for one in store.digests() if (record := TuningRecord.from_json(store.load(one) or ""))
        }
        assert tuner.report().counts.get("tuned", 0) == len(keys) == (6 if mode == "on" else 0)


def test_sixteen_threads_with_a_signature_each_get_sixteen_records(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch, BLOCK=512)
    store, inputs = MemoryStore(), [torch.full((2**number,), float(number), device=DEVICE) for number in range(THREADS)]
    with new_process(store) as tuner:

        def act(number: int) -> list[float]:
            with autotune("on"):
                return [value for _call in range(3) for value in add_one(inputs[number]).unique().tolist()]

        assert _together(act) == [[number + 1.0] * 3 for number in range(THREADS)]
        assert tuner.report().counts["tuned"] == len(store.digests()) == THREADS


def test_a_block_of_one_thread_decides_nothing_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch)
    inputs = [torch.zeros(2**number, device=DEVICE) for number in range(THREADS)]
    with new_process(MemoryStore()) as tuner:

        def act(number: int) -> None:
            with autotune("on" if number % 2 else "off"):
                assert add_one(inputs[number]).unique().tolist() == [1.0]

        _together(act)
        assert tuner.report().counts["tuned"] == THREADS // 2


def test_tensors_written_in_place_by_many_threads_are_written_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch, BLOCK=256)
    inputs = [torch.zeros(N, device=DEVICE) for _ in range(THREADS)]
    with new_process(MemoryStore()) as tuner:

        def act(number: int) -> None:
            with autotune("on"):
                for _call in range(5):
                    inc_kernel[by_blocks](inputs[number], N)

        _together(act)
        assert tuner.report().counts["tuned"] == 1
    assert {(one.unique().item(), one._version) for one in inputs} == {(5.0, 5)}


def test_every_compile_thread_sets_the_device_of_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[tuple[int, threading.Thread]] = []
    inside = threading.local()

    class Device:
        def __init__(self, index: int) -> None:
            self._index = index

        def __enter__(self) -> None:
            inside.index = self._index
            entered.append((self._index, threading.current_thread()))

        def __exit__(self, *_error: object) -> None:
            inside.index = None

    class Jitted:
        def warmup(self, **arguments: Any) -> dict[str, Any]:
            assert inside.index == 3
            assert arguments["enable_fp_fusion"] is True
            return {"BLOCK": arguments["BLOCK"]}

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(compiler, "load", lambda _compiled: loads.append(threading.current_thread()))
    monkeypatch.setattr(compiler, "launch_identity", lambda compiled, _grid: str(compiled))
    monkeypatch.setattr(distinct, "bit_class", lambda _compiled: BitClass((), ()))
    loads: list[threading.Thread] = []
    candidates = tuple(Candidate.of(BLOCK=block) for block in (1024, 512, 256))
    site = LaunchSite(one_kernel(Jitted(), (1,), {"n": 5}), 3, "", Failures())
    assert site.distinct(candidates).kept == candidates
    assert [index for index, _thread in entered] == [3, 3, 3]
    assert threading.current_thread() not in {thread for _index, thread in entered}
    assert set(loads) == {threading.current_thread()}  # what does not fit the card shows at loading, in this thread


def test_compile_threads_end_with_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch)
    forget_failures(monkeypatch, add_one_kernel)
    compilers = FakeCompiler(monkeypatch)
    with new_process(MemoryStore()), autotune("on"):
        add_one(torch.zeros(N, device=DEVICE))
    assert compilers.threads
    for thread in compilers.threads:
        thread.join(timeout=10)
        assert not thread.is_alive()


FORK_WHILE_A_THREAD_LAUNCHES = """
import os, signal, sys, threading
import torch
from rl_engine.backends.shared.triton import autotuning
from rl_engine.platforms import autotuner
from tests.support.ops_toys import add_one
print(add_one(torch.zeros(1000)).unique().tolist(), autotuner.report().counts, flush=True)
held, done = threading.Event(), threading.Event()
def hold():
    tuner = autotuner.process_autotuner()
    with autotuning._interpreter_lock, autotuner._process_lock, tuner._lock, tuner._log._lock:
        held.set()
        done.wait(60)
thread = threading.Thread(target=hold)
thread.start()
held.wait()
pid = os.fork()
if not pid:
    signal.alarm(30)  # a lock of the parent's would be held for ever
    for size in (1000, 5000):
        print(add_one(torch.zeros(size)).unique().tolist(), autotuner.report().counts, flush=True)
    os._exit(0)
print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
done.set()
thread.join()
"""


@pytest.mark.skipif(ON_GPU, reason="a child of a process that uses CUDA tunes nothing: below")
def test_a_child_forked_from_a_cpu_process_tunes_although_every_lock_was_held(tmp_path: Path) -> None:
    env = environment(RL_KERNEL_AUTOTUNE="1", RL_KERNEL_AUTOTUNE_CACHE_DIR=str(tmp_path / "cache"))
    assert run(FORK_WHILE_A_THREAD_LAUNCHES, env=env).splitlines() == [
        "[1.0] {'tuned': 1}",
        "[1.0] {'replayed': 1}",
        "[1.0] {'replayed': 1, 'tuned': 1}",
        "child 0",
    ]


CHILD_OF_A_PROCESS_THAT_SAYS_IT_USES_CUDA = """
import os
import torch
from rl_engine.platforms import autotuner
from tests.support.ops_toys import add_one
parent = os.getpid()
torch.cuda.is_initialized = lambda: os.getpid() == parent  # as torch answers: no, in a forked child
for generation in ("child", "grandchild"):
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        break
    print(generation, add_one(torch.zeros(1000)).unique().tolist(), autotuner.report().counts, flush=True)
if os.getpid() == parent:
    print("parent", add_one(torch.zeros(1000)).unique().tolist(), autotuner.report().counts, flush=True)
"""


@pytest.mark.skipif(ON_GPU, reason="with a card: below")
def test_no_descendant_of_a_process_that_used_cuda_tunes(tmp_path: Path) -> None:
    env = environment(RL_KERNEL_AUTOTUNE="1", RL_KERNEL_AUTOTUNE_CACHE_DIR=str(tmp_path / "cache"))
    assert run(CHILD_OF_A_PROCESS_THAT_SAYS_IT_USES_CUDA, env=env).splitlines() == [
        "child [1.0] {'missed': 1}",
        "grandchild [1.0] {'missed': 1}",
        "parent [1.0] {'tuned': 1}",
    ]


CHILD_OF_A_CUDA_PROCESS = """
import os, sys
import torch
from rl_engine.backends.shared.triton import autotuning
from rl_engine.backends.shared.triton.launch_trial import LaunchTrial
from rl_engine.platforms import autotuner
from tests.support.ops_toys import add_one_kernel, by_blocks
x, y = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
add_one_kernel[by_blocks](x, y, 1000)
torch.cuda.synchronize()
print(y.unique().tolist(), autotuner.report().counts, flush=True)
pid = os.fork()
if not pid:
    try:
        # its CUDA context is the parent's: nothing can run here, only be chosen
        chosen = []
        autotuning.KernelLauncher._run = lambda self, grid, args, kwargs: chosen.append(dict(kwargs))
        LaunchTrial.__init__ = lambda *args, **kwargs: chosen.append("a trial")
        for size in (1000, 500):
            add_one_kernel[by_blocks](x, y, size)
        print(chosen, len(autotuner.missed()), autotuner.report().counts, flush=True)
    except BaseException as error:
        print(repr(error), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
add_one_kernel[by_blocks](x, y, 500)
print(y.unique().tolist(), autotuner.report().counts, flush=True)
"""


@pytest.mark.gpu
def test_a_child_forked_from_a_process_that_used_cuda_tunes_nothing(tmp_path: Path) -> None:
    env = environment(RL_KERNEL_AUTOTUNE="1", RL_KERNEL_AUTOTUNE_CACHE_DIR=str(tmp_path / "cache"))
    fixed = {"BLOCK": 1024, "num_warps": 4}
    first, child, parent = run(CHILD_OF_A_CUDA_PROCESS, env=env).splitlines()
    assert first == "[1.0] {'tuned': 1}"
    assert child == f"{[fixed, fixed]} 2 {{'missed': 2}}"
    assert parent == "[1.0] {'tuned': 2}"
