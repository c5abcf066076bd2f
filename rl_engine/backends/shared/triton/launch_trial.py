"""The tuner's `Trial` of one kernel launch: drop equal launches and other bit classes, gate bytes, time; on scratch."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import torch

from rl_engine.backends.shared.triton import compiler
from rl_engine.backends.shared.triton.qualification import REPEATS, BoundLaunch, Sandbox, gate
from rl_engine.backends.shared.triton.scratch import require_memory, spans, total
from rl_engine.errors import TrialUnavailableError
from rl_engine.platforms.tuning.record import PROTOCOL
from rl_engine.platforms.tuning.timer import GraphTimer, Timer, WallTimer
from rl_engine.platforms.tuning.trial import Canary, Evidence, Qualified

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rl_engine.backends.shared.triton.distinct import LaunchSite
    from rl_engine.platforms.device import DeviceIdentity
    from rl_engine.platforms.tuning.key import Candidate

_ROTATIONS = 128  # argument sets at most, to keep the L2 cold
_ROTATION_BYTES = 1 << 29


class LaunchTrial:
    """Runs one launch with different options on a stream of its own, ordered after the caller's.

    Args:
        site: what compiling a candidate takes.
        launch: what running one takes.
        identity: the device it runs on.
        warm: the kernel's inputs usually lie in the L2 (its producer ran just before): time it so.
    """

    def __init__(self, site: LaunchSite, launch: BoundLaunch, *, identity: DeviceIdentity, warm: bool) -> None:
        self._site = site
        self._launch = launch
        self._identity = identity
        self._warm = warm
        self._timer: Timer = WallTimer() if site.interpreted else GraphTimer()
        self._samplers: dict[Candidate, Callable[[], float]] = {}
        self._sandboxes: list[Sandbox] = []
        self._side: torch.cuda.Stream | None = None
        if not site.interpreted:
            self._side = torch.cuda.Stream(site.device_index)  # type: ignore[no-untyped-call]  # torch
            self._side.wait_stream(torch.cuda.current_stream(site.device_index))

    def qualify(self, candidates: tuple[Candidate, ...]) -> Qualified:
        """See `rl_engine.platforms.tuning.trial.Trial`."""
        with self._ordered():
            distinct = self._site.distinct(candidates)
            repeats = 1 if self._site.interpreted else REPEATS  # the interpreter runs one program after the other
            found = gate(self._launch, distinct.kept, repeats=repeats)
        evidence = Evidence(
            protocol=PROTOCOL,
            bits=distinct.bits,
            comparisons=found.comparisons,
            repeats=repeats,
            inputs=found.inputs,
            timer=self._timer.name,
            cache="cold" if self._rotation() * self._footprint >= 2 * self._identity.l2_bytes else "warm",
        )
        return Qualified(found.survivors, (*distinct.rejections, *found.rejections), evidence)

    def canary(self, candidate: Candidate, fixed: Candidate, bits: str) -> Canary:
        """See `rl_engine.platforms.tuning.trial.Trial`."""
        if not self._site.keeps(fixed, bits):
            return Canary.OTHER_CLASS
        with self._ordered():
            passed = gate(self._launch, (fixed, candidate), repeats=1)
        return Canary.EQUAL if candidate in passed.survivors else Canary.DIFFERENT

    def sample(self, candidate: Candidate) -> float:
        """See `rl_engine.platforms.tuning.trial.Trial`; infinity where the candidate fails here after all."""
        with self._ordered():
            try:
                if candidate not in self._samplers:
                    self._samplers[candidate] = self._prepare(candidate)
                return self._samplers[candidate]()
            except torch.OutOfMemoryError:
                raise  # a RuntimeError too, but no fault of the candidate's
            except compiler.CANDIDATE_FAILURES:
                return math.inf

    def close(self) -> None:
        """Let scratch go, and make the caller's stream wait for what still runs."""
        self._samplers.clear()
        self._sandboxes.clear()
        if self._side is not None:
            torch.cuda.current_stream(self._site.device_index).wait_stream(self._side)

    @contextlib.contextmanager
    def _ordered(self) -> Iterator[None]:
        try:
            with contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side):
                yield
        except torch.OutOfMemoryError as error:
            raise TrialUnavailableError("no memory for scratch copies") from error

    @property
    def _footprint(self) -> int:
        return max(1, total(spans(self._launch.tensors)))

    def _rotation(self) -> int:
        """Return how many argument sets keep the L2 cold, as far as memory allows; 1 where it should be warm.

        One more than fill it twice: of a set larger than it, repeated, the end still lies there when the next launch
        begins, which flatters some orders of programs (a product that reads 200 MB took 1.6% more in real use).
        """
        if self._warm or self._site.interpreted:
            return 1
        wanted = 1 + -(-2 * self._identity.l2_bytes // self._footprint)
        return max(1, min(wanted, _ROTATIONS, _ROTATION_BYTES // self._footprint))

    def _prepare(self, candidate: Candidate) -> Callable[[], float]:
        if not self._sandboxes:
            rotation = self._rotation()
            device = next(iter(self._launch.tensors.values())).device
            require_memory(total(self._launch.written) + (rotation - 1) * self._footprint, device)
            self._sandboxes = [Sandbox(self._launch, copy_inputs=number > 0) for number in range(rotation)]
            self._reset()
        sandboxes = self._sandboxes
        sample = self._timer.prepare(lambda n: self._launch.run(sandboxes[n].values, candidate), len(sandboxes))

        def restored() -> float:
            self._reset()
            return sample()

        return restored if sandboxes[0].restores else sample

    def _reset(self) -> None:
        for sandbox in self._sandboxes:
            sandbox.reset()
