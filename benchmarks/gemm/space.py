"""The space of paths, tiles and launches of one product, all of one bit class: what a search goes through."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.gemm.rows import ITEMSIZE, PEERS
from rl_engine.backends.shared.triton.gemm import rule
from rl_engine.backends.shared.triton.gemm.rule import Plan
from rl_engine.backends.shared.triton.resources import shared_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

_FEW = 64  # rows or columns up to which the other operand's stream is the limit
_MIDDLE = 512
_ARCH = "sm_90"  # what the report is about


@dataclass(frozen=True)
class Choice:
    """A path and tile, and its launch."""

    plan: Plan
    num_warps: int
    num_stages: int
    GROUP: int = 8

    def __str__(self) -> str:
        """Return it as text."""
        plan = self.plan
        path = ("descriptors" if plan.described else "pointers") + (", exchanged" if plan.swapped else "")
        launch = f"{self.num_warps} warps, {self.num_stages} stages, group {self.GROUP}"
        return f"{plan.block_m}x{plan.block_n}x{plan.block_k}, {path}, {launch}"

    @property
    def options(self) -> dict[str, int]:
        """Return the launch as keyword arguments."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "GROUP": self.GROUP}


NAIVE = {
    PEERS[2]: Choice(Plan(128, 128, 64), 8, 3),
    PEERS[3]: Choice(Plan(128, 256, 64), 8, 3),
}


def space(m: int, n: int, k: int) -> list[Choice]:
    """Return every choice that the kernels admit on a Hopper card, without repeats; the rule's own is timed beside."""
    few = min(m, n)
    some = _few(m, n) if few <= _FEW else _middle() if few <= _MIDDLE else _many()
    return list(dict.fromkeys(one for one in (_no_deeper(one, k) for one in some) if _fits(one, m, n, k)))


def _no_deeper(choice: Choice, k: int) -> Choice:
    """Return a choice whose pipeline is no deeper than K has steps."""
    return replace(choice, num_stages=min(choice.num_stages, max(2, -(-k // choice.plan.block_k))))


def _fits(choice: Choice, m: int, n: int, k: int) -> bool:
    plan = choice.plan
    rows, cols = (n, m) if plan.swapped else (m, n)
    sizes = {"m": rows, "n": cols, "k": k, "PRECISION": None}
    sizes |= {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k}
    if plan.described:
        sizes["PARTS"] = 1 if plan.block_n < _FEW else ITEMSIZE
    shared = rule.needs(sizes, choice.options).shared_bytes
    return rule.admits(sizes, choice.options) and shared <= shared_bytes(_ARCH)


def _few(m: int, n: int) -> Iterator[Choice]:
    width = max(rule.LEAST, 1 << (min(m, n) - 1).bit_length())
    for described, block_k, stages in itertools.product((True, False), (64, 128, 256), (3, 5, 6)):
        for rows in (64, 128):  # the longer side fills the rows of the matrix instruction
            yield Choice(Plan(rows, width, block_k, described, m < n), 4, stages)
        for cols in (32, 64, 128):  # the shorter side does, filled up
            tile = (width, cols) if m < n else (cols, width)
            yield Choice(Plan(*tile, block_k, described), 4, stages)


def _middle() -> Iterator[Choice]:
    tiles = ((128, 128), (64, 128), (128, 64), (64, 64), (128, 32), (64, 32), (64, 256))
    for (rows, cols), block_k, stages in itertools.product(tiles, (64, 128), (3, 4, 6)):
        warps = 8 if rows * cols > 64 * 128 else 4
        yield Choice(Plan(rows, cols, block_k, described=True), warps, stages)
        yield Choice(Plan(rows, cols, block_k, described=True, swapped=True), warps, stages)
        yield Choice(Plan(rows, cols, block_k), warps, stages)


def _many() -> Iterator[Choice]:
    for (rows, cols), group in itertools.product(((128, 256), (256, 128)), (4, 8, 16)):
        for stages in (3, 4):
            yield Choice(Plan(rows, cols, 64, described=True), 8, stages, group)
    for rows, cols, warps in ((128, 128, 4), (128, 128, 8), (64, 256, 4)):
        for stages in (3, 4, 5):
            yield Choice(Plan(rows, cols, 64, described=True), warps, stages)
    yield Choice(Plan(128, 128, 128, described=True), 8, 2)
    yield Choice(Plan(128, 256, 64), 8, 3)
    yield Choice(Plan(128, 256, 64), 8, 4)
    yield Choice(Plan(128, 128, 64), 8, 4)
