"""File locks that are tried and never waited for, on file systems where a lock may fail, or never answer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import inspect
import os
import threading
from typing import TYPE_CHECKING, Any

import filelock

from rl_engine.errors import LocksUnusableError, StoreUnusableError

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 1.0  # a try-lock answers in microseconds; one that does not is on a dead network disk
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ESTALE}
# where a file system has no locks, filelock 4 would fall back to a marker file that a killed process leaves behind
_STRICT: dict[str, Any] = (
    {"fallback_to_soft": False} if "fallback_to_soft" in inspect.signature(filelock.FileLock).parameters else {}
)


def try_acquire(path: Path) -> filelock.BaseFileLock | None:
    """Return the lock at ``path``, held, or None where somebody else holds it.

    Raises:
        LocksUnusableError: locks do not work there, or the call did not answer within `PATIENCE_S`; a lock that is
            granted later is let go again.
        StoreUnusableError: this try failed (disk full, too many open files or threads); another may not.
    """
    attempt = _Attempt(path)
    try:
        threading.Thread(target=attempt.run, name="rl_kernel try-lock", daemon=True).start()
    except RuntimeError as error:  # a limit on threads, or an interpreter that is shutting down
        raise StoreUnusableError(f"{path.parent}: cannot lock there ({error})") from error
    return attempt.outcome()


def _is_free(path: Path) -> bool:
    """Say whether the lock is free, by bare system calls.

    Asked before filelock is: where this hangs, filelock would make every fork of the process wait for 30 seconds and
    then end the child (4.3.1).
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(handle, 0o600)  # whatever the umask took away
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough: a child forked just now has the descriptor too
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def release(lock: filelock.BaseFileLock) -> None:
    """Let ``lock`` go, in a thread of its own that is waited for no longer than for a try.

    filelock is called in such threads only: Ctrl-C hits the main thread, where it might leave a lock of filelock held.
    Where letting go fails, the lock ends with its descriptor, at the latest with this process.
    """
    thread = threading.Thread(target=_let_go, args=(lock,), name="rl_kernel unlock", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # see try_acquire
        _let_go(lock)
    else:
        thread.join(PATIENCE_S)


def _let_go(lock: filelock.BaseFileLock) -> None:
    with contextlib.suppress(OSError):
        lock.release()


class _Attempt:
    """One try in a thread of its own, which may outlive the caller's patience."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: filelock.BaseFileLock | None = None  # once it is held
        self._guard = threading.Lock()
        self._answered = threading.Event()
        self._abandoned = False
        self._error: OSError | RuntimeError | None = None

    def run(self) -> None:
        try:
            if _is_free(self._path):
                # not thread-local: acquired in this thread, released in another
                lock = filelock.FileLock(self._path, timeout=0, mode=0o600, thread_local=False, **_STRICT)
                lock.acquire()
                self._lock = lock
        except filelock.Timeout:
            pass  # held elsewhere
        except (OSError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
            self._error = error
        with self._guard:
            self._answered.set()
            if self._abandoned and self._lock is not None:
                _let_go(self._lock)

    def outcome(self) -> filelock.BaseFileLock | None:
        answered = False
        try:
            answered = self._answered.wait(PATIENCE_S)
        finally:  # also where Ctrl-C interrupts the wait
            if not answered:
                self._abandon()
        if not answered:
            raise LocksUnusableError(f"{self._path.parent}: a lock call there did not answer in {PATIENCE_S:g} s")
        if self._error is None:
            return self._lock
        number = getattr(self._error, "errno", None)
        if number in _NO_LOCKS or isinstance(self._error, NotImplementedError):
            raise LocksUnusableError(f"{self._path.parent}: its file system has no locks ({self._error})")
        raise StoreUnusableError(f"{self._path.parent}: cannot lock there ({self._error})") from self._error

    def _abandon(self) -> None:
        with self._guard:
            self._abandoned = True
            if self._lock is not None:
                release(self._lock)
