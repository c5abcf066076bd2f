"""Disks that are full, fail, vanish or lie: selections stay in memory, old records stay whole, and it heals."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import FileStore
from tests.support.processes import run
from tests.support.tuning import CANDIDATES, FAST, FakeTrial, Lab, make_key, make_record

OLD, LATER = make_key(n="old"), make_key(n="later")
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ESTALE)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """A cache with one record."""
    store = FileStore(tmp_path / "cache")
    store.publish(OLD.digest, make_record(OLD).to_json())
    return store


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k,mode=700", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def tuned_in_memory(lab: Lab) -> None:
    """Tune three keys, each of which is then a hit."""
    for number in range(3):
        trial = FakeTrial()
        assert lab.select(trial, make_key(n=number)).winner == FAST
        assert (lab.select(trial, make_key(n=number)).source, trial.count("qualify")) == ("memory", 1)


def healed(lab: Lab, folder: Path) -> None:
    """Assert one warning so far, no temporary file, an intact old record, and that the next key is persisted."""
    assert len(lab.warnings()) == 1, lab.warnings()
    assert str(folder) in lab.warnings()[0]
    assert "set RL_KERNEL_AUTOTUNE_CACHE_DIR" in lab.warnings()[0]
    assert list(folder.glob(".*.tmp")) == []
    assert lab.select(FakeTrial(), LATER).source == "tuned"
    store = FileStore(folder)
    for key in (OLD, LATER):
        TuningRecord.from_json(store.load(key.digest) or "").check(key, CANDIDATES)
    for digest in store.digests():
        TuningRecord.from_json(store.load(digest) or "")
    assert len(lab.warnings()) == 1


def test_a_full_disk_costs_one_warning_and_heals(small: Path, tally: Callable[..., None]) -> None:
    # B42
    store = FileStore(small / "cache")
    store.publish(OLD.digest, make_record(OLD).to_json())
    filler = small / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:  # noqa: PT012  # until
        while True:
            file.write(bytes(512))
    lab = Lab(store)
    tuned_in_memory(lab)
    assert store.digests() == (OLD.digest,)
    filler.unlink()
    healed(lab, store.folder)
    tally(
        "a full disk (a tmpfs of 16 KiB)", 3, "in memory, one warning, no partial file; persisted once there is space"
    )


class _Failing:
    """A file whose write or close fails."""

    def __init__(self, file: Any, method: str, error: OSError) -> None:
        self._file, self._method, self._error = file, method, error

    def __enter__(self) -> _Failing:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()
        if self._method == "close":
            raise self._error

    def write(self, text: str) -> None:
        if self._method == "write":
            self._file.write(text[: len(text) // 2])
            raise self._error
        self._file.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def breaking(broken: pytest.MonkeyPatch, call: str, error: OSError) -> None:
    """Make one call of the publication fail from now on."""

    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    if call in ("write", "close"):
        real = os.fdopen

        def fdopen(handle: int, mode: str, **options: Any) -> Any:
            file = real(handle, mode, **options)
            return _Failing(file, call, error) if mode == "w" else file

        broken.setattr(os, "fdopen", fdopen)
    elif call == "open to write":
        opened = os.open

        def only_reading(path: Any, flags: int, *mode: int, **options: Any) -> int:
            if flags & os.O_CREAT and str(path).endswith(".tmp"):
                raise error
            return opened(path, flags, *mode, **options)

        broken.setattr(os, "open", only_reading)
    else:
        broken.setattr(*{"fsync": (os, "fsync"), "replace": (Path, "replace"), "mkdir": (Path, "mkdir")}[call], fail)


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open to write", "write", "fsync", "close", "replace"])
def test_a_publication_that_fails_at_any_call_costs_one_warning_and_heals(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, call: str, number: int, tally: Callable[..., None]
) -> None:
    # B23, B42
    lab = Lab(store)
    with monkeypatch.context() as broken:
        breaking(broken, call, OSError(number, os.strerror(number)))
        tuned_in_memory(lab)
    assert store.digests() == (OLD.digest,)
    healed(lab, store.folder)
    tally(f"{call} fails (ENOSPC, EDQUOT, EIO, EROFS, EMFILE, ESTALE)", 3, "in memory, one warning, no partial file")


@pytest.mark.parametrize("number", [*ERRORS, errno.EACCES], ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_made_costs_one_warning_and_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, tally: Callable[..., None]
) -> None:
    lab = Lab(FileStore(tmp_path / "parent" / "cache"))
    with monkeypatch.context() as broken:
        breaking(broken, "mkdir", OSError(number, os.strerror(number)))
        tuned_in_memory(lab)
    FileStore(tmp_path / "parent" / "cache").publish(OLD.digest, make_record(OLD).to_json())
    healed(lab, tmp_path / "parent" / "cache")
    tally("mkdir fails", 3, "in memory, one warning")


@pytest.mark.parametrize("number", [errno.EBUSY, errno.ESTALE, errno.ENOENT], ids=errno.errorcode.get)
def test_a_rename_that_fails_once_is_followed_by_others(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, number: int, tally: Callable[..., None]
) -> None:
    # B23
    lab, real, failures = Lab(store), Path.replace, [OSError(number, os.strerror(number))]
    monkeypatch.setattr(Path, "replace", lambda path, target: real(path, target) if not failures else _raise(failures))
    tuned_in_memory(lab)
    assert set(store.digests()) == {OLD.digest, make_key(n=1).digest, make_key(n=2).digest}
    healed(lab, store.folder)
    tally("rename fails once (EBUSY, ESTALE, ENOENT)", 1, "in memory, one warning; the next ones are persisted")


def _raise(failures: list[OSError]) -> None:
    raise failures.pop()


@pytest.mark.parametrize(("number", "warnings"), [(errno.EINVAL, 0), (errno.ENOTSUP, 0), (errno.EIO, 1)])
def test_a_folder_that_cannot_be_synced_holds_the_record_all_the_same(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, number: int, warnings: int, tally: Callable[..., None]
) -> None:
    # B23: some file systems do not sync folders, which is no reason to warn
    real = os.fsync

    def fsync(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").is_dir():
            raise OSError(number, os.strerror(number))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    lab = Lab(store)
    tuned_in_memory(lab)
    assert len(lab.warnings()) == warnings
    assert {Lab(store).select(FakeTrial(), make_key(n=one)).source for one in range(3)} == {"disk"}
    tally("fsync of the folder fails (EINVAL, ENOTSUP, EIO)", 3, "the record is there and used; EIO warns once")


def test_a_temporary_file_that_cannot_be_removed_is_no_failure(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, tally: Callable[..., None]
) -> None:
    # B23
    def busy(_path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EBUSY, "busy")

    lab = Lab(store)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", busy)
        tuned_in_memory(lab)
    assert (len(store.digests()), lab.warnings()) == (4, [])
    tally("unlink of the temporary file fails (EBUSY)", 3, "published, no warning")


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE], ids=errno.errorcode.get)
def test_a_record_that_cannot_be_read_now_is_measured_in_memory_and_not_pruned(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, number: int, tally: Callable[..., None]
) -> None:
    # B23
    real, lab = os.open, Lab(store)

    def stale(path: Any, flags: int, *mode: int, **options: Any) -> int:
        if str(path).endswith(".json"):
            raise OSError(number, os.strerror(number))
        return real(path, flags, *mode, **options)

    with monkeypatch.context() as broken:
        broken.setattr(os, "open", stale)
        assert lab.select(FakeTrial(), OLD).source == "tuned"
        assert lab.select(FakeTrial(), OLD).source == "memory"
        assert store.prune(now_s=0, keep=lambda _record: False) == (), "it may well be of use"
    healed(lab, store.folder)
    tally("a record cannot be read (ESTALE, EIO, EMFILE)", 1, "in memory, one warning; prune leaves it there")


FEW_FILES = """
import os, resource, sys
from pathlib import Path
from rl_engine.platforms.tuning.store import FileStore
from tests.support.tuning import FakeTrial, Lab, make_key
store = FileStore(Path(sys.argv[1]))
lab = Lab(store)
before = resource.getrlimit(resource.RLIMIT_NOFILE)
opened = [os.open("/", os.O_RDONLY) for _ in range(8)]
resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened) + 1, before[1]))
print([lab.select(FakeTrial(), make_key(n=n)).source for n in (0, 1, 2, 0)], len(lab.warnings()))
resource.setrlimit(resource.RLIMIT_NOFILE, before)
print(lab.select(FakeTrial(), make_key(n=3)).source, len(lab.warnings()), store.digests() == (make_key(n=3).digest,))
"""


def test_too_many_open_files_cost_one_warning_and_heal(tmp_path: Path, tally: Callable[..., None]) -> None:
    # B42: not one descriptor is left
    said = run(FEW_FILES, str(tmp_path / "cache")).splitlines()
    assert said == ["['tuned', 'tuned', 'tuned', 'memory'] 1", "tuned 1 True"]
    tally("no file descriptor left (RLIMIT_NOFILE)", 3, "in memory, one warning; persisted once there are some")


def test_a_folder_that_vanishes_is_made_again(store: FileStore, tally: Callable[..., None]) -> None:
    lab = Lab(store)
    for number in range(5):
        shutil.rmtree(store.folder)
        trial = FakeTrial(before_qualify=lambda: shutil.rmtree(store.folder))
        assert lab.select(trial, make_key(n=number)).source == "tuned"
        assert store.digests() == (make_key(n=number).digest,)
    assert lab.warnings() == []
    tally("the cache folder vanishes, before and while a key is measured", 10, "made again, the record published")
