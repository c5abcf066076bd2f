"""Which folders are trusted: every step of the path, links included, belongs to root or us and to nobody else's pen."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from rl_engine.errors import StoreUnusableError
from rl_engine.platforms.tuning.store import FileStore, PackStore
from rl_engine.platforms.tuning.trust import _require_ours, require_trusted
from tests.support.processes import run

DIGEST = "ab" * 32
REMEDY = "set RL_KERNEL_AUTOTUNE_CACHE_DIR to a folder of your own"
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A trusted folder with one record, three levels down."""
    folder = tmp_path / "home" / "caches" / "autotune"
    FileStore(folder).publish(DIGEST, "text")
    return folder


def refused(folder: Path) -> str:
    """Return why the folder is refused; every act of the store refuses it for the same reason."""
    store, reasons = FileStore(folder), set()
    acts = (
        lambda: store.load(DIGEST),
        lambda: store.publish(DIGEST, "new"),
        lambda: store.try_lock(DIGEST),
        lambda: store.quarantine(DIGEST, "text"),
        lambda: store.quarantined(DIGEST),
        store.digests,
    )
    for act in acts:
        with pytest.raises(StoreUnusableError) as error:
            act()
        reasons.add(str(error.value))
    (reason,) = reasons
    return reason


@pytest.mark.parametrize("bits", [0o770, 0o750, 0o707, 0o701, 0o710])
def test_a_folder_that_is_not_ours_alone_is_refused(cache: Path, bits: int) -> None:
    cache.chmod(bits)
    reason = refused(cache)
    assert reason.startswith(f"{cache}: ")
    assert REMEDY in reason
    assert "chmod" in reason


@pytest.mark.parametrize("bits", [0o777, 0o770, 0o720, 0o702])
def test_an_ancestor_that_others_may_write_to_is_refused(cache: Path, bits: int) -> None:
    ancestor = cache.parent.parent
    ancestor.chmod(bits)
    assert refused(cache).startswith(f"{ancestor}: others may write there; chmod go-w it, or {REMEDY}")
    with pytest.raises(StoreUnusableError, match="others may write there"):
        PackStore(cache).load(DIGEST)
    with pytest.raises(StoreUnusableError, match="others may write there"):
        FileStore(ancestor / "new" / "cache").publish(DIGEST, "text")
    assert not (ancestor / "new").exists()


@pytest.mark.parametrize("bits", [0o1777, 0o1770, 0o755, 0o555 | stat.S_ISVTX])
def test_an_ancestor_that_keeps_others_from_our_entries_is_trusted(cache: Path, bits: int) -> None:
    cache.parent.chmod(bits)
    assert FileStore(cache).load(DIGEST) == PackStore(cache).load(DIGEST) == "text"
    FileStore(cache).publish(DIGEST, "new")
    assert FileStore(cache).load(DIGEST) == "new"


def test_only_root_and_we_are_trusted_owners() -> None:
    def owned_by(uid: int) -> os.stat_result:
        return os.stat_result((stat.S_IFDIR | 0o755, 1, 1, 1, uid, 0, 0, 0, 0, 0))

    for uid in (0, os.geteuid()):
        _require_ours(Path("/folder"), owned_by(uid))
    with pytest.raises(StoreUnusableError, match=rf"^/folder: belongs to another user \(uid {NOBODY - 1}\); {REMEDY}"):
        _require_ours(Path("/folder"), owned_by(NOBODY - 1))


@as_root
@pytest.mark.parametrize("level", [0, 1, 2])
def test_another_users_folder_anywhere_on_the_path_is_refused(cache: Path, level: int) -> None:
    foreign = [cache, *cache.parents][level]
    os.chown(foreign, NOBODY, NOBODY)
    assert refused(cache).startswith(f"{foreign}: belongs to another user (uid {NOBODY})")
    with pytest.raises(StoreUnusableError, match=f"belongs to another user .uid {NOBODY}"):
        PackStore(cache).load(DIGEST)


def test_a_link_is_followed_to_a_trusted_folder(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "absolute").symlink_to(cache.parent)
    (tmp_path / "relative").symlink_to(Path("absolute"))
    (cache.parent / "up").symlink_to(Path("../../relative/../caches"))
    for folder in (tmp_path / "relative" / "autotune", cache.parent / "up" / "autotune"):
        assert FileStore(folder).load(DIGEST) == PackStore(folder).load(DIGEST) == "text"


@pytest.mark.parametrize("kind", ["loose", pytest.param("foreign", marks=as_root)])
@pytest.mark.parametrize("place", ["holds the link", "lies behind the link"])
def test_a_path_that_goes_through_an_untrusted_folder_by_a_link_is_refused(
    tmp_path: Path, cache: Path, kind: str, place: str
) -> None:
    between = tmp_path / "between"
    between.mkdir()
    if place == "holds the link":  # own -> between/link -> cache: whoever writes to `between` turns the link
        (between / "link").symlink_to(cache)
        (tmp_path / "own").symlink_to(between / "link")
    else:
        (between / "folder").mkdir()
        shutil.move(cache, between / "folder" / "autotune")
        (tmp_path / "own").symlink_to(between / "folder" / "autotune")
    assert FileStore(tmp_path / "own").load(DIGEST) == "text"
    if kind == "loose":
        between.chmod(0o777)
    else:
        os.chown(between, NOBODY, NOBODY)
    assert refused(tmp_path / "own").startswith(f"{between}: ")


@as_root
def test_another_users_link_is_refused_even_in_a_sticky_folder(tmp_path: Path, cache: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "link").symlink_to(cache)
    assert FileStore(shared / "link").load(DIGEST) == "text"
    os.lchown(shared / "link", NOBODY, NOBODY)
    assert refused(shared / "link").startswith(f"{shared / 'link'}: belongs to another user")


def test_links_in_a_circle_and_links_to_nowhere_are_unusable(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert REMEDY in refused(tmp_path / "a")
    (tmp_path / "nowhere").symlink_to("absent")
    store = FileStore(tmp_path / "nowhere")
    assert store.load(DIGEST) is None
    for act in (lambda: store.publish(DIGEST, "text"), lambda: store.try_lock(DIGEST)):
        with pytest.raises(StoreUnusableError, match="cannot make it"):
            act()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "nowhere"]


def test_a_chain_of_more_links_than_the_kernel_follows_is_unusable(tmp_path: Path, cache: Path) -> None:
    last = cache
    for number in range(41):
        link = tmp_path / f"link{number}"
        link.symlink_to(last)
        last = link
    assert FileStore(tmp_path / "link39").load(DIGEST) == "text"
    assert REMEDY in refused(last)


def test_a_path_that_changes_while_it_is_walked_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    for path, reason in ((tmp_path / "gone", "No such file"), (tmp_path / "circle", "too many symbolic links")):
        with pytest.raises(StoreUnusableError, match=reason):
            require_trusted(path)


def test_a_file_where_a_folder_should_be_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o600)
    assert "not a folder" in refused(tmp_path / "file")
    assert "Not a directory" in refused(tmp_path / "file" / "below")
    with pytest.raises(StoreUnusableError, match="Not a directory"):
        PackStore(tmp_path / "file" / "below").load(DIGEST)


def test_a_folder_that_cannot_be_made_says_why_once() -> None:
    with pytest.raises(StoreUnusableError, match=r"^/proc/rl: cannot make it \(No such file or directory\); ") as error:
        FileStore(Path("/proc/rl")).publish(DIGEST, "text")
    assert str(error.value).count(REMEDY) == 1


def test_a_missing_pack_is_empty_and_not_made(tmp_path: Path) -> None:
    pack = PackStore(tmp_path / "absent")
    assert (pack.load(DIGEST), pack.digests()) == (None, ())
    assert not pack.folder.exists()


AS_ANOTHER_USER = """
import os, sys
from pathlib import Path
from rl_engine.errors import StoreUnusableError
from rl_engine.platforms.tuning.store import FileStore, PackStore
os.setgroups([])  # after the imports: the other user may not read this checkout
os.setresgid(*[int(sys.argv[2])] * 3)
os.setresuid(*[int(sys.argv[2])] * 3)
closed = Path(sys.argv[1]) / "closed"  # root's alone
for store in (PackStore(closed / "pack"), FileStore(closed / "cache")):
    try:
        store.load("ab" * 32)
    except StoreUnusableError as error:
        print("Permission denied" in str(error))
try:
    FileStore(closed).load("ab" * 32)
except StoreUnusableError as error:
    print("not ours alone" in str(error))
try:
    FileStore(Path(sys.argv[1]) / "new").publish("ab" * 32, "text")
except StoreUnusableError as error:
    print("cannot make it" in str(error))
pack = PackStore(Path(sys.argv[1]) / "pack")  # root's, readable by all: a pack may be
print(pack.load("ab" * 32))
"""


@as_root
def test_what_a_user_may_not_enter_is_unusable_and_roots_packs_are_trusted(tmp_path: Path) -> None:
    place = Path("/tmp") / f"{tmp_path.parent.name}-{os.getpid()}-trust"  # pytest's own folders are closed to others
    place.mkdir(mode=0o755)
    try:
        (place / "closed").mkdir(mode=0o700)
        FileStore(place / "pack").publish(DIGEST, "text")
        (place / "pack").chmod(0o755)
        (place / "pack" / f"{DIGEST}.json").chmod(0o644)
        assert run(AS_ANOTHER_USER, str(place), str(NOBODY)).split() == ["True"] * 4 + ["text"]
    finally:
        shutil.rmtree(place)
