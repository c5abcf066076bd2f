"""How far a phase has come: a bar on a terminal that has tqdm, else a plain line for every tenth of the way."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType


class Progress:
    """Counts the steps of one phase for the person who waits; says nothing when ``quiet``."""

    def __init__(self, label: str, total: int, *, done: int = 0, quiet: bool = False) -> None:
        self._label = label
        self._total = total
        self._done = done
        self._quiet = quiet
        self._bar: Any = None
        if not quiet and sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            tqdm = importlib.import_module("tqdm").tqdm
            self._bar = tqdm(total=total, initial=done, desc=label, unit="step")

    def advance(self, note: str) -> None:
        """Count one step; ``note`` says how it went."""
        self._done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update()
        elif not self._quiet and (self._done % max(1, self._total // 10) == 0 or self._done == self._total):
            print(f"{self._label} {self._done}/{self._total}: {note}", flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
