"""What a launch plan covers and what it must not: everything that Triton specialises on, flipped (cases B22, B49)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from rl_engine.runtime.policy import LaunchPolicy, pinned
from tests.support.fake_card import FakeCard, on_card
from tests.support.plan_toys import BASE, MEMORY, shifted_kernel, start, warm


def test_a_plan_starts_what_tritons_own_launch_would(card: FakeCard) -> None:
    first = start(card)
    again = start(card)
    assert (first.by_address, again.by_address) == (False, True)
    named = dict(zip(shifted_kernel.arg_names, again.args, strict=True))
    assert named == {
        **BASE, "x_ptr": BASE["x_ptr"].data_ptr(), "extra_ptr": 0, "y_ptr": BASE["y_ptr"].data_ptr(), "BLOCK": 64,
    }  # fmt: skip
    ordinary = dict(zip(shifted_kernel.arg_names, first.args, strict=True))
    assert ordinary["x_ptr"] is BASE["x_ptr"]
    assert (again.grid, again.stream, again.function, again.packed) == (
        first.grid, first.stream, first.function, first.packed,
    )  # fmt: skip
    assert (again.grid, again.stream, again.packed) == ((1, 1, 1), card.stream, (2, 1, 0))  # two warps: the winner's


def _half(tensor: torch.Tensor) -> torch.Tensor:
    return on_card(tensor.view(torch.float16))


FLIPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dtype of an input": ({}, {"x_ptr": _half(MEMORY[:1024])}),
    "dtype of an output": ({}, {"y_ptr": _half(MEMORY[2048:3072])}),
    "a misaligned input": ({}, {"x_ptr": on_card(MEMORY[1:1025])}),
    "an input misaligned by 8 bytes": ({}, {"x_ptr": on_card(MEMORY[2:1026])}),
    "a misaligned output": ({}, {"y_ptr": on_card(MEMORY[2049:3073])}),
    "an aligned one after a misaligned one": ({"x_ptr": on_card(MEMORY[1:1025])}, {}),
    "a tensor for None": ({}, {"extra_ptr": on_card(MEMORY[1024:2048])}),
    "None for a tensor": ({"extra_ptr": on_card(MEMORY[1024:2048])}, {}),
    "an integer that becomes 1": ({}, {"stride": 1}),
    "an integer that no longer is 1": ({"stride": 1}, {"stride": 2}),
    "a stride no multiple of 16": ({}, {"stride": 33}),
    "a stride of another value": ({}, {"stride": 48}),
    "a stride of 64 bits": ({}, {"stride": 2**31}),
    "a stride below 32 bits": ({}, {"stride": -(2**31) - 16}),
    "an unsigned stride": ({"stride": 2**62}, {"stride": 2**63}),
    "a float for an integer": ({"stride": 2}, {"stride": 2.0}),
    "True for 1": ({"stride": 1}, {"stride": True}),
    "a length of 64 bits": ({"n": 2**31 - 1}, {"n": 2**31}),
    "a length below 32 bits": ({"n": -5}, {"n": -(2**31) - 5}),
    "an unsigned length": ({"n": 2**63 - 1}, {"n": 2**63}),
    "a length that is a bool": ({"n": 1}, {"n": True}),
    "a length of another bucket": ({}, {"n": 65}),
    "an unspecialised integer": ({}, {"free": 1}),
    "an unspecialised integer of 64 bits": ({}, {"free": 2**31}),
    "an integer for a float": ({}, {"scale": 2}),
    "True for False": ({}, {"flag": True}),
    "0 for False": ({}, {"flag": 0}),
    "None for a bool": ({}, {"flag": None}),
    "a constant float": ({}, {"CUTOFF": 0.25}),
    "a constant -0.0": ({"CUTOFF": 0.0}, {"CUTOFF": -0.0}),
    "a constant integer": ({"CUTOFF": 1.0}, {"CUTOFF": 1}),
    "a word": ({}, {"WORD": "b"}),
}  # fmt: skip


@pytest.mark.parametrize("what", FLIPS)
def test_b49_whatever_triton_specialises_on_misses_the_plan(what: str, card: FakeCard) -> None:
    before, after = FLIPS[what]
    once = (1,)  # lengths of 64 bits are only numbers here
    shifted_kernel[once](**{**BASE, **before})
    planned = start(card, once, **before)
    assert planned.by_address
    other = start(card, once, **after)
    assert not other.by_address, "the plan of other arguments was used"
    assert start(card, once, **before).function == planned.function


SAME: dict[str, dict[str, Any]] = {
    "another length of the bucket": {"n": 33},
    "the bucket's last length": {"n": 64},
    "another float": {"scale": -7.25},
    "not a number": {"scale": math.nan},
    "another aligned address": {"x_ptr": on_card(MEMORY[4:1028])},
}


@pytest.mark.parametrize("what", SAME)
def test_b22_what_changes_from_step_to_step_is_passed_on_exactly(what: str, card: FakeCard) -> None:
    planned = warm(card)
    again = start(card, **SAME[what])
    assert again.by_address
    assert again.function == planned.function
    for name, value in SAME[what].items():
        seen = again.args[shifted_kernel.arg_names.index(name)]
        assert seen == (value.data_ptr() if isinstance(value, torch.Tensor) else value) or seen is value


def test_b22_the_grid_is_evaluated_at_every_launch_with_all_arguments(card: FakeCard) -> None:
    warm(card, n=130)
    assert start(card, n=200).grid == (4, 1, 1)
    assert start(card, n=129).grid == (3, 1, 1)
    assert start(card, (5, 2), n=130).grid == (5, 2, 1)
    seen: list[Mapping[str, Any]] = []

    def grid(meta: Mapping[str, Any]) -> list[int]:
        seen.append(dict(meta))
        return [1, 2, 3]

    assert start(card, grid, n=131).grid == (1, 2, 3)
    assert seen == [{**BASE, "n": 131, "BLOCK": 64}]


def test_b22_launches_with_every_option_of_the_callers_have_plans_of_their_own(card: FakeCard) -> None:
    chosen = warm(card)
    for options in ({"BLOCK": 32, "num_warps": 4}, {"BLOCK": 64, "num_warps": 4}):
        first, again = start(card, **options), start(card, n=40, **options)
        assert (first.by_address, again.by_address) == (False, True)
        assert again.function == first.function != chosen.function
        assert (again.args[-1], again.packed[0]) == (options["BLOCK"], 4)
    assert start(card).function == chosen.function


@pytest.mark.parametrize("option", [{"num_warps": 4}, {"BLOCK": 32}, {"num_stages": 2}])
def test_b22_some_options_of_the_caller_are_not_planned(option: dict[str, int], card: FakeCard) -> None:
    planned = warm(card)
    explicit = start(card, **option)
    assert not explicit.by_address
    assert (explicit.function != planned.function) or "num_stages" in option
    assert explicit.args[-1] == option.get("BLOCK", 32)


def test_an_argument_that_the_kernel_lacks_is_refused_hot_and_cold(card: FakeCard) -> None:
    for _launch in range(2):
        with pytest.raises(TypeError, match="no_such"):
            start(card, no_such=1)
        start(card)


def test_phases_and_modes_have_plans_of_their_own(card: FakeCard) -> None:
    warm(card)
    for policy in (LaunchPolicy("on", "backward"), LaunchPolicy("replay"), LaunchPolicy("replay", "backward")):
        with pinned(policy):
            warm(card)
    assert len(shifted_kernel._settled) == 4
