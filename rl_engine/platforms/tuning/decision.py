"""From samples to a winner: paired rounds, a noise band, and ties to the fixed launch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_engine.platforms.tuning.key import Candidate

MARGIN = 0.01  # a winner saves more than 1%
SIGMAS = 3.0  # and more than three standard errors of the median ratio
SCREENING_ROUNDS = 5
FINAL_ROUNDS = 15
FINALISTS = 3
_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_MEDIAN_INEFFICIENCY = math.sqrt(math.pi / 2)  # standard error of a median over that of a mean

Samples = Mapping["Candidate", tuple[float, ...]]


@dataclass(frozen=True)
class Decision:
    """The winner, how much of the fixed launch's time it takes, and the noise of that ratio."""

    winner: Candidate
    ratio: float
    noise: float
    reason: str


@dataclass(frozen=True)
class Measurement:
    """A decision and every sample behind it, in microseconds, in the order they were taken."""

    decision: Decision
    screening: Samples
    final: Samples


def measure(
    candidates: tuple[Candidate, ...],
    sample: Callable[[Candidate], float],
    out_of_time: Callable[[], bool],
) -> Measurement | None:
    """Measure ``candidates``, the fixed launch first; return None where time ran out before a decision.

    A few rounds over all choose the finalists; fresh rounds over finalists and fixed launch decide, so that the winner
    of many noisy candidates does not win by luck. The first sample of each candidate is thrown away (it pays for
    cold clocks and instruction caches). A round samples every candidate once, starting at another one each time, and
    is judged by its ratios to the fixed launch of the same round: slow drift cancels.
    """
    for candidate in candidates:
        sample(candidate)
    screening = _rounds(candidates, sample, SCREENING_ROUNDS, out_of_time)
    if screening is None:
        return None
    fixed, *challengers = candidates
    challengers.sort(key=lambda candidate: statistics.median(_ratios(screening[candidate], screening[fixed])))
    finalists = (fixed, *challengers[:FINALISTS])
    final = _rounds(finalists, sample, FINAL_ROUNDS, out_of_time)
    if final is None:
        return None
    return Measurement(decide(fixed, final), screening, final)


def decide(fixed: Candidate, samples: Samples) -> Decision:
    """Return the fastest candidate that beats ``fixed`` by more than `MARGIN` and the noise, else ``fixed``."""
    best = Decision(fixed, 1.0, 0.0, "no candidate was faster than the fixed launch beyond the noise")
    for candidate, times in samples.items():
        ratios = _ratios(times, samples[fixed])
        if candidate == fixed or math.inf in ratios:
            continue
        ratio, noise = statistics.median(ratios), _standard_error(ratios)
        if ratio < min(1 - max(MARGIN, SIGMAS * noise), best.ratio):
            best = Decision(candidate, ratio, noise, f"{1 - ratio:.1%} faster than the fixed launch")
    return best


def _rounds(
    candidates: tuple[Candidate, ...],
    sample: Callable[[Candidate], float],
    rounds: int,
    out_of_time: Callable[[], bool],
) -> Samples | None:
    taken: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
    for start in range(rounds):
        if out_of_time():
            return None
        for step in range(len(candidates)):
            candidate = candidates[(start + step) % len(candidates)]
            taken[candidate].append(sample(candidate))
    return {candidate: tuple(times) for candidate, times in taken.items()}


def _ratios(times: tuple[float, ...], fixed: tuple[float, ...]) -> list[float]:
    """Return the paired ratios; a time that is no time (NaN, infinite, zero) counts as hopeless."""
    pairs = zip(times, fixed, strict=True)
    return [ours / theirs if 0 < ours < math.inf and 0 < theirs < math.inf else math.inf for ours, theirs in pairs]


def _standard_error(ratios: list[float]) -> float:
    """Return the standard error of the ratios' median, from their median absolute deviation."""
    centre = statistics.median(ratios)
    deviation = statistics.median(abs(ratio - centre) for ratio in ratios)
    return _MAD_TO_SIGMA * deviation * _MEDIAN_INEFFICIENCY / math.sqrt(len(ratios))
