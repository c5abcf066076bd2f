"""What the tuner asks of a launch; the adapter that owns tensors answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rl_engine.platforms.tuning.key import Candidate


class Canary(Enum):
    """What one comparison of a recorded winner with the fixed launch said."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_NOW = "not now"
    OTHER_CLASS = "other class"  # the fixed launch is not in the bit class that the record was made in


@dataclass(frozen=True)
class Evidence:
    """What was compared before anything was timed, and how the timing was done."""

    protocol: int  # version of the comparison; a record of another version is not trusted
    bits: str  # digest of the fixed launch's bit class, which every survivor shares; '' where there is none
    comparisons: int  # byte comparisons that were made
    repeats: int  # launches of each candidate on each input set
    inputs: tuple[str, ...]  # kinds of input sets, e.g. live, perturbed
    timer: str  # e.g. cuda-graph
    cache: str  # state of the L2 while timing: cold or warm


@dataclass(frozen=True)
class Rejection:
    """A candidate that may not be chosen, and why."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class Qualified:
    """Candidates whose bytes equal the fixed launch's, the fixed launch first, and those that fell out."""

    survivors: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    evidence: Evidence


class Trial(Protocol):
    """One launch that can be run with different candidates, without touching the caller's data."""

    def qualify(self, candidates: tuple[Candidate, ...]) -> Qualified:
        """Compare every candidate's bytes with those of the first, the fixed launch.

        Raises TrialUnavailableError where nothing can be measured now (no memory for scratch copies, say).
        """
        ...

    def canary(self, candidate: Candidate, fixed: Candidate, bits: str) -> Canary:
        """Compare ``candidate`` with ``fixed`` once, on the live inputs.

        First the bit class of ``fixed`` with the recorded one, ``bits``: in another class the record proves nothing.
        """
        ...

    def sample(self, candidate: Candidate) -> float:
        """Return the time of one launch of a qualified candidate, in microseconds."""
        ...

    def close(self) -> None:
        """Let go of scratch memory, and order the caller's stream after the trial's."""
        ...
