"""Storms of keys, budgets that end, and many threads: bounded time, files, memory and warnings."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_engine.platforms.tuning import events
from rl_engine.platforms.tuning.limits import MAX_BUCKETS, MAX_SIGNATURES
from rl_engine.platforms.tuning.store import FileStore, MemoryStore
from tests.support.tuning import CANDIDATES, FAST, FIXED, FakeTrial, Lab, make_key

KEYS = 10_000
MEDIAN_S = 0.005  # of one select: it reads the folder and hashes the key; measured 0.2 ms


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("part", "measured"), [("bucket.n", MAX_BUCKETS), ("launch.n", MAX_SIGNATURES)])
def test_ten_thousand_lengths_cost_bounded_time_files_memory_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, measured: int, tally: Callable[..., None]
) -> None:
    monkeypatch.setattr(events, "KEPT", 1000)
    store = FileStore(tmp_path / "cache")
    lab, trial, taken_s, warnings = Lab(store), FakeTrial(), [], []
    lab.log.subscribe(lambda event: warnings.append(event.reason) if event.kind == "warning" else None)
    for number in range(KEYS):
        key = make_key(**{part: number})
        began_s = time.perf_counter()
        chosen = lab.select(trial, key)
        taken_s.append(time.perf_counter() - began_s)
        assert chosen.winner == (FAST if number < measured else FIXED)
        assert chosen.settled
    assert sorted(taken_s)[KEYS // 2] < MEDIAN_S
    assert sum(taken_s[-1000:]) < 3 * sum(taken_s[1000:2000]) + 1, "later ones are not slower"
    assert trial.count("qualify") == measured
    assert len(list(store.folder.iterdir())) == 2 * measured, "a record and a lock each"
    (warning,) = warnings
    assert f"{part} keeps changing" in warning
    assert len(lab.tuner.report().selections) == 1000, "the oldest are forgotten, and looked up again when they come"
    hot = FakeTrial()
    assert lab.select(hot, make_key(**{part: 0})).source == "disk"
    assert lab.select(hot, make_key(**{part: 0})).source == "memory"
    what = "lengths of one signature" if part == "bucket.n" else "static signatures"
    each_ms = 1000 * sorted(taken_s)[KEYS // 2]
    outcome = f"{measured} measured, the rest fixed in {each_ms:.2f} ms each, {2 * measured} files, one warning"
    tally(f"distinct {what} in one run", KEYS, outcome)


def test_missed_keys_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEPT", 100)
    lab = Lab(MemoryStore())
    for number in range(300):
        lab.tuner.miss(make_key(n=number))
    assert lab.tuner.missed() == tuple(make_key(n=number) for number in range(200, 300))


def test_a_budget_of_zero_measures_nothing_and_touches_no_disk(tmp_path: Path, tally: Callable[..., None]) -> None:
    lab, trial = Lab(FileStore(tmp_path / "cache"), budget_s=0), FakeTrial()
    for number in range(100):
        chosen = lab.select(trial, make_key(n=number))
        assert (chosen.winner, chosen.reason, chosen.settled) == (FIXED, "the budget of 0 s is spent", True)
    assert (trial.calls, lab.warnings(), (tmp_path / "cache").exists()) == ([], [], False)
    tally("a budget of zero", 100, "fixed, nothing made, nothing run")


def test_a_budget_spent_in_the_middle_of_a_key_ends_the_key(tmp_path: Path, tally: Callable[..., None]) -> None:
    store = FileStore(tmp_path / "cache")
    for cut in range(1, 24):  # a round is three samples of a second
        lab = Lab(store, budget_s=float(cut))

        def pay(lab: Lab = lab) -> None:
            lab.clock.now_s += 1

        trial = FakeTrial(before_sample=pay)
        chosen = lab.select(trial)
        assert (chosen.winner, chosen.reason) == (FIXED, "the tuning budget ended while it was measured")
        assert trial.calls[-1] == "close"
        assert lab.tuner.report().seconds <= max(cut, 3) + 3, "the round that was begun, and the warm-up"
        assert store.digests() == ()
    tally("a budget spent in the middle of a key", 23, "fixed, nothing published, one round over at most")


def test_threads_share_one_budget(tally: Callable[..., None]) -> None:
    # of ten seconds, one thread spends eight; another, begun after six of them, has two when that is known
    lab = Lab(MemoryStore(), budget_s=10)
    begun, both, done = threading.Event(), threading.Event(), threading.Event()
    reasons = []

    def early() -> None:
        lab.clock.now_s += 6
        begun.set()
        assert both.wait(10)
        lab.clock.now_s += 2

    def late() -> None:
        both.set()
        assert done.wait(10)

    first = threading.Thread(target=lambda: lab.select(FakeTrial(before_qualify=early)))
    second = threading.Thread(
        target=lambda: reasons.append(lab.select(FakeTrial(before_qualify=late), make_key(n=1)).reason)
    )
    first.start()
    assert begun.wait(10)
    second.start()
    first.join(10)
    done.set()
    second.join(10)
    assert lab.tuner.report().selections[0].source == "tuned"
    assert reasons == ["the tuning budget ended while it was measured"]
    tally("two threads spend one budget", 1, "what one spent ends the other")


def test_sixteen_threads_tune_the_same_and_different_keys_once_each(tmp_path: Path, tally: Callable[..., None]) -> None:
    n_threads, n_own, n_common = 16, 6, 12
    lab = Lab(FileStore(tmp_path / "cache"))
    start, failures, slowest_s = threading.Barrier(n_threads), [], [0.0] * n_threads
    measured: dict[str, list[int]] = {}

    def work(rank: int) -> None:
        try:
            start.wait(10)
            numbers = [*range(n_common), *(100 * (rank + 1) + own for own in range(n_own))]
            for number in numbers[rank % n_common :] + numbers[: rank % n_common]:
                key = make_key(**{"bucket.n": number % 16, "launch.n": number})
                trial = FakeTrial(before_qualify=lambda key=key: measured.setdefault(key.digest, []).append(rank))
                began_s = time.monotonic()
                chosen = lab.select(trial, key)
                slowest_s[rank] = max(slowest_s[rank], time.monotonic() - began_s)
                assert chosen.winner == (FIXED if chosen.source == "fixed" else FAST)
        except BaseException as error:  # noqa: BLE001  # shown below
            failures.append(error)

    lab.tuner._limits.refuse = lambda _key: None  # type: ignore[method-assign]  # more keys than a run should hold
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    n_keys = n_common + n_threads * n_own
    assert (len(measured), {len(ranks) for ranks in measured.values()}) == (n_keys, {1}), "each once"
    assert len(lab.tuner._own.digests()) == n_keys
    assert max(slowest_s) < 5
    assert lab.warnings() == []
    outcome = f"{n_keys} keys measured once each, none waited"
    tally("16 threads, first launches of the same and of different keys", n_threads * (n_common + n_own), outcome)


def test_failing_candidates_cost_once_and_never_win(tmp_path: Path, tally: Callable[..., None]) -> None:
    # B28, B80: as far as the tuner sees them
    store = FileStore(tmp_path / "cache")
    rejected = dict.fromkeys(CANDIDATES[1:], "out of resources: shared memory")
    lab, trial = Lab(store), FakeTrial(rejected=rejected)
    for number in range(10):
        chosen = lab.select(trial, make_key(n=number))
        assert (chosen.winner, chosen.source, chosen.reason) == (FIXED, "tuned", "no other candidate qualified")
    assert (trial.count("qualify"), trial.count("sample")) == (10, 0)
    again, restarted = FakeTrial(rejected=rejected), Lab(store)
    assert {restarted.select(again, make_key(n=number)).source for number in range(10)} == {"disk"}
    assert again.calls == []
    newer = make_key(n=0, **{"compiler.triton": "9.9"})
    assert restarted.select(again, newer).source == "tuned", "another compiler: tried again"
    tally(
        "all candidates fail, 10 keys and a restart", 10, "fixed, remembered with the reason, retried by a new compiler"
    )


def test_a_fixed_launch_that_raises_raises_its_own_error_and_leaves_nothing(
    tmp_path: Path, tally: Callable[..., None]
) -> None:
    # B28
    def fail() -> None:
        raise RuntimeError("the launch itself is wrong")

    store = FileStore(tmp_path / "cache")
    for where in ("before_qualify", "before_sample"):
        lab, trial = Lab(store), FakeTrial(**{where: fail})  # type: ignore[arg-type]  # one field by name
        with pytest.raises(RuntimeError, match="the launch itself is wrong"):
            lab.select(trial)
        assert (trial.calls[-1], store.digests()) == ("close", ())
        lock = FileStore(store.folder).try_lock(make_key().digest)
        assert lock is not None
        with lock:
            pass
    assert lab.select(FakeTrial()).source == "tuned"
    tally("the fixed launch raises inside a trial", 2, "its own error; lock free, nothing published")


def test_no_memory_for_a_trial_costs_one_warning_and_publishes_nothing(
    tmp_path: Path, tally: Callable[..., None]
) -> None:
    # B51: the tuner's part
    lab, trial = Lab(FileStore(tmp_path / "cache")), FakeTrial(unavailable="no memory for scratch copies")
    assert {lab.select(trial, make_key(n=number)).winner for number in range(20)} == {FIXED}
    assert (trial.count("close"), lab.tuner._own.digests(), len(lab.warnings())) == (20, (), 1)
    tally("no memory for scratch copies", 20, "fixed, trial closed, nothing published, one warning")
