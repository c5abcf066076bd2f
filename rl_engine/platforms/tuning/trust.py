"""Whom a cache folder belongs to: write access to it is authority over launch selection."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from rl_engine.errors import StoreUnusableError

if TYPE_CHECKING:
    from pathlib import Path

REMEDY = "set RL_KERNEL_AUTOTUNE_CACHE_DIR to a folder of your own; selections stay in memory until then"
_MAX_LINKS = 40  # what Linux follows


def require_trusted(path: Path) -> None:
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
                    raise StoreUnusableError(f"{path}: too many symbolic links; {REMEDY}")
                target = step.parent / step.readlink()
                walked = type(path)(target.anchor)
                names = list(target.parts[1:]) + names
            else:
                walked = step
    except StoreUnusableError:
        raise
    except OSError as error:
        raise StoreUnusableError(f"{path}: {error.strerror}; {REMEDY}") from error


def _require_ours(path: Path, info: os.stat_result) -> None:
    if info.st_uid not in (0, os.geteuid()):
        raise StoreUnusableError(f"{path}: belongs to another user (uid {info.st_uid}); {REMEDY}")
    loose = info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX and not stat.S_ISLNK(info.st_mode)
    if loose:
        raise StoreUnusableError(f"{path}: others may write there; chmod go-w it, or {REMEDY}")
