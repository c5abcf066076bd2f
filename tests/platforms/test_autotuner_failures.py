"""What the tuner does when something is in the way: budgets, locks, wrong bytes, interruptions, unusable folders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_engine.errors import StoreUnusableError
from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import FileStore, MemoryStore, PackStore
from rl_engine.platforms.tuning.trial import Canary
from tests.support.tuning import FAST, FIXED, SLOW, FakeTrial, Lab, make_key, make_record


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "cache")


def pay(lab: Lab, seconds: float) -> Callable[[], None]:
    def advance() -> None:
        lab.clock.now_s += seconds

    return advance


def test_a_spent_budget_keeps_new_keys_fixed_and_recorded_ones_usable(store: FileStore) -> None:
    lab = Lab(store, budget_s=10)
    first = FakeTrial(before_qualify=pay(lab, 10))
    assert lab.select(first).winner == FIXED
    later = FakeTrial()
    chosen = lab.select(later, make_key(n=2))
    assert (chosen.winner, chosen.reason, chosen.settled) == (FIXED, "the budget of 10 s is spent", True)
    assert later.calls == []
    store.publish(make_key(n=3).digest, make_record(make_key(n=3)).to_json())
    assert lab.select(FakeTrial(), make_key(n=3)).source == "disk"
    assert lab.tuner.report().seconds == 10


def test_a_budget_that_ends_within_a_key_keeps_it_fixed_and_publishes_nothing(store: FileStore) -> None:
    lab = Lab(store, budget_s=10)
    trial = FakeTrial(before_sample=pay(lab, 0.3))  # 63 samples would take 19 s
    chosen = lab.select(trial)
    assert (chosen.winner, chosen.source, chosen.settled) == (FIXED, "fixed", True)
    assert chosen.reason == "the tuning budget ended while it was measured"
    assert trial.calls[-1] == "close"
    assert store.digests() == ()
    assert 10 <= lab.tuner.report().seconds < 11  # one round of three samples past it at most
    free = FileStore(store.folder).try_lock(make_key().digest)
    assert free is not None
    with free:
        pass


def test_budgets_add_up_over_keys(store: FileStore) -> None:
    lab = Lab(store, budget_s=10)
    sources = [lab.select(FakeTrial(before_qualify=pay(lab, 4)), make_key(n=n)).source for n in range(4)]
    assert sources == ["tuned", "tuned", "fixed", "fixed"]  # the third ends within, the fourth does not begin
    assert len(store.digests()) == 2


def test_a_locked_key_is_fixed_at_once_and_asked_for_again_after_1_2_4_to_60_seconds(store: FileStore) -> None:
    lab, trial = Lab(store), FakeTrial()
    digest, other = make_key().digest, FileStore(store.folder)
    held = other.try_lock(digest)
    assert held is not None
    with held:
        for delay_s in (1, 2, 4, 8, 16, 32, 60, 60):
            chosen = lab.select(trial)
            assert (chosen.winner, chosen.source, chosen.settled) == (FIXED, "fixed", False)
            assert chosen.reason == "another process is measuring this key"
            asked = lab.log.counts()["pending"]
            lab.clock.now_s += delay_s - 0.01
            assert lab.select(trial).settled is False
            assert lab.log.counts()["pending"] == asked, "looked again too early"
            lab.clock.now_s += 0.01
        assert lab.log.counts() == {"pending": 8}
        assert trial.calls == []
        other.publish(digest, make_record().to_json())
    chosen = lab.select(trial)
    assert (chosen.winner, chosen.source, trial.count("sample")) == (FAST, "disk", 0)
    assert lab.select(trial).source == "memory"


def test_a_record_that_appeared_before_the_lock_was_ours_is_used(store: FileStore) -> None:
    class LateStore(FileStore):
        def try_lock(self, digest: str) -> contextlib.AbstractContextManager[None] | None:
            store.publish(digest, make_record().to_json())  # the other process ends just before we lock
            return super().try_lock(digest)

    trial = FakeTrial()
    assert Lab(LateStore(store.folder)).select(trial).source == "disk"
    assert trial.count("sample") == 0


def test_a_winner_with_other_bytes_is_quarantined_with_one_warning(store: FileStore) -> None:
    digest = make_key().digest
    store.publish(digest, make_record().to_json())
    lab, trial = Lab(store), FakeTrial(verdict=Canary.DIFFERENT)
    chosen = lab.select(trial)
    assert (chosen.winner, chosen.source, chosen.settled) == (FIXED, "fixed", True)
    assert trial.calls == ["make", f"canary {FAST} | {FIXED} | 5eed-c0de", "close"]
    assert lab.warnings() == [chosen.reason]
    assert digest in chosen.reason
    assert str(FAST) in chosen.reason
    assert lab.log.counts() == {"warning": 1, "quarantined": 1}
    assert store.load(digest) is None
    assert store.quarantined(digest) == make_record().to_json()
    assert lab.select(trial).source == "memory"
    assert Lab(store).select(FakeTrial()).source == "tuned"  # the next process measures anew


def test_quarantined_text_is_not_used_again_from_a_pack_either(tmp_path: Path, store: FileStore) -> None:
    pack = FileStore(tmp_path / "pack")
    pack.publish(make_key().digest, make_record().to_json())
    assert Lab(store, PackStore(pack.folder)).select(FakeTrial(verdict=Canary.DIFFERENT)).winner == FIXED
    assert pack.digests() == (make_key().digest,)  # read-only: left where it is
    trial = FakeTrial()
    chosen = Lab(store, PackStore(pack.folder)).select(trial, mode="replay")
    assert (chosen.winner, chosen.reason) == (FIXED, "no record, and replay measures nothing")
    assert trial.calls == []


def test_a_record_of_another_bit_class_is_a_miss_and_is_measured_anew(store: FileStore) -> None:
    digest = make_key().digest
    store.publish(digest, make_record(reason="old").to_json())
    trial = FakeTrial(verdict=Canary.OTHER_CLASS)
    lab = Lab(store)
    replayed = lab.select(trial, mode="replay")
    assert (replayed.winner, replayed.reason) == (FIXED, "no record, and replay measures nothing")
    assert lab.warnings() == [f"the record {digest} (disk) is not used: the fixed launch is in another bit class now"]
    assert lab.select(trial).source == "tuned"
    assert trial.count("sample") > 0
    assert store.quarantined(digest) is None
    assert TuningRecord.from_json(store.load(digest) or "").reason != "old"


@pytest.mark.parametrize("trouble", [{"verdict": Canary.NOT_NOW}, {"unavailable": "out of memory"}])
def test_a_record_that_cannot_be_compared_now_is_postponed(store: FileStore, trouble: dict[str, object]) -> None:
    store.publish(make_key().digest, make_record().to_json())
    lab, trial = Lab(store), FakeTrial(**trouble)  # type: ignore[arg-type]  # one field by name
    chosen = lab.select(trial)
    assert (chosen.winner, chosen.source, chosen.settled) == (FIXED, "fixed", False)
    assert chosen.reason.startswith("the record cannot be compared now")
    assert trial.calls[-1] == "close"
    lab.clock.now_s += 1
    trial.verdict, trial.unavailable = Canary.EQUAL, ""
    assert lab.select(trial).source == "disk"
    assert store.quarantined(make_key().digest) is None


@pytest.mark.parametrize("trouble", [{"verdict": Canary.NOT_NOW}, {"unavailable": "out of memory"}])
def test_a_record_that_cannot_be_compared_three_times_is_left_to_the_next_process(
    store: FileStore, trouble: dict[str, object]
) -> None:
    text = make_record().to_json()
    store.publish(make_key().digest, text)
    lab, trial = Lab(store), FakeTrial(**trouble)  # type: ignore[arg-type]  # one field by name
    for delay_s in (1, 2):
        assert lab.select(trial).settled is False
        lab.clock.now_s += delay_s
    chosen = lab.select(trial)
    assert (chosen.winner, chosen.source, chosen.settled) == (FIXED, "fixed", True)
    assert chosen.reason.startswith("the record cannot be compared now")
    assert chosen.reason.endswith("; the fixed launch is used after 3 tries")
    assert lab.warnings() == [f"{make_key().kernel}: {chosen.reason}"]
    assert lab.log.counts() == {"pending": 2, "warning": 1, "fixed": 1}
    lab.clock.now_s += 3600
    assert (lab.select(trial).source, trial.count("canary")) == ("memory", 3)
    assert (store.load(make_key().digest), store.quarantined(make_key().digest)) == (text, None)
    assert Lab(store).select(FakeTrial()).source == "disk"  # the next process


def test_waiting_for_another_process_uses_up_no_try_of_a_record(store: FileStore) -> None:
    held = FileStore(store.folder).try_lock(make_key().digest)
    assert held is not None
    lab, trial = Lab(store), FakeTrial(verdict=Canary.NOT_NOW)
    with held:
        for _time in range(5):
            assert lab.select(trial).reason == "another process is measuring this key"
            lab.clock.now_s += 60
        store.publish(make_key().digest, make_record().to_json())
        for _time in range(2):
            chosen = lab.select(trial)
            assert (chosen.reason, chosen.settled) == ("the record cannot be compared now", False)
            lab.clock.now_s += 60
    trial.verdict = Canary.EQUAL
    assert lab.select(trial).source == "disk"


@pytest.mark.parametrize("where", ["before_qualify", "before_sample"])
def test_an_interruption_propagates_and_leaves_nothing_behind(store: FileStore, where: str) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    lab, trial = Lab(store), FakeTrial(**{where: interrupt})  # type: ignore[arg-type]  # one field by name
    with pytest.raises(KeyboardInterrupt):
        lab.select(trial)
    assert trial.calls[-1] == "close"
    assert store.digests() == ()
    free = FileStore(store.folder).try_lock(make_key().digest)
    assert free is not None
    with free:
        pass
    assert lab.tuner.report().selections == ()
    assert lab.select(FakeTrial()).source == "tuned"  # nothing in this process holds it either


def test_a_launch_that_cannot_be_measured_is_fixed_with_one_warning(store: FileStore) -> None:
    lab, trial = Lab(store), FakeTrial(unavailable="no memory for scratch copies")
    chosen = lab.select(trial)
    assert (chosen.winner, chosen.source, chosen.reason, chosen.settled) == (
        FIXED,
        "fixed",
        "no memory for scratch copies",
        True,
    )
    lab.select(trial, make_key(n=2))
    assert lab.warnings() == ["_silu_fwd_kernel is not tuned: no memory for scratch copies"]
    assert trial.count("close") == trial.count("make") == 2
    assert store.digests() == ()


def test_a_fixed_launch_without_a_time_is_not_judged(store: FileStore) -> None:
    chosen = Lab(store).select(FakeTrial(costs_us={FIXED: float("nan"), FAST: 1.0, SLOW: 1.0}))
    assert (chosen.winner, chosen.reason) == (FIXED, "the fixed launch could not be timed")
    assert store.digests() == ()


def test_an_unusable_folder_costs_one_warning_and_selections_stay_in_memory(store: FileStore) -> None:
    store.folder.write_text("a file lies where the folder should be")
    lab = Lab(store)
    assert lab.select(FakeTrial()).source == "tuned"
    assert lab.select(FakeTrial()).source == "memory"
    assert lab.select(FakeTrial(), make_key(n=2)).source == "tuned"
    (warning,) = lab.warnings()
    assert warning.startswith(f"autotune cache not used: {store.folder}: ")
    assert "RL_KERNEL_AUTOTUNE_CACHE_DIR" in warning


def test_a_result_that_cannot_be_written_still_counts_in_this_process(store: FileStore) -> None:
    class FullStore(FileStore):
        def publish(self, digest: str, text: str) -> None:
            raise StoreUnusableError("no space left")

    lab = Lab(FullStore(store.folder))
    assert lab.select(FakeTrial()).winner == FAST
    assert lab.warnings() == ["autotune cache not used: no space left"]


def test_an_untrusted_pack_costs_one_warning_and_is_passed_over(tmp_path: Path) -> None:
    pack = FileStore(tmp_path / "pack")
    for n in (1, 2):
        pack.publish(make_key(n=n).digest, make_record(make_key(n=n)).to_json())
    pack.folder.chmod(0o770)
    lab = Lab(MemoryStore(), PackStore(pack.folder))
    assert [lab.select(FakeTrial(), make_key(n=n)).source for n in (1, 2)] == ["tuned", "tuned"]
    (warning,) = lab.warnings()
    assert warning.startswith(f"shared autotune records not used: {pack.folder}: others may write there")


def test_ten_thousand_signatures_measure_sixty_four_and_warn_once_naming_the_part() -> None:
    lab, trial = Lab(MemoryStore()), FakeTrial(rejected={FAST: "other bytes", SLOW: "other bytes"})
    selections = [lab.select(trial, make_key(pad=number % 3, seqlen=number)) for number in range(10_000)]
    assert trial.count("qualify") == 64
    assert [one.source for one in selections] == ["tuned"] * 64 + ["fixed"] * 9_936
    (warning,) = lab.warnings()
    assert warning == (
        "_silu_fwd_kernel: more than 64 signatures or 16 sizes of one; "
        "seqlen keeps changing, so new ones run the fixed launch"
    )
    assert lab.select(trial, make_key(pad=0, seqlen=0)).source == "memory"
    assert lab.select(trial, make_key("_other_kernel")).source == "tuned"  # counted by kernel


def test_sixteen_sizes_of_one_signature_are_measured() -> None:
    lab, trial = Lab(MemoryStore()), FakeTrial(rejected={FAST: "other bytes", SLOW: "other bytes"})
    sources = [lab.select(trial, make_key(**{"bucket.n": 1 << power})).source for power in range(18)]
    assert sources == ["tuned"] * 16 + ["fixed"] * 2
    assert "bucket.n keeps changing" in lab.warnings()[0]
