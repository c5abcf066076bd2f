"""Operators inside torch.compile and under checkpointing: whole graphs, eager's bytes, traces that do nothing."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from benchmarks.operators.launches import recorded
from rl_engine.platforms.autotuner import PersistentAutotuner
from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import FileStore, MemoryStore, Store
from rl_engine.runtime.policy import autotune
from tests.support.ops_inputs import (
    DEVICE,
    DTYPES,
    ON_GPU,
    Maker,
    Outcome,
    Sample,
    assert_same,
    map_tensors,
    of_cases,
    run_sample,
    samples,
    to_double,
    triton_op,
)
from tests.support.ops_launches import new_process, process_mode
from tests.support.ops_toys import Stopwatch

TINY_FP32 = samples(lambda sample: sample.case.name == "tiny" and sample.dtype == "float32")
TINY = samples(of_cases("tiny")) if ON_GPU else TINY_FP32
silu, rms_norm = triton_op("silu"), triton_op("rms_norm")  # asked for here: get_op reads folders, so no graph holds it
BACKENDS = ("eager", "aot_eager")
GRAPH_OPERATORS = {
    "silu", "silu_backward", "swiglu", "swiglu_backward", "rms_norm", "rms_norm_backward",
    "rope", "rope_backward", "det_gemm", "det_gemm_backward",
    "embedding", "embedding_backward", "logp", "logp_backward", "grpo_loss", "grpo_loss_backward", "group_advantages",
    "ratio_kl", "ratio_kl_backward", "grpo_loss_from_logits", "grpo_loss_from_logits_backward",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _phases(store: Store) -> dict[tuple[str, object], str]:
    """Return every record's digest by kernel and phase."""
    records = [TuningRecord.from_json(store.load(digest) or "") for digest in store.digests()]
    return {(one.key.kernel, dict(one.key.parts)["phase"]): one.key.digest for one in records}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sample", TINY, ids=str)
def test_b50_a_compiled_operator_gives_eagers_bytes_off_measured_and_replayed(
    sample: Sample, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Stopwatch(monkeypatch)
    op, inputs = triton_op(sample.spec.name), sample.inputs()
    with autotune("off"):
        fixed = run_sample(op, sample, inputs)
    eager, store = MemoryStore(), MemoryStore()
    with new_process(eager), autotune("on"):
        run_sample(op, sample, inputs)
    compiled = torch.compile(op, backend=backend, fullgraph=True)
    with new_process(store) as tuner, process_mode("off"):
        assert_same(run_sample(compiled, sample, inputs), fixed, "off")
        assert tuner.report().counts == {}
    with new_process(store) as tuner, process_mode("on"):
        assert_same(run_sample(compiled, sample, inputs), fixed, "measured")
        assert_same(run_sample(compiled, sample, inputs), fixed, "remembered")
        assert tuner.report().counts["tuned"] == len(store.digests()) > 0
    assert _phases(store) == _phases(eager), "a graph's launches have other keys than the eager operator's"
    spent = timed.samples
    with new_process(store) as tuner, process_mode("replay"):
        assert_same(run_sample(compiled, sample, inputs), fixed, "replayed")
        assert tuner.report().counts == {"replayed": len(store.digests())}
    assert timed.samples == spent


@pytest.mark.parametrize(("process", "block"), [("on", "off"), ("off", "on")])
def test_inside_a_compiled_graph_the_processs_mode_rules_whatever_block_is_around(
    process: str, block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch)
    store, inputs = MemoryStore(), _block_inputs()
    compiled = torch.compile(_block, backend="aot_eager", fullgraph=True)
    with new_process(store) as tuner, process_mode(process), autotune(block):
        _gradients(compiled, inputs)
        tuned = set(_phases(store))
        assert tuned == (FORWARD | BACKWARD if process == "on" else set())
        assert tuner.report().counts.get("tuned", 0) == len(tuned)


@pytest.mark.parametrize("sample", TINY_FP32, ids=str)
def test_b50_batches_of_any_size_share_one_dynamic_graph(sample: Sample) -> None:
    op, counter = triton_op(sample.spec.name), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op, backend=counter, fullgraph=True)
    batch = next(iter(sample.case.sizes))  # rows, groups or sequences
    for size in (1, 2, 3, 4, 2, 1, 7):
        inputs = sample.inputs(**{batch: size})
        assert_same(run_sample(compiled, sample, inputs), run_sample(op, sample, inputs), f"{size} {batch}")
    assert counter.frame_count <= 2  # torch specialises a size of 1; every other size is one graph


@pytest.mark.parametrize("sample", TINY_FP32, ids=str)
def test_b50_tracing_launches_times_opens_and_asks_nothing(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopwatch(monkeypatch)
    store, opened, seen = FileStore(tmp_path / "cache"), [], []

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(path: Any, *args: Any, **kwargs: Any) -> Any:
            opened.append(str(path))
            return call(path, *args, **kwargs)

        return noted

    for module, name in ((builtins, "open"), (os, "open"), (os, "stat"), (os, "mkdir")):
        monkeypatch.setattr(module, name, noting(getattr(module, name)))

    def touched() -> list[str]:
        return [path for path in opened if path.startswith(str(tmp_path))]

    op, inputs = triton_op(sample.spec.name), sample.inputs()
    with new_process(store) as tuner, process_mode("on"), recorded() as launches:

        def backend(graph: torch.fx.GraphModule, arguments: list[torch.Tensor]) -> Callable[..., Any]:
            compiled = torch._dynamo.lookup_backend("aot_eager")(graph, arguments)  # traces forward and backward
            seen.append((len(launches), dict(tuner.report().counts), touched()))
            return compiled

        run_sample(torch.compile(op, backend=backend, fullgraph=True), sample, inputs)
        assert seen == [(0, {}, [])]
        assert len(launches) >= tuner.report().counts["tuned"] > 0, "nothing would have been seen"
    assert touched()


class Calls(TorchDispatchMode):
    """Keeps the arguments of every custom operator of the library."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "rl_kernel":
            self.found.setdefault(func._schema.name.split("::")[1], (func, args))
        return func(*args, **(kwargs or {}))


def test_b50_every_registered_operator_passes_torchs_own_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        for sample in TINY_FP32:
            with calls:
                run_sample(triton_op(sample.spec.name), sample)
    assert set(calls.found) == GRAPH_OPERATORS
    for name, (operator, args) in calls.found.items():
        fresh = tuple(arg.detach().clone() if isinstance(arg, torch.Tensor) else arg for arg in args)
        if f"{name}_backward" in GRAPH_OPERATORS or name == "rms_norm":
            fresh[0].requires_grad_()
        found = torch.library.opcheck(operator, fresh)
        assert set(found.values()) == {"SUCCESS"}, f"{name}: {found}"
        assert "test_aot_dispatch_dynamic" in found


@pytest.mark.parametrize("sample", TINY_FP32, ids=str)
def test_b50_errors_are_raised_from_compiled_code_too(sample: Sample) -> None:
    op, message = triton_op(sample.spec.name), rf"{sample.spec.name}: \w+ is torch.float64; pass bfloat16"
    inputs = map_tensors(sample.inputs(), to_double)
    with pytest.raises(TypeError, match="^" + message):
        torch.compile(op, backend="aot_eager")(*inputs.args, **inputs.kwargs)
    torch._dynamo.reset()  # it would remember that this function broke, and run it eagerly
    # under fullgraph torch raises an error of its own, which quotes ours
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        torch.compile(op, backend="aot_eager", fullgraph=True)(*inputs.args, **inputs.kwargs)


def test_b50_shapes_that_do_not_fit_are_refused_from_compiled_code() -> None:
    compiled = torch.compile(triton_op("swiglu"), backend="aot_eager")
    with pytest.raises(ValueError, match=r"^swiglu: gate is \[2, 3\], up is \[2, 4\]; pass equal shapes"):
        compiled(torch.zeros(2, 3, device=DEVICE), torch.zeros(2, 4, device=DEVICE))


def _block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return silu(rms_norm(x, weight))


def _block_inputs(dtype: torch.dtype = torch.float32, rows: int = 4, hidden: int = 8) -> tuple[torch.Tensor, ...]:
    make = Maker(dtype)
    return make.normal(rows, hidden).requires_grad_(), make.normal(hidden).requires_grad_()


def _gradients(block: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> Outcome:
    y = block(*inputs)
    dy = torch.linspace(-2.0, 2.0, y.numel(), device=y.device, dtype=torch.float32).to(y.dtype).view(y.shape)
    return Outcome((y.detach(),), dict(enumerate(torch.autograd.grad(y, inputs, dy))))


def _reentrant_gradients(block: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> Outcome:
    """Use .backward(), the only way through a reentrant checkpoint."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    y = block(*leaves)
    dy = torch.linspace(-2.0, 2.0, y.numel(), device=y.device, dtype=torch.float32).to(y.dtype).view(y.shape)
    y.backward(dy)
    return Outcome((y.detach(),), {number: leaf.grad for number, leaf in enumerate(leaves)})


def _checkpointed(reentrant: bool) -> Callable[..., torch.Tensor]:
    return lambda *args: checkpoint(_block, *args, use_reentrant=reentrant)


@pytest.mark.parametrize("mode", ["off", "on", "replay"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_checkpointing_changes_no_byte(reentrant: bool, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch)
    inputs, measure = _block_inputs(), _reentrant_gradients if reentrant else _gradients
    with autotune("off"):
        plain = _gradients(_block, inputs)
    with new_process(MemoryStore()), autotune(mode):
        assert_same(measure(_checkpointed(reentrant), inputs), plain, mode)


def _phases_tuned(tuner: PersistentAutotuner, store: Store) -> set[tuple[str, object]]:
    assert tuner.report().counts.get("tuned", 0) == len(store.digests())
    return set(_phases(store))


FORWARD = {("_rms_norm_fwd_kernel", "forward"), ("_silu_fwd_kernel", "forward")}
BACKWARD = {(name, "backward") for name in ("_silu_bwd_kernel", "_rms_norm_dx_kernel", "_rms_norm_dw_kernel")}


def test_a_checkpoint_that_is_not_reentrant_keeps_the_policy_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch)
    inputs, store = _block_inputs(), MemoryStore()
    with new_process(store) as tuner:
        with autotune("on"):
            y = checkpoint(_block, *inputs, use_reentrant=False)
        assert _phases_tuned(tuner, store) == FORWARD
        with autotune("off"), recorded() as launches:  # a GPU's backward runs where no block is in force
            torch.autograd.grad(y, inputs, torch.ones_like(y))
        # silu's backward asks for its tensors, so they are computed again inside it: under its policy, in its phase
        again = {(name, "backward") for name, _phase in FORWARD}
        assert {(one.kernel.__name__, "backward") for one in launches[:2]} == again
        assert _phases_tuned(tuner, store) == FORWARD | BACKWARD | again


def test_a_reentrant_checkpoint_follows_the_policy_around_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch)
    x, weight = _block_inputs()
    store = MemoryStore()
    with new_process(store) as tuner:
        with autotune("on"):
            y = checkpoint(_block, x, weight, use_reentrant=True)
        assert _phases_tuned(tuner, store) == FORWARD
        with autotune("replay"):  # what a GPU's backward, in autograd's thread, would take from the environment
            y.sum().backward()
        fixed = [event.kernel for event in tuner._log.events("fixed")]
        if not ON_GPU:
            assert set(fixed) == {name for name, _phase in BACKWARD}
            assert _phases_tuned(tuner, store) == FORWARD


def test_a_checkpoint_inside_a_compiled_graph_gives_eagers_bytes() -> None:
    inputs = _block_inputs()
    compiled = torch.compile(_checkpointed(reentrant=False), backend="aot_eager", fullgraph=True)
    assert_same(_gradients(compiled, inputs), _gradients(_block, inputs), "checkpointed and compiled")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # torch's own first graph, of nothing
@pytest.mark.parametrize(
    ("dtype", "compiling"), [("float32", "default"), ("bfloat16", "default"), ("bfloat16", "reduce-overhead")]
)
def test_b50_inductor_and_its_graphs_give_eagers_bytes_off_cold_and_warm(
    dtype: str, compiling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = _block_inputs(DTYPES[dtype], rows=4, hidden=256)
    with autotune("off"):
        eager = _gradients(_block, inputs)
    store = MemoryStore()
    for mode in ("off", "on", "on", "replay"):
        torch._dynamo.reset()
        with new_process(store) as tuner, process_mode(mode):
            compiled = torch.compile(_block, mode=compiling, fullgraph=True)
            for call in range(4):  # the third is captured, the fourth replayed
                torch.compiler.cudagraph_mark_step_begin()
                got = _gradients(lambda *args, run=compiled: run(*args).clone(), inputs)
                assert_same(got, eager, f"{mode}, call {call}")
            counts = tuner.report().counts
        assert counts.get("tuned", 0) == 0 or mode == "on"


@pytest.mark.gpu
def test_b50_batches_of_any_size_share_one_inductor_graph() -> None:
    op, counter = triton_op("rms_norm"), CompileCounterWithBackend("inductor")
    compiled = torch.compile(op, backend=counter, fullgraph=True)
    for rows in (1, 2, 3, 4):
        x, weight = _block_inputs(rows=rows, hidden=128)
        assert_same(_gradients(compiled, (x, weight)), _gradients(op, (x, weight)), f"{rows} rows")
    assert counter.frame_count <= 2
