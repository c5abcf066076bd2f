"""The byte gate: which candidates give exactly the bytes of the fixed launch, on poisoned copies of its outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rl_engine.backends.shared.triton.compiler import CANDIDATE_FAILURES, first_line
from rl_engine.backends.shared.triton.scratch import Copy, Span, require_memory, spans, total
from rl_engine.errors import TrialUnavailableError
from rl_engine.platforms.tuning.trial import Rejection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rl_engine.platforms.tuning.key import Candidate

REPEATS = 4  # launches of a candidate on one input set; races show from run to run (flash-linear-attention #945)
_SEED = 0x5EED
_NARROW = (torch.float16, torch.bfloat16)
_WIDENING = 2  # bytes of an fp32 element for each of a narrow one
_ALIGNED = 16  # bytes; what Triton compiles for, one way or the other


@dataclass(frozen=True)
class BoundLaunch:
    """A kernel with the arguments of one call.

    Attributes:
        run: launches with argument values by name and a candidate's options.
        values: all arguments by name.
        outputs: names of tensors that the kernel writes and does not read.
        inout: names of tensors that it reads and writes.
        data: names of floating-point inputs whose values may be anything.
    """

    run: Callable[[Mapping[str, Any], Candidate], None]
    values: Mapping[str, Any]
    outputs: tuple[str, ...]
    inout: tuple[str, ...]
    data: tuple[str, ...]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The arguments that are tensors."""
        return {name: value for name, value in self.values.items() if isinstance(value, torch.Tensor)}

    @property
    def written(self) -> tuple[Span, ...]:
        """Spans with at least one tensor that the kernel writes."""
        names = {*self.outputs, *self.inout}
        return tuple(span for span in spans(self.tensors) if names & span.tensors.keys())


class Sandbox:
    """Argument values of a launch in which everything it writes is a copy, and data arguments may be perturbed."""

    def __init__(self, launch: BoundLaunch, *, copy_inputs: bool = False) -> None:
        found = launch.written
        self._fresh = [Copy(span) for span in found if set(launch.outputs) >= span.tensors.keys()]
        self._kept = [Copy(span) for span in found if not set(launch.outputs) >= span.tensors.keys()]
        read = [span for span in spans(launch.tensors) if span not in found] if copy_inputs else []
        self._inputs = [Copy(span) for span in read]
        for copy in self._inputs:
            copy.restore()
        copies = {name: view for copy in self.copies for name, view in copy.tensors.items()}
        self.values = {**launch.values, **copies}

    @property
    def copies(self) -> list[Copy]:
        """Every copy."""
        return [*self._fresh, *self._kept, *self._inputs]

    @property
    def restores(self) -> bool:
        """Whether `reset` brings back values that the kernel reads."""
        return bool(self._kept)

    def reset(self) -> None:
        """Poison what the kernel only writes; restore what it reads and writes."""
        for copy in self._fresh:
            copy.poison()
        for copy in self._kept:
            copy.restore()

    def outputs(self) -> Iterator[torch.Tensor]:
        """Yield the bytes of everything the kernel writes."""
        for copy in (*self._fresh, *self._kept):
            yield copy.bytes

    def perturb(self, names: tuple[str, ...], generator: torch.Generator) -> bool:
        """Randomise the inputs that consist of data arguments alone; returns whether there were any."""
        changed = [copy.randomise(generator) for copy in self._inputs if set(names) >= copy.tensors.keys()]
        return any(changed)


@dataclass(frozen=True)
class GateResult:
    """What passed, what fell out and why, and how much was compared."""

    survivors: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    comparisons: int
    inputs: tuple[str, ...]


def gate(launch: BoundLaunch, candidates: tuple[Candidate, ...], *, repeats: int = REPEATS) -> GateResult:
    """Compare candidates with the first, on the live inputs and, where there is ``data``, on a perturbed copy.

    Raises TrialUnavailableError where scratch does not fit or the fixed launch itself does not repeat its bytes.
    """
    fixed, *others = candidates
    rejections: dict[Candidate, Rejection] = {}
    comparisons = 0
    kinds: list[str] = []
    for kind, sandbox in _input_sets(launch):
        kinds.append(kind)
        try:
            expected = _run(launch, sandbox, fixed)
        except CANDIDATE_FAILURES as error:
            raise TrialUnavailableError(f"the fixed launch fails: {first_line(error)}") from error
        if not all(_equal(_run(launch, sandbox, fixed), expected) for _ in range(repeats - 1)):
            raise TrialUnavailableError("the fixed launch gives different bytes from run to run")
        for candidate in others:
            if candidate in rejections:
                continue
            try:
                equal = [_equal(_run(launch, sandbox, candidate), expected) for _ in range(repeats)]
            except torch.OutOfMemoryError:
                raise  # a RuntimeError too, but no fault of the candidate's
            except CANDIDATE_FAILURES as error:
                rejections[candidate] = Rejection(candidate, f"failed: {first_line(error)}")
                continue
            comparisons += repeats
            if not all(equal):
                rejections[candidate] = Rejection(candidate, "unstable" if any(equal) else "not_bit_exact")
    survivors = tuple(candidate for candidate in candidates if candidate not in rejections)
    return GateResult(survivors, tuple(rejections.values()), comparisons, tuple(kinds))


def widened(launch: BoundLaunch) -> BoundLaunch | None:
    """Return the launch with fp32 tensors for its fp16 and bf16 outputs, so that rounding hides no difference.

    It is another binary and another launch: a candidate, the fixed one too, may not fit the card any more. The new
    tensors have the shapes, strides and overlaps of the old ones, in memory of their own that nobody filled and that
    lives as long as they do; each group begins at a multiple of 16 bytes where the old one does. What the kernel reads,
    and what overlaps that, stays.

    Returns None where no output can be widened. Raises TrialUnavailableError where the memory for it is not there.
    """
    found = [
        span
        for span in launch.written
        if set(launch.outputs) >= span.tensors.keys() and all(one.dtype in _NARROW for one in span.tensors.values())
    ]
    if not found:
        return None
    require_memory(_WIDENING * total(found), next(iter(found[0].tensors.values())).device)
    wide = {name: tensor for span in found for name, tensor in _wide(span).items()}
    return replace(launch, values={**launch.values, **wide})


def _wide(span: Span) -> dict[str, torch.Tensor]:
    some = next(iter(span.tensors.values()))
    start = 1 if span.low % _ALIGNED else 0
    memory = torch.empty(start + span.size // some.element_size(), dtype=torch.float32, device=some.device)
    return {
        name: memory.as_strided(one.size(), one.stride(), start + (one.data_ptr() - span.low) // one.element_size())
        for name, one in span.tensors.items()
    }


def _input_sets(launch: BoundLaunch) -> Iterator[tuple[str, Sandbox]]:
    some = next(iter(launch.tensors.values()))
    require_memory(2 * total(launch.written), some.device)  # a copy, and the expected bytes
    yield "live", Sandbox(launch)
    if launch.data:
        require_memory(2 * total(launch.written) + total(spans(launch.tensors)), some.device)
        perturbed = Sandbox(launch, copy_inputs=True)
        if perturbed.perturb(launch.data, torch.Generator(some.device).manual_seed(_SEED)):
            yield "perturbed", perturbed


def _run(launch: BoundLaunch, sandbox: Sandbox, candidate: Candidate) -> list[torch.Tensor]:
    sandbox.reset()
    launch.run(sandbox.values, candidate)
    return [output.clone() for output in sandbox.outputs()]


def _equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
