"""Asking the autotuner how to run something met for the first time: one kernel's launch, or an operator's way."""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_engine import settings
from rl_engine.backends.shared.triton import compiler
from rl_engine.backends.shared.triton.distinct import LaunchSite
from rl_engine.backends.shared.triton.launch_trial import LaunchTrial
from rl_engine.platforms import device
from rl_engine.platforms.autotuner import Selection, process_autotuner
from rl_engine.platforms.tuning import events
from rl_engine.platforms.tuning.identity import machine_parts, physical_parts
from rl_engine.platforms.tuning.key import Candidate, Part, TuningKey, candidates_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_engine.backends.shared.triton.distinct import Failures, Launches
    from rl_engine.backends.shared.triton.qualification import BoundLaunch
    from rl_engine.platforms.device import DeviceIdentity
    from rl_engine.runtime.policy import LaunchPolicy


_tables: list[dict[Any, Any]] = []  # of answers, one a module that asks; emptied together


def answers() -> dict[Any, Any]:
    """Return a new table for answers that last, empty again after `forget_answers` and in forked children."""
    table: dict[Any, Any] = {}
    _tables.append(table)
    return table


def forget_answers() -> None:
    """Ask everything again."""
    for table in _tables:
        table.clear()


os.register_at_fork(after_in_child=forget_answers)


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        name: the kernel's, or the backend's.
        jitted: the kernels that may run.
        parts: key parts of the launch, named after its arguments.
        candidates: device -> launches, the fixed one first.
        launches: candidate -> what it launches.
        bound: what running one takes.
        failures: what is known of these candidates already.
        index: of the device, -1 for the interpreter.
        warm: inputs usually lie in the L2.
    """

    name: str
    jitted: tuple[Any, ...]
    parts: Mapping[str, Part]
    candidates: Callable[[DeviceIdentity], tuple[Candidate, ...]]
    launches: Launches
    bound: BoundLaunch
    failures: Failures
    index: int
    warm: bool = False


class Answer(NamedTuple):
    """The launch that the autotuner names; whether it is the fixed one; whether it lasts, or may still change."""

    winner: Candidate
    is_fixed: bool
    lasts: bool


def ask(question: Question, policy: LaunchPolicy, *, measures: bool) -> Answer:
    """Return the autotuner's answer.

    Args:
        question: what is asked.
        policy: in force around the launch.
        measures: whether this is a moment to measure at all: no capture, no child of a process that used CUDA.
    """
    try:
        identity = device.identify(question.index)
        parts = {**static_parts(question.jitted, question.index), **question.parts, "phase": policy.phase}
    except (RuntimeError, AssertionError, OSError) as error:
        text = f"{question.name} runs fixed: the device cannot be told ({error})"
        events.log().warn_once(question.name, text)
        return Answer(question.candidates(device.UNKNOWN)[0], is_fixed=True, lasts=False)
    candidates = question.candidates(identity)
    key = TuningKey.of(question.name, {**parts, "kernel.candidates": candidates_digest(candidates)})
    if not measures:
        process_autotuner().miss(key)
        return Answer(candidates[0], is_fixed=True, lasts=False)
    selection = _select(question, key, candidates, identity, policy)
    return Answer(selection.winner, selection.winner == candidates[0], selection.settled)


def _select(
    question: Question,
    key: TuningKey,
    candidates: tuple[Candidate, ...],
    identity: DeviceIdentity,
    policy: LaunchPolicy,
) -> Selection:
    site = LaunchSite(question.launches, question.index, key.static_digest, question.failures)

    def trial() -> LaunchTrial:
        return LaunchTrial(site, question.bound, identity=identity, warm=question.warm)

    try:
        return process_autotuner().select(
            key, candidates, trial, mode=policy.mode, provenance=physical_parts(question.index)
        )
    except Exception as error:  # noqa: BLE001  # a fault of the tuner must not stop a training run
        reason = f"{question.name} runs fixed: the tuner failed, please report it ({compiler.first_line(error)})"
        events.log().warn_once(question.name, reason)
        events.logger.debug("the tuner failed", exc_info=True)
        return Selection(candidates[0], "fixed", reason)


@functools.cache
def static_parts(jitted: tuple[Any, ...], index: int) -> Mapping[str, Part]:
    """Return the key parts that do not change from launch to launch: machine, compiler, sources."""
    digests = [compiler.source_digest(one) for one in jitted]
    joined = digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()
    return {
        **machine_parts(index, settings.current().scope),
        **compiler.compiler_parts(device.identify(index).arch),
        "kernel.source": joined,
    }
