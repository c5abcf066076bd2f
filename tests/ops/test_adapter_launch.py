"""The launch adapter around toy kernels: what is launched, with which options, on whose memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_engine.backends.shared.triton import asking
from rl_engine.backends.shared.triton.autotuning import KernelLauncher, TunableKernel
from rl_engine.platforms import device
from rl_engine.platforms.tuning import events
from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import FileStore, MemoryStore
from rl_engine.runtime.policy import autotune
from tests.support.ops_inputs import DEVICE
from tests.support.ops_launches import forget, new_process
from tests.support.ops_toys import (
    BLOCKS,
    Stopwatch,
    acc_kernel,
    accumulate,
    add_one,
    add_one_kernel,
    by_blocks,
    fixed_block,
    inc_kernel,
    part_kernel,
)
from tests.support.processes import environment, run

N = 1000


def _zeros(size: int = N) -> torch.Tensor:
    return torch.zeros(size, device=DEVICE)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "cache")


INCREMENT_IN_A_PROCESS = """
import torch
from rl_engine.platforms.autotuner import process_autotuner
from tests.support.ops_toys import by_blocks, inc_kernel
x = torch.zeros(1000, device="cuda" if torch.cuda.is_available() else "cpu")
inc_kernel[by_blocks](x, 1000)
print(x.unique().tolist(), process_autotuner().report().counts)
"""


@pytest.mark.parametrize("fastest", BLOCKS)
def test_b01_an_in_place_kernel_is_applied_once_cold_hot_and_replayed(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, fastest: int
) -> None:
    Stopwatch(monkeypatch, BLOCK=fastest)
    x = _zeros()
    with new_process(store), autotune("on"):
        inc_kernel[by_blocks](x, N)
        assert x.unique().tolist() == [1.0]
        inc_kernel[by_blocks](x, N)
        assert x.unique().tolist() == [2.0]
    with new_process(store) as tuner, autotune("on"):
        x = _zeros()
        inc_kernel[by_blocks](x, N)
        assert x.unique().tolist() == [1.0]
        assert tuner.report().counts == {"replayed": 1}
        assert tuner.report().selections[0].winner == f"BLOCK={fastest} num_warps=4"


def test_b01_real_processes_with_real_clocks_apply_it_once(tmp_path: Path) -> None:
    env = environment(RL_KERNEL_AUTOTUNE="1", RL_KERNEL_AUTOTUNE_CACHE_DIR=str(tmp_path / "cache"))
    assert run(INCREMENT_IN_A_PROCESS, env=env) == "[1.0] {'tuned': 1}\n"
    assert run(INCREMENT_IN_A_PROCESS, env=env) == "[1.0] {'replayed': 1}\n"
    off = environment(RL_KERNEL_AUTOTUNE_CACHE_DIR=str(tmp_path / "other"))
    assert run(INCREMENT_IN_A_PROCESS, env=off) == "[1.0] {}\n"
    assert not (tmp_path / "other").exists()


def _overlaps() -> dict[str, Any]:
    return {
        "the same tensor": lambda x: x,
        "another view of it": lambda x: x.view(10, -1).view(-1),
        "a view of a part": lambda x: x[: x.numel() // 2 + 1],
    }


@pytest.mark.parametrize("view", _overlaps())
@pytest.mark.parametrize("by_keyword", [False, True], ids=["positional", "keyword"])
def test_b01_an_output_that_is_a_view_of_the_input_is_written_once(
    monkeypatch: pytest.MonkeyPatch, view: str, by_keyword: bool
) -> None:
    Stopwatch(monkeypatch, BLOCK=256)
    x = torch.arange(float(N), device=DEVICE)
    y = _overlaps()[view](x)
    with new_process(MemoryStore()) as tuner, autotune("on"):
        for calls in (1, 2):
            if by_keyword:
                add_one_kernel[by_blocks](n=y.numel(), y_ptr=y, x_ptr=x)
            else:
                add_one_kernel[by_blocks](x, y, y.numel())
            expected = torch.arange(float(N), device=DEVICE)
            expected[: y.numel()] += calls
            assert torch.equal(x, expected)
        assert tuner.report().counts["tuned"] == 1


@pytest.mark.parametrize("mode", ["off", "on"])
def test_b36_keywords_in_any_order_launch_the_same_kernel(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch, BLOCK=512)
    x, y = torch.arange(float(N), device=DEVICE), _zeros()
    with new_process(MemoryStore()), autotune(mode):
        add_one_kernel[by_blocks](n=N, y_ptr=y, x_ptr=x)
        assert torch.equal(y, x + 1)
        y.zero_()
        add_one_kernel[by_blocks](x, n=N, y_ptr=y)
        assert torch.equal(y, x + 1)


def test_b25_an_accumulator_is_cleared_by_its_wrapper_cold_hot_and_replayed(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch, BLOCK=256)
    x = torch.arange(N, dtype=torch.int32, device=DEVICE)
    junk = torch.full((1,), 12345, dtype=torch.int32, device=DEVICE)
    del junk  # for an allocator that hands memory out again
    with autotune("off"):
        assert accumulate(x).item() == x.sum().item()
    for _process in ("cold", "replayed"):
        with new_process(store) as tuner, autotune("on"):
            for _call in range(3):
                assert accumulate(x).item() == x.sum().item()
            assert tuner.report().selections[0].winner == "BLOCK=256 num_warps=4"


def test_b25_what_an_accumulator_held_is_added_to_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch, BLOCK=512)
    x, out = torch.ones(N, dtype=torch.int32, device=DEVICE), torch.full((1,), 7, dtype=torch.int32, device=DEVICE)
    with new_process(MemoryStore()), autotune("on"):
        acc_kernel[by_blocks](x, out, N)
        assert out.item() == 7 + N


def test_b26_candidates_that_write_only_a_part_are_rejected_however_fast(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Stopwatch(monkeypatch)
    y = _zeros(1024)
    with new_process(store) as tuner, autotune("on"):
        part_kernel[(1,)](y, 1024, BLOCK=1024)
        assert tuner.report().selections[0].winner == "PART=0"
        assert tuner.report().counts["rejected"] == 2
    assert torch.equal(y, torch.arange(1024.0, device=DEVICE))
    assert timed.samples == 0
    record = TuningRecord.from_json(store.load(store.digests()[0]) or "")
    assert {(str(one.candidate), one.reason) for one in record.rejections} == {
        ("PART=1", "not_bit_exact"),
        ("PART=2", "not_bit_exact"),
    }


class Recorder:
    """Stands in for a jitted kernel: writes down what it is launched with, and computes x + 1 on the CPU."""

    def __init__(self, function: Any) -> None:
        self.fn = function
        self.arg_names = ["x_ptr", "y_ptr", "n", "BLOCK"]
        self.launches: list[tuple[Any, Mapping[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
            assert len(named) == len(args) + len(kwargs), "an argument was passed twice"
            self.launches.append((grid, {name: named[name] for name in named if name not in self.arg_names[:3]}))
            named["y_ptr"].copy_(named["x_ptr"] + 1)

        return launch


def _add_one(x_ptr: Any, y_ptr: Any, n: int, BLOCK: int) -> None:
    """Have the arguments of a kernel."""


def _recorded(**changes: Any) -> tuple[KernelLauncher, Recorder]:
    declared = {"outputs": ("y_ptr",), "dynamic": ("n",), "fixed": fixed_block, "neutral": {"BLOCK": BLOCKS}}
    recorder = Recorder(_add_one)
    return TunableKernel(**{**declared, **changes})(recorder), recorder


def _launch(kernel: KernelLauncher, size: int = N, **options: int) -> None:
    x, y = torch.zeros(size), torch.zeros(size)  # on the CPU everywhere: a recorder runs there
    kernel[by_blocks](x, y, size, **options)
    assert y.unique().tolist() == [1.0]


def test_b22_every_launch_after_the_choice_carries_exactly_the_winners_options(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch, BLOCK=256)
    kernel, recorder = _recorded()
    wanted = ((4, 1, 1), {"BLOCK": 256, "num_warps": 4})
    with new_process(store), autotune("on"):
        for number in range(1, 1001):
            _launch(kernel)
            if number in (1, 2, 1000):
                assert recorder.launches[-1] == wanted, f"launch {number}"
        qualified = len(recorder.launches) - 1000
        forget()
        _launch(kernel)  # memory of the tuner
        assert recorder.launches[-1] == wanted
        assert len(recorder.launches) == qualified + 1001
    with new_process(store) as tuner, autotune("on"):
        _launch(kernel)
        assert recorder.launches[-1] == wanted
        assert tuner.report().selections[0].source == "disk"


def test_b22_one_candidate_and_two_shapes_keep_two_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Stopwatch(monkeypatch)

    def fixed(given: Mapping[str, Any], _device: Any) -> dict[str, int]:
        return {"BLOCK": given["n"] // 2, "num_warps": 2}

    kernel, recorder = _recorded(neutral={"BLOCK": ()}, fixed=fixed)
    with new_process(MemoryStore()), autotune("on"):
        for size in (1000, 4000, 1000, 4000):
            _launch(kernel, size)
            assert recorder.launches[-1] == ((2, 1, 1), {"BLOCK": size // 2, "num_warps": 2})
        assert len(kernel._settled) == 2
    assert timed.samples == 0


@pytest.mark.parametrize("mode", ["off", "on"])
def test_b22_options_of_the_caller_win_and_such_a_launch_is_not_tuned(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Stopwatch(monkeypatch, BLOCK=256)
    kernel, recorder = _recorded()
    with new_process(MemoryStore()), autotune(mode):
        _launch(kernel, num_warps=8)
        assert recorder.launches[-1] == ((1, 1, 1), {"BLOCK": 1024, "num_warps": 8})
        _launch(kernel, BLOCK=512)
        assert recorder.launches[-1] == ((2, 1, 1), {"BLOCK": 512, "num_warps": 4})
        _launch(kernel, num_stages=3)
        assert recorder.launches[-1] == ((1, 1, 1), {"BLOCK": 1024, "num_warps": 4, "num_stages": 3})
    assert timed.samples == 0
    assert len(recorder.launches) == 3


def test_hot_launches_make_no_call_to_the_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    x = _zeros()
    with new_process(MemoryStore()), autotune("on"):
        add_one(x)
        calls: list[str] = []
        monkeypatch.setattr(asking, "process_autotuner", lambda: calls.append("asked"))
        monkeypatch.setattr(device, "identify", lambda _index: calls.append("identified"))
        for _launch in range(100):
            assert add_one(x).unique().tolist() == [1.0]
        assert calls == []


def test_b36_a_device_that_cannot_be_told_runs_fixed_with_one_warning_and_no_record(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(_index: int) -> None:
        raise RuntimeError("no NVML here: b36")

    monkeypatch.setattr(device, "identify", unknown)
    before = len(events.log().events("warning"))
    with new_process(store):
        for mode in ("on", "on", "replay", "off"):
            with autotune(mode):
                assert add_one(_zeros()).unique().tolist() == [1.0]
    warnings = [event.reason for event in events.log().events("warning")[before:]]
    assert warnings == ["add_one_kernel runs fixed: the device cannot be told (no NVML here: b36)"]
    assert not store.folder.exists()


def test_a_wrapped_kernel_is_still_the_kernel_it_was() -> None:
    assert add_one_kernel.__name__ == "add_one_kernel"
    assert add_one_kernel.__doc__ == "y = x + 1."
    assert add_one_kernel.__module__ == "tests.support.ops_toys"
    assert add_one_kernel.arg_names == ["x_ptr", "y_ptr", "n", "BLOCK"]
    assert "tl.store(y_ptr + lane" in add_one_kernel.src
    assert isinstance(add_one_kernel, KernelLauncher)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = add_one_kernel.no_such_thing


@pytest.mark.parametrize("mode", ["off", "on"])
def test_grids_may_be_tuples_or_functions_of_arguments_and_chosen_parameters(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch, BLOCK=256)
    kernel, recorder = _recorded()
    seen: list[Mapping[str, Any]] = []

    def grid(meta: Mapping[str, Any]) -> tuple[int, int]:
        seen.append(dict(meta))
        return (-(-meta["n"] // meta["BLOCK"]), 2)

    x, y = torch.zeros(N), torch.zeros(N)
    with new_process(MemoryStore()), autotune(mode):
        kernel[grid](x, y, N)
        block = 256 if mode == "on" else 1024
        assert recorder.launches[-1] == ((-(-N // block), 2, 1), {"BLOCK": block, "num_warps": 4})
        assert seen[-1]["BLOCK"] == block
        assert seen[-1]["x_ptr"] is x
        kernel[(5,)](x, y, n=N)
        assert recorder.launches[-1][0] == (5, 1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outputs": ("z_ptr",)}, "_add_one: z_ptr declared, but the kernel has no such argument"),
        ({"inout": ("z_ptr",)}, "_add_one: z_ptr declared"),
        ({"data": ("z_ptr",)}, "_add_one: z_ptr declared"),
        ({"dynamic": ("m",)}, "_add_one: m declared"),
        ({"neutral": {"TILE": (1,)}}, "_add_one: TILE declared"),
        ({"neutral": {"num_wraps": (4,)}}, "_add_one: num_wraps declared"),
        ({"outputs": ()}, "_add_one: name in outputs or inout what the kernel writes"),
        ({"outputs": ("n",)}, "_add_one: n: pointer arguments end in _ptr"),
    ],
    ids=str,
)
def test_declarations_that_do_not_fit_the_kernel_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _recorded(**changes)


def test_no_module_of_the_library_keeps_a_tensor_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch, BLOCK=256)
    x = _zeros()
    with new_process(MemoryStore()), autotune("on"):
        add_one(x)
        references = sys.getrefcount(x)
        for _launch in range(10):
            add_one(x)
        assert sys.getrefcount(x) == references == 2
