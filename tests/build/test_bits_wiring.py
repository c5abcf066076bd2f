"""Candidates of another bit class are never run, and a record of another class is not followed."""

from __future__ import annotations

from typing import Any

import pytest

from rl_engine.backends.shared.triton import compiler
from rl_engine.backends.shared.triton.bits import bit_class
from rl_engine.backends.shared.triton.distinct import Failures, LaunchSite, one_kernel
from rl_engine.platforms.tuning.key import Candidate
from tests.support import bits_toys as toys
from tests.support.bits_toys import compiled
from tests.support.offline import TARGETS

FOUR, EIGHT, STAGES = (
    Candidate.of(num_warps=4), Candidate.of(num_warps=8), Candidate.of(num_warps=4, num_stages=4),
)  # fmt: skip


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile for a card that is not there, and load nothing."""

    def compile_launch(kernel: Any, _grid: Any, values: Any, options: Any, _index: int) -> Any:
        return compiled(kernel, TARGETS["sm_90"], {**values, **options})

    monkeypatch.setattr(compiler, "compile_launch", compile_launch)
    monkeypatch.setattr(compiler, "load", lambda _compiled: None)


def _site(kernel: Any, **values: int) -> LaunchSite:
    return LaunchSite(one_kernel(kernel, (1,), values), 0, "", Failures())


def test_a_candidate_that_sums_in_another_order_is_rejected_with_what_differs() -> None:
    found = _site(toys.row_sum_kernel).distinct((FOUR, EIGHT, STAGES))
    assert found.kept == (FOUR,)
    other, same = found.rejections
    assert (other.candidate, same.candidate) == (EIGHT, STAGES)
    layouts = "register=1,2 lane=4,8,16,32,64 warp=128,256,512", "register=1,2,512 lane=4,8,16,32,64 warp=128,256"
    differing = " against ".join(f"tt.reduce by arith.addf over 1024: {one} of f32" for one in layouts)
    assert other.reason == f"bits: another class ({differing})"
    assert same.reason == f"same launch as {FOUR}"
    assert found.bits == bit_class(compiled(toys.row_sum_kernel, TARGETS["sm_90"], {})).digest


def test_a_fold_keeps_its_candidates() -> None:
    found = _site(toys.fold_kernel).distinct((FOUR, EIGHT))
    assert (found.kept, found.rejections) == ((FOUR, EIGHT), ())


def test_float_atomics_leave_the_fixed_launch_alone() -> None:
    found = _site(toys.atomic_kernel).distinct((FOUR, EIGHT))
    assert found.kept == (FOUR,)
    assert [one.reason for one in found.rejections] == ["bits: another class (atomics add in any order)"]


def test_a_record_is_kept_by_the_class_of_the_fixed_launch_without_disassembling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = _site(toys.elementwise_kernel)
    bits = site.distinct((FOUR,)).bits
    monkeypatch.setattr(compiler, "nvdisasm", lambda: pytest.fail("takes 0.4 s a kernel"))
    assert site.keeps(FOUR, bits)
    assert not site.keeps(FOUR, "")
    assert not _site(toys.fold_kernel).keeps(FOUR, bits)
