"""Host time of calls that leave work on a GPU: loops that never wait for it, everyone's in turns."""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rl_engine.runtime.policy import autotune

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from rl_engine.settings import AutotuneMode

ROUNDS = 15
_WARM_CALLS = 5
_Name = TypeVar("_Name")


@dataclass(frozen=True)
class Contender:
    """A call, and the launch policy that its loops run under; None for who has none."""

    call: Callable[[], Any]
    mode: AutotuneMode | None = None

    def around(self) -> AbstractContextManager[Any]:
        """Return the context of a loop."""
        return nullcontext() if self.mode is None else autotune(self.mode)

    def once(self) -> Any:
        """Call it once under its policy."""
        with self.around():
            return self.call()


def in_turns(contenders: Mapping[_Name, Contender], *, times: int, rounds: int = ROUNDS) -> dict[_Name, float]:
    """Return microseconds a call of each: the median of ``rounds`` loops of ``times`` calls, in turns.

    The card is waited for between loops and not inside them. ``times`` must leave the queue of launches, some 1,000
    deep, room, or the host waits after all: so short kernels only.
    """
    samples: dict[_Name, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        for _warm in range(_WARM_CALLS):
            contender.once()
    gc.collect()
    gc.disable()  # a collection in one loop would be counted against whoever runs then
    try:
        for _round in range(rounds):
            for name, contender in contenders.items():
                samples[name].append(_loop(contender, times))
    finally:
        gc.enable()
    return {name: statistics.median(found) for name, found in samples.items()}


def _loop(contender: Contender, times: int) -> float:
    call = contender.call
    with contender.around():
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _call in range(times):
            call()
        spent = time.perf_counter() - began
    torch.cuda.synchronize()
    return spent / times * 1e6
