"""A try at a lock answers at once or is given up; what it leaves behind is let go."""

from __future__ import annotations

import _thread
import errno
import fcntl
import threading
import time
from pathlib import Path

import filelock
import pytest

from rl_engine.errors import LocksUnusableError, StoreUnusableError
from rl_engine.platforms.tuning import locks
from rl_engine.platforms.tuning.locks import try_acquire
from rl_engine.platforms.tuning.store import FileStore

real_flock = fcntl.flock
DIGEST = "ab" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "key.lock"


def test_a_lock_is_held_until_it_is_released(path: Path) -> None:
    lock = try_acquire(path)
    assert lock is not None
    assert try_acquire(path) is None
    lock.release()
    again = try_acquire(path)
    assert again is not None
    again.release()


def test_a_lock_that_somebody_takes_between_look_and_try_is_busy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_is_free", lambda _path: True)
    lock = filelock.FileLock(path)
    with lock:
        assert try_acquire(path) is None


def test_a_call_that_does_not_answer_is_given_up_and_its_lock_let_go(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(locks, "PATIENCE_S", 0.05)
    with monkeypatch.context() as slow:
        slow.setattr(fcntl, "flock", lambda handle, operation: answer.wait(10) and real_flock(handle, operation))
        with pytest.raises(LocksUnusableError, match=r"did not answer in 0\.05 s"):
            try_acquire(path)
        answer.set()
    monkeypatch.setattr(locks, "PATIENCE_S", 5.0)
    ends_s = time.monotonic() + 10
    while (lock := try_acquire(path)) is None:
        assert time.monotonic() < ends_s
    lock.release()


def test_an_interrupted_wait_lets_go_of_a_lock_that_was_granted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = locks._Attempt.outcome

    def interrupted(attempt: locks._Attempt) -> None:
        outcome(attempt)
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(locks._Attempt, "outcome", interrupted)
        with pytest.raises(KeyboardInterrupt):
            try_acquire(path)
    lock = try_acquire(path)
    assert lock is not None
    lock.release()


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "no locks"), NotImplementedError("no flock")], ids=str)
def test_a_file_system_without_locks_is_left_alone_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(_handle: int, _operation: int) -> None:
        raise error

    store = FileStore(tmp_path / "cache")
    with monkeypatch.context() as broken:
        broken.setattr(fcntl, "flock", fail)
        with pytest.raises(StoreUnusableError, match="has no locks"):
            store.try_lock(DIGEST)
    with pytest.raises(StoreUnusableError, match="has no locks"):
        store.load(DIGEST)


def test_without_another_thread_a_lock_is_neither_taken_nor_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_run: object, _args: object) -> None:
        raise RuntimeError("can't start new thread")

    lock = try_acquire(path)
    assert lock is not None
    with monkeypatch.context() as broken:
        broken.setattr(_thread, "start_new_thread", none_left)
        with pytest.raises(StoreUnusableError, match="can't start new thread"):
            try_acquire(path)
        lock.release()
    again = try_acquire(path)
    assert again is not None
    again.release()


def test_tries_leave_no_descriptor_open(path: Path) -> None:
    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = opened()
    for _ in range(20):
        lock = try_acquire(path)
        assert lock is not None
        assert try_acquire(path) is None
        lock.release()
    assert opened() == before


def run_here(path: Path) -> locks._Attempt:
    """Make a try in this thread, told beforehand to let go of what it is granted: seen by the coverage tracer."""
    attempt = locks._Attempt(path)
    attempt.abandon()
    attempt.run()
    return attempt


def test_a_try_holds_nothing_once_it_was_told_to_let_go(path: Path) -> None:
    assert isinstance(run_here(path).outcome(), locks.Lease)
    lock = try_acquire(path)
    assert lock is not None
    lock.release()


def test_a_try_at_a_busy_lock_is_answered_with_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filelock.FileLock(path):
        assert run_here(path).outcome() is None
        monkeypatch.setattr(locks, "_is_free", lambda _path: True)
        assert run_here(path).outcome() is None


def test_a_try_that_fails_is_answered_with_its_reason(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_handle: int, _operation: int) -> None:
        raise OSError(errno.EIO, "disk")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(StoreUnusableError, match="cannot lock there"):
        run_here(path).outcome()


def test_a_lease_that_nobody_holds_any_more_is_let_go(path: Path) -> None:
    assert try_acquire(path) is not None  # and dropped
    ends_s = time.monotonic() + 10
    while (lock := try_acquire(path)) is None:
        assert time.monotonic() < ends_s
    lock.release()
    lock.release()  # once more changes nothing
