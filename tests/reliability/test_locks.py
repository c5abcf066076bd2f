"""Lock calls that hang, fail or misbehave, and tuners that meet their own locks: a launch is never held up."""

from __future__ import annotations

import errno
import fcntl
import gc
import importlib.metadata
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest

from rl_engine.platforms.tuning.locks import PATIENCE_S
from rl_engine.platforms.tuning.store import FileStore
from tests.support.processes import run
from tests.support.tuning import CANDIDATES, FAST, FIXED, FakeTrial, Lab, make_key

real_flock = fcntl.flock
FILELOCK = int(importlib.metadata.version("filelock").partition(".")[0])
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")


def free(folder: Path) -> bool:
    """Say whether the usual key's lock can be had."""
    lock = FileStore(folder).try_lock(make_key().digest)
    if lock is not None:
        with lock:
            return True
    return False


@pytest.mark.parametrize("slow_call", [1, 3], ids=["first call", "filelock's call"])
def test_a_lock_call_that_hangs_costs_one_second_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_call: int, tally: Callable[..., None]
) -> None:
    # B19, part a
    answer, calls = threading.Event(), []

    def flock(handle: int, operation: int) -> None:
        calls.append(operation)
        if len(calls) == slow_call:
            answer.wait(30)
        real_flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    lab = Lab(FileStore(tmp_path / "cache"))
    began_s = time.monotonic()
    assert lab.select(FakeTrial()).winner == FAST
    assert PATIENCE_S <= time.monotonic() - began_s < PATIENCE_S + 2
    began_s = time.monotonic()
    for number in range(20):
        assert lab.select(FakeTrial(), make_key(n=number)).source == "tuned"
    assert time.monotonic() - began_s < PATIENCE_S, "in memory from now on"
    assert len(calls) == slow_call, "no second try"
    (warning,) = lab.warnings()
    assert "did not answer in 1 s" in warning
    assert "RL_KERNEL_AUTOTUNE_CACHE_DIR" in warning
    answer.set()
    ends_s = time.monotonic() + 10
    while not free(tmp_path / "cache"):
        assert time.monotonic() < ends_s, "a lock granted too late is let go again"
    tally("a lock call hangs", 1, "1 s once, then in memory, one warning; granted late, it is let go")


HUNG = """
import _thread, fcntl, os, signal, sys, threading, time
from pathlib import Path
from rl_engine.platforms.tuning.store import FileStore
from tests.support.tuning import FakeTrial, Lab, make_key
real = fcntl.flock
fcntl.flock = lambda *_arguments: time.sleep(600)
assert Lab(FileStore(Path(sys.argv[1]))).select(FakeTrial()).source == "tuned"
fcntl.flock = real
assert _thread._count() == 1, "it still hangs"  # besides this one
began_s = time.monotonic()
child = os.fork()
if child == 0:
    signal.alarm(10)
    store = FileStore(Path(sys.argv[1]))
    assert Lab(store).select(FakeTrial(), make_key(n=1)).source == "tuned"
    assert store.digests() == (make_key(n=1).digest,)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert time.monotonic() - began_s < 5, "forks wait for nothing"
print("to the end", flush=True)
"""


def test_a_hung_lock_call_delays_neither_forks_nor_the_exit(tmp_path: Path, tally: Callable[..., None]) -> None:
    # filelock 4.3.1 by itself would hold up the fork for 30 s and then end the child
    began_s = time.monotonic()
    assert run(HUNG, str(tmp_path / "cache")) == "to the end\n"
    assert time.monotonic() - began_s < PATIENCE_S + 9
    tally("fork and exit while a lock call hangs", 1, "no delay; the forked child tunes")


def refusing(error: BaseException, after: int = 0) -> Callable[[int, int], None]:
    calls = []

    def flock(handle: int, operation: int) -> None:
        calls.append(operation)
        if len(calls) > after:
            raise error
        real_flock(handle, operation)

    return flock


NO_LOCKS = [OSError(number, os.strerror(number)) for number in (
    errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.ESTALE,
)]  # fmt: skip


@pytest.mark.parametrize("error", [*NO_LOCKS, NotImplementedError("no flock")], ids=str)
@pytest.mark.parametrize("after", [0, 2], ids=["first call", "filelock's call"])
def test_a_file_system_without_locks_costs_one_warning_and_selections_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int, tally: Callable[..., None]
) -> None:
    # B19, part b
    if after and FILELOCK < 4:
        pytest.skip("filelock 3 takes every failure for a busy lock; our own call comes first")
    monkeypatch.setattr(fcntl, "flock", refusing(error, after))
    lab, trial = Lab(FileStore(tmp_path / "cache")), FakeTrial()
    for number in range(3):
        assert lab.select(trial, make_key(n=number)).source == "tuned"
        assert lab.select(trial, make_key(n=number)).source == "memory"
    (warning,) = lab.warnings()
    assert "has no locks" in warning
    assert "RL_KERNEL_AUTOTUNE_CACHE_DIR" in warning
    assert FileStore(tmp_path / "cache").digests() == ()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"], "no marker file either"
    tally("lock calls fail (ENOLCK, ENOSYS, ENOTSUP, ESTALE, NotImplementedError)", 1, "in memory, one warning")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), RuntimeError("filelock gave up")], ids=str)
def test_a_lock_that_fails_once_is_tried_again_for_the_next_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, tally: Callable[..., None]
) -> None:
    lab, store = Lab(FileStore(tmp_path / "cache")), FileStore(tmp_path / "cache")
    with monkeypatch.context() as broken:
        broken.setattr(fcntl, "flock", refusing(error))
        assert lab.select(FakeTrial()).source == "tuned"
    assert lab.select(FakeTrial(), make_key(n=1)).source == "tuned"
    assert set(store.digests()) == {make_key().digest, make_key(n=1).digest}
    assert len(lab.warnings()) == 1
    tally("one lock call fails (EIO, an error of filelock's)", 1, "tuned; the next key locks again")


@pytest.mark.skipif(FILELOCK < 4, reason="filelock 3 loses the descriptor: locked until the process ends")
def test_a_lock_that_cannot_be_let_go_neither_raises_nor_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Callable[..., None]
) -> None:
    lab = Lab(FileStore(tmp_path / "cache"))
    with monkeypatch.context() as broken:
        broken.setattr(fcntl, "flock", refusing(OSError(errno.EIO, "I/O error"), after=3))
        assert lab.select(FakeTrial()).source == "tuned"
    gc.collect()
    assert free(tmp_path / "cache")
    held = lab.tuner._own.try_lock(make_key().digest)
    assert held is not None, "this store does not take it for held either"
    with held:
        pass
    tally("unlocking fails (EIO)", 1, "no exception; free once the descriptor is closed")


THREADLESS = """
import os, resource, sys
from pathlib import Path
from rl_engine.platforms.tuning.store import FileStore
from tests.support.tuning import FakeTrial, Lab, make_key
os.setgroups([])
os.setresgid(*[12345] * 3)
os.setresuid(*[12345] * 3)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
lab = Lab(FileStore(Path(sys.argv[1])))
print([lab.select(FakeTrial(), make_key(n=n)).source for n in range(3)], len(lab.warnings()))
print("can't start new thread" in lab.warnings()[0])
"""


@as_root
def test_a_user_who_may_start_no_more_threads_is_tuned(tmp_path: Path, tally: Callable[..., None]) -> None:
    place = Path("/tmp") / f"{tmp_path.parent.name}-{os.getpid()}-threads"  # pytest's folders are closed to others
    place.mkdir(mode=0o700)
    try:
        os.chown(place, 12345, 12345)
        assert run(THREADLESS, str(place)).splitlines() == ["['tuned', 'tuned', 'tuned'] 1", "True"]
    finally:
        for path in place.iterdir():
            path.unlink()
        place.rmdir()
    tally("no more threads allowed (RLIMIT_NPROC)", 3, "tuned, one warning")


@pytest.mark.parametrize("nested", ["the same key", "another key"])
@pytest.mark.parametrize("through", ["the same tuner", "a relative path", "a symbolic link", "a second tuner"])
def test_a_trial_that_tunes_itself_neither_hangs_nor_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nested: str, through: str, tally: Callable[..., None]
) -> None:
    # B38
    folder = tmp_path / "cache"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    outer, inner_key = Lab(FileStore(folder)), make_key() if nested == "the same key" else make_key(n=1)
    inner = {
        "the same tuner": outer,
        "a relative path": Lab(FileStore(Path("cache"))),
        "a symbolic link": Lab(FileStore(tmp_path / "link")),
        "a second tuner": Lab(FileStore(folder)),
    }[through]
    seen = []
    trial = FakeTrial(before_qualify=lambda: seen.append(inner.select(FakeTrial(), inner_key)))
    began_s = time.monotonic()
    assert outer.select(trial).source == "tuned"
    assert time.monotonic() - began_s < PATIENCE_S
    (chosen,) = seen
    if nested == "another key":
        assert (chosen.winner, chosen.source) == (FAST, "tuned")
    else:
        assert (chosen.winner, chosen.source, chosen.settled) == (FIXED, "fixed", False)
    assert (outer.warnings(), inner.warnings()) == ([], [])
    inner.clock.now_s += 1
    assert inner.select(FakeTrial(), inner_key).winner == FAST
    assert CANDIDATES[0] == FIXED
    tally(f"a launch is tuned inside a trial, {nested}", 1, "no hang, no error; the fixed launch or a tuned one")


def test_a_lock_object_of_somebody_else_in_this_thread_is_a_busy_key(tmp_path: Path) -> None:
    # B38: filelock itself raises for a second object that would wait
    store, lab = FileStore(tmp_path / "cache"), Lab(FileStore(tmp_path / "cache"))
    store.publish(make_key(n=9).digest, "makes the folder")
    with filelock.FileLock(store.folder / f"{make_key().digest}.lock"):
        assert lab.select(FakeTrial()).reason == "another process is measuring this key"
    lab.clock.now_s += 1
    assert lab.select(FakeTrial()).source == "tuned"
