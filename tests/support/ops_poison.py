"""Allocations of the package, filled with what no result may hold."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

SENTINEL = 0x5A  # of every byte of an integer
_ALLOCATES_FOR_OTHERS = "rl_engine.backends.shared.triton.graph"  # its `empty_like`


def poison_allocations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Poison what `torch.empty` and `torch.empty_like` give to this package; returns who asked, as it grows."""
    callers: list[str] = []

    def poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocated(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = allocate(*args, **kwargs)
            caller = _module(1)
            if caller.startswith("rl_engine."):
                callers.append(_module(2) if caller == _ALLOCATES_FOR_OTHERS else caller)
                _fill(made)
            return made

        return allocated

    monkeypatch.setattr(torch, "empty", poisoning(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoning(torch.empty_like))
    return callers


def _module(depth: int) -> str:
    """Return the name of the module ``depth`` calls above the caller."""
    return str(sys._getframe(depth + 1).f_globals.get("__name__", ""))


def _fill(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(int.from_bytes(bytes([SENTINEL]) * tensor.element_size(), "little"))
