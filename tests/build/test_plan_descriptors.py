"""Plans of kernels that take matrices as tensor descriptors: encoded once for every place, and never a wrong one."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import weakref
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from rl_engine.backends.shared.triton import descriptors, plan
from rl_engine.backends.shared.triton.autotuning import KernelLauncher, TunableKernel
from rl_engine.runtime.policy import autotune
from tests.support.fake_card import FakeCard, Start, fake_card, on_card

MEMORY = torch.arange(8192, dtype=torch.float32)
WIDE = on_card(MEMORY[:2048].view(32, 64))
OUT = on_card(MEMORY[4096:6144])


def _block(meta: Mapping[str, Any]) -> list[int]:
    block = [meta["ROWS"], meta["COLS"]]
    return block[::-1] if meta["TURNED"] else block


@TunableKernel(
    outputs=("y_ptr",),
    data=("x_ptr",),
    descriptors={"x_ptr": _block},
    fixed=lambda _sizes, _device: {"num_warps": 4},
    neutral={"num_warps": (2, 4)},
)
@triton.jit
def copied_kernel(y_ptr, x_ptr, ROWS: tl.constexpr, COLS: tl.constexpr, TURNED: tl.constexpr):
    """Copy a tile; the described argument is not the first."""
    tile = x_ptr.load([0, 0])
    tl.store(y_ptr + tl.arange(0, ROWS * COLS), tl.reshape(tile, (ROWS * COLS,)))


def _copy(given: dict[str, Any]) -> None:
    encoding, *sizes = given["x_ptr"]
    digest = zlib.crc32(repr((encoding.how, sizes, ctypes.string_at(encoding.address, 8))).encode())
    ctypes.memset(given["y_ptr"], 1 + digest % 200, 8)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCard]:
    plan._unsupported.cache_clear()
    monkeypatch.setattr(KernelLauncher, "_choose", lambda *_args: ({"num_warps": 2}, True))
    with fake_card(monkeypatch, copied_kernel) as found, autotune("on"):
        found.compute["copied_kernel"] = _copy
        yield found
    plan._unsupported.cache_clear()


def _start(card: FakeCard, matrix: torch.Tensor) -> Start:
    before = len(card.starts)
    turned = descriptors.lies_transposed(matrix)
    copied_kernel[(1,)](OUT, matrix, ROWS=16, COLS=32, TURNED=turned)
    return card.starts[before]


def _encoding(start: Start) -> tuple[Any, ...]:
    encoding, *sizes = start.args[1]
    return encoding.address, encoding.how, sizes


def test_a_hot_launch_passes_what_tritons_own_does(card: FakeCard) -> None:
    first, again = _start(card, WIDE), _start(card, WIDE)
    assert (first.by_address, again.by_address) == (False, True)
    assert _encoding(again) == _encoding(first)
    assert again.args[0] == OUT.data_ptr()
    assert (again.function, again.packed, again.grid) == (first.function, first.packed, first.grid)


PLACES: dict[str, torch.Tensor] = {
    "another address": on_card(MEMORY[64:2112].view(32, 64)),
    "another shape": on_card(MEMORY[:1984].view(31, 64)),
    "another row stride": on_card(MEMORY[:3072].view(32, 96)[:, :64]),
    "rows and columns exchanged in shape and strides": on_card(MEMORY[:2048].view(64, 32)),
}


@pytest.mark.parametrize("what", PLACES)
def test_a_matrix_that_lies_otherwise_gets_its_own_encoding(what: str, card: FakeCard) -> None:
    _start(card, WIDE)
    planned = _start(card, WIDE)
    with autotune("off"):
        wanted = _start(card, PLACES[what])
    other = _start(card, PLACES[what])
    assert (planned.by_address, wanted.by_address, other.by_address) == (True, False, True)
    assert _encoding(other) == _encoding(wanted) != _encoding(planned)
    assert _encoding(_start(card, WIDE)) == _encoding(planned)


def test_a_transposed_matrix_is_described_as_it_lies(card: FakeCard) -> None:
    turned = on_card(MEMORY[:2048].view(64, 32).mT)
    first, again = _start(card, turned), _start(card, turned)
    assert (first.by_address, again.by_address) == (False, True)
    assert _encoding(again) == _encoding(first)
    assert list(_encoding(again)[2]) == [64, 32, 32, 1]


def test_plans_of_described_matrices_keep_no_tensor(card: FakeCard) -> None:
    matrix = on_card(torch.zeros(32, 64))
    for _launch in range(3):
        assert _start(card, matrix)
    kept = weakref.ref(matrix)
    del matrix
    card.starts.clear()
    gc.collect()
    assert kept() is None


def test_a_place_is_encoded_once_and_places_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []

    def encode(one: Any) -> tuple[Any, ...]:
        encoded.append((one.base.data_ptr(), list(one.shape), list(one.strides), list(one.block_shape)))
        return tuple(encoded[-1])

    monkeypatch.setattr(descriptors, "_MOST_PLACES", 2)
    places = descriptors.Places([16, 32], encode)
    first, second, third = (MEMORY[64 * at : 64 * at + 2048].view(32, 64) for at in range(3))
    address = first.data_ptr()
    assert places(first, address) == places(first, address) == (address, [32, 64], [64, 1], [16, 32])
    assert places(first.mT, address) == (address, [32, 64], [64, 1], [16, 32])  # as it lies in memory
    assert len(encoded) == 2
    places(second, second.data_ptr())
    places(third, third.data_ptr())
    assert (len(encoded), len(places._made)) == (4, 2)
    places(first, address)
    assert len(encoded) == 5  # it had been forgotten


def test_a_kernel_whose_descriptors_were_lowered_to_pointers_has_no_plan(card: FakeCard) -> None:
    _start(card, WIDE)
    (compiled,) = next(iter(copied_kernel.fn.device_caches.values()))[0].values()
    values = {"y_ptr": OUT, "x_ptr": WIDE, "ROWS": 16, "COLS": 32, "TURNED": False}
    known = (copied_kernel.fn, copied_kernel._signature)
    assert plan.obstacle(*known, compiled, values, 0) is None
    others = dataclasses.replace(copied_kernel._signature, described=())
    assert plan.obstacle(copied_kernel.fn, others, compiled, values, 0) is not None
    assert plan.obstacle(*known, compiled, {**values, "x_ptr": None}, 0) is not None
