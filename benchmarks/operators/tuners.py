"""A tuner that knows nothing yet, for benchmarks that time what it chooses."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rl_engine.backends.shared.triton import autotuning
from rl_engine.platforms.autotuner import PersistentAutotuner, installed
from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import MemoryStore
from rl_engine.runtime.policy import autotune

if TYPE_CHECKING:
    from collections.abc import Iterator

_BUDGET_S = 600.0  # of measuring: here its choice is of interest, not its patience


class NewTuner:
    """Tunes what is launched in its blocks, as the first process on a machine would. Forgets what kernels settled."""

    def __init__(self) -> None:
        for kernel in autotuning.kernels().values():
            kernel.forget()
        self._store = MemoryStore()
        self._tuner = PersistentAutotuner(self._store, budget_s=_BUDGET_S)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Tune the launches of the block."""
        with installed(self._tuner), autotune("on"):
            yield

    def taken(self) -> list[TuningRecord]:
        """Return the records of launches that it did not leave to the fixed rule."""
        records = [TuningRecord.from_json(self._store.load(digest) or "") for digest in self._store.digests()]
        return [one for one in records if one.winner != one.candidates[0]]
