"""What only a card can show: streams, captures, autograd's threads, other generators (cases B18, B27)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl_engine.platforms.tuning.decision import FINAL_ROUNDS
from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import FileStore, MemoryStore
from rl_engine.runtime.policy import autotune
from tests.support.ops_inputs import (
    Maker,
    Sample,
    assert_same_bytes,
    map_tensors,
    run_sample,
    samples,
    shifted,
    triton_op,
)
from tests.support.ops_launches import forget, new_process
from tests.support.ops_toys import Doubled, add_one
from tests.support.processes import environment, run

pytestmark = pytest.mark.gpu
DELAY_CYCLES = 200_000_000  # about 0.1 s: whoever does not wait reads what was there before


def test_b18_trials_and_launches_wait_for_what_the_callers_stream_still_writes() -> None:
    silu = triton_op("silu")
    streams = [torch.cuda.Stream() for _ in range(2)]
    with autotune("off"):
        wanted = silu(torch.full((4096,), 3.0, device="cuda"))
    assert wanted[0].item() == pytest.approx(2.857722, abs=1e-6)
    for repeat in range(50):
        stream = streams[repeat % 2]
        with new_process(MemoryStore()) as tuner, autotune("on"), torch.cuda.stream(stream):
            x = torch.full((4096,), -1.0, device="cuda")
            torch.cuda._sleep(DELAY_CYCLES // 10)
            x.fill_(3.0)
            found = silu(x).clone()
            counts = tuner.report().counts
        stream.synchronize()
        assert_same_bytes(found, wanted, f"repeat {repeat}")
        assert counts["tuned"] == 1
        assert not [one for one in tuner._log.events("rejected") if one.reason in ("not_bit_exact", "unstable")]


def test_b18_a_hot_launch_runs_on_the_callers_stream_and_waits_for_nothing() -> None:
    x = torch.zeros(4096, device="cuda")
    with new_process(MemoryStore()), autotune("on"):
        add_one(x)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY_CYCLES)
            y = add_one(x)
            assert not stream.query()  # the sleep still runs: nobody waited for it
            done = torch.cuda.Event()
            done.record()
        assert not done.query()  # the launch is behind the sleep, on its stream
        stream.synchronize()
    assert y.unique().tolist() == [1.0]


@pytest.mark.parametrize("name", ["silu", "rms_norm"])
def test_a_first_launch_inside_a_capture_is_fixed_listed_as_missed_and_tuned_afterwards(name: str) -> None:
    (sample,) = samples(lambda one: (one.spec.name, one.case.name, one.dtype) == (name, "odd", "bfloat16"))
    op, inputs = triton_op(name), sample.inputs()
    with autotune("off"):
        wanted = op(*inputs.args)  # compiles and loads
    static = [arg.clone() for arg in inputs.args]
    with new_process(MemoryStore()) as tuner, autotune("on"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = op(*static)
        assert tuner.report().counts == {"missed": 1}
        assert [key.kernel for key in tuner.missed()] == [f"_{name}_fwd_kernel"]
        for _replay in range(3):
            graph.replay()
            assert_same_bytes(captured, wanted, "replay")
        static[0].neg_()
        graph.replay()
        with autotune("off"):
            assert_same_bytes(captured, op(*static), "replay on other values")
        assert_same_bytes(op(*inputs.args), wanted, "eager, tuned")
        assert tuner.report().counts["tuned"] == 1
        assert tuner.missed() == ()
        static[0].neg_()
        graph.replay()
        assert_same_bytes(captured, wanted, "replay after tuning")


def test_a_tuned_launch_can_be_captured() -> None:
    x = Maker(torch.float32).normal(5000)
    with new_process(MemoryStore()) as tuner, autotune("on"):
        wanted = add_one(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = add_one(x)
        graph.replay()
        assert_same_bytes(captured, wanted, "replay")
        assert tuner.missed() == ()
        forget()
        graph.replay()
        assert_same_bytes(captured, wanted, "replay after the tables were emptied")


def test_tuning_leaves_the_cards_generators_and_the_current_device_alone() -> None:
    before, current = torch.cuda.get_rng_state(), torch.cuda.current_device()
    with new_process(MemoryStore()), autotune("on"):
        add_one(torch.zeros(4096, device="cuda"))
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert torch.cuda.current_device() == current


def test_scratch_is_handed_back_after_tuning() -> None:
    x = torch.zeros(1 << 22, device="cuda")
    with new_process(MemoryStore()) as tuner, autotune("on"):
        add_one(x)
        assert tuner.report().counts["tuned"] == 1
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        forget()
    with new_process(MemoryStore()), autotune("on"):
        y = add_one(x)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before + y.untyped_storage().nbytes()


def test_records_hold_graph_replays_with_the_inputs_out_of_the_cache(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "cache")
    with new_process(store), autotune("on"):
        add_one(torch.zeros(1 << 18, device="cuda"))  # large enough for 128 sets of it to fill an L2
    (digest,) = store.digests()
    record = TuningRecord.from_json(store.load(digest) or "")
    assert (record.evidence.timer, record.evidence.cache) == ("cuda-graph", "cold")
    assert record.evidence.inputs == ("live", "perturbed")
    assert record.evidence.comparisons > 0
    assert all(len(times) == FINAL_ROUNDS for times in record.final.values())
    names = dict(record.key.parts)
    assert names["device.name"] == torch.cuda.get_device_name()
    assert names["device.uuid"] == str(torch.cuda.get_device_properties(0).uuid)


BACKWARD_FIRST = """
import torch
from rl_engine.platforms.autotuner import process_autotuner
from tests.support.ops_toys import Doubled
x = torch.zeros(1000, device="cuda", requires_grad=True)
y = Doubled.apply(x)
torch.autograd.backward(y, torch.zeros_like(y))
print(x.grad.unique().tolist(), sorted(process_autotuner().report().counts))
"""


def test_b27_a_process_whose_records_are_there_may_launch_first_in_autograds_thread(tmp_path: Path) -> None:
    env = environment(RL_KERNEL_AUTOTUNE="1", RL_KERNEL_AUTOTUNE_CACHE_DIR=str(tmp_path / "cache"))
    assert "[1.0]" in run(BACKWARD_FIRST, env=env)
    assert run(BACKWARD_FIRST, env=env) == "[1.0] ['replayed']\n"


def test_b27_a_backward_in_autograds_thread_follows_the_block_around_its_forward() -> None:
    x = torch.zeros(1000, device="cuda", requires_grad=True)
    with new_process(MemoryStore()) as tuner:
        with autotune("on"):
            y = Doubled.apply(x)
        torch.autograd.backward(y, torch.zeros_like(y))
        assert tuner.report().counts["tuned"] == 2
    assert x.grad is not None, "a leaf"
    assert x.grad.unique().tolist() == [1.0]


@pytest.mark.parametrize("sample", samples(lambda one: one.case.name == "odd" and one.dtype == "bfloat16"), ids=str)
def test_b49_misaligned_views_share_the_bytes_of_aligned_ones(sample: Sample) -> None:
    op, inputs = triton_op(sample.spec.name), sample.inputs()
    with new_process(MemoryStore()), autotune("on"):
        first = run_sample(op, sample, inputs)
        moved = run_sample(op, sample, map_tensors(inputs, shifted))
        again = run_sample(op, sample, inputs)
    for (name, aligned), (_name, other), (_again, last) in zip(
        first.tensors(), moved.tensors(), again.tensors(), strict=True
    ):
        assert_same_bytes(other, aligned, f"{name}, one element further")
        assert_same_bytes(last, aligned, f"{name}, aligned again")
