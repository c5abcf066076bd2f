"""Where records lie: the user's own folder, read-only packs, or memory where there is no folder to trust."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rl_engine.errors import InvalidRecordError, LocksUnusableError, StoreUnusableError
from rl_engine.platforms.tuning.locks import try_acquire
from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.trust import REMEDY, require_trusted

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path


MAX_BYTES = 1 << 20  # a record of 64 candidates takes about 40 KiB
_RECORD, _LOCK, _QUARANTINE = ".json", ".lock", ".quarantined"
_ABANDONED_S = 3600.0  # a temporary file this old was left by a process that was killed
_FAILING = {errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # of the disk or process, not the file
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}  # file systems that order renames in their own way


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
        require_trusted(self.folder)
        return _read(self.folder / (digest + _RECORD))

    def digests(self) -> tuple[str, ...]:
        """Return the digests of the records there are, sorted."""
        return _digests(self.folder)


@dataclass(frozen=True)
class Pruned:
    """A record that `FileStore.prune` removed, and why."""

    digest: str
    reason: str


class FileStore:
    """One JSON file a key, under a folder that is ours alone (0700, trusted ancestors).

    Files: ``<digest>.json`` the record, ``<digest>.lock`` its lock (left behind: unlinking a held lock would give two
    processes one each), ``<digest>.quarantined`` a record whose bytes were wrong.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._unusable = ""  # why this process leaves the folder alone from now on

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
        try:
            return try_acquire(self.folder / (digest + _LOCK))
        except LocksUnusableError as error:
            self._unusable = f"{error}; {REMEDY}"
            raise StoreUnusableError(self._unusable) from error

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

    def prune(
        self,
        *,
        now_s: float,
        max_age_s: float | None = None,
        max_bytes: int | None = None,
        keep: Callable[[TuningRecord], bool] = lambda _record: True,
    ) -> tuple[Pruned, ...]:
        """Remove records that are broken, older than ``max_age_s``, not to ``keep``, or, the oldest first, too many.

        A record whose key is being measured stays, as does one that was replaced since it was judged. Files that a
        killed writer left behind go too; locks stay.

        Args:
            now_s: seconds since the epoch.
            max_age_s: seconds since a record was made.
            max_bytes: what all records together may take.
            keep: whether a record is still of use, e.g. that it is of today's compiler and source.
        """
        judged: list[tuple[int, str, str | None]] = []
        found: list[Pruned] = []
        for digest in self.digests():
            try:
                text = self.load(digest)
            except StoreUnusableError:  # not readable at this moment: it may well be of use
                continue
            verdict = _judge(text, now_s, max_age_s, keep)
            if isinstance(verdict, str):
                found += self._remove(digest, text, verdict)
            else:
                judged.append((verdict.created_s, digest, text))
        size = sum(len(text or "") for _created, _digest, text in judged)
        for _created_s, digest, text in sorted(judged) if max_bytes is not None else ():
            if max_bytes is None or size <= max_bytes:
                break
            size -= len(text or "")
            found += self._remove(digest, text, "too many bytes")
        self._sweep(now_s)
        return tuple(found)

    def _remove(self, digest: str, judged: str | None, reason: str) -> list[Pruned]:
        lock = self.try_lock(digest)
        if lock is None:
            return []
        with lock:
            try:
                if self.load(digest) != judged:
                    return []
                (self.folder / (digest + _RECORD)).unlink()
            except OSError:  # gone already, not readable, or a folder in its place, which is not ours to empty
                return []
        return [Pruned(digest, reason)]

    def _sweep(self, now_s: float) -> None:
        for path in _listed(self.folder, ".*.tmp"):
            with contextlib.suppress(OSError):  # its writer was faster, and took it away itself
                if now_s - path.lstat().st_mtime > _ABANDONED_S:
                    path.unlink()

    def _present(self) -> bool:
        """Say whether the folder is there; raises StoreUnusableError where it is and must not be used."""
        if self._unusable:
            raise StoreUnusableError(self._unusable)
        info = _stat(self.folder)
        if info is None:
            return False
        require_trusted(self.folder)
        if not stat.S_ISDIR(info.st_mode):
            raise StoreUnusableError(f"{self.folder}: not a folder; {REMEDY}")
        if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise StoreUnusableError(f"{self.folder}: not ours alone; chmod 700 it, or {REMEDY}")
        return True

    def _make(self) -> None:
        """Make the folder and its missing parents, each for us alone."""
        if self._present():
            return
        try:
            there = next(path for path in self.folder.parents if path.exists())
            require_trusted(there)
            for name in self.folder.relative_to(there).parts:
                there /= name
                with contextlib.suppress(FileExistsError):  # another process was faster; judged below
                    there.mkdir(mode=0o700)  # one by one: mkdir(parents=True) gives parents the umask's mode
                    there.chmod(0o700)  # whatever the umask took away
        except StoreUnusableError:
            raise
        except OSError as error:
            raise _unusable(self.folder, "cannot make it", error) from error
        if not self._present():  # a symbolic link that leads nowhere
            raise StoreUnusableError(f"{self.folder}: cannot make it; {REMEDY}")

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
            raise _unusable(self.folder, "cannot write there", error) from error
        finally:
            with contextlib.suppress(OSError):  # gone already, unless something failed
                temporary.unlink()


def _judge(
    text: str | None, now_s: float, max_age_s: float | None, keep: Callable[[TuningRecord], bool]
) -> TuningRecord | str:
    """Return the record, or the reason to remove it."""
    try:
        record = TuningRecord.from_json(text or "")
    except InvalidRecordError as error:
        return f"broken: {error}"
    if max_age_s is not None and now_s - record.created_s > max_age_s:
        return "too old"
    return record if keep(record) else "stale"


def _unusable(folder: Path, problem: str, error: OSError) -> StoreUnusableError:
    return StoreUnusableError(f"{folder}: {problem} ({error.strerror or error}); {REMEDY}")


def _stat(folder: Path) -> os.stat_result | None:
    """Return what ``folder`` leads to, or None where nothing is there."""
    try:
        return folder.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreUnusableError(f"{folder}: {error.strerror}; {REMEDY}") from error


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(handle)


def _read(path: Path) -> str | None:
    """Return the text of a plain file of ours, at most `MAX_BYTES` long; None for anything else that lies there.

    Raises StoreUnusableError where nothing can be read at this moment, whatever lies there.
    """
    try:
        return _plain_text(path)
    except UnicodeDecodeError:
        return None
    except OSError as error:
        if error.errno in _FAILING:
            raise _unusable(path.parent, "cannot read there", error) from error
        return None  # absent, a symbolic link, not readable: no record


def _plain_text(path: Path) -> str | None:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(handle)
        # no link at all: it was replaced since we opened it, and is whole
        ours = info.st_uid in (0, os.geteuid()) and not info.st_mode & 0o022 and info.st_nlink <= 1
        if not stat.S_ISREG(info.st_mode) or not ours or info.st_size > MAX_BYTES:
            return None
        with os.fdopen(handle, "rb", closefd=False) as file:  # refuses a folder, so only now
            return file.read(MAX_BYTES).decode("utf-8")
    finally:
        os.close(handle)


def _digests(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _listed(folder, "*" + _RECORD)))


def _listed(folder: Path, pattern: str) -> tuple[Path, ...]:
    try:
        return tuple(folder.glob(pattern))
    except OSError as error:  # it went away while it was listed
        raise _unusable(folder, "cannot list it", error) from error
