"""PersistentAutotuner: memory, own cache, shared packs, measurement, publication. It knows keys and times only."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar
from weakref import WeakValueDictionary

from rl_engine import settings
from rl_engine.errors import InvalidRecordError, StoreUnusableError, TrialUnavailableError
from rl_engine.platforms.tuning import events
from rl_engine.platforms.tuning.decision import measure
from rl_engine.platforms.tuning.events import EventKind, EventLog, TuningEvent
from rl_engine.platforms.tuning.limits import KeyLimits
from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import FileStore, MemoryStore, PackStore, Store
from rl_engine.platforms.tuning.trial import Canary
from rl_engine.platforms.tuning.waiting import CANARY_TRIES, WaitingKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rl_engine.platforms.tuning.decision import Measurement
    from rl_engine.platforms.tuning.key import Candidate, Part, TuningKey
    from rl_engine.platforms.tuning.trial import Qualified, Trial
    from rl_engine.settings import AutotuneMode

Source = Literal["tuned", "disk", "shared", "memory", "fixed"]
_Result = TypeVar("_Result")
logger = logging.getLogger("rl_engine")


@dataclass(frozen=True)
class Selection:
    """Which launch to use. ``settled`` is False where the answer may change: ask again at the next launch."""

    winner: Candidate
    source: Source
    reason: str
    settled: bool = True


@dataclass(frozen=True)
class SelectionReport:
    """One key of `Report.selections`."""

    kernel: str
    key: str
    winner: str
    source: Source
    reason: str


@dataclass(frozen=True)
class Report:
    """What a process tuned: event counts, seconds spent on measuring, its selections, keys missed under capture."""

    counts: dict[str, int]
    seconds: float
    selections: tuple[SelectionReport, ...]
    missed: tuple[TuningKey, ...]


@dataclass(frozen=True)
class _Request:
    """The arguments of one `PersistentAutotuner.select`."""

    key: TuningKey
    candidates: tuple[Candidate, ...]
    trial: Callable[[], Trial]
    mode: AutotuneMode
    provenance: tuple[tuple[str, Part], ...]

    @property
    def fixed(self) -> Candidate:
        return self.candidates[0]


@dataclass
class _Book:
    """What this process knows; guarded by one lock. Selections by mode: what replay misses, ``on`` still measures."""

    selections: dict[tuple[str, AutotuneMode], tuple[str, Selection]] = field(default_factory=dict)  # digest: kernel
    in_flight: WeakValueDictionary[str, _Request] = field(default_factory=WeakValueDictionary)  # until its select ends
    missed: dict[TuningKey, None] = field(default_factory=dict)
    spent_s: float = 0.0


class PersistentAutotuner:
    """Selects launches and remembers them, in memory and on disk. Thread-safe; never waits for anybody.

    Args:
        own: where this user's records lie.
        packs: read-only folders, looked up after ``own``.
        budget_s: seconds this object may spend on qualifying and timing.
        clock: monotonic seconds.
        wall_clock: seconds since the epoch, for a record's date.
        log: where decisions go; the process's log by default.
    """

    def __init__(
        self,
        own: Store,
        packs: tuple[PackStore, ...] = (),
        *,
        budget_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        log: EventLog | None = None,
    ) -> None:
        self._own = own
        self._fallback = MemoryStore()
        self._packs = packs
        self._budget_s = budget_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._log = log or events.log()
        self._limits = KeyLimits()
        self._waiting = WaitingKeys(clock)
        self._book = _Book()
        self._lock = threading.Lock()

    def select(
        self,
        key: TuningKey,
        candidates: tuple[Candidate, ...],
        trial: Callable[[], Trial],
        *,
        mode: AutotuneMode = "on",
        provenance: tuple[tuple[str, Part], ...] = (),
    ) -> Selection:
        """Return the launch to use for ``key``: remembered, recorded, or measured now.

        Args:
            key: what the answer is valid for.
            candidates: the fixed launch first.
            trial: makes the trial; called only where something has to be run.
            mode: ``on``, or ``replay``, which never measures.
            provenance: facts to store in a new record beside its key.
        """
        fixed = candidates[0]
        with self._lock:
            _kernel, known = self._book.selections.get((key.digest, mode), ("", None))
            if known is not None:
                return Selection(known.winner, "memory", known.reason)
            waiting_for = self._waiting.reason(key.digest)
            if waiting_for is not None:
                return Selection(fixed, "fixed", waiting_for, settled=False)
            if key.digest in self._book.in_flight:
                return Selection(fixed, "fixed", "another thread is measuring this key", settled=False)
            request = self._book.in_flight[key.digest] = _Request(key, candidates, trial, mode, provenance)
        selection = None
        try:
            selection = self._resolve(request)
        finally:
            with self._lock:  # in one step: a thread that saw neither would measure the key again
                self._book.in_flight.pop(key.digest, None)
                if selection is not None and selection.settled:
                    events.keep(self._book.selections, (key.digest, mode), (key.kernel, selection))
                    self._waiting.end(key.digest)
        return selection

    def miss(self, key: TuningKey) -> None:
        """Remember that ``key`` was met where nothing may be measured (a capture)."""
        with self._lock:
            new = key not in self._book.missed
            events.keep(self._book.missed, key, None)
        if new:
            self._emit("missed", key, reason="met under capture; the fixed launch was used")

    def missed(self) -> tuple[TuningKey, ...]:
        """Return the keys that were met under capture, in order, without those settled since."""
        with self._lock:
            settled = {digest for digest, _mode in self._book.selections}
            return tuple(key for key in self._book.missed if key.digest not in settled)

    def report(self) -> Report:
        """Return what was decided so far, as data."""
        missed = self.missed()
        with self._lock:
            selections = tuple(
                SelectionReport(kernel, digest, str(one.winner), one.source, one.reason)
                for (digest, _mode), (kernel, one) in self._book.selections.items()
            )
            return Report(self._log.counts(), self._book.spent_s, selections, missed)

    def _resolve(self, request: _Request) -> Selection:
        replayed = self._replay(request)
        if replayed is not None:
            return replayed
        if request.mode != "on":
            return self._fixed(request, "no record, and replay measures nothing")
        if self._book.spent_s >= self._budget_s:
            return self._fixed(request, f"the budget of {self._budget_s:g} s is spent")
        refusal = self._limits.refuse(request.key)
        if refusal is not None:
            self._log.warn_once(request.key.kernel, refusal)
            return self._fixed(request, refusal)
        lock = self._guarded(lambda store: store.try_lock(request.key.digest))
        if lock is None:
            return self._postpone(request, "another process is measuring this key")
        with lock:
            return self._replay(request) or self._measure(request)

    def _replay(self, request: _Request) -> Selection | None:
        """Return what a record on disk says, once it is compared with the fixed launch, or None."""
        found = self._find(request)
        if found is None:
            return None
        record, text, source = found
        if record.winner == request.fixed:
            return self._settle(request, Selection(record.winner, source, record.reason), "replayed")
        trial = request.trial()
        try:
            verdict = trial.canary(record.winner, request.fixed, record.evidence.bits)
        except TrialUnavailableError as error:
            return self._not_compared(request, f"the record cannot be compared now: {error}")
        finally:
            trial.close()
        if verdict is Canary.NOT_NOW:
            return self._not_compared(request, "the record cannot be compared now")
        if verdict is Canary.OTHER_CLASS:
            self._refuse(request, source, "the fixed launch is in another bit class now")
            return None
        if verdict is Canary.DIFFERENT:
            self._guarded(lambda store: store.quarantine(request.key.digest, text))
            reason = (
                f"{request.key.kernel}: the record {request.key.digest} names {record.winner}, whose bytes differ from "
                "the fixed launch's; it is quarantined and the fixed launch is used"
            )
            self._log.warn_once(request.key.kernel, reason)
            return self._settle(request, Selection(request.fixed, "fixed", reason), "quarantined")
        return self._settle(request, Selection(record.winner, source, record.reason), "replayed")

    def _find(self, request: _Request) -> tuple[TuningRecord, str, Source] | None:
        digest = request.key.digest
        bad = self._guarded(lambda store: store.quarantined(digest))
        places: list[tuple[Source, str | None]] = [("disk", self._guarded(lambda store: store.load(digest)))]
        places += [("shared", self._from_pack(pack, digest)) for pack in self._packs]
        for source, text in places:
            if text is None or text == bad:
                continue
            try:
                record = TuningRecord.from_json(text)
                record.check(request.key, request.candidates)
            except InvalidRecordError as error:
                self._refuse(request, source, error)
                continue
            return record, text, source
        return None

    def _refuse(self, request: _Request, source: Source, problem: object) -> None:
        """Warn of a record that is not used, once a place: a cache may hold many."""
        reason = f"the record {request.key.digest} ({source}) is not used: {problem}"
        self._log.warn_once(request.key.kernel, reason, topic=f"bad record ({source})")

    def _measure(self, request: _Request) -> Selection:
        from_s = self._clock()
        trial = request.trial()
        try:
            qualified = trial.qualify(request.candidates)
            measurement = measure(
                qualified.survivors, trial.sample, lambda: self._book.spent_s + self._clock() - from_s >= self._budget_s
            )
        except TrialUnavailableError as error:
            self._log.warn_once(request.key.kernel, f"{request.key.kernel} is not tuned: {error}")
            return self._fixed(request, str(error))
        finally:
            trial.close()
            seconds = self._clock() - from_s
            with self._lock:
                self._book.spent_s += seconds
        for rejection in qualified.rejections:
            self._emit("rejected", request.key, winner=str(rejection.candidate), reason=rejection.reason)
        record = self._record(request, qualified, measurement)
        self._guarded(lambda store: store.publish(request.key.digest, record.to_json()))
        return self._settle(request, Selection(record.winner, "tuned", record.reason), "tuned", seconds)

    def _record(self, request: _Request, qualified: Qualified, measurement: Measurement) -> TuningRecord:
        decision = measurement.decision
        return TuningRecord(
            key=request.key,
            candidates=request.candidates,
            winner=decision.winner,
            ratio=decision.ratio,
            noise=decision.noise,
            reason=decision.reason,
            screening=measurement.screening,
            final=measurement.final,
            rejections=qualified.rejections,
            evidence=qualified.evidence,
            provenance=request.provenance,
            created_s=int(self._wall_clock()),
        )

    def _fixed(self, request: _Request, reason: str) -> Selection:
        return self._settle(request, Selection(request.fixed, "fixed", reason), "fixed")

    def _settle(self, request: _Request, selection: Selection, kind: EventKind, seconds: float = 0.0) -> Selection:
        self._emit(kind, request.key, winner=str(selection.winner), reason=selection.reason, seconds=seconds)
        return selection

    def _not_compared(self, request: _Request, reason: str) -> Selection:
        """Put the canary off, or give it up for this process: the record stays on disk for the next one."""
        if self._waiting.may_retry_canary(request.key.digest):
            return self._postpone(request, reason)
        kernel, given_up = request.key.kernel, f"{reason}; the fixed launch is used after {CANARY_TRIES} tries"
        self._log.warn_once(kernel, f"{kernel}: {given_up}")
        return self._fixed(request, given_up)

    def _postpone(self, request: _Request, reason: str) -> Selection:
        self._waiting.put_off(request.key.digest, reason)
        self._emit("pending", request.key, reason=reason)
        return Selection(request.fixed, "fixed", reason, settled=False)

    def _guarded(self, act: Callable[[Store], _Result]) -> _Result:
        """Act on the own store; where that fails, warn once and act in memory. The next time may go well again."""
        try:
            return act(self._own)
        except StoreUnusableError as error:
            self._log.warn_once("", f"autotune cache not used: {error}", topic="own cache")
            return act(self._fallback)

    def _from_pack(self, pack: PackStore, digest: str) -> str | None:
        try:
            return pack.load(digest)
        except StoreUnusableError as error:
            self._log.warn_once("", f"shared autotune records not used: {error}", topic=f"pack {pack.folder}")
            return None

    def _emit(self, kind: EventKind, key: TuningKey, *, winner: str = "", reason: str = "", seconds: float = 0) -> None:
        self._log.emit(TuningEvent(kind, key.kernel, key.digest, winner, reason, seconds))


_process: PersistentAutotuner | None = None
_process_lock = threading.Lock()


def process_autotuner() -> PersistentAutotuner:
    """Return the autotuner of this process, made from its settings at the first call."""
    global _process  # noqa: PLW0603  # one a process, made late: the environment is read at the first tuned launch
    with _process_lock:
        if _process is None:
            chosen = settings.current()
            own = MemoryStore() if chosen.cache_dir is None else FileStore(chosen.cache_dir)
            _process = PersistentAutotuner(
                own, tuple(PackStore(folder) for folder in chosen.shared), budget_s=chosen.budget_s
            )
            atexit.register(_log_summary, _process)
        return _process


@contextlib.contextmanager
def installed(autotuner: PersistentAutotuner) -> Iterator[None]:
    """Make ``autotuner`` the process's inside the block, for programs that bring their own store or budget.

    Launches that were settled before keep their launch.
    """
    global _process  # noqa: PLW0603  # see process_autotuner
    before, _process = _process, autotuner
    try:
        yield
    finally:
        _process = before


def _after_fork_in_child() -> None:
    """Start anew: a lock that another thread of the parent held would be held for ever here."""
    global _process, _process_lock  # see process_autotuner
    _process, _process_lock = None, threading.Lock()
    atexit.unregister(_log_summary)  # it would take the parent's locks


os.register_at_fork(after_in_child=_after_fork_in_child)


def report() -> Report:
    """Return what this process tuned so far; empty where no tuned launch ran."""
    return Report({}, 0.0, (), ()) if _process is None else _process.report()


def missed() -> tuple[TuningKey, ...]:
    """Return the keys that this process met under capture and has not settled since."""
    return () if _process is None else _process.missed()


def _log_summary(autotuner: PersistentAutotuner) -> None:
    found = autotuner.report()
    kinds: tuple[EventKind, ...] = ("tuned", "replayed", "fixed", "quarantined", "missed")
    counts = ", ".join(f"{found.counts.get(kind, 0)} {kind}" for kind in kinds)
    logger.info("autotune: %s; %.1f s spent on measuring", counts, found.seconds)
