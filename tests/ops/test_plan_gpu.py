"""Launch plans on a card: the bytes of Triton's own launch, whatever changes between two (B03, B27, B49, B50, B64)."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from rl_engine.backends.shared.triton import plan
from rl_engine.backends.shared.triton.autotuning import KernelLauncher
from rl_engine.platforms import device
from rl_engine.platforms.tuning import events
from rl_engine.platforms.tuning.store import MemoryStore
from rl_engine.runtime.policy import autotune
from tests.support.ops_inputs import assert_same_bytes, map_tensors, run_sample, samples, triton_op
from tests.support.ops_launches import forget, new_process, process_mode
from tests.support.ops_toys import Doubled, Stopwatch, add_one, add_one_kernel, by_blocks, inc_kernel, keyed_kernel

pytestmark = pytest.mark.gpu

N = 3000
THREADS = 16
SIGNATURES = 10_000
LAUNCHES = 1_000_000
DELAY_CYCLES = 200_000_000  # about 0.1 s
GROWTH_BYTES = 4 << 20


def _fixed_for_good(
    self: KernelLauncher, _policy: Any, _grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Mapping[str, int], bool]:
    identity = device.for_launch(self._signature.index(*args, **kwargs))
    return self.declaration.fixed(self._signature.sizes(*args, **kwargs), identity), True


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the names of kernels that were launched through Triton, in a process that settles everything at once."""
    launched: list[str] = []
    run = KernelLauncher._run

    def noted(self: KernelLauncher, grid: Any, args: Any, kwargs: Any) -> Any:
        launched.append(self.__name__)
        return run(self, grid, args, kwargs)

    monkeypatch.setattr(KernelLauncher, "_run", noted)
    monkeypatch.setattr(KernelLauncher, "_choose", _fixed_for_good)
    with new_process(MemoryStore()), autotune("on"):
        yield launched


def _planned(ordinary: list[str], act: Callable[[], Any]) -> bool:
    before = len(ordinary)
    act()
    return len(ordinary) == before


def _keyed(x: torch.Tensor, y: torch.Tensor, n: int, stride: int, extra: torch.Tensor | None = None) -> torch.Tensor:
    y.fill_(float("nan"))
    keyed_kernel[by_blocks](x, extra, y, n, stride, 1.5, 7)
    return y.clone()


def _off(*args: Any) -> torch.Tensor:
    with autotune("off"):
        return _keyed(*args)


def test_this_triton_has_plans_and_none_of_them_failed() -> None:
    assert plan._unsupported() is None
    with new_process(MemoryStore()), autotune("on"):
        add_one(torch.zeros(N, device="cuda"))
        (settled,) = add_one_kernel._settled.values()
    assert settled.plan is not None
    assert not [one.reason for one in events.log().events("warning") if "launch plan" in one.reason]


MEMORY = 1 << 16
FLIPS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]]] = {
    "a misaligned input": lambda x, y: (x[1:], y, N, 16),
    "a misaligned output": lambda x, y: (x, y[3:], N, 16),
    "an integer that becomes 1": lambda x, y: (x, y, N, 1),
    "a stride no multiple of 16": lambda x, y: (x, y, N, 17),
    "another dtype": lambda x, y: (x.view(torch.bfloat16), y, N, 16),
    "another dtype of the output": lambda x, y: (x, y.view(torch.bfloat16), N, 16),
    "a tensor for None": lambda x, y: (x, y, N, 16, x),
    "another bucket": lambda x, y: (x, y, 100, 16),
}


@pytest.mark.parametrize("what", FLIPS)
def test_b49_what_changes_has_the_bytes_of_tritons_own_launch(what: str, ordinary: list[str]) -> None:
    x = torch.randn(MEMORY, device="cuda")
    y = torch.empty(MEMORY, device="cuda")
    base, other = (x, y, N, 16), FLIPS[what](x, y)
    wanted, wanted_other = _off(*base), _off(*other)
    assert_same_bytes(_keyed(*base), wanted, "first")
    assert _planned(ordinary, lambda: assert_same_bytes(_keyed(*base), wanted, "planned"))
    assert not _planned(ordinary, lambda: assert_same_bytes(_keyed(*other), wanted_other, "changed"))
    assert _planned(ordinary, lambda: assert_same_bytes(_keyed(*other), wanted_other, "changed, planned"))
    assert _planned(ordinary, lambda: assert_same_bytes(_keyed(*base), wanted, "as before"))


def test_lengths_and_floats_are_those_of_the_launch(ordinary: list[str]) -> None:
    x = torch.zeros(MEMORY, device="cuda")
    add_one(x[:N])
    for n in (N, 2049, 4096, 2050, 3001):
        assert _planned(ordinary, lambda n=n: add_one(x[:n]))
        assert add_one(x[:n]).unique().tolist() == [1.0]


def test_ten_thousand_random_signatures_have_the_bytes_of_tritons_own_launch(ordinary: list[str]) -> None:
    generator = random.Random(20_240_607)
    memory = torch.randn(MEMORY, device="cuda")
    outputs = torch.empty(MEMORY, device="cuda")
    planned = 0
    for number in range(SIGNATURES):
        dtype = generator.choice([torch.float32, torch.bfloat16, torch.float16])
        x = memory.view(dtype)[generator.choice([0, 0, 8, 1, 3]) :]
        y = outputs.view(generator.choice([dtype, torch.float32]))[generator.choice([0, 16, 1]) :]
        extra = generator.choice([None, x])
        args = (x, y, generator.randint(1, N), generator.choice([1, 2, 3, 16, 17]), extra)
        wanted = _off(*args)
        for _launch in range(2):
            before = len(ordinary)
            assert_same_bytes(_keyed(*args), wanted, f"signature {number}: {args[2:4]}")
        planned += len(ordinary) == before
    assert planned == SIGNATURES


def test_products_of_described_matrices_have_the_bytes_of_tritons_own_launch(ordinary: list[str]) -> None:
    gemm, draw = triton_op("det_gemm"), random.Random(5)
    memory = torch.randn(1 << 18, device="cuda").bfloat16()

    def matrix(rows: int, cols: int) -> torch.Tensor:
        turned = draw.random() < 0.5
        wide, high = (rows, cols) if turned else (cols, rows)
        at, stride = 8 * draw.randrange(512), wide + 8 * draw.randrange(3)
        found = memory[at : at + high * stride].view(high, stride)[:, :wide]
        return found.mT if turned else found

    planned = 0
    for _number in range(400):
        m, n, k = (8 * draw.randint(low, low + 7) for low in (17, 9, 9))
        a, b = matrix(m, k), matrix(k, n)
        with autotune("off"):
            wanted = gemm(a, b)
        before = len(ordinary)
        assert_same_bytes(gemm(a, b), wanted, f"{m} {n} {k} {a.stride()} {b.stride()}")
        planned += len(ordinary) == before
    assert "_gemm_persistent_kernel" in ordinary, "no product was described"
    assert planned > 300, "one launch in four or more went through Triton"


def test_a_plan_launches_on_the_current_stream_and_waits_for_nothing(ordinary: list[str]) -> None:
    x = torch.zeros(N, device="cuda")
    add_one(x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        x.fill_(4.0)
        assert _planned(ordinary, lambda: add_one(x))
        y = add_one(x)
        assert not stream.query()
    stream.synchronize()
    assert y.unique().tolist() == [5.0]


def test_b64_a_planned_launch_is_captured_and_outlives_its_plan(ordinary: list[str]) -> None:
    x = torch.zeros(N, device="cuda")
    add_one(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = len(ordinary)
    with torch.cuda.graph(graph):
        y = add_one(add_one(x))
    assert len(ordinary) == before
    forget()
    add_one_kernel.fn.device_caches.clear()
    gc.collect()
    for value in (1.0, -3.5):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert y.unique().tolist() == [value + 2]


def test_sixteen_threads_get_their_own_values(ordinary: list[str]) -> None:
    inputs = [torch.full((2049 + number,), float(number), device="cuda") for number in range(THREADS)]
    add_one(inputs[0])
    torch.cuda.synchronize()
    before = len(ordinary)

    def act(number: int) -> list[float]:
        with autotune("on"), torch.cuda.stream(torch.cuda.Stream()):
            found = [add_one(inputs[number]) for _launch in range(200)]
            return torch.stack(found).unique().tolist()

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(act, range(THREADS))) == [[number + 1.0] for number in range(THREADS)]
    assert len(ordinary) == before


def test_b27_a_backward_on_autograds_thread_is_planned_too(ordinary: list[str]) -> None:
    inputs = [torch.zeros(N, device="cuda", requires_grad=True) for _ in range(4)]

    def act(x: torch.Tensor) -> torch.Tensor:
        x.grad = None
        with autotune("on"):
            y = Doubled.apply(x)
        torch.autograd.backward(y, torch.full_like(y, 2.0))
        return x.grad

    act(inputs[0])
    before = len(ordinary)
    with ThreadPoolExecutor(4) as pool:
        assert [one.unique().tolist() for one in pool.map(act, inputs)] == [[3.0]] * 4
    assert len(ordinary) == before


def test_a_kernel_that_writes_in_place_tells_autograd(ordinary: list[str]) -> None:
    x = torch.zeros(N, device="cuda")
    for launch in range(1, 4):
        version = x._version
        inc_kernel[by_blocks](x, N)
        assert (x.unique().tolist(), x._version) == ([float(launch)], version + 1)
    assert ordinary[-1] == "inc_kernel"
    assert _planned(ordinary, lambda: inc_kernel[by_blocks](x, N))


@pytest.mark.parametrize(
    "sample", samples(lambda one: one.case.name == "odd" and one.dtype == one.spec.dtypes[-1]), ids=str
)
def test_operators_have_their_fixed_bytes_by_plan(sample: Any, ordinary: list[str]) -> None:
    op, inputs = triton_op(sample.spec.name), sample.inputs()
    with autotune("off"):
        fixed = run_sample(op, sample, inputs)
    run_sample(op, sample, inputs)
    before = len(ordinary)
    planned = run_sample(op, sample, inputs)
    left = sorted(set(ordinary[before:]))
    for (name, ours), (_name, theirs) in zip(planned.tensors(), fixed.tensors(), strict=True):
        assert_same_bytes(ours, theirs, name)
    # scaling by a gradient of 1 writes nothing, so a first launch of it proves nothing
    assert set(left) <= {"_grpo_scale_kernel"}, f"launched through Triton: {left}"


def test_b50_a_compiled_region_launches_by_plan(ordinary: list[str]) -> None:
    silu = triton_op("silu")
    x = torch.randn(N, device="cuda")
    with autotune("off"):
        wanted = silu(x)
    with process_mode("on"):
        compiled = torch.compile(silu, fullgraph=True)
        assert_same_bytes(compiled(x), wanted, "cold")
        before = len(ordinary)
        assert_same_bytes(compiled(x), wanted, "hot")
    assert len(ordinary) == before


def test_launch_hooks_see_every_launch(ordinary: list[str]) -> None:
    x = torch.zeros(N, device="cuda")
    add_one(x)
    seen: list[str] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        for _launch in range(3):
            add_one(x)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["add_one_kernel"] * 3
    assert _planned(ordinary, lambda: add_one(x))


def test_a_tensor_of_the_host_is_refused_as_ever(ordinary: list[str]) -> None:
    x, y = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")
    add_one_kernel[by_blocks](x, y, N)
    with pytest.raises(ValueError, match="cpu tensor"):
        add_one_kernel[by_blocks](torch.zeros(N), y, N)
    assert _planned(ordinary, lambda: add_one_kernel[by_blocks](x, y, N))
    torch.cuda.synchronize()


def test_a_million_launches_take_no_more_memory(ordinary: list[str]) -> None:
    x, y = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")

    def launch(times: int) -> tuple[int, int]:
        for number in range(times):
            add_one_kernel[by_blocks](x, y, N - number % 900)
        torch.cuda.synchronize()
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        return resident, torch.cuda.memory_allocated()

    before = launch(20_000)
    launched = len(ordinary)
    after = launch(LAUNCHES)
    assert after[1] == before[1]
    assert after[0] - before[0] < GROWTH_BYTES
    assert len(ordinary) == launched
    assert len(add_one_kernel._settled) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("name", ["swiglu", "rms_norm", "rope", "logp", "grpo_loss"])
def test_b03_every_operator_runs_on_its_tensors_device(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch)
    (sample,) = samples(lambda one: (one.spec.name, one.case.name, one.dtype) == (name, "odd", one.spec.dtypes[-1]))
    op = triton_op(name)
    far = map_tensors(sample.inputs(), lambda one: one.to("cuda:1"))
    with torch.cuda.device(1), autotune("off"):
        wanted = run_sample(op, sample, far)
    with new_process(MemoryStore()), autotune(mode):
        for _launch in range(3):
            found = run_sample(op, sample, far)
            assert torch.cuda.current_device() == 0
            for (label, ours), (_label, theirs) in zip(found.tensors(), wanted.tensors(), strict=True):
                assert ours.get_device() == 1
                assert_same_bytes(ours, theirs, label)
