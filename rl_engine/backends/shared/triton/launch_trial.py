"""The tuner's `Trial` of one kernel launch: compile, drop equal launches, gate bytes, time; never the user's data."""

from __future__ import annotations

import contextlib
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from rl_engine.backends.shared.triton import compiler
from rl_engine.backends.shared.triton.qualification import REPEATS, BoundLaunch, Sandbox, first_line, gate
from rl_engine.backends.shared.triton.scratch import require_memory, spans, total
from rl_engine.platforms.tuning.record import PROTOCOL
from rl_engine.platforms.tuning.timer import GraphTimer, Timer, WallTimer
from rl_engine.platforms.tuning.trial import Canary, Evidence, Qualified, Rejection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rl_engine.platforms.device import DeviceIdentity
    from rl_engine.platforms.tuning.key import Candidate

_COMPILE_THREADS = 8  # 16 GEMM candidates: 5.8 s in one thread, 1.3 s in 8 (H200)
_ROTATIONS = 128  # argument sets at most, to keep the L2 cold
_ROTATION_BYTES = 1 << 29
_INTERPRETED_MORE = 4  # interpreted programs run one after the other, milliseconds each


class LaunchTrial:
    """Runs one launch with different options on a stream of its own, ordered after the caller's.

    Args:
        jitted: the kernel below the adapter.
        grid: as the caller gave it.
        launch: the kernel with the caller's arguments.
        identity: the device it runs on.
        device_index: its index, -1 for the interpreter.
        warm: the kernel's inputs usually lie in the L2 (its producer ran just before): time it so.
    """

    def __init__(
        self,
        jitted: Any,
        grid: Any,
        launch: BoundLaunch,
        *,
        identity: DeviceIdentity,
        device_index: int,
        warm: bool,
    ) -> None:
        self._jitted = jitted
        self._grid = grid
        self._launch = launch
        self._identity = identity
        self._index = device_index
        self._interpreted = device_index < 0
        self._timer: Timer = WallTimer() if self._interpreted else GraphTimer()
        self._warm = warm
        self._samplers: dict[Candidate, Callable[[], float]] = {}
        self._sandboxes: list[Sandbox] | None = None
        self._side: torch.cuda.Stream | None = None
        if not self._interpreted:
            self._side = torch.cuda.Stream(device_index)  # type: ignore[no-untyped-call]  # torch
            self._side.wait_stream(torch.cuda.current_stream(device_index))

    def qualify(self, candidates: tuple[Candidate, ...]) -> Qualified:
        """See `rl_engine.platforms.tuning.trial.Trial`."""
        with self._ordered():
            distinct, rejections = self._distinct(candidates)
            repeats = 1 if self._interpreted else REPEATS  # the interpreter runs one program after the other
            found = gate(self._launch, distinct, repeats=repeats)
            rotation = 1 if self._interpreted else self._rotation()
        evidence = Evidence(
            protocol=PROTOCOL,
            comparisons=found.comparisons,
            repeats=repeats,
            inputs=found.inputs,
            timer=self._timer.name,
            cache="cold" if rotation * self._footprint >= 2 * self._identity.l2_bytes else "warm",
        )
        return Qualified(found.survivors, (*rejections, *found.rejections), evidence)

    def canary(self, candidate: Candidate, fixed: Candidate) -> Canary:
        """See `rl_engine.platforms.tuning.trial.Trial`."""
        with self._ordered():
            passed = gate(self._launch, (fixed, candidate), repeats=1)
        return Canary.EQUAL if candidate in passed.survivors else Canary.DIFFERENT

    def sample(self, candidate: Candidate) -> float:
        """See `rl_engine.platforms.tuning.trial.Trial`."""
        with self._ordered():
            sampler = self._samplers.get(candidate)
            if sampler is None:
                sampler = self._samplers[candidate] = self._prepare(candidate)
            return sampler()

    def close(self) -> None:
        """Let scratch go, and make the caller's stream wait for what still runs."""
        self._samplers.clear()
        self._sandboxes = None
        if self._side is not None:
            torch.cuda.current_stream(self._index).wait_stream(self._side)

    @contextlib.contextmanager
    def _ordered(self) -> Iterator[None]:
        with contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side):
            yield

    @property
    def _footprint(self) -> int:
        return max(1, total(spans(self._launch.tensors)))

    # Compiled kernels stay referenced by the jitted function's own cache: one that was launched is never dropped.

    def _distinct(self, candidates: tuple[Candidate, ...]) -> tuple[tuple[Candidate, ...], list[Rejection]]:
        """Drop candidates that fail to compile or load, and those that are the same launch as an earlier one."""
        kept: dict[str, Candidate] = {}
        rejections: list[Rejection] = []
        for candidate, identity in zip(candidates, self._identities(candidates), strict=True):
            if isinstance(identity, Exception):
                rejections.append(Rejection(candidate, f"failed: {first_line(identity)}"))
            elif self._interpreted and self._programs(candidate) > _INTERPRETED_MORE * self._programs(candidates[0]):
                rejections.append(Rejection(candidate, "too many programs for the interpreter"))
            elif identity in kept:
                rejections.append(Rejection(candidate, f"same launch as {kept[identity]}"))
            else:
                kept[identity] = candidate
        distinct = tuple(kept.values())
        if candidates[0] not in distinct:
            distinct = (candidates[0], *distinct)  # the fixed launch raises its own error when it is run
        return distinct, rejections

    def _identities(self, candidates: tuple[Candidate, ...]) -> list[str | Exception]:
        grids = [compiler.launch_grid(self._grid, self._launch.values, dict(one.options)) for one in candidates]
        if self._interpreted:
            ignored = ("num_warps", "num_stages")  # the interpreter has neither
            return [
                repr((grid, [option for option in one.options if option[0] not in ignored]))
                for one, grid in zip(candidates, grids, strict=True)
            ]
        with ThreadPoolExecutor(min(_COMPILE_THREADS, os.cpu_count() or 1)) as pool:
            waiting = [pool.submit(self._compile, candidate) for candidate in candidates]
        found: list[str | Exception] = []
        for future, grid in zip(waiting, grids, strict=True):
            try:
                compiled = future.result()
                compiler.load(compiled)
            except compiler.CANDIDATE_FAILURES as error:
                found.append(error)
                continue
            found.append(compiler.launch_identity(compiled, grid))
        return found

    def _programs(self, candidate: Candidate) -> int:
        return math.prod(compiler.launch_grid(self._grid, self._launch.values, dict(candidate.options)))

    def _compile(self, candidate: Candidate) -> Any:
        options = dict(candidate.options)
        return compiler.compile_launch(self._jitted, self._grid, self._launch.values, options, self._index)

    def _rotation(self) -> int:
        """Return how many argument sets keep the L2 cold, as far as memory allows; 1 where it should be warm."""
        if self._warm:
            return 1
        wanted = -(-2 * self._identity.l2_bytes // self._footprint)
        return max(1, min(wanted, _ROTATIONS, _ROTATION_BYTES // self._footprint))

    def _prepare(self, candidate: Candidate) -> Callable[[], float]:
        if self._sandboxes is None:
            rotation = 1 if self._interpreted else self._rotation()
            device = next(iter(self._launch.tensors.values())).device
            require_memory(total(self._launch.written) + (rotation - 1) * self._footprint, device)
            self._sandboxes = [Sandbox(self._launch, copy_inputs=number > 0) for number in range(rotation)]
            for sandbox in self._sandboxes:
                sandbox.reset()
        sandboxes = self._sandboxes
        sample = self._timer.prepare(lambda n: self._launch.run(sandboxes[n].values, candidate), len(sandboxes))

        def restored() -> float:
            for sandbox in sandboxes:
                sandbox.reset()
            return sample()

        return restored if sandboxes[0].restores else sample
