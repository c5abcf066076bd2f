"""Launches with tuning off: Triton's own, with fixed options that are looked up rather than asked for again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rl_engine.backends.shared.triton import autotuning
from rl_engine.platforms import device
from rl_engine.platforms.device import DeviceIdentity
from rl_engine.runtime.policy import autotune
from tests.support.fake_card import FakeCard
from tests.support.plan_toys import shifted_kernel, start


def test_off_asks_the_fixed_rule_once_for_equal_sizes(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fixed(sizes: Any, _device: Any) -> dict[str, int]:
        asked.append(sizes["n"])
        return {"BLOCK": 32 if sizes["n"] < 40 else 64, "num_warps": 4}

    monkeypatch.setattr(device, "identify", lambda _index: DeviceIdentity("cuda", "card", "sm_90", 132))
    monkeypatch.setattr(autotuning, "_FIXED_LAUNCHES", 4)
    with autotune("off"):
        start(card)  # by the rule that another takes the place of
        monkeypatch.setattr(shifted_kernel, "declaration", replace(shifted_kernel.declaration, fixed=fixed))
        for n, grid in ((33, 2), (48, 1), (33, 2), (48, 1)):
            again = start(card, n=n)
            assert (again.by_address, again.grid, again.packed[0]) == (False, (grid, 1, 1), 4)
        assert asked == [33, 48]
        for n in range(40):
            start(card, n=n)
        assert len(shifted_kernel._fixed) <= 4
