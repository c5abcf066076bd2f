"""The only reader of RL_KERNEL_* variables: parsed once, into a frozen dataclass, at the first launch that asks."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from rl_engine.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

AutotuneMode = Literal["off", "on", "replay"]
KernelMode = Literal["strict", "audit", "auto", "off"]
AutotuneScope = Literal["device", "model"]
_Choice = TypeVar("_Choice", bound=str)

_AUTOTUNE_WORDS: dict[str, AutotuneMode] = {
    "": "off", "0": "off", "false": "off", "off": "off", "no": "off",
    "1": "on", "true": "on", "on": "on", "yes": "on",
    "replay": "replay",
}  # fmt: skip
_MODE_WORDS: dict[str, KernelMode] = {
    "": "auto", "auto": "auto", "strict": "strict", "audit": "audit", "off": "off",
}  # fmt: skip
_SCOPE_WORDS: dict[str, AutotuneScope] = {"": "device", "device": "device", "model": "model"}


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        mode: ``RL_KERNEL_MODE``: which operators dispatch may choose.
        autotune: ``RL_KERNEL_AUTOTUNE``: off, on, or replay (records are used, nothing is timed).
        cache_dir: ``RL_KERNEL_AUTOTUNE_CACHE_DIR``, else the user's cache folder; None where the user has none.
        shared: ``RL_KERNEL_AUTOTUNE_SHARED``: read-only folders of records, looked up after the user's own.
        budget_s: ``RL_KERNEL_AUTOTUNE_BUDGET_S``: seconds one process may spend on measuring, 120 by default.
        scope: ``RL_KERNEL_AUTOTUNE_SCOPE``: ``device`` keeps a record to one card, ``model`` shares it between
            identical cards.
    """

    mode: KernelMode = "auto"
    autotune: AutotuneMode = "off"
    cache_dir: Path | None = None
    shared: tuple[Path, ...] = ()
    budget_s: float = 120.0
    scope: AutotuneScope = "device"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Parse ``environment``; raises SettingsError naming the variable, the words it takes and the one it holds."""
        shared = environment.get("RL_KERNEL_AUTOTUNE_SHARED", "").split(os.pathsep)
        return cls(
            mode=_choice(environment, "RL_KERNEL_MODE", _MODE_WORDS),
            autotune=_choice(environment, "RL_KERNEL_AUTOTUNE", _AUTOTUNE_WORDS),
            cache_dir=_cache_dir(environment),
            shared=tuple(Path(folder.strip()).absolute() for folder in shared if folder.strip()),
            budget_s=_seconds(environment, "RL_KERNEL_AUTOTUNE_BUDGET_S", default=cls.budget_s),
            scope=_choice(environment, "RL_KERNEL_AUTOTUNE_SCOPE", _SCOPE_WORDS),
        )


@functools.cache
def current() -> Settings:
    """Return the settings of this process, read from the environment at the first call."""
    return Settings.from_environment(os.environ)


def _choice(environment: Mapping[str, str], name: str, words: Mapping[str, _Choice]) -> _Choice:
    seen = environment.get(name, "")
    found = words.get(seen.strip().lower())
    if found is None:
        known = ", ".join(word for word in words if word)
        raise SettingsError(f"{name} is {seen!r}; set it to one of {known}, or unset it")
    return found


def _seconds(environment: Mapping[str, str], name: str, *, default: float) -> float:
    seen = environment.get(name, "").strip()
    if not seen:
        return default
    try:
        value = float(seen)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise SettingsError(f"{name} is {seen!r}; set it to a number of seconds, 0 or more, or unset it")
    return value


def _cache_dir(environment: Mapping[str, str]) -> Path | None:
    chosen = environment.get("RL_KERNEL_AUTOTUNE_CACHE_DIR", "").strip()
    if chosen:
        return Path(chosen).absolute()
    base = environment.get("XDG_CACHE_HOME", "").strip()
    if base and Path(base).is_absolute():  # the XDG specification says to ignore relative ones
        return Path(base) / "rl_kernel" / "autotune"
    try:
        home = Path(environment["HOME"].strip()) if "HOME" in environment else Path.home()
    except RuntimeError:  # a container's user without a home and without a passwd entry
        return None
    return home / ".cache" / "rl_kernel" / "autotune" if home.is_absolute() else None
