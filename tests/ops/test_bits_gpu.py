"""Why sums are explicit folds: a plain ``tl.sum`` gives other bytes at other warp counts, and the byte gate sees it."""

import pytest
import torch
import triton
import triton.language as tl

from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.primitives.folds import fold_columns
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


def rejected(kernel) -> set[str]:
    """Tune the sum of random rows; return why candidates fell out."""
    x = torch.randn(ROWS, COLS, device="cuda", generator=torch.Generator("cuda").manual_seed(21))
    y, store = torch.empty(ROWS, device="cuda"), MemoryStore()
    with new_process(store), autotune("on"):
        kernel[(ROWS,)](x, y, COLS)
    torch.testing.assert_close(y, x.sum(1), rtol=0, atol=1e-3)  # 4,096 values near 1: 2**-24 * 4096 is 2.4e-4
    (digest,) = store.digests()
    record = TuningRecord.from_json(store.load(digest) or "")
    assert record.winner not in {one.candidate for one in record.rejections}
    return {one.reason for one in record.rejections}


@pytest.mark.gpu
def test_b21_a_plain_sum_at_other_warp_counts_is_rejected_before_it_is_timed():
    assert rejected(_plain_sum_kernel) == {"not_bit_exact"}


@pytest.mark.gpu
def test_b21_a_fold_at_other_warp_counts_is_not():
    assert rejected(_folded_sum_kernel) == set()
