"""The launch that nobody thought about: blocks of 1024 elements, one row a program, 4 warps."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

NAIVE_BLOCK = 1024
NAIVE_WARPS = 4
# axes that count what one program handles
COUNTS = frozenset({"ROWS", "SEQS", "GROUPS", "TOKENS", "HEADS"})


def naive_launch(fixed: Mapping[str, int], neutral: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return a fixed launch with every axis that the kernel declares neutral set to the naive value.

    Counts become 1 and blocks 1024, but not above the widest block that the kernel declares; an axis of another kind
    keeps its value, and so do axes that are not neutral.
    """
    launch = dict(fixed)
    for axis in fixed:
        if axis not in neutral:
            continue
        if axis == "num_warps":
            launch[axis] = NAIVE_WARPS
        elif axis in COUNTS:
            launch[axis] = 1
        elif axis.startswith("BLOCK"):
            launch[axis] = min(NAIVE_BLOCK, max(neutral[axis]))
    return launch


@contextlib.contextmanager
def naive_launches(kernels: Mapping[str, Any]) -> Iterator[None]:
    """Launch every kernel naively inside the block; ``kernels`` as `autotuning.kernels` returns them."""
    declared = {kernel: kernel.declaration for kernel in kernels.values()}
    for kernel, declaration in declared.items():
        kernel.declaration = replace(declaration, fixed=_rule(declaration))
    try:
        yield
    finally:
        for kernel, declaration in declared.items():
            kernel.declaration = declaration


def _rule(declaration: Any) -> Callable[[Any, Any], dict[str, int]]:
    def rule(sizes: Any, identity: Any) -> dict[str, int]:
        return naive_launch(declaration.fixed(sizes, identity), declaration.neutral)

    return rule
