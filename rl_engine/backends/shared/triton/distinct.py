"""Which candidates are launches of their own in the fixed launch's bit class: compiled side by side and compared."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from rl_engine.backends.shared.triton import compiler
from rl_engine.backends.shared.triton.bits import BitClass, bit_class, structure_digest, structure_of, together
from rl_engine.backends.shared.triton.descriptors import Blocks, describe
from rl_engine.backends.shared.triton.parallel import AbandonedError, run_all
from rl_engine.errors import TrialUnavailableError
from rl_engine.platforms.tuning.trial import Rejection

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rl_engine.backends.shared.triton.autotuning import KernelLauncher
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
class Compiled:
    """What would run, as text that equal launches share, and its bit class; None where it is interpreted."""

    identity: str
    bits: BitClass | None


@dataclass(frozen=True)
class Prepared:
    """One launch of a kernel, ready to be compiled.

    Attributes:
        jitted: the kernel below the adapter.
        grid: as the caller gave it.
        values: all arguments by name.
        options: tuned parameters and launch options.
        descriptors: arguments that the kernel takes as tensor descriptors, and the block of each.
    """

    jitted: Any
    grid: Any
    values: Mapping[str, Any]
    options: Mapping[str, int]
    descriptors: Blocks = field(default_factory=dict)

    @property
    def axes(self) -> tuple[int, ...]:
        """Programs along three axes."""
        return compiler.launch_grid(self.grid, self.values, self.options)

    def compile(self, device_index: int) -> Any:
        """Compile it without running or loading it."""
        made = describe({**self.values, **self.options}, self.descriptors)
        values = {name: made[name] for name in self.values}
        return compiler.compile_launch(self.jitted, self.grid, values, self.options, device_index)


class Ready(NamedTuple):
    """A launch of a wrapped kernel that only lacks its options."""

    kernel: KernelLauncher
    grid: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def launch(self, **options: int) -> None:
        """Run it; options that are not given are the rule's or the tuner's."""
        self.kernel[self.grid](*self.args, **self.kwargs, **options)

    def prepared(self, options: Mapping[str, int]) -> Prepared:
        """Return it as something to compile."""
        values = self.kernel.values(*self.args, **self.kwargs)
        return Prepared(self.kernel.fn, self.grid, values, options, self.kernel.declaration.descriptors)


Launches: TypeAlias = "Callable[[Candidate], tuple[Prepared, ...]]"


def one_kernel(
    jitted: Any, grid: Any, values: Mapping[str, Any], descriptors: Blocks = MappingProxyType({})
) -> Launches:
    """Return the launches of candidates that are options of one kernel's launch."""
    return lambda candidate: (Prepared(jitted, grid, values, dict(candidate.options), descriptors),)


@dataclass(frozen=True)
class LaunchSite:
    """What compiling candidates takes.

    Attributes:
        launches: candidate -> what it launches.
        device_index: where it runs, -1 for the interpreter.
        specialisation: static digest of the launch's key.
        failures: what is known of these candidates already; new failures are added.
    """

    launches: Launches
    device_index: int
    specialisation: str
    failures: Failures

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
        compiled = self.compiled([one for one in candidates if one not in known])
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
            return structure_of(*self._compile(fixed)) == structure_digest(bits)
        except compiler.CANDIDATE_FAILURES as error:
            raise TrialUnavailableError(f"the fixed launch failed: {compiler.first_line(error)}") from error

    def compiled(self, candidates: Sequence[Candidate]) -> dict[Candidate, Compiled | Exception]:
        """Return what would run for each candidate, or why nothing would."""
        if self.interpreted:
            return {
                one: Compiled(repr([_interpreted(each) for each in self.launches(one)]), None) for one in candidates
            }
        outcomes = run_all(
            [functools.partial(self._compile_and_read, one) for one in candidates],
            threads=min(_COMPILE_THREADS, os.cpu_count() or 1),
            patience_s=COMPILE_PATIENCE_S,
            expected=compiler.CANDIDATE_FAILURES,
        )
        return {one: self._loaded(one, outcome) for one, outcome in zip(candidates, outcomes, strict=True)}

    def _compile(self, candidate: Candidate) -> tuple[Any, ...]:
        return tuple(one.compile(self.device_index) for one in self.launches(candidate))

    def _compile_and_read(self, candidate: Candidate) -> tuple[tuple[Any, ...], BitClass]:
        compiled = self._compile(candidate)
        return compiled, together(bit_class(one) for one in compiled)

    def _loaded(
        self, candidate: Candidate, outcome: tuple[tuple[Any, ...], BitClass] | Exception
    ) -> Compiled | Exception:
        """Load in this thread: what does not fit the card shows here, not at compilation."""
        if isinstance(outcome, Exception):
            return outcome
        compiled, bits = outcome
        try:
            for one in compiled:
                compiler.load(one)
        except compiler.CANDIDATE_FAILURES as error:
            return error
        launches = zip(compiled, self.launches(candidate), strict=True)
        return Compiled(" ".join(compiler.launch_identity(one, launch.axes) for one, launch in launches), bits)

    def _programs(self, candidate: Candidate) -> int:
        return sum(math.prod(one.axes) for one in self.launches(candidate))


def _interpreted(launch: Prepared) -> tuple[int, tuple[int, ...], list[tuple[str, Any]]]:
    """Return what the interpreter would run: a kernel, here by identity, its programs and scalars."""
    scalars = {name: value for name, value in launch.values.items() if not hasattr(value, "data_ptr")}
    options = {name: value for name, value in launch.options.items() if name not in _NOT_INTERPRETED}
    return id(launch.jitted), launch.axes, sorted({**scalars, **options}.items())
