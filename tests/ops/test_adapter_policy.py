"""Who decides whether a launch is tuned, and what tuning must leave alone: threads, random numbers, data, disk."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_engine import settings
from rl_engine.backends.shared.triton.launch_trial import LaunchTrial
from rl_engine.backends.shared.triton.norm.rms_norm import rms_norm
from rl_engine.platforms.autotuner import PersistentAutotuner
from rl_engine.platforms.tuning.decision import FINAL_ROUNDS, SCREENING_ROUNDS
from rl_engine.platforms.tuning.store import FileStore, MemoryStore
from rl_engine.runtime.policy import autotune
from tests.support.ops_inputs import (
    DEVICE,
    ON_GPU,
    Maker,
    Outcome,
    assert_same,
    assert_same_bytes,
    run,
    samples,
    triton_op,
)
from tests.support.ops_launches import new_process
from tests.support.ops_toys import BLOCKS, Doubled, Stopwatch, Unpinned, accumulate, add_one, by_blocks, inc_kernel
from tests.support.processes import environment
from tests.support.processes import run as run_process

N = 1000


def _x(value: float = 0.0) -> torch.Tensor:
    return torch.full((N,), value, device=DEVICE, requires_grad=True)


def _tuned(tuner: PersistentAutotuner) -> int:
    return tuner.report().counts.get("tuned", 0)


def test_b27_a_backward_is_tuned_as_its_forward_was_wherever_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch, BLOCK=256)
    x = _x()
    with new_process(MemoryStore()) as tuner:
        with autotune("on"):
            y = Doubled.apply(x)
        assert _tuned(tuner) == 1
        with autotune("off"):
            (dx,) = torch.autograd.grad(y, x, torch.zeros(N, device=DEVICE))
        assert _tuned(tuner) == 2  # forward and backward are two keys: their neighbours in time differ
    assert dx.unique().tolist() == [1.0]


def test_b27_tuning_around_the_backward_alone_tunes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Stopwatch(monkeypatch, BLOCK=256)
    x = _x()
    with new_process(MemoryStore()) as tuner:
        with autotune("off"):
            y = Doubled.apply(x)
        with autotune("on"):
            torch.autograd.grad(y, x, torch.zeros(N, device=DEVICE))
        assert tuner.report().counts == {}
    assert timed.samples == 0


@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_backward_whose_forward_never_pinned_follows_the_policy_around_it(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch, BLOCK=256)
    x = _x()
    with new_process(MemoryStore()) as tuner:
        with autotune("off"):
            y = Unpinned.apply(x)
        with autotune(mode):
            (dx,) = torch.autograd.grad(y, x, torch.zeros(N, device=DEVICE))
        # a GPU's backward runs in autograd's own thread, where no block is in force but the process's policy
        assert _tuned(tuner) == ((settings.current().autotune if ON_GPU else mode) == "on")
    assert dx.unique().tolist() == [1.0]


def test_b27_backwards_from_four_threads_give_the_serial_gradients_and_tune_each_key_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Stopwatch(monkeypatch)
    (sample,) = samples(lambda one: one.spec.name == "rms_norm" and one.case.name == "odd" and one.dtype == "float32")
    op, inputs = triton_op("rms_norm"), [sample.inputs(seed=seed) for seed in range(4)]
    with autotune("off"):
        serial = [run(op, one) for one in inputs]
    with new_process(MemoryStore()) as tuner:
        graphs = []
        for one in inputs:
            leaves = [arg.detach().requires_grad_() for arg in one.args]
            with autotune("on"):
                graphs.append((op(*leaves), leaves))

        def backward(number: int) -> Outcome:
            y, leaves = graphs[number]
            generator = torch.Generator().manual_seed(20_240_608)  # as `incoming` draws them
            dy = torch.randn(y.shape, generator=generator, dtype=torch.float32).to(y.device)
            return Outcome((y.detach(),), dict(enumerate(torch.autograd.grad(y, leaves, dy))))

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(backward, range(4)))
        kernels = [one.kernel for one in tuner.report().selections if one.source == "tuned"]
    assert len(kernels) == len(set(kernels)) == 3
    for number, (ours, wanted) in enumerate(zip(found, serial, strict=True)):
        assert_same(ours, wanted, f"graph {number}")


def test_eight_threads_that_meet_a_signature_together_get_right_results_and_one_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed = Stopwatch(monkeypatch, BLOCK=256)
    barrier, inputs = threading.Barrier(8), [torch.full((N,), float(number), device=DEVICE) for number in range(8)]
    with new_process(MemoryStore()) as tuner:

        def launch(number: int) -> list[float]:
            with autotune("on"):
                barrier.wait()
                return [value for _call in range(5) for value in add_one(inputs[number]).unique().tolist()]

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(launch, range(8)))
        assert _tuned(tuner) == 1
    assert found == [[number + 1.0] * 5 for number in range(8)]
    assert timed.samples <= len(BLOCKS) * (2 + SCREENING_ROUNDS + FINAL_ROUNDS)


def test_b07_lengths_that_change_from_step_to_step_share_the_records_of_their_buckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Stopwatch(monkeypatch)
    make, hidden = Maker(torch.float32), 1024 if ON_GPU else 8
    x, weight, lengths = make.normal(1200, hidden), make.normal(hidden), range(1000, 1201)
    store = FileStore(tmp_path / "cache")
    with autotune("off"):
        whole = rms_norm(x, weight)
    with new_process(store) as tuner, autotune("on"):
        for length in lengths:
            assert_same_bytes(rms_norm(x[:length], weight), whole[:length], f"{length} rows")
        assert _tuned(tuner) == 2  # up to 1024 rows and up to 2048
        assert len(store.digests()) == 2
        spent = timed.samples
        for length in lengths:
            assert_same_bytes(rms_norm(x[:length], weight), whole[:length], f"{length} rows again")
        assert timed.samples == spent
    with new_process(store) as tuner, autotune("on"):
        for length in lengths[::20]:
            assert_same_bytes(rms_norm(x[:length], weight), whole[:length], f"{length} rows, another process")
        assert tuner.report().counts == {"replayed": 2}
        assert timed.samples == spent


def test_random_generators_are_left_as_they_were() -> None:
    def states() -> list[object]:
        kept: list[object] = [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]  # noqa: NPY002  # the global one is what may change
        return [*kept, torch.cuda.get_rng_state().tolist()] if ON_GPU else kept

    before = states()
    with new_process(MemoryStore()) as tuner, autotune("on"):
        add_one(_x().detach())  # `data` inputs are perturbed with random numbers
        assert _tuned(tuner) == 1
    assert states() == before


def _break_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaunchTrial, "sample", _interrupt)


def _break_qualifying(monkeypatch: pytest.MonkeyPatch) -> None:
    # in the middle: the fixed launch has run on scratch, the first candidate is about to
    monkeypatch.setattr("rl_engine.backends.shared.triton.qualification._equal", _interrupt)


def _interrupt(*_args: object) -> float:
    raise KeyboardInterrupt


@pytest.mark.parametrize("break_in", [_break_sampling, _break_qualifying])
def test_ctrl_c_inside_a_trial_leaves_the_callers_data_alone_and_the_key_free(
    tmp_path: Path, break_in: Callable[[pytest.MonkeyPatch], None]
) -> None:
    x, store = torch.arange(float(N), device=DEVICE), FileStore(tmp_path / "cache")
    with new_process(store) as tuner, autotune("on"):
        with pytest.MonkeyPatch.context() as patch:
            break_in(patch)
            with pytest.raises(KeyboardInterrupt):
                inc_kernel[by_blocks](x, N)
        assert torch.equal(x, torch.arange(float(N), device=DEVICE))
        assert store.digests() == ()
        inc_kernel[by_blocks](x, N)
        assert torch.equal(x, torch.arange(float(N), device=DEVICE) + 1)
        assert _tuned(tuner) == 1
        assert len(store.digests()) == 1


def test_tuning_writes_to_nothing_but_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch)
    memory = torch.arange(3.0 * N, device=DEVICE)
    before = memory.clone()
    with new_process(MemoryStore()), autotune("on"):
        y = add_one(memory[N : 2 * N])
        assert accumulate(memory[:N].int()).item() == memory[:N].sum().item()
    assert torch.equal(memory, before)
    assert torch.equal(y, before[N : 2 * N] + 1)


NO_CLOCK_NO_DISK = """
import time
import torch
from rl_engine.runtime.registry import get_op
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.ones(3, 5, device=device, requires_grad=True)
w = torch.ones(5, device=device, requires_grad=True)
op = get_op("rms_norm", device, backend="rlkernel.triton.rms_norm")
if device == "cuda":
    op(x, w).sum().backward()  # compiling reads clocks
def refuse(*args):
    raise AssertionError("a clock was read")
for name in ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns"):
    setattr(time, name, refuse)
op(x, w).sum().backward()
print(x.grad.abs().max().item() < 1e-5)
"""


@pytest.mark.parametrize("value", ["", "0", "off"])
def test_off_reads_no_clock_and_makes_no_folder(tmp_path: Path, value: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    env = environment(HOME=str(home), RL_KERNEL_AUTOTUNE=value, RL_KERNEL_AUTOTUNE_CACHE_DIR=str(tmp_path / "cache"))
    env.pop("XDG_CACHE_HOME", None)
    env["TRITON_CACHE_DIR"] = str(tmp_path / "triton")  # Triton's own, of compiled code
    assert run_process(NO_CLOCK_NO_DISK, env=env) == "True\n"
    assert not (tmp_path / "cache").exists()
    assert {one.name for one in home.iterdir()} <= {".nv"}  # the driver's own


LEAN_IMPORT = """
import os, sys
import torch
from rl_engine.backends import catalog
from rl_engine.backends.shared.triton import autotuning
from rl_engine.platforms.autotuner import PersistentAutotuner
from rl_engine.platforms.tuning.store import FileStore, MemoryStore
from rl_engine.runtime import registry
from pathlib import Path
catalog.load()
PersistentAutotuner(MemoryStore()), PersistentAutotuner(FileStore(Path(sys.argv[1]) / "cache"))
import tests.support.ops_toys
print(len(catalog.implementations()) >= 12, len(autotuning.kernels()) >= 14, torch.cuda.is_initialized())
pid = os.fork()
if not pid:
    x = torch.zeros(4, device="cuda" if torch.cuda.is_available() else "cpu")
    os._exit(0 if (x + 1 == 1).all() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), torch.cuda.is_initialized(), os.listdir(sys.argv[1]))
"""


@pytest.mark.parametrize("visible", [None, ""], ids=["as here", "no card visible"])
def test_b76_importing_everything_starts_no_cuda_and_touches_no_disk(tmp_path: Path, visible: str | None) -> None:
    env = environment(RL_KERNEL_AUTOTUNE="1", RL_KERNEL_AUTOTUNE_CACHE_DIR=str(tmp_path / "cache"))
    env.pop("TRITON_INTERPRET", None)
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    assert run_process(LEAN_IMPORT, str(tmp_path), env=env) == "True True False\n0 False []\n"
