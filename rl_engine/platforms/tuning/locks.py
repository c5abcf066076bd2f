"""File locks that are tried and never waited for, on file systems where a lock may fail, or never answer."""

from __future__ import annotations

import _thread
import contextlib
import errno
import fcntl
import inspect
import os
import queue
from typing import TYPE_CHECKING, Any, TypeAlias

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

_Signal: TypeAlias = "queue.SimpleQueue[None]"


class Lease:
    """A lock that is held: until `release`, the end of a ``with`` block, or nobody refers to it any more.

    The lock belongs to the thread that took it, which lets it go when told, through queues written in C: Ctrl-C cuts
    none of their calls in two. It could stop filelock half-way, with a lock held for good, and where it hits
    `threading.Event.wait`, CPython may raise "release unlocked lock" in its place.
    """

    def __init__(self, told: _Signal, ended: _Signal) -> None:
        self._told = told
        self._ended = ended

    def release(self) -> None:
        """Let the lock go, and wait for that no longer than for a try."""
        self._told.put(None)
        with contextlib.suppress(queue.Empty):
            self._ended.get(timeout=PATIENCE_S)
            self._ended.put(None)  # for whoever asks again

    def __enter__(self) -> None:
        """Hold on to the lock."""

    def __exit__(self, *_error: object) -> None:
        self.release()

    def __del__(self) -> None:
        self._told.put(None)  # interrupted before it was entered


def try_acquire(path: Path) -> Lease | None:
    """Return the lock at ``path``, held, or None where somebody else holds it.

    Raises:
        LocksUnusableError: locks do not work there, or the call did not answer within `PATIENCE_S`; a lock that is
            granted later is let go again.
        StoreUnusableError: this try failed (disk full, too many open files or threads); another may not.
    """
    attempt = _Attempt(path)
    try:
        _thread.start_new_thread(attempt.run, ())  # threading.Thread.start waits on an Event: see Lease
        return attempt.outcome()
    except LocksUnusableError:
        attempt.abandon()
        raise
    except RuntimeError as error:  # a limit on threads, or an interpreter that is shutting down
        raise StoreUnusableError(f"{path.parent}: cannot lock there ({error})") from error
    except KeyboardInterrupt:
        attempt.lease().release()
        raise


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


class _Attempt:
    """One try in a thread of its own, which may outlive the caller's patience, and holds what it was granted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answered: _Signal = queue.SimpleQueue()
        self._held = False
        self._error: OSError | RuntimeError | None = None
        self._told: _Signal = queue.SimpleQueue()
        self._ended: _Signal = queue.SimpleQueue()

    def run(self) -> None:
        lock: filelock.BaseFileLock | None = None
        try:
            if _is_free(self._path):
                lock = filelock.FileLock(self._path, timeout=0, mode=0o600, **_STRICT)
                lock.acquire()
                self._held = True
        except filelock.Timeout:
            pass  # held elsewhere
        except (OSError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
            self._error = error
        self._answered.put(None)
        if lock is not None and self._held:
            self._told.get()
            with contextlib.suppress(OSError, RuntimeError):  # it ends with its descriptor
                lock.release()
        self._ended.put(None)

    def lease(self) -> Lease:
        return Lease(self._told, self._ended)

    def abandon(self) -> None:
        self._told.put(None)

    def outcome(self) -> Lease | None:
        try:
            self._answered.get(timeout=PATIENCE_S)
        except queue.Empty:
            problem = f"{self._path.parent}: a lock call there did not answer in {PATIENCE_S:g} s"
            raise LocksUnusableError(problem) from None
        if self._error is None:
            return self.lease() if self._held else None
        number = getattr(self._error, "errno", None)
        if number in _NO_LOCKS or isinstance(self._error, NotImplementedError):
            raise LocksUnusableError(f"{self._path.parent}: its file system has no locks ({self._error})")
        raise StoreUnusableError(f"{self._path.parent}: cannot lock there ({self._error})") from self._error
