"""Events are counted, kept, handed on; warnings are given once."""

from __future__ import annotations

import logging
import threading

import pytest

from rl_engine.platforms.tuning import events
from rl_engine.platforms.tuning.events import EventLog, TuningEvent


def test_events_are_kept_in_order_and_counted_by_kind() -> None:
    log = EventLog()
    first, second = TuningEvent("tuned", "_a", "k1", "BLOCK=1", "faster", 0.5), TuningEvent("fixed", "_b")
    log.emit(first)
    log.emit(second)
    log.emit(first)
    assert log.events() == (first, second, first)
    assert log.events("fixed") == (second,)
    assert log.events("missed") == ()
    assert log.counts() == {"tuned": 2, "fixed": 1}
    log.counts()["tuned"] = 7
    assert log.counts()["tuned"] == 2, "callers get a copy"


def test_old_events_go_and_counts_stay() -> None:
    log = EventLog()
    for number in range(events.KEPT + 5):
        log.emit(TuningEvent("fixed", "_a", str(number)))
    assert [log.events()[0].key, log.events()[-1].key] == ["5", str(events.KEPT + 4)]
    assert (len(log.events()), log.counts()) == (events.KEPT, {"fixed": events.KEPT + 5})


def test_listeners_hear_what_comes_after_they_subscribed_until_they_leave() -> None:
    log, heard, also = EventLog(), [], []
    early, middle, late = (TuningEvent("tuned", name) for name in ("early", "middle", "late"))
    log.emit(early)
    leave = log.subscribe(heard.append)
    log.subscribe(also.append)
    log.emit(middle)
    leave()
    log.emit(late)
    assert (heard, also) == ([middle], [middle, late])


def test_a_listener_may_ask_the_log() -> None:
    log, seen = EventLog(), []
    log.subscribe(lambda _event: seen.append(log.counts()))
    log.emit(TuningEvent("tuned", "_a"))
    assert seen == [{"tuned": 1}], "no lock is held while listeners run"


def test_a_warning_is_logged_and_recorded_once(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog()
    with caplog.at_level(logging.WARNING, "rl_engine"):
        for _ in range(3):
            log.warn_once("_a", "100% of the disk is full")
        log.warn_once("_b", "another")
    assert caplog.messages == ["100% of the disk is full", "another"]
    assert log.events("warning") == (
        TuningEvent("warning", "_a", reason="100% of the disk is full"),
        TuningEvent("warning", "_b", reason="another"),
    )


def test_every_event_is_logged_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "rl_engine"):
        EventLog().emit(TuningEvent("tuned", "_a", "digest", "BLOCK=1", "5% faster", 0.25))
    assert caplog.messages == ["tuned _a digest: BLOCK=1 5% faster 0.250 s"]


def test_threads_lose_no_event() -> None:
    log = EventLog()

    def work() -> None:
        for _ in range(500):
            log.emit(TuningEvent("tuned", "_a"))
            log.warn_once("_a", "the same")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert log.counts() == {"tuned": 4000, "warning": 1}


def test_the_process_has_one_log() -> None:
    assert events.log() is events.log()
    assert isinstance(events.log(), EventLog)
