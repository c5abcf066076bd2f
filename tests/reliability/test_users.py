"""Homes that are missing, folders of others, umasks, and keys that are the same in every process."""

from __future__ import annotations

import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_engine.platforms.tuning.key import candidates_digest
from rl_engine.platforms.tuning.store import FileStore
from tests.support.processes import ROOT, environment, run
from tests.support.tuning import CANDIDATES, FAST, FIXED, SLOW, FakeTrial, Lab, make_key, make_record

NOBODY = 65534
UNKNOWN = 12345  # a user without a passwd entry
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")

AS_USER = """
import json, os, sys
from rl_engine import settings
from rl_engine.platforms import autotuner
from tests.support.tuning import CANDIDATES, FakeTrial, make_key
import pwd  # imports come first: the other user may not read this checkout
os.chdir(sys.argv[2])
os.setgroups([])
os.setresgid(*[int(sys.argv[1])] * 3)
os.setresuid(*[int(sys.argv[1])] * 3)
tuner, trial = autotuner.process_autotuner(), FakeTrial()
sources = [tuner.select(make_key(n=n), CANDIDATES, trial).source for n in (0, 0, 1)]
warnings = [event.reason for event in tuner._log.events("warning")]
print(json.dumps([sources, trial.count("qualify"), warnings]))
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder that other users may enter; pytest's own they may not."""
    place = Path("/tmp") / f"{tmp_path.parent.name}-{os.getpid()}-users"
    (place / "work").mkdir(parents=True)
    place.chmod(0o755)
    (place / "work").chmod(0o1777)
    yield place
    shutil.rmtree(place)


def as_user(uid: int, place: Path, **variables: str) -> list[str]:
    """Tune two keys as another user, in memory wherever nothing else is said; return the warnings."""
    env = {name: value for name, value in environment().items() if name in ("PATH", "PYTHONPATH")}
    sources, measured, warnings = json.loads(run(AS_USER, str(uid), str(place / "work"), env={**env, **variables}))
    assert (sources, measured) == (["tuned", "memory", "tuned"], 2)
    return list(warnings)


@as_root
@pytest.mark.parametrize("home", [None, "", "relative", "~"])
def test_a_user_without_a_home_is_tuned_in_memory_without_a_word(
    place: Path, home: str | None, tally: Callable[..., None]
) -> None:
    # B06, B44
    assert as_user(UNKNOWN, place, **({} if home is None else {"HOME": home})) == []
    assert list((place / "work").iterdir()) == [], "no folder named ~"
    tally("no passwd entry, HOME unset, empty or relative", 2, "in memory, nothing made")


@as_root
@pytest.mark.parametrize(
    "variables",
    [
        {"HOME": "/"},
        {"HOME": "/nonexistent"},
        {"XDG_CACHE_HOME": "/nonexistent"},
        {"RL_KERNEL_AUTOTUNE_CACHE_DIR": "/proc/x"},
        {"RL_KERNEL_AUTOTUNE_CACHE_DIR": str(ROOT / "pyproject.toml" / "x")},
        {"RL_KERNEL_AUTOTUNE_CACHE_DIR": "/dev/null/x"},
    ],
    ids=str,
)
def test_a_folder_that_the_user_cannot_make_costs_one_warning_with_path_and_remedy(
    place: Path, variables: dict[str, str], tally: Callable[..., None]
) -> None:
    # B06
    (warning,) = as_user(UNKNOWN, place, **variables)
    assert next(iter(variables.values())) in warning
    assert "set RL_KERNEL_AUTOTUNE_CACHE_DIR to a folder of your own" in warning
    assert len(warning) < 400
    assert warning.count("set RL_KERNEL_AUTOTUNE_CACHE_DIR") == 1
    tally("a cache folder that cannot be made (HOME=/, /proc/x, below a file)", 2, "in memory, one warning")


@as_root
@pytest.mark.parametrize(
    ("owner", "bits", "uid"), [(NOBODY, 0o700, 0), (NOBODY, 0o755, 0), (NOBODY, 0o777, 0), (0, 0o700, UNKNOWN),
    (0, 0o755, UNKNOWN), (UNKNOWN, 0o777, UNKNOWN), (UNKNOWN, 0o750, UNKNOWN)],
)  # fmt: skip
def test_a_folder_that_is_not_this_users_alone_is_left_alone(
    place: Path, owner: int, bits: int, uid: int, tally: Callable[..., None]
) -> None:
    # B43
    cache = place / "cache"
    FileStore(cache).publish(make_key(n=0).digest, make_record(make_key(n=0), winner=SLOW).to_json())
    for path in (cache, *cache.iterdir()):
        os.chown(path, owner, owner)
    cache.chmod(bits)
    (warning,) = as_user(uid, place, RL_KERNEL_AUTOTUNE_CACHE_DIR=str(cache))
    assert str(cache) in warning
    assert "set RL_KERNEL_AUTOTUNE_CACHE_DIR to a folder of your own" in warning
    assert len(list(cache.iterdir())) == 1, "nothing was written there"
    tally("a cache folder of another user, or open to others", 2, "left alone, in memory, one warning")


def test_a_record_that_all_may_write_to_is_measured_again_and_replaced(
    tmp_path: Path, tally: Callable[..., None]
) -> None:
    # B43
    store = FileStore(tmp_path / "cache")
    path = store.folder / f"{make_key().digest}.json"
    store.publish(make_key().digest, make_record(winner=SLOW).to_json())
    path.chmod(0o666)
    assert Lab(store).select(FakeTrial()).source == "tuned"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Lab(store).select(FakeTrial()).source == "disk"
    tally("a record that all may write to", 1, "measured again, replaced by a private one")


@pytest.mark.parametrize("umask", [0o000, 0o027, 0o077, 0o777], ids=oct)
def test_the_umask_never_changes_and_modes_do_not_follow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, tally: Callable[..., None]
) -> None:
    # B47; the umask is read from the kernel by another thread: os.umask itself would change it
    folder, seen, modes, end = tmp_path / "cache", set[str](), set[int](), threading.Event()
    real = os.fsync

    def fsync(handle: int) -> None:  # the moment at which a temporary file is there
        modes.update(stat.S_IMODE(path.lstat().st_mode) for path in folder.iterdir())
        real(handle)

    def watch() -> None:
        while not end.is_set():
            lines = Path("/proc/self/status").read_text().splitlines()
            seen.update(line.split()[1] for line in lines if line.startswith("Umask:"))

    monkeypatch.setattr(os, "fsync", fsync)
    before, watcher = os.umask(umask), threading.Thread(target=watch)
    try:
        watcher.start()
        lab = Lab(FileStore(folder))
        for number in range(30):
            assert lab.select(FakeTrial(), make_key(n=number)).source == "tuned"
        end.set()
        watcher.join(10)
    finally:
        end.set()
        after = os.umask(before)
    assert (after, seen) == (umask, {f"{umask:04o}"})
    assert (modes, stat.S_IMODE(folder.stat().st_mode)) == ({0o600}, 0o700)
    tally("umasks 000, 027, 077, 777, watched by another thread", 30, "never changed; files 0600, folder 0700")


DIGESTS = """
import gc, json, os, sys
if sys.argv[1] == "late":
    import rl_engine.platforms.autotuner
    junk = [[number] for number in range(10_000)]
    gc.collect()
from tests.support.tuning import CANDIDATES, make_key, make_record
from rl_engine.platforms.tuning.key import candidates_digest
key = make_key(a="x", b=1, c=True, d=None, e="ö")
print(json.dumps([key.digest, key.static_digest, candidates_digest(CANDIDATES), make_record(key).to_json()]))
"""


def test_keys_and_records_are_the_same_text_in_every_process(tmp_path: Path, tally: Callable[..., None]) -> None:
    # B34
    said = set()
    places = {"0": (ROOT, "early"), "1": (tmp_path, "late"), "2": (Path("/"), "early"), "random": (ROOT, "late")}
    for seed, (where, order) in places.items():
        said.add(run(DIGESTS, order, env=environment(PYTHONHASHSEED=seed), cwd=where))
    said.add(run(DIGESTS, "early", env=environment(PYTHONOPTIMIZE="2")))
    assert len(said) == 1
    tally("processes with other hash seeds, folders, import orders, -O", 5, "the same digests and the same record text")


@pytest.mark.parametrize("name", ["kernel.source", "compiler.triton", "device.uuid", "runtime.driver"])
def test_what_changed_since_is_a_new_key_and_the_old_record_stays_unread(
    tmp_path: Path, name: str, tally: Callable[..., None]
) -> None:
    # B32: as far as the tuner sees it
    store, old, new = FileStore(tmp_path / "cache"), make_key(**{name: "old"}), make_key(**{name: "new"})
    store.publish(old.digest, make_record(old, winner=SLOW).to_json())
    trial: Any = FakeTrial()
    chosen = Lab(store).select(trial, new)
    assert (chosen.winner, chosen.source, trial.count("qualify")) == (FAST, "tuned", 1)
    assert Lab(store).select(FakeTrial(), old).winner == SLOW, "each its own"
    gone = store.prune(now_s=0, keep=lambda record: record.key.agrees_with({name: "new"}))
    assert [(one.digest, one.reason) for one in gone] == [(old.digest, "stale")]
    tally("kernel source, compiler, card or driver changed", 1, "measured anew; the old record is pruned as stale")


def test_the_order_of_candidates_does_not_change_the_key_but_the_fixed_launch_does() -> None:
    # B32
    assert candidates_digest((FIXED, FAST, SLOW)) == candidates_digest((FIXED, SLOW, FAST))
    assert len({candidates_digest(one) for one in ((FIXED, FAST, SLOW), (FAST, FIXED, SLOW), (FIXED, FAST))}) == 3
    assert candidates_digest(CANDIDATES) == candidates_digest((FIXED, FAST, SLOW))
