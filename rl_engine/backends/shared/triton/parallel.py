"""Jobs in daemon threads, none of which is waited for longer than it deserves: a compiler that hangs hangs alone."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Result = TypeVar("_Result")


class AbandonedError(RuntimeError):
    """A job did not end in time; its thread goes on, and dies with the process."""


def run_all(
    jobs: Sequence[Callable[[], _Result]], *, threads: int, patience_s: float, expected: tuple[type[Exception], ...]
) -> list[_Result | Exception]:
    """Run ``jobs`` side by side; return each one's result, or the exception of a type in ``expected`` that it raised.

    A job that takes longer than ``patience_s`` is left to its thread, another thread takes over, and its place holds
    an AbandonedError. Threads are daemons, so none is joined when the process ends. An unexpected exception is raised.
    """
    pool = _Pool(jobs, patience_s)
    for _ in range(min(threads, len(jobs))):
        pool.start_thread()
    outcomes = pool.wait()
    for outcome in outcomes:
        if isinstance(outcome, Exception) and not isinstance(outcome, (*expected, AbandonedError)):
            raise outcome
    return outcomes


@dataclass
class _Job(Generic[_Result]):
    run: Callable[[], _Result]
    started_s: float = math.inf
    outcome: _Result | Exception | None = None
    done: bool = False


class _Pool(Generic[_Result]):
    def __init__(self, jobs: Sequence[Callable[[], _Result]], patience_s: float) -> None:
        self._jobs = [_Job(job) for job in jobs]
        self._waiting = iter(self._jobs)
        self._patience_s = patience_s
        self._changed = threading.Condition()  # guards every job

    def start_thread(self) -> None:
        threading.Thread(target=self._work, name="rl_kernel compile", daemon=True).start()

    def wait(self) -> list[_Result | Exception]:
        with self._changed:
            while not all(job.done for job in self._jobs):
                self._changed.wait(self._abandon_overdue())
        return [job.outcome for job in self._jobs]  # type: ignore[misc]  # done: a result or an exception

    def _abandon_overdue(self) -> float:
        """Give up jobs that took too long; return the seconds until the next may have."""
        now_s = time.monotonic()
        left_s = self._patience_s
        for job in self._jobs:
            if job.done or job.started_s > now_s:
                continue
            if now_s - job.started_s >= self._patience_s:
                job.outcome, job.done = AbandonedError(f"did not end in {self._patience_s:g} s"), True
                self.start_thread()
                left_s = 0.0  # look again: it may have been the last
            else:
                left_s = min(left_s, job.started_s + self._patience_s - now_s)
        return left_s

    def _work(self) -> None:
        while True:
            with self._changed:
                job = next(self._waiting, None)
                if job is None:
                    return
                job.started_s = time.monotonic()
            try:
                outcome: _Result | Exception = job.run()
            except Exception as error:  # noqa: BLE001  # carried to the caller's thread, which sorts it
                outcome = error
            with self._changed:
                if job.done:
                    return  # given up meanwhile; another thread has taken this one's place
                job.outcome, job.done = outcome, True
                self._changed.notify()
