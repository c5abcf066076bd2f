"""What operators launch, written down, and tuners as new processes would have them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from rl_engine import settings
from rl_engine.backends.shared.triton import autotuning
from rl_engine.backends.shared.triton.asking import forget_answers
from rl_engine.platforms.autotuner import PersistentAutotuner, installed
from rl_engine.platforms.tuning.events import EventLog
from rl_engine.platforms.tuning.store import Store
from rl_engine.runtime import policy


@contextlib.contextmanager
def process_mode(mode: str) -> Iterator[None]:
    """Run the block as if RL_KERNEL_AUTOTUNE had been ``mode`` when the process began."""
    cached = (settings.current, policy.process_policy)
    before = os.environ.get("RL_KERNEL_AUTOTUNE", "")
    try:
        os.environ["RL_KERNEL_AUTOTUNE"] = mode
        for one in cached:
            one.cache_clear()
        yield
    finally:
        os.environ["RL_KERNEL_AUTOTUNE"] = before
        for one in cached:
            one.cache_clear()


def forget() -> None:
    """Empty the launch tables, as they are when a process begins."""
    for kernel in autotuning.kernels().values():
        kernel.forget()
    forget_answers()


@contextlib.contextmanager
def new_process(store: Store, *, budget_s: float = 600.0) -> Iterator[PersistentAutotuner]:
    """Give the block a tuner and launch tables that remember nothing, over ``store``."""
    forget()
    tuner = PersistentAutotuner(store, budget_s=budget_s, log=EventLog())
    try:
        with installed(tuner):
            yield tuner
    finally:
        forget()
