"""A try at a lock answers at once or is given up; what it leaves behind is let go."""

from __future__ import annotations

import errno
import fcntl
import threading
from pathlib import Path

import filelock
import pytest

from rl_engine.errors import LocksUnusableError, StoreUnusableError
from rl_engine.platforms.tuning import locks
from rl_engine.platforms.tuning.locks import release, try_acquire
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
    release(lock)
    again = try_acquire(path)
    assert again is not None
    release(again)


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
        (late,) = [one for one in threading.enumerate() if one.name == "rl_kernel try-lock"]
        answer.set()
        late.join(10)
    monkeypatch.setattr(locks, "PATIENCE_S", 5.0)
    lock = try_acquire(path)
    assert lock is not None
    release(lock)


def test_an_interrupted_wait_lets_go_of_a_lock_that_was_granted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = threading.Event.wait

    def interrupted(event: threading.Event, timeout: float | None = None) -> bool:
        wait(event, timeout)
        if threading.current_thread() is threading.main_thread() and timeout == locks.PATIENCE_S:
            raise KeyboardInterrupt
        return event.is_set()

    with monkeypatch.context() as broken:
        broken.setattr(threading.Event, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            try_acquire(path)
    lock = try_acquire(path)
    assert lock is not None
    release(lock)


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
    def none_left(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    lock = try_acquire(path)
    assert lock is not None
    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", none_left)
        with pytest.raises(StoreUnusableError, match="can't start new thread"):
            try_acquire(path)
        release(lock)
    again = try_acquire(path)
    assert again is not None
    release(again)


def test_tries_leave_no_descriptor_open(path: Path) -> None:
    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = opened()
    for _ in range(20):
        lock = try_acquire(path)
        assert lock is not None
        assert try_acquire(path) is None
        release(lock)
    assert opened() == before
