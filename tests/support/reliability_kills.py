"""Children that tune, publish and prune until they are killed, and the parent that looks at what they left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rl_engine.platforms.autotuner import PersistentAutotuner
from rl_engine.platforms.tuning import locks, store
from rl_engine.platforms.tuning.events import EventLog
from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import FileStore
from tests.support.tuning import CANDIDATES, FakeTrial, make_key, make_record

KEYS = tuple(make_key(n=n) for n in range(6))
LONGEST_LIFE_S = 0.03  # some ten publications
LATER_S = 7200.0  # past the age at which a temporary file counts as abandoned
STEPS = frozenset({store.__file__, locks.__file__})


class Child:
    """What runs until it is killed; tells the parent what it has done, after it was done."""

    def __init__(self, folder: Path, pipe: int, serial: int) -> None:
        self._store = FileStore(folder)
        self._pipe = pipe
        self._serial = serial

    def work(self, chance: random.Random) -> None:
        while True:
            number = chance.randrange(len(KEYS))
            chance.choice((self.tune, self.tune, self.publish, self.prune))(number)

    def tune(self, number: int) -> None:
        """Measure the key if it has no record; each tuner is new, so nothing comes from memory."""
        self._serial += 1
        tuner = PersistentAutotuner(self._store, wall_clock=lambda: self._serial, log=EventLog())
        if tuner.select(KEYS[number], CANDIDATES, FakeTrial()).source == "tuned":
            self._say("published", number)

    def publish(self, number: int) -> None:
        """Replace the record, as a second tuner without working locks would."""
        self._serial += 1
        self._store.publish(KEYS[number].digest, make_record(KEYS[number], created_s=self._serial).to_json())
        self._say("published", number)

    def prune(self, number: int) -> None:
        """Remove one key's record as stale."""
        self._say("pruning", number)
        removed = self._store.prune(now_s=time.time(), keep=lambda record: record.key != KEYS[number])
        assert [one.digest for one in removed] in ([], [KEYS[number].digest]), removed
        self._say("pruned", number)

    def _say(self, what: str, number: int) -> None:
        os.write(self._pipe, f"{what} {number} {self._serial}\n".encode())  # at once, or not at all


class Parent:
    """Starts children, kills them, and knows what must still be there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self._store = FileStore(folder)
        self._published: dict[int, int] = {}  # key number -> serial of the record that must be there, or a later one
        self._serial = 0

    def run(self, life: Callable[[Child], None], kill_after_s: float | None) -> bool:
        """Let a child live for so long (None: until it ends or kills itself); return whether it was killed."""
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reading)
            with contextlib.suppress(BaseException):
                life(Child(self.folder, writing, self._serial))
                os._exit(0)
            os._exit(3)
        os.close(writing)
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            os.kill(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert killed or (kill_after_s is None and status == 0), f"a child failed by itself: status {status}"
        with os.fdopen(reading) as said:
            self._check(said.read().splitlines())
        self.counts["kills"] += killed
        return killed

    def _check(self, said: list[str]) -> None:
        being_pruned = None
        for line in said:
            what, number, serial = line.split()[0], *map(int, line.split()[1:])
            self._serial = max(self._serial, serial)
            self.counts[what] += 1
            being_pruned = number if what == "pruning" else None
            if what == "published":
                self._published[number] = serial
            elif what == "pruned":
                self._published.pop(number, None)
        self._serial += 1  # what the child was about to publish when it was killed
        for number, key in enumerate(KEYS):
            text = self._store.load(key.digest)
            if text is None:
                assert number not in self._published or number == being_pruned, f"key {number} was lost"
                self._published.pop(number, None)
                continue
            record = TuningRecord.from_json(text)
            record.check(key, CANDIDATES)
            assert record.created_s >= self._published.get(number, 0), f"key {number} is an older record"
            if number == being_pruned:
                self._published.pop(number, None)
            self.counts["records checked"] += 1
            lock = self._store.try_lock(key.digest)
            assert lock is not None, f"the lock of key {number} is still held"
            with lock:
                pass
        known = {key.digest for key in KEYS}
        assert set(self._store.digests()) <= known

    def sweep(self) -> None:
        """Prune as if it were later; nothing but records and locks may be left."""
        temporary = sorted(self.folder.glob(".*.tmp"))
        self.counts["temporary files"] += len(temporary)
        records = self._store.digests()
        assert self._store.prune(now_s=time.time()) == ()
        assert sorted(self.folder.glob(".*.tmp")) == temporary, "a young one may still be written to"
        assert self._store.prune(now_s=time.time() + LATER_S) == ()
        ends = {path.name.partition(".")[2] for path in self.folder.iterdir()}
        assert ends <= {"json", "lock"}, "what killed writers left is swept"
        assert self._store.digests() == records


def kill_at_random(folder: str, kills: int, seed: int) -> None:
    """Kill ``kills`` children at moments drawn from ``seed``; prints what happened as JSON."""
    parent, chance = Parent(Path(folder)), random.Random(seed)
    for _ in range(kills):
        moves = random.Random(chance.random())
        parent.run(lambda child, chance=moves: child.work(chance), chance.uniform(0.001, LONGEST_LIFE_S))
    parent.sweep()
    json.dump(parent.counts, sys.stdout)


def kill_at_every_line(folder: str) -> None:
    """Kill a child at the first, second, third ... line of the store and the locks that it runs."""
    parent, line = Parent(Path(folder)), 0
    while True:
        line += 1
        if not parent.run(lambda child, last=line: _until(child, last), None):
            break
        parent.sweep()  # what is left would make the next child run more lines
    json.dump(parent.counts, sys.stdout)


def _until(child: Child, last: int) -> None:
    seen = 0

    def trace(frame: object, event: str, _argument: object) -> object:
        nonlocal seen
        if frame.f_code.co_filename not in STEPS:  # type: ignore[attr-defined]  # a frame
            return None
        if event == "line":
            seen += 1
            if seen == last:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    child.publish(0)  # before the count: it must survive everything below
    child.publish(1)
    threading.settrace(trace)  # type: ignore[arg-type]  # a trace function
    sys.settrace(trace)  # type: ignore[arg-type]  # a trace function
    child.prune(1)
    child.tune(1)
    child.publish(2)
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]  # a trace function
