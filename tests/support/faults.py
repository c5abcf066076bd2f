"""Candidates that fail, compilers that hang and launches that go wrong, on any device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from rl_engine.backends.shared.triton import compiler, distinct
from rl_engine.backends.shared.triton.autotuning import KernelLauncher
from rl_engine.backends.shared.triton.distinct import Failures, LaunchSite
from rl_engine.platforms.autotuner import PersistentAutotuner
from rl_engine.platforms.tuning import events
from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import Store

FAILURES: Mapping[str, Callable[[], Exception]] = {
    "CompilationError": lambda: CompilationError("def kernel(): ...", None, "made up"),
    "RuntimeError": lambda: RuntimeError("PassManager::run failed"),
    "OutOfResources": lambda: OutOfResources(262_176, 232_448, "shared memory"),
    "PTXASError": lambda: PTXASError("made up"),
}
_compiled = LaunchSite.compiled
_run = KernelLauncher._run


class _OnACard(LaunchSite):
    """A launch that is compiled, wherever it runs."""

    interpreted = False  # type: ignore[assignment]  # a property of the base class


class _Compiled:
    def __init__(self, options: Mapping[str, int]) -> None:
        self.options = dict(options)


class FakeCompiler:
    """Stands in for Triton's: counts what it is asked for, then fails, hangs or obliges as it is told.

    Candidates are told apart by their options. The interpreter compiles nothing; here it seems to.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, int]] = []
        self.on_compile: Callable[[Mapping[str, int]], None] = lambda _options: None
        self.on_load: Callable[[Mapping[str, int]], None] = lambda _options: None
        self.threads: set[threading.Thread] = set()
        monkeypatch.setattr(compiler, "compile_launch", self._compile)
        monkeypatch.setattr(compiler, "load", lambda compiled: self.on_load(compiled.options))
        monkeypatch.setattr(compiler, "launch_identity", lambda compiled, grid: f"{compiled.options} {grid}")
        monkeypatch.setattr(distinct, "bit_class", lambda _compiled: None)
        monkeypatch.setattr(distinct, "together", lambda classes: next(iter(classes)))  # as interpreted: none
        monkeypatch.setattr(LaunchSite, "compiled", self._as_on_a_card)
        monkeypatch.setattr(LaunchSite, "keeps", lambda _site, _fixed, bits: not bits)

    def count(self, **options: int) -> int:
        """Return how often candidates with these options were compiled."""
        return sum(options.items() <= asked.items() for asked in self.asked)

    def _compile(self, _jitted: Any, _grid: Any, _values: Any, options: Mapping[str, int], _index: int) -> _Compiled:
        self.asked.append(dict(options))
        self.threads.add(threading.current_thread())
        self.on_compile(options)
        return _Compiled(options)

    @staticmethod
    def _as_on_a_card(site: LaunchSite, candidates: Any) -> Any:
        return _compiled(_OnACard(*(getattr(site, field.name) for field in fields(site))), candidates)


def failing(error: Callable[[], Exception], **options: int) -> Callable[[Mapping[str, int]], None]:
    """Return a function that raises for candidates with these options."""

    def fail(asked: Mapping[str, int]) -> None:
        if options.items() <= asked.items():
            raise error()

    return fail


def forget_failures(monkeypatch: pytest.MonkeyPatch, *kernels: KernelLauncher) -> None:
    """Make kernels know of no candidate that failed, as when a process begins."""
    for kernel in kernels:
        monkeypatch.setattr(kernel, "_failures", Failures())


def after_launches(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[Mapping[str, Any]], None], *, trials: bool | None = True
) -> None:
    """Call ``act`` with arguments and options of every launch that has run: of trials, real ones, or both (None)."""

    def run(self: KernelLauncher, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        _run(self, grid, args, kwargs)
        if trials in (None, not args):  # a trial names every argument
            act({**dict(zip(self.arg_names, args, strict=False)), **kwargs})

    monkeypatch.setattr(KernelLauncher, "_run", run)


def only_record(store: Store) -> TuningRecord:
    """Return the one record of a store."""
    (digest,) = store.digests()
    return TuningRecord.from_json(store.load(digest) or "")


def rejections(record: TuningRecord) -> dict[str, str]:
    """Return why candidates fell out, by their text."""
    return {str(one.candidate): one.reason for one in record.rejections}


class Warnings:
    """The warnings given since this was made: by a tuner of a test's own, or by the process."""

    def __init__(self) -> None:
        self._before = len(events.log().events("warning"))

    def of(self, tuner: PersistentAutotuner) -> list[str]:
        """Return the texts."""
        ours = [event.reason for event in tuner._log.events("warning")]
        return ours + [event.reason for event in events.log().events("warning")[self._before :]]


def raise_out_of_memory(*_args: Any, **_kwargs: Any) -> None:
    """Fail as torch's allocator does."""
    raise torch.OutOfMemoryError("CUDA out of memory. Made up.")
