"""Keys without an answer yet: when each is asked for again, and how often its record could not be compared."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
CANARY_TRIES = 3  # at 0, 1 and 3 s; each stalls a launch, so a run that never has the memory must not try for ever


@dataclass
class _Pause:
    again_at_s: float
    delay_s: float
    reason: str


class WaitingKeys:
    """Puts keys off, each time twice as long. Thread-safe.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pauses: dict[str, _Pause] = {}
        self._canaries: dict[str, int] = {}

    def reason(self, digest: str) -> str | None:
        """Return why the key is not to be asked for yet, or None where it may be."""
        with self._lock:
            pause = self._pauses.get(digest)
            return None if pause is None or self._clock() >= pause.again_at_s else pause.reason

    def put_off(self, digest: str, reason: str) -> None:
        """Let the key wait: a second at first, a minute at most."""
        with self._lock:
            before = self._pauses.get(digest)
            delay_s = FIRST_RETRY_S if before is None else min(2 * before.delay_s, LAST_RETRY_S)
            self._pauses[digest] = _Pause(self._clock() + delay_s, delay_s, reason)

    def may_retry_canary(self, digest: str) -> bool:
        """Count a canary that could not run; returns whether there is to be another."""
        with self._lock:
            self._canaries[digest] = self._canaries.get(digest, 0) + 1
            return self._canaries[digest] < CANARY_TRIES

    def end(self, digest: str) -> None:
        """Forget the key: it is settled."""
        with self._lock:
            self._pauses.pop(digest, None)
            self._canaries.pop(digest, None)
