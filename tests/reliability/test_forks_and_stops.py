"""Forks while locks are held, a lock's holder that is stopped, and one that dies while its child lives."""

from __future__ import annotations

import importlib.metadata
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_engine.platforms.tuning.store import FileStore
from tests.support.processes import environment, run, start
from tests.support.tuning import FAST, FIXED, FakeTrial, Lab

SOON_S = 1.0  # a select that finds the key busy takes milliseconds; this leaves room for a busy machine

FORK_WHILE_HELD = """
import os, signal, sys, threading
from rl_engine.platforms import autotuner
from tests.support.tuning import CANDIDATES, FakeTrial, make_key
tuner = autotuner.process_autotuner()
assert tuner.select(make_key(n=0), CANDIDATES, FakeTrial()).source == "tuned"
locks = {
    "tuner": tuner._lock, "limits": tuner._limits._lock, "log": tuner._log._lock,
    "process": autotuner._process_lock,
}
held = threading.Event()
def hold():
    for name in sys.argv[1:]:
        locks[name].acquire()
    held.set()
    threading.Event().wait(30)
threading.Thread(target=hold, daemon=True).start()
held.wait(30)
child = os.fork()
if child == 0:
    signal.alarm(10)  # a child that waits for ever is killed
    chosen = autotuner.process_autotuner().select(make_key(n=1), CANDIDATES, FakeTrial())
    known = autotuner.process_autotuner().select(make_key(n=0), CANDIDATES, FakeTrial())
    print(chosen.source, known.source, len(autotuner.report().selections), flush=True)
    sys.exit(0)  # through the handlers at exit, which must not wait either
status = os.waitpid(child, 0)[1]
print(status, flush=True)
os._exit(0)  # the thread still holds the locks
"""


@pytest.mark.parametrize("held", ["tuner", "limits", "log", "process", "tuner limits log process"])
def test_a_child_forked_while_a_thread_holds_locks_can_tune_and_exit(
    tmp_path: Path, held: str, tally: Callable[..., None]
) -> None:
    env = environment(RL_KERNEL_AUTOTUNE_CACHE_DIR=str(tmp_path / "cache"))
    assert run(FORK_WHILE_HELD, *held.split(), env=env).splitlines() == ["tuned disk 2", "0"]
    tally("fork while another thread holds the tuner's locks", 1, "the child tunes, reads the cache and exits")


HOLD = """
import ctypes, os, sys, time
from pathlib import Path
from rl_engine.platforms.tuning.store import FileStore
from tests.support.tuning import FakeTrial, Lab
def measure():
    child = 0
    if sys.argv[2:] and (os.fork if sys.argv[2] == "os" else ctypes.PyDLL(None).fork)() == 0:
        sys.stdin.read()  # until the test lets it end
        os._exit(0)
    print("held", flush=True)
    while not sys.argv[2:] and sys.stdin.readline() != "go on\\n":
        pass
    time.sleep(60 if sys.argv[2:] else 0)
print(Lab(FileStore(Path(sys.argv[1]))).select(FakeTrial(before_qualify=measure)).source, flush=True)
"""


def holder(folder: Path, *how: str) -> subprocess.Popen[str]:
    """Start a process that holds the usual key's lock while it measures."""
    process = start(HOLD, str(folder), *how)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def busy(lab: Lab) -> None:
    """Assert that the key is fixed at once and pending."""
    began_s = time.monotonic()
    chosen = lab.select(FakeTrial())
    assert time.monotonic() - began_s < SOON_S
    assert (chosen.winner, chosen.source, chosen.settled) == (FIXED, "fixed", False)
    assert chosen.reason == "another process is measuring this key"


def test_a_stopped_holder_costs_nobody_time_and_its_result_is_picked_up(
    tmp_path: Path, tally: Callable[..., None]
) -> None:
    # B19
    process, lab = holder(tmp_path / "cache"), Lab(FileStore(tmp_path / "cache"))
    try:
        process.send_signal(signal.SIGSTOP)
        for delay_s in (1, 2, 4):
            busy(lab)
            lab.clock.now_s += delay_s
        process.send_signal(signal.SIGCONT)
        assert process.communicate("go on\n", timeout=20) == ("tuned\n", "")
    finally:
        process.kill()
    lab.clock.now_s += 8
    trial = FakeTrial()
    chosen = lab.select(trial)
    assert (chosen.winner, chosen.source, trial.count("sample")) == (FAST, "disk", 0)
    assert lab.warnings() == []
    tally("a lock's holder is stopped (SIGSTOP)", 3, "fixed at once, pending; picked up after SIGCONT")


@pytest.mark.parametrize("how", ["os", "C"])
def test_a_holder_killed_while_its_forked_child_lives_leaves_the_key_to_others(
    tmp_path: Path, how: str, tally: Callable[..., None]
) -> None:
    process, lab = holder(tmp_path / "cache", how), Lab(FileStore(tmp_path / "cache"))
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        busy(lab)
        process.kill()
        process.wait(10)
        lab.clock.now_s += 1
        closes = int(importlib.metadata.version("filelock").partition(".")[0]) >= 4  # its children close it at fork
        if how == "C" or not closes:
            busy(lab)  # the child has the lock's descriptor: the kernel keeps it locked
            lab.clock.now_s += 2
        process.stdin.close()
        process.stdout.read()  # ends when the child has
    finally:
        process.kill()
        process.stdout.close()
        assert process.stderr is not None
        process.stderr.close()
    assert lab.select(FakeTrial()).source == "tuned"
    assert lab.warnings() == []
    if how == "C":
        tally("a holder is killed while its child, which has the lock, lives", 1, "pending, tuned once the child ends")
    else:
        tally("a holder is killed while its child, forked by Python, lives", 1, "tuned here at the next look")
