"""Prune removes what is of no use, and nothing that may be: what is locked, replaced or unreadable stays."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rl_engine.errors import StoreUnusableError
from rl_engine.platforms.tuning.key import TuningKey
from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import FileStore, PackStore, Pruned
from tests.support.tuning import make_key, make_record

KEYS = tuple(make_key(n=n) for n in range(4))


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """Four records, made at 100, 200, 300 and 400 seconds."""
    store = FileStore(tmp_path / "cache")
    for number, key in enumerate(KEYS):
        store.publish(key.digest, make_record(key, created_s=100 * (number + 1)).to_json())
    return store


def digests(*numbers: int) -> tuple[str, ...]:
    return tuple(sorted(KEYS[number].digest for number in numbers))


def pruned(found: tuple[Pruned, ...]) -> dict[str, str]:
    return {one.digest: one.reason for one in found}


def test_without_a_reason_nothing_goes_and_an_absent_folder_is_empty(store: FileStore, tmp_path: Path) -> None:
    assert store.prune(now_s=1e9) == ()
    assert store.digests() == digests(0, 1, 2, 3)
    assert FileStore(tmp_path / "absent").prune(now_s=0) == ()


def test_old_ones_go(store: FileStore) -> None:
    assert pruned(store.prune(now_s=500, max_age_s=300)) == {KEYS[0].digest: "too old"}
    assert store.digests() == digests(1, 2, 3)


def test_the_oldest_go_until_the_rest_fit(store: FileStore) -> None:
    size = len(store.load(KEYS[0].digest) or "")
    found = store.prune(now_s=500, max_bytes=2 * size + 5)
    assert [one.digest for one in found] == [KEYS[0].digest, KEYS[1].digest]
    assert {one.reason for one in found} == {"too many bytes"}
    assert store.prune(now_s=500, max_bytes=2 * size + 5) == ()
    assert len(store.prune(now_s=500, max_bytes=0)) == 2


def test_stale_and_broken_ones_go_and_a_folder_in_the_way_stays(store: FileStore) -> None:
    (store.folder / f"{KEYS[0].digest}.json").write_text("{")
    (store.folder / f"{KEYS[1].digest}.json").unlink()
    (store.folder / f"{KEYS[1].digest}.json").mkdir()
    found = pruned(store.prune(now_s=500, keep=lambda record: record.key.agrees_with({"n": 3, "unknown": 1})))
    assert found == {KEYS[0].digest: "broken: not JSON: JSONDecodeError", KEYS[2].digest: "stale"}
    assert store.digests() == digests(1, 3)


@pytest.mark.parametrize(("parts", "agree"), [
    ({}, True), ({"a": 1}, True), ({"a": 1, "c": 7}, True), ({"a": True}, False), ({"a": 1, "b": "y"}, False),
])  # fmt: skip
def test_a_key_agrees_with_parts_that_it_has_alike_or_not_at_all(parts: dict[str, Any], agree: bool) -> None:
    assert TuningKey.of("_k", {"a": 1, "b": "x"}).agrees_with(parts) is agree


def test_what_is_being_measured_stays(store: FileStore) -> None:
    lock = FileStore(store.folder).try_lock(KEYS[0].digest)
    assert lock is not None
    with lock:
        assert store.prune(now_s=500, max_age_s=399) == ()
    assert len(store.prune(now_s=500, max_age_s=399)) == 1


def test_what_was_replaced_since_it_was_judged_stays(store: FileStore) -> None:
    def replace(record: TuningRecord) -> bool:
        if record.key == KEYS[0]:
            store.publish(KEYS[0].digest, make_record(KEYS[0], created_s=500).to_json())
        return False

    assert set(pruned(store.prune(now_s=500, keep=replace))) == set(digests(1, 2, 3))
    assert store.digests() == digests(0)


def test_what_cannot_be_read_now_stays(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real, later = os.open, []

    def failing(path: Any, *rest: Any, **options: Any) -> int:
        if str(path).endswith(f"{KEYS[0].digest}.json"):
            raise OSError(errno.ESTALE, "stale")
        if str(path).endswith(f"{KEYS[1].digest}.json"):  # readable when it is judged, but not under the lock
            later.append(path)
            if len(later) > 1:
                raise OSError(errno.EIO, "I/O error")
        return real(path, *rest, **options)

    monkeypatch.setattr(os, "open", failing)
    assert set(pruned(store.prune(now_s=500, keep=lambda _record: False))) == set(digests(2, 3))
    with pytest.raises(StoreUnusableError, match=r"cannot read there \(stale\); set RL_KERNEL"):
        store.load(KEYS[0].digest)
    assert store.digests() == digests(0, 1)


def test_abandoned_temporary_files_go_and_young_ones_stay(store: FileStore) -> None:
    now_s = time.time()
    (store.folder / ".old.json.1.tmp").write_text("")
    os.utime(store.folder / ".old.json.1.tmp", (now_s - 3700, now_s - 3700))
    (store.folder / ".young.json.2.tmp").write_text("")
    store.prune(now_s=now_s)
    assert [path.name for path in store.folder.glob(".*")] == [".young.json.2.tmp"]
    assert store.digests() == digests(0, 1, 2, 3)


def test_a_folder_that_goes_away_while_it_is_listed_is_unusable(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_path: Path, _pattern: str) -> list[Path]:
        raise OSError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(Path, "glob", gone)
    for one in (store, PackStore(store.folder)):
        with pytest.raises(StoreUnusableError, match="cannot list it"):
            one.digests()


@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_only_a_file_system_that_syncs_folders_may_fail_at_it(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, number: int, fails: bool
) -> None:
    real = os.fsync

    def fsync(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").is_dir():
            raise OSError(number, os.strerror(number))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    if fails:
        with pytest.raises(StoreUnusableError, match="cannot write there"):
            store.publish(KEYS[0].digest, "new")
    else:
        store.publish(KEYS[0].digest, "new")
    assert store.load(KEYS[0].digest) == "new"
