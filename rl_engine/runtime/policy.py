"""Which operators dispatch may choose, and whether their launches are tuned: process-wide, or for a block of code."""

from __future__ import annotations

import contextlib
import functools
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Literal, get_args

from rl_engine import settings
from rl_engine.settings import AutotuneMode

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "PLAIN",
    "AutotuneMode",
    "LaunchPolicy",
    "RLKernelMode",
    "autotune",
    "innermost_policy",
    "launch_policy",
    "pinned",
    "process_policy",
    "rl_kernel_mode",
]

Phase = Literal["forward", "backward"]


class RLKernelMode(str, Enum):
    """What dispatch may choose: see `rl_engine.runtime.registry`."""

    STRICT = "strict"
    AUDIT = "audit"
    AUTO = "auto"
    OFF = "off"


@dataclass(frozen=True)
class LaunchPolicy:
    """What a launch needs to know of its surroundings.

    Attributes:
        mode: whether it is tuned.
        phase: the pass it runs in.
        backend: id of the tuned backend it runs for, which opens more to the tuner; "" for every other one.
    """

    mode: AutotuneMode
    phase: Phase = "forward"
    backend: str = ""


PLAIN = LaunchPolicy("off")  # as Triton launches, with options that are given
_ambient: ContextVar[LaunchPolicy | None] = ContextVar("rl_kernel_launch_policy", default=None)
innermost_policy = _ambient.get  # the innermost block's policy, None outside: for code that cannot pay for a call more


@functools.cache
def process_policy() -> LaunchPolicy:
    """Return the policy of this process, from RL_KERNEL_AUTOTUNE as it was at the first call."""
    return LaunchPolicy(settings.current().autotune)


def launch_policy() -> LaunchPolicy:
    """Return the policy in force here: the innermost `autotune` block's, else the process's (RL_KERNEL_AUTOTUNE)."""
    return _ambient.get() or process_policy()


def rl_kernel_mode() -> RLKernelMode:
    """Return the process's dispatch mode, from RL_KERNEL_MODE; ``auto`` when it is unset."""
    return RLKernelMode(settings.current().mode)


@contextlib.contextmanager
def autotune(mode: AutotuneMode) -> Iterator[None]:
    """Tune launches inside the block (``on``), use records only (``replay``), or neither (``off``).

    The backward of a forward that ran inside the block follows the block, wherever and whenever it runs.
    Raises ValueError for any other word.
    """
    if mode not in get_args(AutotuneMode):
        raise ValueError(f"autotune({mode!r}): pass one of {', '.join(get_args(AutotuneMode))}")
    with pinned(replace(_ambient.get() or LaunchPolicy(mode), mode=mode)):
        yield


class pinned:  # noqa: N801  # used as a function is; every backward enters it, and a generator's costs more
    """Make ``policy`` the one in force inside the block."""

    def __init__(self, policy: LaunchPolicy) -> None:
        self._policy = policy

    def __enter__(self) -> None:
        self._token = _ambient.set(self._policy)

    def __exit__(self, *_error: object) -> None:
        _ambient.reset(self._token)
