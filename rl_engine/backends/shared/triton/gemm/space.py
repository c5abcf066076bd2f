"""The space of paths, tiles and launches of one product: what a tuned backend and a search choose between."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from rl_engine.backends.shared.triton.compiler import is_interpreter
from rl_engine.backends.shared.triton.gemm import rule
from rl_engine.backends.shared.triton.gemm.rule import Plan
from rl_engine.backends.shared.triton.resources import shared_bytes
from rl_engine.platforms.tuning.key import Candidate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_engine.platforms.device import DeviceIdentity

_FEW = 64  # rows or columns up to which the other operand's stream is the limit
_MIDDLE = 512


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

    @classmethod
    def of(cls, candidate: Candidate) -> Choice:
        """Return the choice that `candidate` was made of."""
        found = dict(candidate.options)
        tile = (found["BLOCK_M"], found["BLOCK_N"], found["BLOCK_K"])
        plan = Plan(*tile, described=bool(found["described"]), swapped=bool(found["swapped"]))
        return cls(plan, found["num_warps"], found["num_stages"], found["GROUP"])

    @property
    def candidate(self) -> Candidate:
        """Return it as the autotuner takes it."""
        plan = self.plan
        return Candidate.of(
            BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, described=int(plan.described),
            swapped=int(plan.swapped), **self.options,
        )  # fmt: skip

    @property
    def options(self) -> dict[str, int]:
        """Return the launch as keyword arguments."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "GROUP": self.GROUP}


class Sizes(NamedTuple):
    """What is multiplied: a result [m, n] of ``itemsize`` bytes an element, over k, of bf16 or fp16 operands.

    ``describable`` says whether all three matrices can be described.
    """

    m: int
    n: int
    k: int
    itemsize: int
    describable: bool


def chosen_by_rule(sizes: Sizes, device: DeviceIdentity) -> Choice:
    """Return what the rule takes."""
    plan = rule.plan(sizes.m, sizes.n, sizes.k, "half", device, describable=sizes.describable)
    return Choice(plan, **rule.launch(_seen_by_rules(plan, sizes), device))


def space(sizes: Sizes, device: DeviceIdentity) -> tuple[Choice, ...]:
    """Return every choice that the kernels admit on a card, without repeats.

    On AMD's there is none: its matrix units add other groups of K in other tiles.
    """
    if is_interpreter(device.arch):  # a longer BLOCK_K would be added in NumPy's order
        plans = (Plan(rows, 64, 1, swapped=swapped) for rows in (64, 128) for swapped in (False, True))
        return tuple(Choice(plan, 4, 1, 1) for plan in plans)
    if device.kind != "cuda":
        return ()
    few = min(sizes.m, sizes.n)
    some = _few(sizes.m, sizes.n) if few <= _FEW else _middle() if few <= _MIDDLE else _many()
    hopper = sizes.describable and device.arch.startswith(("sm_9", "sm_10"))
    able = (_no_deeper(one, sizes.k) for one in some if hopper or not one.plan.described)
    return tuple(dict.fromkeys(one for one in able if _fits(one, sizes, device)))


def _no_deeper(choice: Choice, k: int) -> Choice:
    """Return a choice whose pipeline is no deeper than K has steps."""
    return replace(choice, num_stages=min(choice.num_stages, max(2, -(-k // choice.plan.block_k))))


def _seen_by_rules(plan: Plan, sizes: Sizes) -> dict[str, int | None]:
    """Return what the kernels' rules look at."""
    rows, cols = (sizes.n, sizes.m) if plan.swapped else (sizes.m, sizes.n)
    seen = {"m": rows, "n": cols, "k": sizes.k, "PRECISION": None}
    seen |= {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k}
    return seen | {"PARTS": rule.parts(plan, sizes.itemsize)} if plan.described else seen


def _fits(choice: Choice, sizes: Sizes, device: DeviceIdentity) -> bool:
    seen = _seen_by_rules(choice.plan, sizes)
    shared = rule.needs(seen, choice.options).shared_bytes
    return rule.admits(seen, choice.options) and shared <= shared_bytes(device.arch)


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
