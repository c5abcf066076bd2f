"""What the tuned backends open is one bit class with what the rule takes: compiled for Hopper, path by path."""

from __future__ import annotations

import pytest
import torch

from rl_engine.backends.shared.triton.bits import BitClass, bit_class, together
from rl_engine.backends.shared.triton.distinct import Ready
from rl_engine.backends.shared.triton.gemm.launch import ready
from rl_engine.backends.shared.triton.gemm.space import Sizes, chosen_by_rule, space
from rl_engine.backends.shared.triton.rows import selected_logps
from rl_engine.platforms import device
from tests.support.offline import OPTIONS, TARGETS, Offline, Specialisation, compile_offline

TARGET = TARGETS["sm_90"]
MOST = 5  # of a space, from all over it


def _class(launches: list[tuple[Ready, dict[str, int]]]) -> BitClass:
    made = []
    for launch, options in launches:
        values = {**launch.prepared(options).values, **{name: options[name] for name in options if name not in OPTIONS}}
        given = {name: options[name] for name in options if name in OPTIONS}
        made.append(bit_class(compile_offline(Offline(launch.kernel, values, given), TARGET, Specialisation())))
    return together(made)


@pytest.fixture(autouse=True)
def _card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "identify", lambda _index: TARGET.identity)


@pytest.mark.parametrize(("m", "n", "k"), [(16, 6144, 4096), (128, 4096, 4096), (8192, 6144, 4096)])
def test_paths_and_tiles_of_a_product_add_in_one_order(m: int, n: int, k: int) -> None:
    a, b = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(n, k, dtype=torch.bfloat16).mT
    out = torch.empty(m, n, dtype=torch.bfloat16)
    sizes = Sizes(m, n, k, out.element_size(), describable=True)
    choices = space(sizes, TARGET.identity)
    assert {one.plan.described for one in choices} == {True, False}
    expected, *found = (
        _class([(ready(one.plan, a, b, out, "half"), one.options)])
        for one in (chosen_by_rule(sizes, TARGET.identity), *choices[:: len(choices) // MOST])
    )
    assert [one.difference(expected) for one in found] == [""] * len(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(64, 151936), (16384, 5003)])
def test_rows_and_chunks_of_log_probabilities_add_in_one_order(rows: int, cols: int, dtype: torch.dtype) -> None:
    call = selected_logps._Call(
        torch.empty(rows, cols, dtype=dtype), None, torch.zeros(rows, dtype=torch.int64), None,
        torch.empty(1, rows), torch.empty(2, rows), -100, 1.0,
    )  # fmt: skip
    fixed, *ways = selected_logps._ways(call, TARGET.identity)
    assert {bool(dict(one.options)["ROWS"]) for one in ways} == {True, False}
    expected, *found = (
        _class(list(selected_logps._launches(call, one))) for one in (fixed, *ways[:: len(ways) // MOST])
    )
    assert [one.difference(expected) for one in found] == [""] * len(found)
