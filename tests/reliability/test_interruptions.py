"""Ctrl-C at random moments of real time: it propagates, and nothing is left held, half-written or half-known."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import FileStore
from tests.support.tuning import CANDIDATES, FAST, FakeTrial, Lab, make_key

SEED, INTERRUPTIONS = 11, 300
LATEST_S = 0.004  # a select takes about 2 ms here


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Return a function that has KeyboardInterrupt raised so many seconds later."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def free(folder: Path, digest: str) -> bool:
    """Say whether the key's lock can be had."""
    lock = FileStore(folder).try_lock(digest)
    if lock is not None:
        with lock:
            return True
    return False


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that hits a finaliser is swallowed
def test_three_hundred_interruptions_leave_every_lock_free_and_every_record_whole(
    tmp_path: Path, alarm: Callable[[float], None], tally: Callable[..., None]
) -> None:
    folder, chance, interrupted, tries = tmp_path / "cache", random.Random(SEED), 0, 0
    while interrupted < INTERRUPTIONS:
        tries += 1
        assert tries < 20 * INTERRUPTIONS
        lab, key = Lab(FileStore(folder)), make_key(n=tries)
        try:
            alarm(chance.uniform(1e-5, LATEST_S))
            lab.select(FakeTrial(), key)
            alarm(0)
            continue
        except KeyboardInterrupt:
            interrupted += 1
        text = FileStore(folder).load(key.digest)
        if text is not None:  # published whole, or not at all
            TuningRecord.from_json(text).check(key, CANDIDATES)
        ends_s = time.monotonic() + 5  # a try that was interrupted takes the lock and lets it go, in its own thread
        while not free(folder, key.digest):
            assert time.monotonic() < ends_s, f"interruption {interrupted}: the lock is held"
        while not (chosen := lab.select(FakeTrial(), key)).settled:  # that thread was later than our look
            assert time.monotonic() < ends_s, f"interruption {interrupted}: {chosen.reason}"
            lab.clock.now_s += 60
        assert chosen.winner == FAST
        assert lab.warnings() == []
    assert list(folder.glob(".*.tmp")) == []
    tally(
        "Ctrl-C at a random moment of a select", INTERRUPTIONS, "it propagates; locks free, records whole, key tunable"
    )
