"""File locks that are tried and never waited for, on file systems where a lock may fail, or never answer."""

from __future__ import annotations

import errno
import inspect
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
        StoreUnusableError: this try failed (disk full, too many open files); another may not.
    """
    attempt = _Attempt(path)
    threading.Thread(target=attempt.run, name="rl_kernel try-lock", daemon=True).start()
    return attempt.outcome()


class _Attempt:
    """One try in a thread of its own, which may outlive the caller's patience."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # not thread-local: acquired in that thread, released in the caller's
        self._lock = filelock.FileLock(path, timeout=0, mode=0o600, thread_local=False, **_STRICT)
        self._guard = threading.Lock()
        self._answered = threading.Event()
        self._abandoned = False
        self._error: OSError | NotImplementedError | None = None

    def run(self) -> None:
        try:
            self._lock.acquire()
        except filelock.Timeout:
            pass  # held elsewhere: not locked here
        except (OSError, NotImplementedError) as error:
            self._error = error
        with self._guard:
            self._answered.set()
            if self._abandoned:
                self._lock.release()

    def outcome(self) -> filelock.BaseFileLock | None:
        try:
            self._answered.wait(PATIENCE_S)
        finally:  # also where Ctrl-C interrupts the wait
            with self._guard:
                self._abandoned = not self._answered.is_set()
        if self._abandoned:
            raise LocksUnusableError(f"{self._path.parent}: a lock call there did not answer in {PATIENCE_S:g} s")
        if self._error is None:
            return self._lock if self._lock.is_locked else None
        number = getattr(self._error, "errno", None)
        if number in _NO_LOCKS or isinstance(self._error, NotImplementedError):
            raise LocksUnusableError(f"{self._path.parent}: its file system has no locks ({self._error})")
        raise StoreUnusableError(f"{self._path.parent}: cannot lock there ({self._error})") from self._error
