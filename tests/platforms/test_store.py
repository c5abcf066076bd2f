"""Records on a real disk: whole or absent, ours alone, and never through a path that others can bend."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_engine.errors import StoreUnusableError
from rl_engine.platforms.tuning import store as store_module
from rl_engine.platforms.tuning.store import MAX_BYTES, FileStore, MemoryStore, PackStore
from tests.support.processes import start

DIGEST, OTHER = "ab" * 32, "cd" * 32
REMEDY = "RL_KERNEL_AUTOTUNE_CACHE_DIR"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")
NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "caches" / "autotune"


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_published_record_is_whole_private_and_alone(folder: Path, umask: int) -> None:
    store = FileStore(folder)
    assert (store.load(DIGEST), store.digests()) == (None, ())
    assert not folder.parent.exists(), "reading makes no folder"
    store.publish(DIGEST, "text ö\n")
    assert (folder / f"{DIGEST}.json").read_bytes() == b"text \xc3\xb6\n"
    assert names(folder) == [f"{DIGEST}.json"]
    assert (mode(folder.parent), mode(folder), mode(folder / f"{DIGEST}.json")) == (0o700, 0o700, 0o600)
    lock = store.try_lock(DIGEST)
    assert lock is not None
    with lock:
        assert mode(folder / f"{DIGEST}.lock") == 0o600
    assert os.umask(umask) == umask, "the process's umask is as it was"
    assert FileStore(folder).load(DIGEST) == "text ö\n"


def test_a_record_is_replaced_as_a_whole(folder: Path) -> None:
    store = FileStore(folder)
    store.publish(DIGEST, "old" * 1000)
    before = (folder / f"{DIGEST}.json").stat().st_ino
    store.publish(DIGEST, "new")
    assert store.load(DIGEST) == "new"
    assert (folder / f"{DIGEST}.json").stat().st_ino != before
    store.publish(OTHER, "other")
    assert store.digests() == (DIGEST, OTHER)


READ_WHILE_WRITTEN = """
import sys
from pathlib import Path
from rl_engine.platforms.tuning.store import FileStore
store, seen = FileStore(Path(sys.argv[1])), set()
print("ready", flush=True)
while "end" not in seen:
    text = store.load("ab" * 32)
    assert text == "end" or (len(text) in (20, 200_000) and len(set(text)) == 1), f"a torn record: {text!r:.20}"
    seen.add(text if text == "end" else text[0])
print(len(seen))
"""


def test_a_reader_never_sees_half_a_record(folder: Path) -> None:
    store = FileStore(folder)
    store.publish(DIGEST, "0" * 200_000)
    reader = start(READ_WHILE_WRITTEN, str(folder))
    assert reader.stdout is not None
    assert reader.stdout.readline() == "ready\n"
    for number in range(300):
        store.publish(DIGEST, str(number % 10) * (200_000 if number % 50 == 0 else 20))
    store.publish(DIGEST, "end")
    out, error = reader.communicate(timeout=30)
    assert (reader.returncode, error) == (0, "")
    assert int(out) > 2, "the reader saw several records"


def test_a_write_that_fails_leaves_nothing_and_says_what_to_do(folder: Path) -> None:
    store = FileStore(folder)
    store.publish(OTHER, "kept")
    (folder / f"{DIGEST}.json").mkdir()  # a file cannot replace a folder
    with pytest.raises(StoreUnusableError, match=f"cannot write there .*{REMEDY}"):
        store.publish(DIGEST, "text")
    assert names(folder) == [f"{DIGEST}.json", f"{OTHER}.json"]


def test_a_lock_is_tried_and_left_behind(folder: Path) -> None:
    store, other = FileStore(folder), FileStore(folder)
    held = store.try_lock(DIGEST)
    assert held is not None
    with held:
        assert store.try_lock(DIGEST) is None  # a thread of this process
        assert other.try_lock(DIGEST) is None  # another holder of the file
        free = other.try_lock(OTHER)
        assert free is not None
        with free:
            pass
    assert names(folder) == [f"{DIGEST}.lock", f"{OTHER}.lock"]
    again = store.try_lock(DIGEST)
    assert again is not None
    with again:
        pass


def test_a_lock_is_released_when_its_block_fails(folder: Path) -> None:
    store = FileStore(folder)
    held = store.try_lock(DIGEST)
    assert held is not None
    with pytest.raises(KeyboardInterrupt), held:
        raise KeyboardInterrupt
    again = FileStore(folder).try_lock(DIGEST)
    assert again is not None
    with again:
        pass


HOLD = """
import sys
from pathlib import Path
from rl_engine.platforms.tuning.store import FileStore
with FileStore(Path(sys.argv[1])).try_lock("ab" * 32):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_of_another_process_is_seen_and_ends_with_a_killed_holder(folder: Path) -> None:
    holder = start(HOLD, str(folder))
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert FileStore(folder).try_lock(DIGEST) is None
    holder.kill()
    holder.communicate(timeout=10)
    lock = FileStore(folder).try_lock(DIGEST)
    assert lock is not None
    with lock:
        pass


def test_a_lock_that_cannot_be_made_is_an_unusable_store(folder: Path) -> None:
    store = FileStore(folder)
    store.publish(OTHER, "text")
    (folder / f"{DIGEST}.lock").mkdir()
    for _ in range(2):  # the second try must not find the key "held"
        with pytest.raises(StoreUnusableError, match="cannot lock there"):
            store.try_lock(DIGEST)


def test_threads_of_one_process_share_one_lock(folder: Path) -> None:
    store, start_together, got = FileStore(folder), threading.Barrier(8), []
    finish = threading.Event()

    def work() -> None:
        start_together.wait(10)
        lock = store.try_lock(DIGEST)
        got.append(lock)
        if len(got) == 8:
            finish.set()
        if lock is not None:
            with lock:
                finish.wait(10)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sum(lock is not None for lock in got) == 1


@pytest.mark.parametrize("kind", [FileStore, MemoryStore])
def test_quarantine_takes_that_text_out_of_use(folder: Path, kind: type[FileStore | MemoryStore]) -> None:
    store = FileStore(folder) if kind is FileStore else MemoryStore()
    assert store.quarantined(DIGEST) is None
    store.publish(DIGEST, "bad")
    store.quarantine(DIGEST, "bad")
    assert (store.load(DIGEST), store.quarantined(DIGEST), store.digests()) == (None, "bad", ())
    store.publish(DIGEST, "good")
    assert (store.load(DIGEST), store.quarantined(DIGEST), store.digests()) == ("good", "bad", (DIGEST,))
    lock = store.try_lock(DIGEST)
    assert lock is not None
    with lock:
        pass


def test_quarantine_of_a_packs_text_leaves_the_own_record(folder: Path) -> None:
    store = FileStore(folder)
    store.publish(DIGEST, "ours")
    store.quarantine(DIGEST, "theirs")
    assert (store.load(DIGEST), store.quarantined(DIGEST)) == ("ours", "theirs")
    assert names(folder) == [f"{DIGEST}.json", f"{DIGEST}.quarantined"]


def a_file(path: Path, bits: int = 0o600) -> Path:
    path.write_text("text")
    path.chmod(bits)
    return path


PLANT: dict[str, Callable[[Path], object]] = {
    "symbolic link": lambda path: path.symlink_to(a_file(path.with_name("elsewhere"))),
    "dangling link": lambda path: path.symlink_to(path.with_name("elsewhere")),
    "hard link": lambda path: path.hardlink_to(a_file(path.with_name("elsewhere"))),
    "fifo": lambda path: os.mkfifo(path, 0o600),
    "folder": lambda path: path.mkdir(mode=0o700),
    "too big": lambda path: path.write_bytes(b"x" * (MAX_BYTES + 1)),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe"),
    "world-writable": lambda path: a_file(path, 0o666),
    "group-writable": lambda path: a_file(path, 0o620),
    "another user's": lambda path: os.chown(a_file(path), NOBODY, NOBODY),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", [pytest.param(one, marks=as_root if "user" in one else ()) for one in PLANT])
def test_what_is_no_plain_file_of_ours_is_no_record(folder: Path, kind: str) -> None:
    store = FileStore(folder)
    store.publish(OTHER, "text")
    PLANT[kind](folder / f"{DIGEST}.json")
    assert store.load(DIGEST) is None
    assert PackStore(folder).load(DIGEST) is None
    assert store.load(OTHER) == "text"


def test_the_biggest_record_is_read_whole(folder: Path) -> None:
    store = FileStore(folder)
    store.publish(DIGEST, "x" * MAX_BYTES)
    assert store.load(DIGEST) == "x" * MAX_BYTES


def test_a_digest_finds_only_records(folder: Path) -> None:
    store = FileStore(folder)
    store.publish(OTHER, "text")
    store.publish(DIGEST, "text")
    store.quarantine(DIGEST, "text")
    (folder / ".x.json.1.tmp").write_text("left by a killed process")
    assert store.digests() == PackStore(folder).digests() == (OTHER,)


def test_a_folder_another_process_makes_at_the_same_time_is_used(folder: Path) -> None:
    class SlowStore(FileStore):
        def _present(self) -> bool:
            found = super()._present()
            if not found:
                FileStore(folder).publish(OTHER, "theirs")  # between our look and our mkdir
            return found

    store = SlowStore(folder)
    store.publish(DIGEST, "ours")
    assert store.digests() == (DIGEST, OTHER)


def test_relative_folders_are_taken_from_where_the_process_was_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store, pack = FileStore(Path("cache")), PackStore(Path("cache"))
    store.publish(DIGEST, "text")
    monkeypatch.chdir("/")
    assert (store.load(DIGEST), pack.load(DIGEST)) == ("text", "text")
    assert store_module.FileStore(Path("cache")).folder == Path("/cache")
