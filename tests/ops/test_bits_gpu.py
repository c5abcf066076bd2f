"""Why sums are explicit folds: a plain ``tl.sum`` gives other bytes at other warp counts, and the bit class says so."""

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.operators.launches import recorded
from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.primitives.folds import fold_columns
from rl_engine.backends.shared.triton.qualification import gate
from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import MemoryStore
from rl_engine.runtime.policy import autotune
from tests.support.ops_launches import new_process

ROWS, COLS = 64, 4096
DECLARED = {
    "outputs": ("y_ptr",),
    "data": ("x_ptr",),
    "fixed": lambda _sizes, _device: {"num_warps": 4},
    "neutral": {"num_warps": (1, 2, 8, 16)},
}


@TunableKernel(**DECLARED)
@triton.jit
def _plain_sum_kernel(x_ptr, y_ptr, COLS: tl.constexpr):
    row = tl.program_id(0)
    tl.store(y_ptr + row, tl.sum(tl.load(x_ptr + row * COLS + tl.arange(0, COLS)), 0))


@TunableKernel(**DECLARED)
@triton.jit
def _folded_sum_kernel(x_ptr, y_ptr, COLS: tl.constexpr):
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * COLS + tl.arange(0, COLS))
    tl.store(y_ptr + row + tl.arange(0, 1), fold_columns(tl.reshape(x, (1, COLS)), 1, COLS))


def summed(kernel) -> torch.Tensor:
    """Launch the sum of random rows."""
    x = torch.randn(ROWS, COLS, device="cuda", generator=torch.Generator("cuda").manual_seed(21))
    y = torch.empty(ROWS, device="cuda")
    kernel[(ROWS,)](x, y, COLS)
    torch.testing.assert_close(y, x.sum(1), rtol=0, atol=1e-3)  # 4,096 values near 1: 2**-24 * 4096 is 2.4e-4
    return y


def tuned(kernel) -> TuningRecord:
    """Tune the sum of random rows; return the record."""
    store = MemoryStore()
    with new_process(store), autotune("on"):
        summed(kernel)
    (digest,) = store.digests()
    record = TuningRecord.from_json(store.load(digest) or "")
    assert record.winner not in {one.candidate for one in record.rejections}
    return record


@pytest.mark.gpu
def test_b21_a_plain_sum_at_other_warp_counts_is_rejected_before_it_runs():
    record = tuned(_plain_sum_kernel)
    assert len(record.rejections) == len(DECLARED["neutral"]["num_warps"])
    reasons = {one.reason for one in record.rejections}
    assert all(one.startswith("bits: another class (tt.reduce by arith.addf over 4096: ") for one in reasons)
    assert record.evidence.bits


@pytest.mark.gpu
def test_b21_what_the_bit_class_refuses_does_differ_in_bytes():
    with recorded() as made, autotune("off"):
        summed(_plain_sum_kernel)
    (launch,) = made
    found = gate(launch.bound(), launch.candidates())
    assert {one.reason for one in found.rejections} == {"not_bit_exact"}
    assert len(found.survivors) == 1


@pytest.mark.gpu
def test_b21_a_fold_at_other_warp_counts_is_not_rejected():
    assert tuned(_folded_sum_kernel).rejections == ()


@pytest.mark.gpu
def test_the_class_of_a_kernel_compiled_here_is_that_of_the_record_it_made():
    with recorded() as made, autotune("off"):
        summed(_folded_sum_kernel)
    (launch,) = made
    site = launch.site()
    bits = tuned(_folded_sum_kernel).evidence.bits
    assert site.keeps(launch.candidates()[0], bits)
    assert not site.keeps(launch.candidates()[0], "0" + bits[1:] if bits[0] != "0" else "1" + bits[1:])
