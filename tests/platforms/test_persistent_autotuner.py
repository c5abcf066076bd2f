"""The life of a key: measured once, remembered, recorded, replayed, shared; and what is never done."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from rl_engine import settings
from rl_engine.platforms import autotuner
from rl_engine.platforms.autotuner import PersistentAutotuner, Report, SelectionReport
from rl_engine.platforms.tuning import events
from rl_engine.platforms.tuning.key import Candidate
from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import FileStore, MemoryStore, PackStore
from rl_engine.platforms.tuning.trial import Rejection
from tests.support.tuning import CANDIDATES, EVIDENCE, FAST, FIXED, SLOW, FakeTrial, Lab, make_key, make_record

SAMPLES = 3 + 3 + 5 * 3 + 15 * 2  # a warm-up each, a first round, screening, and a final of FIXED and FAST


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "cache")


def test_a_cold_key_is_measured_published_and_settled(store: FileStore) -> None:
    lab, trial = Lab(store), FakeTrial()
    chosen = lab.select(trial, provenance=(("device.uuid", "GPU-7"),))
    assert (chosen.winner, chosen.source, chosen.settled) == (FAST, "tuned", True)
    assert chosen.reason == "20.0% faster than the fixed launch"
    assert trial.calls == ["make", "qualify", *["sample"] * SAMPLES, "close"]
    record = TuningRecord.from_json(store.load(make_key().digest) or "")
    assert record == make_record(
        noise=0.0,
        screening={FIXED: (10.0,) * 5, FAST: (8.0,) * 5, SLOW: (12.0,) * 5},
        final={FIXED: (10.0,) * 15, FAST: (8.0,) * 15},
        rejections=(),
        provenance=(("device.uuid", "GPU-7"),),
    )
    assert record.created_s == 1_700_000_000


def test_a_hot_key_comes_from_memory_without_a_trial(store: FileStore) -> None:
    lab = Lab(store)
    first = lab.select(FakeTrial())
    hot = FakeTrial()
    again = lab.select(hot)
    assert (again.winner, again.source, again.reason, again.settled) == (FAST, "memory", first.reason, True)
    assert hot.calls == []


def test_a_restart_takes_the_record_after_one_comparison(store: FileStore) -> None:
    Lab(store).select(FakeTrial())
    restarted, trial = Lab(store), FakeTrial(costs_us={FIXED: 1.0, FAST: 2.0, SLOW: 3.0})
    chosen = restarted.select(trial)
    assert (chosen.winner, chosen.source, chosen.reason) == (FAST, "disk", "20.0% faster than the fixed launch")
    assert trial.calls == ["make", f"canary {FAST} | {FIXED} | 5eed-c0de", "close"]
    assert restarted.select(trial).source == "memory"
    assert len(trial.calls) == 3
    assert restarted.log.counts() == {"replayed": 1}


def test_a_record_whose_winner_is_the_fixed_launch_is_not_compared(store: FileStore) -> None:
    Lab(store).select(FakeTrial(costs_us={FIXED: 8.0, FAST: 8.0, SLOW: 8.0}))
    trial = FakeTrial()
    chosen = Lab(store).select(trial)
    assert (chosen.winner, chosen.source) == (FIXED, "disk")
    assert trial.calls == []


def test_replay_measures_nothing_and_makes_no_folder(store: FileStore) -> None:
    lab, trial = Lab(store), FakeTrial()
    chosen = lab.select(trial, mode="replay")
    assert (chosen.winner, chosen.source, chosen.settled) == (FIXED, "fixed", True)
    assert chosen.reason == "no record, and replay measures nothing"
    assert trial.calls == []
    assert not store.folder.exists()


def test_what_replay_missed_is_measured_when_tuning_is_on(store: FileStore) -> None:
    lab = Lab(store)
    assert lab.select(FakeTrial(), mode="replay").winner == FIXED
    assert lab.select(FakeTrial(), mode="on").source == "tuned"
    assert lab.select(FakeTrial(), mode="replay").winner == FIXED
    assert lab.select(FakeTrial(), mode="on").winner == FAST


def test_replay_uses_a_record(store: FileStore) -> None:
    Lab(store).select(FakeTrial())
    trial = FakeTrial()
    chosen = Lab(store).select(trial, mode="replay")
    assert (chosen.winner, chosen.source) == (FAST, "disk")
    assert (trial.count("canary"), trial.count("sample")) == (1, 0)


def test_a_pack_is_looked_up_after_the_own_cache(tmp_path: Path, store: FileStore) -> None:
    pack = PackStore(tmp_path / "pack")
    FileStore(pack.folder).publish(make_key().digest, make_record(winner=SLOW, reason="from the pack").to_json())
    shared = Lab(store, PackStore(tmp_path / "absent"), pack).select(FakeTrial())
    assert (shared.winner, shared.source, shared.reason) == (SLOW, "shared", "from the pack")
    assert not store.folder.exists()
    store.publish(make_key().digest, make_record().to_json())
    assert Lab(store, pack).select(FakeTrial()).source == "disk"


@pytest.mark.parametrize("bad", ["not json", make_record(make_key(other=1)).to_json()])
def test_a_record_that_does_not_hold_is_a_miss_with_one_warning_and_is_replaced(store: FileStore, bad: str) -> None:
    store.publish(make_key().digest, bad)
    lab = Lab(store)
    assert lab.select(FakeTrial()).source == "tuned"
    (warning,) = lab.warnings()
    assert warning.startswith(f"the record {make_key().digest} (disk) is not used: ")
    assert TuningRecord.from_json(store.load(make_key().digest) or "").winner == FAST


def test_a_winner_that_is_no_candidate_today_is_measured_again(store: FileStore) -> None:
    gone = Candidate.of(BLOCK=512, num_warps=1)
    store.publish(make_key().digest, make_record(candidates=(FIXED, gone, FAST, SLOW), winner=gone).to_json())
    lab = Lab(store)
    assert lab.select(FakeTrial()).source == "tuned"
    assert lab.warnings() == [
        f"the record {make_key().digest} (disk) is not used: winner: {gone} is not among today's candidates"
    ]


def test_sixteen_threads_on_one_key_measure_once() -> None:
    lab, start, finish = Lab(MemoryStore()), threading.Barrier(16), threading.Event()
    trial = FakeTrial(before_qualify=lambda: finish.wait(10) and None)
    chosen = []

    def ask() -> None:
        start.wait(10)
        chosen.append(lab.select(trial))
        if len(chosen) == 15:  # everybody but the one that measures was answered at once
            finish.set()

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert trial.count("qualify") == 1
    waiting, (measured,) = chosen[:15], chosen[15:]
    assert measured.source == "tuned"
    assert {(one.winner, one.source, one.settled) for one in waiting} == {(FIXED, "fixed", False)}
    assert {one.reason for one in waiting} == {"another thread is measuring this key"}
    assert lab.select(trial).source == "memory"


class _SlowLock:
    """A lock that lets the other threads run whenever it was released."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()
        time.sleep(0.002)


def test_a_key_that_stays_fixed_is_tried_once_by_sixteen_threads() -> None:
    # nothing is published for it: a thread between "no longer in flight" and "settled" would try again
    lab, start, trial = Lab(MemoryStore()), threading.Barrier(16), FakeTrial(unavailable="no memory")
    lab.tuner._lock = _SlowLock()

    def ask() -> None:
        start.wait(10)
        for _ in range(20):
            lab.select(trial)

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert trial.count("qualify") == 1


def test_the_record_keeps_rejections_and_costs_once_when_nobody_qualifies(store: FileStore) -> None:
    reasons = {FAST: "compile error", SLOW: "other bytes"}
    lab, trial = Lab(store), FakeTrial(rejected=reasons)
    chosen = lab.select(trial)
    assert (chosen.winner, chosen.source, chosen.reason) == (FIXED, "tuned", "no other candidate qualified")
    assert trial.count("sample") == 0
    record = TuningRecord.from_json(store.load(make_key().digest) or "")
    assert record.winner == FIXED
    assert record.rejections == (Rejection(FAST, "compile error"), Rejection(SLOW, "other bytes"))
    assert (record.screening, record.final, record.evidence) == ({}, {}, EVIDENCE)
    assert [(one.winner, one.reason) for one in lab.log.events("rejected")] == [
        (str(FAST), "compile error"),
        (str(SLOW), "other bytes"),
    ]
    restarted = FakeTrial()
    assert Lab(store).select(restarted).winner == FIXED
    assert restarted.calls == []


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), float("-inf"), 0.0, -1.0])
def test_a_candidate_without_a_time_never_wins_and_never_reaches_the_disk(store: FileStore, nonsense: float) -> None:
    chosen = Lab(store).select(FakeTrial(costs_us={FIXED: 10.0, FAST: nonsense, SLOW: 8.0}))
    assert chosen.winner == SLOW
    text = store.load(make_key().digest) or ""
    assert set(json.loads(text)["screening_us"]) == set(json.loads(text)["final_us"]) == {"0", "2"}
    assert "NaN" not in text
    assert "Infinity" not in text


def test_report_and_missed_say_what_happened(store: FileStore) -> None:
    lab = Lab(store)
    captured, tuned = make_key(shape=1), make_key(shape=2)
    lab.tuner.miss(captured)
    lab.tuner.miss(captured)
    lab.tuner.miss(tuned)
    trial = FakeTrial()

    def tick() -> None:
        lab.clock.now_s += 0.5

    trial.before_sample = tick
    lab.select(trial, tuned)
    assert lab.tuner.missed() == (captured,)
    assert lab.tuner.report() == Report(
        counts={"missed": 2, "tuned": 1},
        seconds=0.5 * SAMPLES,
        selections=(
            SelectionReport(tuned.kernel, tuned.digest, str(FAST), "tuned", "20.0% faster than the fixed launch"),
        ),
        missed=(captured,),
    )
    (event,) = lab.log.events("tuned")
    assert (event.key, event.winner, event.seconds) == (tuned.digest, str(FAST), 0.5 * SAMPLES)


def test_parts_that_python_takes_for_equal_are_measured_apart() -> None:
    lab, trial = Lab(MemoryStore()), FakeTrial()
    keys = [make_key(scalar=value) for value in (1, True, "1", None, 0, False)]
    assert [lab.select(trial, key).source for key in keys] == ["tuned"] * len(keys)
    assert trial.count("qualify") == len(keys)


def test_the_process_tuner_follows_the_settings_and_can_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(autotuner, "_process", None)
    empty = Report({}, 0.0, (), ())
    assert (autotuner.report(), autotuner.missed()) == (empty, ())
    pack = FileStore(tmp_path / "pack")
    pack.publish(make_key().digest, make_record(winner=SLOW).to_json())
    for name, value in {"CACHE_DIR": tmp_path / "cache", "SHARED": pack.folder, "BUDGET_S": 0}.items():
        monkeypatch.setenv(f"RL_KERNEL_AUTOTUNE_{name}", str(value))
    settings.current.cache_clear()
    try:
        tuner = autotuner.process_autotuner()
    finally:
        settings.current.cache_clear()
    assert autotuner.process_autotuner() is tuner
    assert tuner.select(make_key(), CANDIDATES, FakeTrial()).source == "shared"
    assert tuner.select(make_key(n=1), CANDIDATES, FakeTrial()).reason == "the budget of 0 s is spent"
    assert [one.source for one in autotuner.report().selections] == ["shared", "fixed"]
    other = PersistentAutotuner(MemoryStore(), log=events.EventLog())
    with autotuner.installed(other):
        autotuner.process_autotuner().miss(make_key())
        assert autotuner.missed() == (make_key(),)
        with caplog.at_level("INFO", "rl_engine"):
            autotuner._log_summary(other)
    assert autotuner.missed() == ()
    assert caplog.messages == [
        "autotune: 0 tuned, 0 replayed, 0 fixed, 0 quarantined, 1 missed; 0.0 s spent on measuring"
    ]


def test_a_user_without_a_cache_folder_is_tuned_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuner, "_process", None)
    for name in ("XDG_CACHE_HOME", "RL_KERNEL_AUTOTUNE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "")
    monkeypatch.chdir(tmp_path)
    settings.current.cache_clear()
    try:
        tuner = autotuner.process_autotuner()
    finally:
        settings.current.cache_clear()
    assert tuner.select(make_key(), CANDIDATES, FakeTrial()).source == "tuned"
    assert list(tmp_path.iterdir()) == []
