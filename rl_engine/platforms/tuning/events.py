"""What the tuner did, as data: every decision is an event; the library never prints."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("rl_engine")

EventKind = Literal[
    "tuned",  # measured here; `winner` may be the fixed launch
    "replayed",  # a record from disk, checked
    "fixed",  # the fixed launch, for `reason`
    "pending",  # another process measures this key, or its record cannot be compared now; the fixed launch meanwhile
    "missed",  # met while a stream was being captured
    "quarantined",  # a record whose bytes differ from the fixed launch's
    "rejected",  # a candidate that may not be chosen
    "warning",  # something the user should mend; logged once
    "dispatch",  # an operator was chosen (audit mode)
]
KEPT = 10_000  # events kept for report(); counts go on beyond
_Name = TypeVar("_Name")
_Entry = TypeVar("_Entry")


def keep(table: dict[_Name, _Entry], name: _Name, value: _Entry) -> None:
    """Enter ``value``, and drop the oldest of more than `KEPT`: it is looked up again."""
    table[name] = value
    if len(table) > KEPT:
        del table[next(iter(table))]


@dataclass(frozen=True)
class TuningEvent:
    """One decision. ``key`` is a digest, ``winner`` a candidate's text, ``seconds`` the time it cost."""

    kind: EventKind
    kernel: str
    key: str = ""
    winner: str = ""
    reason: str = ""
    seconds: float = 0.0


class EventLog:
    """Keeps events, counts them and hands them to listeners. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[TuningEvent] = deque(maxlen=KEPT)
        self._counts: Counter[str] = Counter()
        self._listeners: list[Callable[[TuningEvent], None]] = []
        self._warned: set[str] = set()

    def emit(self, event: TuningEvent) -> None:
        """Record ``event``, log it at debug level and call the listeners, in this thread."""
        with self._lock:
            self._events.append(event)
            self._counts[event.kind] += 1
            listeners = tuple(self._listeners)
        logger.debug(
            "%s %s %s: %s %s %.3f s", event.kind, event.kernel, event.key, event.winner, event.reason, event.seconds
        )
        for listener in listeners:
            listener(event)

    def warn_once(self, kernel: str, reason: str, *, topic: str | None = None) -> None:
        """Log ``reason`` as a warning and record it, the first time this process meets it, or ``topic`` if given."""
        with self._lock:
            if (topic or reason) in self._warned:
                return
            self._warned.add(topic or reason)
        logger.warning("%s", reason)
        self.emit(TuningEvent("warning", kernel, reason=reason))

    def subscribe(self, listener: Callable[[TuningEvent], None]) -> Callable[[], None]:
        """Call ``listener`` with every later event; returns the function that ends that."""
        with self._lock:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners.remove(listener)

        return unsubscribe

    def events(self, kind: EventKind | None = None) -> tuple[TuningEvent, ...]:
        """Return the kept events, oldest first; only those of ``kind`` if it is given."""
        with self._lock:
            return tuple(event for event in self._events if kind in (None, event.kind))

    def counts(self) -> dict[str, int]:
        """Return how many events of each kind there were."""
        with self._lock:
            return dict(self._counts)


_process_log = EventLog()


def _after_fork_in_child() -> None:
    """Start anew: a lock that another thread of the parent held would be held for ever here."""
    global _process_log  # noqa: PLW0603  # one a process
    _process_log = EventLog()


os.register_at_fork(after_in_child=_after_fork_in_child)


def log() -> EventLog:
    """Return the event log of this process."""
    return _process_log
