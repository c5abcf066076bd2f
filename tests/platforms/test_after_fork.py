"""What a forked child starts with; tests/reliability forks for real, where coverage cannot look."""

from __future__ import annotations

import pytest

from rl_engine.platforms import autotuner
from rl_engine.platforms.autotuner import PersistentAutotuner
from rl_engine.platforms.tuning import events
from rl_engine.platforms.tuning.events import EventLog
from rl_engine.platforms.tuning.store import MemoryStore
from tests.support.tuning import FakeTrial, Lab, make_key


def test_a_child_has_no_tuner_and_no_lock_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuner, "_process", PersistentAutotuner(MemoryStore(), log=EventLog()))
    monkeypatch.setattr(autotuner, "_process_lock", autotuner._process_lock)
    before = autotuner._process_lock
    with before:
        autotuner._after_fork_in_child()
        assert autotuner._process is None
        assert autotuner._process_lock is not before
        assert not autotuner._process_lock.locked()


def test_a_child_has_a_log_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_process_log", EventLog())
    before = events.log()
    before.warn_once("_a", "the parent's")
    events._after_fork_in_child()
    assert events.log() is not before
    assert events.log().counts() == {}


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEPT", 3)
    lab = Lab(MemoryStore())
    for number in range(5):
        lab.select(FakeTrial(), make_key(n=number))
    assert [one.key for one in lab.tuner.report().selections] == [make_key(n=number).digest for number in (2, 3, 4)]
    assert lab.select(FakeTrial(), make_key(n=0)).source == "disk", "looked up again"
