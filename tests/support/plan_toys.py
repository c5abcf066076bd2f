"""A kernel with an argument of every kind, launched on a card that is not there: for trials of launch plans."""

import contextlib
import ctypes
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from rl_engine.backends.shared.triton import plan
from rl_engine.backends.shared.triton.autotuning import KernelLauncher, TunableKernel
from rl_engine.runtime.policy import autotune
from tests.support.fake_card import FakeCard, Start, fake_card, on_card

N = 48
MEMORY = torch.zeros(4096)
SHIFT = tl.constexpr(2.0)


@TunableKernel(
    outputs=("y_ptr",),
    data=("x_ptr",),
    dynamic=("n",),
    fixed=lambda _sizes, _device: {"BLOCK": 32, "num_warps": 4},
    neutral={"BLOCK": (32, 64), "num_warps": (2, 4)},
)
@triton.jit(do_not_specialize=["n", "free"])
def shifted_kernel(
    x_ptr, extra_ptr, y_ptr, n, stride, free, scale, flag, CUTOFF: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr
):
    """Have an argument of every kind, and a captured global."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + (lane * stride).to(tl.int64), mask=lane < n, other=0.0).to(tl.float32) * scale + SHIFT
    x += free * CUTOFF
    if extra_ptr is not None:
        x += tl.load(extra_ptr + lane, mask=lane < n, other=0.0)
    if flag:
        x += 1.0
    tl.store(y_ptr + lane, x.to(y_ptr.dtype.element_ty), mask=lane < n)


def fold(given: Mapping[str, Any]) -> None:
    """Write to y bytes that depend on every argument but the tuned one, and on what lies at the addresses."""
    seen = [(name, value) for name, value in given.items() if name != "BLOCK" and not name.endswith("_ptr")]
    read = [(name, ctypes.string_at(given[name], 8) if given[name] else None) for name in ("x_ptr", "extra_ptr")]
    ctypes.memset(given["y_ptr"], 1 + zlib.crc32(repr((seen, read)).encode()) % 200, 8)


@contextlib.contextmanager
def toy_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCard]:
    """Give the block a card; every signature settles at once, on options that are not the fixed ones."""
    plan._unsupported.cache_clear()
    monkeypatch.setattr(KernelLauncher, "_choose", lambda *_args: ({"BLOCK": 64, "num_warps": 2}, True))
    with fake_card(monkeypatch, shifted_kernel) as card, autotune("on"):
        card.compute["shifted_kernel"] = fold
        yield card
    plan._unsupported.cache_clear()


BASE: dict[str, Any] = {
    "x_ptr": on_card(MEMORY[:1024]), "extra_ptr": None, "y_ptr": on_card(MEMORY[2048:3072]),
    "n": N, "stride": 32, "free": 5, "scale": 1.5, "flag": False, "CUTOFF": 0.5, "WORD": "a",
}  # fmt: skip


def blocks(meta: Mapping[str, Any]) -> tuple[int]:
    return (-(-meta["n"] // meta["BLOCK"]),)


def start(card: FakeCard, grid: Any = blocks, **changes: Any) -> Start:
    """Launch and return what was started last: a first launch may be followed by those that prove its plan."""
    before = len(card.starts)
    shifted_kernel[grid](**{**BASE, **changes})
    assert len(card.starts) > before
    return card.starts[-1] if len(card.starts) == before + 1 else card.starts[before]


def warm(card: FakeCard, **changes: Any) -> Start:
    """Launch until a plan does it, and return that launch."""
    first, second = start(card, **changes), start(card, **changes)
    assert not first.by_address
    assert second.by_address, "no plan was made"
    assert second.function == first.function
    return second
