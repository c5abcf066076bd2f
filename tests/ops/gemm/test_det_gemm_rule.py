"""The rule from sizes to a launch: pure, for five cards."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rl_engine.backends.shared.triton.gemm.rule import LEAST, Plan, admits, launch, needs, plan
from rl_engine.backends.shared.triton.resources import shared_bytes
from rl_engine.platforms.device import UNKNOWN, DeviceIdentity
from tests.support.offline import TARGETS

SHAPES = [(1, 6144, 4096), (16, 24576, 4096), (64, 4096, 12288), (128, 6144, 4096), (8192, 8192, 8192),
          (1 << 17, 1, 768), (3, 5, 7), (2048, 4096, 4096)]  # fmt: skip


def _sizes(found: Plan, precision: str) -> dict[str, Any]:
    sizes = {"BLOCK_M": found.block_m, "BLOCK_N": found.block_n, "BLOCK_K": found.block_k}
    parts = {"PARTS": 1 if found.block_n < 64 else 2} if found.described else {}
    return {**sizes, **parts, "PRECISION": None if precision == "half" else precision}


@pytest.mark.parametrize("precision", ["half", "tf32", "ieee"])
@pytest.mark.parametrize("name", TARGETS)
def test_the_rule_fits_every_card_and_keeps_the_groups_of_k_whole(name: str, precision: Any) -> None:
    target = TARGETS[name]
    for shape, describable in itertools.product(SHAPES, (True, False)):
        found = plan(*shape, precision, target.identity, describable=describable)
        assert found.block_k % LEAST == 0
        assert min(found.block_m, found.block_n) >= LEAST
        chosen = launch(_sizes(found, precision), target.identity)
        itemsize = 2 if precision == "half" else 4
        buffers = chosen["num_stages"] - (target.identity.kind == "hip")  # the last one is in registers
        assert (found.block_m + found.block_n) * found.block_k * itemsize * buffers <= target.shared_bytes
        assert found.block_m * found.block_n <= 128 * 32 * chosen["num_warps"] * (
            2 if target.identity.kind == "hip" else 1
        )
        assert not found.described or (describable and name in ("sm_90", "sm_100"))


def test_an_amd_card_has_one_tile_a_precision() -> None:
    for name in ("gfx942", "gfx950"):
        for precision in ("half", "tf32", "ieee"):
            found = {plan(*shape, precision, TARGETS[name].identity, describable=True) for shape in SHAPES}
            assert len(found) == 1


def test_decode_computes_the_transposed_product_and_training_the_largest_tile() -> None:
    card = TARGETS["sm_90"].identity
    assert plan(1, 6144, 4096, "half", card, describable=True).swapped
    assert not plan(1 << 17, 1, 768, "half", card, describable=True).swapped
    large = plan(8192, 8192, 8192, "half", card, describable=True)
    assert (large.block_m, large.block_n, large.described) == (128, 256, True)
    middle = plan(128, 4096, 4096, "half", card, describable=True)
    assert (middle.block_m, middle.block_n, middle.block_k) == (64, 64, 128)
    assert plan(8192, 8192, 8192, "half", DeviceIdentity("cuda", "?", "sm_89", 128), describable=True).block_n == 128


def test_candidates_fit_the_card_and_differ_in_what_runs() -> None:
    sizes = {**_sizes(Plan(64, 16, 128, described=True), "half"), "m": 6144, "n": 1, "k": 4096}
    fixed = launch(sizes, TARGETS["sm_90"].identity)
    assert admits(sizes, fixed)
    assert not admits(sizes, {**fixed, "GROUP": 1})  # one column of tiles has one order
    assert not admits({**sizes, "k": 256}, {**fixed, "num_stages": 6})  # two steps
    assert admits({**sizes, "k": 256}, {**fixed, "num_stages": 2})
    large = {**_sizes(Plan(128, 256, 64, described=True), "half"), "m": 8192, "n": 8192, "k": 8192}
    assert admits(large, {"num_warps": 8, "num_stages": 4, "GROUP": 1})
    assert needs(large, {"num_stages": 4}).shared_bytes <= shared_bytes("sm_90")
    assert needs(large, {"num_stages": 5}).shared_bytes > shared_bytes("sm_90")  # 240 KiB and more
    assert not admits(large, {"num_warps": 4, "num_stages": 3, "GROUP": 8})  # 256 sums a thread


def test_a_short_k_takes_a_short_step_and_an_unknown_card_the_smallest_memory() -> None:
    card = TARGETS["sm_90"].identity
    assert plan(64, 4096, 24, "half", card, describable=True).block_k == 32
    assert plan(8192, 8192, 1, "half", card, describable=False).block_k == LEAST
    found = plan(8192, 8192, 8192, "half", UNKNOWN, describable=True)
    assert not found.described
    assert launch(_sizes(found, "half"), UNKNOWN)["num_stages"] * (found.block_m + found.block_n) * 128 <= 99 * 1024
