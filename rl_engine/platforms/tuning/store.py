"""Where records lie: the user's own folder, read-only packs, or memory where there is no folder to trust."""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
import stat
import threading
from typing import TYPE_CHECKING, Any, Protocol

import filelock

from rl_engine.errors import StoreUnusableError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

MAX_BYTES = 1 << 20  # a record of 64 candidates takes about 40 KiB
_MAX_LINKS = 40  # what Linux follows
_RECORD, _LOCK, _QUARANTINE = ".json", ".lock", ".quarantined"
# where a file system has no locks, filelock 4 would fall back to a marker file that a killed process leaves behind
_STRICT: dict[str, Any] = (
    {"fallback_to_soft": False} if "fallback_to_soft" in inspect.signature(filelock.FileLock).parameters else {}
)


class Store(Protocol):
    """Records by digest. Every method may raise StoreUnusableError; the tuner then goes on in memory."""

    def load(self, digest: str) -> str | None:
        """Return the record's text, or None where there is none."""
        ...

    def publish(self, digest: str, text: str) -> None:
        """Put the record there whole, or not at all."""
        ...

    def try_lock(self, digest: str) -> AbstractContextManager[None] | None:
        """Return the key's lock, held, or None where somebody else holds it. Never waits."""
        ...

    def quarantine(self, digest: str, text: str) -> None:
        """Take the record out of use, and remember that text under this key is not to be trusted."""
        ...

    def quarantined(self, digest: str) -> str | None:
        """Return the text that was quarantined under this key, or None."""
        ...

    def digests(self) -> tuple[str, ...]:
        """Return the digests of the records there are, sorted."""
        ...


class MemoryStore:
    """Records of this process only."""

    def __init__(self) -> None:
        self._records: dict[str, str] = {}
        self._bad: dict[str, str] = {}

    def load(self, digest: str) -> str | None:
        """Return the record's text, or None."""
        return self._records.get(digest)

    def publish(self, digest: str, text: str) -> None:
        """Keep the record."""
        self._records[digest] = text

    def try_lock(self, digest: str) -> AbstractContextManager[None] | None:  # noqa: ARG002  # the protocol's signature
        """Return a lock that is always free: the tuner itself keeps two threads from measuring one key."""
        return contextlib.nullcontext()

    def quarantine(self, digest: str, text: str) -> None:
        """Forget the record and remember that it is bad."""
        self._records.pop(digest, None)
        self._bad[digest] = text

    def quarantined(self, digest: str) -> str | None:
        """Return the quarantined text, or None."""
        return self._bad.get(digest)

    def digests(self) -> tuple[str, ...]:
        """Return the digests, sorted."""
        return tuple(sorted(self._records))


class PackStore:
    """A folder of records that this process only reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def load(self, digest: str) -> str | None:
        """Return the record's text, or None. Raises StoreUnusableError where others may write to the folder."""
        if _stat(self.folder) is None:
            return None
        _require_trusted(self.folder)
        return _read(self.folder / (digest + _RECORD))

    def digests(self) -> tuple[str, ...]:
        """Return the digests of the records there are, sorted."""
        return _digests(self.folder)


class FileStore:
    """One JSON file a key, under a folder that is ours alone (0700, trusted ancestors).

    Files: ``<digest>.json`` the record, ``<digest>.lock`` its lock (left behind: unlinking a held lock would give two
    processes one each), ``<digest>.quarantined`` a record whose bytes were wrong.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._held: set[str] = set()
        self._guard = threading.Lock()

    def load(self, digest: str) -> str | None:
        """Return the record's text, or None; a missing folder is not made."""
        if not self._present():
            return None
        return _read(self.folder / (digest + _RECORD))

    def publish(self, digest: str, text: str) -> None:
        """Write the record atomically: temporary file, fsync, rename, fsync of the folder."""
        self._make()
        self._replace(digest + _RECORD, text)

    def try_lock(self, digest: str) -> AbstractContextManager[None] | None:
        """Return the key's lock, held, or None where this or another process holds it."""
        self._make()
        with self._guard:
            if digest in self._held:
                return None
            self._held.add(digest)
        lock = filelock.FileLock(self.folder / (digest + _LOCK), timeout=0, mode=0o600, **_STRICT)
        try:
            lock.acquire()
        except filelock.Timeout:
            return None
        except (OSError, NotImplementedError) as error:  # no locks on this file system, too many open files ...
            raise StoreUnusableError(f"{self.folder}: cannot lock there ({error})") from error
        finally:
            if not lock.is_locked:
                self._held.discard(digest)
        return self._holding(lock, digest)

    def quarantine(self, digest: str, text: str) -> None:
        """Move the record out of use; where the bad text came from a pack, keep it here so that it is not used."""
        self._make()
        self._replace(digest + _QUARANTINE, text)
        record = self.folder / (digest + _RECORD)
        if _read(record) == text:
            with contextlib.suppress(FileNotFoundError):
                record.unlink()

    def quarantined(self, digest: str) -> str | None:
        """Return the quarantined text, or None."""
        return _read(self.folder / (digest + _QUARANTINE)) if self._present() else None

    def digests(self) -> tuple[str, ...]:
        """Return the digests of the records there are, sorted."""
        return _digests(self.folder) if self._present() else ()

    @contextlib.contextmanager
    def _holding(self, lock: filelock.BaseFileLock, digest: str) -> Iterator[None]:
        try:
            yield
        finally:
            lock.release()
            self._held.discard(digest)

    def _present(self) -> bool:
        """Say whether the folder is there; raises StoreUnusableError where it is and must not be used."""
        info = _stat(self.folder)
        if info is None:
            return False
        _require_trusted(self.folder)
        if not stat.S_ISDIR(info.st_mode):
            raise StoreUnusableError(f"{self.folder}: not a folder; {_REMEDY}")
        if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise StoreUnusableError(f"{self.folder}: not ours alone; chmod 700 it, or {_REMEDY}")
        return True

    def _make(self) -> None:
        """Make the folder and its missing parents, each for us alone."""
        if self._present():
            return
        try:
            there = next(path for path in self.folder.parents if path.exists())
            _require_trusted(there)
            for name in self.folder.relative_to(there).parts:
                there /= name
                with contextlib.suppress(FileExistsError):  # another process was faster; judged below
                    there.mkdir(mode=0o700)  # one by one: mkdir(parents=True) gives parents the umask's mode
                    there.chmod(0o700)  # whatever the umask took away
        except OSError as error:
            raise StoreUnusableError(f"{self.folder}: cannot make it ({error}); {_REMEDY}") from error
        if not self._present():  # a symbolic link that leads nowhere
            raise StoreUnusableError(f"{self.folder}: cannot make it; {_REMEDY}")

    def _replace(self, name: str, text: str) -> None:
        temporary = self.folder / f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                os.fchmod(handle, 0o600)  # whatever the umask took away
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.folder / name)
            _sync(self.folder)
        except OSError as error:
            raise StoreUnusableError(f"{self.folder}: cannot write there ({error}); {_REMEDY}") from error
        finally:
            with contextlib.suppress(OSError):  # gone already, unless something failed
                temporary.unlink()


_REMEDY = "set RL_KERNEL_AUTOTUNE_CACHE_DIR to a folder of your own; selections stay in memory until then"


def _stat(folder: Path) -> os.stat_result | None:
    """Return what ``folder`` leads to, or None where nothing is there."""
    try:
        return folder.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreUnusableError(f"{folder}: {error.strerror}; {_REMEDY}") from error


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(path: Path) -> str | None:
    """Return the text of a plain file of ours, at most `MAX_BYTES` long; None for anything else that lies there."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # absent, a symbolic link, not readable: no record
        return None
    try:
        info = os.fstat(handle)
        # no link at all: it was replaced since we opened it, and is whole
        ours = info.st_uid in (0, os.geteuid()) and not info.st_mode & 0o022 and info.st_nlink <= 1
        if not stat.S_ISREG(info.st_mode) or not ours or info.st_size > MAX_BYTES:
            return None
        with os.fdopen(handle, "rb", closefd=False) as file:  # refuses a folder, so only now
            return file.read(MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    finally:
        os.close(handle)


def _digests(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*" + _RECORD)))


def _require_trusted(path: Path) -> None:
    """Raise StoreUnusableError unless only root and we can change what ``path`` leads to.

    Walks the path as the kernel does, through every symbolic link. A directory that others may write to is accepted
    where its sticky bit keeps them from replacing what is ours (``/tmp``).
    """
    names, walked, links = list(path.parts[1:]), type(path)(path.anchor), 0
    try:
        _require_ours(walked, os.lstat(walked))
        while names:
            name = names.pop(0)
            if name == "..":
                walked = walked.parent
                continue
            step = walked / name
            info = os.lstat(step)
            _require_ours(step, info)
            if stat.S_ISLNK(info.st_mode):
                links += 1
                if links > _MAX_LINKS:
                    raise StoreUnusableError(f"{path}: too many symbolic links; {_REMEDY}")
                target = step.parent / step.readlink()
                walked = type(path)(target.anchor)
                names = list(target.parts[1:]) + names
            else:
                walked = step
    except StoreUnusableError:
        raise
    except OSError as error:
        raise StoreUnusableError(f"{path}: {error.strerror}; {_REMEDY}") from error


def _require_ours(path: Path, info: os.stat_result) -> None:
    if info.st_uid not in (0, os.geteuid()):
        raise StoreUnusableError(f"{path}: belongs to another user (uid {info.st_uid}); {_REMEDY}")
    loose = info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX and not stat.S_ISLNK(info.st_mode)
    if loose:
        raise StoreUnusableError(f"{path}: others may write there; chmod go-w it, or {_REMEDY}")
