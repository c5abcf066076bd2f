"""What tuning must leave as it was: tensors and what lies between their rows, versions, memory, grad modes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from rl_engine.backends.shared.triton import launch_trial, qualification
from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.launch_trial import LaunchTrial
from rl_engine.backends.shared.triton.qualification import BoundLaunch, Sandbox
from rl_engine.backends.shared.triton.scratch import spans, total
from rl_engine.platforms.tuning.store import FileStore, MemoryStore
from rl_engine.runtime.policy import autotune
from tests.support.faults import Warnings, after_launches, only_record, raise_out_of_memory, rejections
from tests.support.ops_inputs import (
    DEVICE,
    LAYOUTS,
    ON_GPU,
    Maker,
    Outcome,
    Sample,
    assert_same,
    assert_same_bytes,
    incoming,
    map_tensors,
    run,
    samples,
    tensors_of,
    triton_op,
)
from tests.support.ops_launches import new_process
from tests.support.ops_toys import Stopwatch, add_one, add_one_kernel, by_blocks, inc_kernel

N = 1000
MIB = 1 << 20


def _by_rows(meta: Any) -> tuple[int]:
    return (-(-meta["n_rows"] // meta["ROWS"]),)


@TunableKernel(
    outputs=("y_ptr", "z_ptr"),
    dynamic=("n_rows",),
    fixed=lambda _sizes, _device: {"ROWS": 4, "num_warps": 4},
    neutral={"ROWS": (1, 2)},
)
@triton.jit(do_not_specialize=["n_rows"])
def _two_outputs_kernel(x_ptr, y_ptr, z_ptr, n_rows, n_cols, x_stride, y_stride, z_stride, ROWS: tl.constexpr):
    """y = x, and z = x beside it, by rows of any stride."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, 16)
    mask = (row < n_rows)[:, None] & (col < n_cols)[None, :]
    x = tl.load(x_ptr + (row * x_stride)[:, None] + col[None, :], mask=mask)
    tl.store(y_ptr + (row * y_stride)[:, None] + col[None, :], x, mask=mask)
    tl.store(z_ptr + (row * z_stride)[:, None] + col[None, :], x, mask=mask)


def _copy_twice(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    _two_outputs_kernel[_by_rows](x, y, z, *x.shape, x.stride(0), y.stride(0), z.stride(0))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of all bytes under a tensor, whatever it shows of them."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole.clone()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "cache")


@pytest.mark.parametrize("layout", ["packed", "sliced", "expanded"])
@pytest.mark.parametrize(
    "sample", samples(lambda one: one.case.name == "tiny" and one.dtype == "float32"), ids=lambda one: one.spec.name
)
def test_inputs_gradients_and_the_memory_around_them_survive_a_measurement(
    sample: Sample, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch)
    change, op, sent = LAYOUTS[layout], triton_op(sample.spec.name), []

    def gradients(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
        made = tuple(None if dy is None else change(dy) for dy in incoming(outputs))
        sent.extend((dy, _bytes(dy)) for dy in made if dy is not None)
        return made

    def outcome() -> Outcome:
        return run(op, inputs, differentiate=sample.spec.differentiable, gradients=gradients)

    inputs = map_tensors(sample.inputs(), change)
    before = {name: _bytes(one) for name, one in tensors_of(inputs).items()}
    with autotune("off"):
        fixed = outcome()
    with new_process(MemoryStore()) as tuner, autotune("on"):
        assert_same(outcome(), fixed, layout)
        assert tuner.report().counts["tuned"] > 0
    for name, one in tensors_of(inputs).items():
        assert torch.equal(_bytes(one), before[name]), f"{name} or what lies around it was written to"
    assert all(torch.equal(_bytes(dy), was) for dy, was in sent)


def test_outputs_that_overlap_are_one_piece_of_scratch_and_come_out_whole(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch, ROWS=1)
    x = Maker(torch.float32).normal(8, 10)
    memory = torch.full((8, 32), 7.0, device=DEVICE)
    y, z = memory[:, :10], memory[:, 12:22]  # rows of one lie between the rows of the other
    launch = BoundLaunch(lambda *_: None, {"x_ptr": x, "y_ptr": y, "z_ptr": z}, ("y_ptr", "z_ptr"), (), ())
    assert [sorted(span.tensors) for span in launch.written] == [["y_ptr", "z_ptr"]]
    with new_process(store) as tuner, autotune("on"):
        _copy_twice(x, y, z)
        assert tuner.report().selections[0].winner == "ROWS=1 num_warps=4"
    expected = torch.full((8, 32), 7.0, device=DEVICE)
    expected[:, :10], expected[:, 12:22] = x, x
    assert_same_bytes(memory, expected, "the memory around the outputs")


def test_a_candidate_that_writes_between_the_rows_is_rejected(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spill(asked: Any) -> None:
        if asked["ROWS"] == 1:
            y = asked["y_ptr"]
            y.as_strided((1,), (1,), y.storage_offset() + 11).fill_(0.0)

    Stopwatch(monkeypatch, ROWS=1)
    after_launches(monkeypatch, spill)
    x, memory = Maker(torch.float32).normal(8, 10), torch.full((8, 32), 7.0, device=DEVICE)
    with new_process(store), autotune("on"):
        _copy_twice(x, memory[:, :10], torch.empty(8, 10, device=DEVICE))
    assert rejections(only_record(store)) == {"ROWS=1 num_warps=4": "not_bit_exact"}
    assert torch.equal(memory[:, 10:], torch.full((8, 22), 7.0, device=DEVICE))


def test_scratch_covers_what_tensors_show_and_not_the_storage_under_them() -> None:
    memory = torch.zeros(1 << 20, device=DEVICE)
    y, z = memory[1000:1010], memory.view(1024, 1024)[512:516, :8]
    tensors = {"x_ptr": memory[:5], "y_ptr": y, "z_ptr": z}
    launch = BoundLaunch(lambda *_: None, tensors, ("y_ptr",), ("z_ptr",), ())
    sandbox = Sandbox(launch)
    assert sorted(copy.bytes.numel() for copy in sandbox.copies) == [40, (3 * 1024 + 8) * 4]
    assert total(spans(tensors)) == 20 + 40 + (3 * 1024 + 8) * 4
    assert sandbox.values["x_ptr"] is tensors["x_ptr"]
    for name in ("y_ptr", "z_ptr"):
        copy = sandbox.values[name]
        assert (copy.shape, copy.stride()) == (tensors[name].shape, tensors[name].stride())
        assert copy.data_ptr() % 256 == tensors[name].data_ptr() % 256


def test_tensors_that_overlap_across_storages_are_not_tuned_and_written_once(store: FileStore) -> None:
    if DEVICE != "cpu":
        pytest.skip("a buffer of the host, seen by two storages")
    buffer, warnings = bytearray(8 * N), Warnings()
    x = torch.frombuffer(buffer, dtype=torch.float32, count=N)
    y = torch.frombuffer(buffer, dtype=torch.float32, count=N, offset=2 * N)
    with new_process(store) as tuner, autotune("on"):
        add_one_kernel[(1,)](x.zero_(), y, N)
        assert warnings.of(tuner) == ["add_one_kernel is not tuned: overlapping tensors lie in different storages"]
    assert y.unique().tolist() == [1.0]
    assert x[: N // 2].unique().tolist() == [0.0]
    assert store.digests() == ()


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_tensor_written_in_place_changes_its_version_once_a_launch(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch, BLOCK=256)
    x, y = torch.zeros(2 * N, device=DEVICE), torch.zeros(N, device=DEVICE)
    view = x[:N]
    with new_process(MemoryStore()), autotune(mode):
        for launches in (1, 2, 3):  # the first is the measured one
            inc_kernel[by_blocks](view, n=N)
            assert (x._version, view._version) == (launches, launches)
            assert x[:N].unique().tolist() == [float(launches)]
            add_one_kernel[by_blocks](x_ptr=view, y_ptr=y, n=N)
            assert (x._version, y._version) == (launches, 0)  # read, and only written


@pytest.mark.parametrize("mode", ["off", "on"])
def test_autograd_notices_a_tensor_written_in_place(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch)
    x = torch.ones(N, device=DEVICE, requires_grad=True)
    saved = x * 2
    y = saved * saved
    with new_process(MemoryStore()), autotune(mode):
        inc_kernel[by_blocks](saved.detach(), N)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("mode", ["off", "on"])
def test_tensors_of_inference_mode_have_no_version_and_are_written_all_the_same(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch)
    with torch.inference_mode():
        x = torch.zeros(N, device=DEVICE)
    with new_process(MemoryStore()), autotune(mode):
        for launches, inside in enumerate((True, True, False, False), 1):
            with torch.inference_mode(inside):
                inc_kernel[by_blocks](x, N)
            assert x.unique().tolist() == [float(launches)]


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad])
def test_what_was_tuned_without_gradients_serves_training_afterwards(
    around: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch)
    make, op = Maker(torch.float32), triton_op("rms_norm")
    x, weight = make.normal(4, 8).requires_grad_(), make.normal(8).requires_grad_()

    def train() -> Outcome:
        y = op(x, weight)
        return Outcome((y.detach(),), dict(enumerate(torch.autograd.grad(y.sum(), (x, weight)))))

    with autotune("off"):
        fixed = train()
    with new_process(MemoryStore()) as tuner, autotune("on"):
        with around():
            assert_same_bytes(op(x, weight), fixed.outputs[0], "without gradients")
            assert tuner.report().counts["tuned"] == 1
        for _step in range(2):
            assert_same(train(), fixed, "trained")
        assert tuner.report().counts["tuned"] == 3  # and the two kernels of the backward


class NoMemory:
    """Lets the first sandboxes be, and has no memory for the next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
        self._left = after
        self.refused = 0
        make = Sandbox.__init__

        def init(sandbox: Sandbox, *args: Any, **kwargs: Any) -> None:
            if not self._left:
                self.refused += 1
                raise_out_of_memory()
            self._left -= 1
            make(sandbox, *args, **kwargs)

        monkeypatch.setattr(Sandbox, "__init__", init)


@pytest.mark.parametrize("after", [0, 1, 2], ids=["live", "perturbed", "timing"])
def test_b51_no_memory_for_scratch_costs_one_warning_and_nothing_else(
    after: int, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, closed, warnings = NoMemory(monkeypatch, after=after), [], Warnings()
    close = LaunchTrial.close
    monkeypatch.setattr(LaunchTrial, "close", lambda trial: closed.append(trial) or close(trial))
    x = torch.arange(float(N), device=DEVICE)
    with new_process(store) as tuner, autotune("on"):
        for _step in range(3):
            assert torch.equal(add_one(x), torch.arange(float(N), device=DEVICE) + 1)
        assert warnings.of(tuner) == ["add_one_kernel is not tuned: no memory for scratch copies"]
        assert tuner.report().counts == {"warning": 1, "fixed": 1}
    assert memory.refused == 1 + ON_GPU  # a launch plan's proof asks too
    assert len(closed) == 1
    assert (closed[0]._sandboxes, closed[0]._samplers) == ([], {})
    assert store.digests() == ()


def test_b51_no_memory_while_a_candidate_runs_is_not_its_fault(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_launches(monkeypatch, lambda asked: raise_out_of_memory() if asked["BLOCK"] == 256 else None)
    warnings = Warnings()
    with new_process(store) as tuner, autotune("on"):
        assert add_one(torch.zeros(N, device=DEVICE)).unique().tolist() == [1.0]
        assert warnings.of(tuner) == ["add_one_kernel is not tuned: no memory for scratch copies"]
    assert store.digests() == (), "a record would keep the candidate out for good"


def test_b51_too_little_free_memory_is_seen_before_anything_is_allocated(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, warnings = [], Warnings()

    def none_left(size: int, _device: torch.device) -> None:
        seen.append(size)
        raise launch_trial.TrialUnavailableError(f"scratch copies need {size} bytes, 0 are free")

    monkeypatch.setattr(qualification, "require_memory", none_left)
    monkeypatch.setattr(Sandbox, "__init__", raise_out_of_memory)
    x = torch.zeros(N, device=DEVICE)
    with new_process(store) as tuner, autotune("on"):
        assert add_one(x).unique().tolist() == [1.0]
        assert warnings.of(tuner) == ["add_one_kernel is not tuned: scratch copies need 8000 bytes, 0 are free"]
    assert seen == [2 * 4 * N] * (1 + ON_GPU)  # the output's copy and its expected bytes; a plan's proof asks too


@pytest.mark.parametrize("free_mib", [0, 90, 110])
def test_b51_scratch_may_take_half_of_what_is_free_or_cached(free_mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_engine.backends.shared.triton.scratch import require_memory

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free_mib * MIB, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 130 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 30 * MIB)
    require_memory((free_mib + 100) * MIB // 2, torch.device("cuda"))
    with pytest.raises(launch_trial.TrialUnavailableError, match=f"need .* MiB, {free_mib + 100} MiB are free"):
        require_memory((free_mib + 100) * MIB // 2 + 1, torch.device("cuda"))


@pytest.fixture
def full_card() -> Iterator[Callable[[int], torch.Tensor]]:
    """Yield a function that fills the card except for so many bytes."""

    def fill(left: int) -> torch.Tensor:
        gc.collect()  # what earlier tests left in cycles would be freed while this one counts
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device="cuda")

    yield fill
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_b51_a_step_that_just_fits_still_fits_and_leaves_nothing_behind(
    store: FileStore, full_card: Callable[[int], torch.Tensor]
) -> None:
    op, warnings = triton_op("swiglu"), Warnings()
    size = 200 * MIB // 2  # bf16
    gate = torch.full((size,), 1.0, dtype=torch.bfloat16, device="cuda")
    up = torch.full((size,), 3.0, dtype=torch.bfloat16, device="cuda")
    with autotune("off"):
        expected = op(gate[:8], up[:8])[0].item()
    hog = full_card(300 * MIB)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with new_process(store) as tuner, autotune("on"):
        y = op(gate, up)
        assert len(warnings.of(tuner)) == 1
        assert "scratch copies" in warnings.of(tuner)[0]
        assert y[0].item() == y[-1].item() == expected
        assert torch.cuda.memory_allocated() - before == 2 * size
        assert torch.cuda.max_memory_allocated() - before <= 2 * size + MIB
        del y
        assert store.digests() == ()
    assert torch.cuda.memory_allocated() == before
    second = full_card(100 * MIB)  # not enough for the result itself
    with pytest.raises(torch.OutOfMemoryError), new_process(store), autotune("on"):
        op(gate, up)
    del hog, second


@pytest.mark.gpu
def test_b51_scratch_is_given_back_where_there_is_enough_of_it(store: FileStore) -> None:
    op = triton_op("swiglu")
    gate, up = (torch.ones(8 * MIB, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    with new_process(store) as tuner, autotune("on"):
        before = torch.cuda.memory_allocated()
        y = op(gate, up)
        assert tuner.report().counts["tuned"] == 1
        del y
        assert torch.cuda.memory_allocated() == before
