"""Which candidates are launches of their own in the fixed launch's bit class: compiled side by side and compared."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_engine.backends.shared.triton import compiler
from rl_engine.backends.shared.triton.bits import BitClass, bit_class, structure_digest, structure_of
from rl_engine.backends.shared.triton.descriptors import Blocks, describe
from rl_engine.backends.shared.triton.parallel import AbandonedError, run_all
from rl_engine.errors import TrialUnavailableError
from rl_engine.platforms.tuning.trial import Rejection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_engine.platforms.tuning.key import Candidate

COMPILE_PATIENCE_S = 60.0  # the slowest candidate of this library takes 3 s
_COMPILE_THREADS = 8  # 16 GEMM candidates: 5.8 s in one thread, 1.3 s in 8 (H200)
_REASON = 300  # characters of a reason: a layout may be long
_INTERPRETED_MORE = 4  # interpreted programs run one after the other, milliseconds each
_NOT_INTERPRETED = ("num_warps", "num_stages")  # options that mean nothing to the interpreter


@dataclass
class Failures:
    """Candidates of one kernel that failed to compile or load in this process, so that none costs twice.

    Attributes:
        specialised: reasons by (static digest of the key, candidate): other sizes may well compile.
        hung: reasons by candidate: a compile that never ended is tried for no other signature either.
    """

    specialised: dict[tuple[str, Candidate], str] = field(default_factory=dict)
    hung: dict[Candidate, str] = field(default_factory=dict)

    def reason(self, specialisation: str, candidate: Candidate) -> str | None:
        """Return why ``candidate`` is not to be tried, or None."""
        return self.hung.get(candidate) or self.specialised.get((specialisation, candidate))

    def remember(self, specialisation: str, candidate: Candidate, error: Exception) -> str:
        """Keep a failure and return its reason."""
        reason = f"failed: {compiler.first_line(error)}"
        if isinstance(error, AbandonedError):
            self.hung[candidate] = reason
        else:
            self.specialised[specialisation, candidate] = reason
        return reason


@dataclass(frozen=True)
class Distinct:
    """What is left of a candidate set before anything runs.

    Attributes:
        kept: launches of their own, the fixed one first, all in its bit class.
        rejections: the others, and why.
        bits: digest of the fixed launch's bit class; '' where launches are interpreted.
    """

    kept: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    bits: str


@dataclass(frozen=True)
class _Compiled:
    """What would run, as text that equal launches share, and its bit class; None where it is interpreted."""

    identity: str
    bits: BitClass | None


@dataclass(frozen=True)
class LaunchSite:
    """A kernel, its arguments and its grid: what compiling a candidate takes.

    Attributes:
        jitted: the kernel below the adapter.
        grid: as the caller gave it.
        values: all arguments by name.
        device_index: where it runs, -1 for the interpreter.
        specialisation: static digest of the launch's key.
        failures: what is known of this kernel's candidates already; new failures are added.
        descriptors: arguments that the kernel takes as tensor descriptors, and the block of each.
    """

    jitted: Any
    grid: Any
    values: Mapping[str, Any]
    device_index: int
    specialisation: str
    failures: Failures
    descriptors: Blocks = field(default_factory=dict)

    @property
    def interpreted(self) -> bool:
        """Whether launches run one program after the other, on the CPU."""
        return self.device_index < 0

    def distinct(self, candidates: tuple[Candidate, ...]) -> Distinct:
        """Compile and load the candidates; leave out what fails, equals another launch, or may give other bits.

        Compiled kernels stay referenced by the jitted function's own cache: one that was launched is never dropped.
        Raises TrialUnavailableError where the fixed launch itself does not compile.
        """
        fixed = candidates[0]
        known = {one: reason for one in candidates if (reason := self.failures.reason(self.specialisation, one))}
        compiled = self._compiled([one for one in candidates if one not in known])
        kept: dict[str, Candidate] = {}
        rejections: list[Rejection] = []
        bits: BitClass | None = None
        for candidate in candidates:
            found = compiled.get(candidate)
            if found is None:
                reason = known[candidate]
            elif isinstance(found, Exception):
                reason = self.failures.remember(self.specialisation, candidate, found)
            elif found.identity in kept:
                reason = f"same launch as {kept[found.identity]}"
            elif self.interpreted and self._programs(candidate) > _INTERPRETED_MORE * self._programs(fixed):
                reason = "too many programs for the interpreter"
            elif bits is not None and found.bits is not None and not found.bits.agrees_with(bits):
                reason = f"bits: another class ({found.bits.difference(bits)})"[:_REASON]
            else:
                kept[found.identity] = candidate
                bits = bits or found.bits
                continue
            if candidate == fixed:
                raise TrialUnavailableError(f"the fixed launch {reason}")
            rejections.append(Rejection(candidate, reason))
        return Distinct(tuple(kept.values()), tuple(rejections), "" if bits is None else bits.digest)

    def keeps(self, fixed: Candidate, bits: str) -> bool:
        """Return whether the fixed launch, compiled here, is in the bit class with digest ``bits``.

        By the half that is read from the IR: disassembling takes longer than a record saves. Raises
        TrialUnavailableError where it does not compile.
        """
        if self.interpreted:
            return not bits
        try:
            return structure_of(self._compile(fixed)) == structure_digest(bits)
        except compiler.CANDIDATE_FAILURES as error:
            raise TrialUnavailableError(f"the fixed launch failed: {compiler.first_line(error)}") from error

    def _compiled(self, candidates: Sequence[Candidate]) -> dict[Candidate, _Compiled | Exception]:
        """Return what would run for each candidate, or why nothing would."""
        if self.interpreted:
            return {one: _Compiled(repr((self._grid(one), _interpreted_options(one))), None) for one in candidates}
        outcomes = run_all(
            [functools.partial(self._compile_and_read, one) for one in candidates],
            threads=min(_COMPILE_THREADS, os.cpu_count() or 1),
            patience_s=COMPILE_PATIENCE_S,
            expected=compiler.CANDIDATE_FAILURES,
        )
        return {one: self._loaded(one, outcome) for one, outcome in zip(candidates, outcomes, strict=True)}

    def _compile(self, candidate: Candidate) -> Any:
        options = dict(candidate.options)
        described = describe({**self.values, **options}, self.descriptors)
        values = {name: described[name] for name in self.values}
        return compiler.compile_launch(self.jitted, self.grid, values, options, self.device_index)

    def _compile_and_read(self, candidate: Candidate) -> tuple[Any, BitClass]:
        compiled = self._compile(candidate)
        return compiled, bit_class(compiled)

    def _loaded(self, candidate: Candidate, outcome: tuple[Any, BitClass] | Exception) -> _Compiled | Exception:
        """Load in this thread: what does not fit the card shows here, not at compilation."""
        if isinstance(outcome, Exception):
            return outcome
        compiled, bits = outcome
        try:
            compiler.load(compiled)
        except compiler.CANDIDATE_FAILURES as error:
            return error
        return _Compiled(compiler.launch_identity(compiled, self._grid(candidate)), bits)

    def _grid(self, candidate: Candidate) -> tuple[int, ...]:
        return compiler.launch_grid(self.grid, self.values, dict(candidate.options))

    def _programs(self, candidate: Candidate) -> int:
        return math.prod(self._grid(candidate))


def _interpreted_options(candidate: Candidate) -> list[tuple[str, int]]:
    return [(name, value) for name, value in candidate.options if name not in _NOT_INTERPRETED]
