"""From samples to a winner: paired rounds, a noise band, and ties to the fixed launch."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from rl_engine.errors import TrialUnavailableError

if TYPE_CHECKING:
    from rl_engine.platforms.tuning.key import Candidate

MARGIN = 0.01  # a winner saves more than 1%
SIGMAS = 3.0  # and more than three standard errors of the median ratio
WINS = 13 / 15  # and is faster in at least so many rounds: by luck once in 270 times
HOPELESS = 2.0  # times the fixed launch's time: not sampled a second time
SCREENING_ROUNDS = 5
FINAL_ROUNDS = 15
FINALISTS = 3
_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_MEDIAN_INEFFICIENCY = math.sqrt(math.pi / 2)  # standard error of a median over that of a mean

_One = TypeVar("_One")
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
) -> Measurement:
    """Measure ``candidates``, the fixed launch first, and decide.

    A few rounds over all choose the finalists; fresh rounds over finalists and fixed launch decide, so that the winner
    of many noisy candidates does not win by luck. The first sample of each candidate is thrown away (it pays for
    cold clocks and instruction caches), and one that then takes twice the fixed launch's time is not sampled again.
    A round samples every candidate once, in an order of its own, and is judged by its ratios to the fixed launch of the
    same round: slow drift cancels, and so does what a launch leaves to its successor.

    Raises:
        TrialUnavailableError: time ran out, or the fixed launch could not be timed.
    """
    fixed, *challengers = candidates
    if not challengers:
        return Measurement(Decision(fixed, 1.0, 0.0, "no other candidate qualified"), {}, {})
    for candidate in candidates:
        sample(candidate)
    first = sample_rounds(candidates, sample, 1, out_of_time)
    hopeful = tuple(one for one in first if median_ratio(one, fixed, first) < HOPELESS)
    screening = sample_rounds(hopeful, sample, SCREENING_ROUNDS, out_of_time)
    # equal ratios go by the options, so that the order in which candidates are declared never matters
    ranked = sorted(screening, key=lambda one: (median_ratio(one, fixed, screening), one.options))
    finalists = [one for one in ranked if median_ratio(one, fixed, screening) < 1][:FINALISTS]
    final = sample_rounds((fixed, *finalists), sample, FINAL_ROUNDS, out_of_time) if finalists else {}
    return Measurement(decide(fixed, final), {**first, **screening}, final)


def decide(fixed: Candidate, samples: Samples) -> Decision:
    """Return the fastest candidate that beats ``fixed`` by more than `MARGIN` and the noise, else ``fixed``.

    The spread of a few rounds may look smaller than it is, so a winner must also win nearly all of them.
    """
    best = Decision(fixed, 1.0, 0.0, "no candidate was faster than the fixed launch beyond the noise")
    for candidate, times in samples.items():
        if candidate == fixed:
            continue
        ratios = _ratios(times, samples[fixed])
        ratio, noise = statistics.median(ratios), _standard_error(ratios)
        steady = sum(one < 1 for one in ratios) >= WINS * len(ratios)
        if steady and ratio < min(1 - max(MARGIN, SIGMAS * noise), best.ratio):
            best = Decision(candidate, ratio, noise, f"{1 - ratio:.1%} faster than the fixed launch")
    return best


def order_of_round(contenders: Sequence[_One], number: int) -> list[_One]:
    """Return the order in which a round takes its turns: shuffled, the same in every process.

    A large product leaves a hot card to what follows, so a place that never changed would be part of what is measured.
    """
    order = list(contenders)
    random.Random(number).shuffle(order)  # noqa: S311  # nothing secret
    return order


def sample_rounds(
    candidates: tuple[Candidate, ...],
    sample: Callable[[Candidate], float],
    rounds: int,
    out_of_time: Callable[[], bool],
) -> Samples:
    """Return ``rounds`` samples of each candidate; one that gave no time (NaN, infinity, zero) is left out."""
    taken: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
    for number in range(rounds):
        if out_of_time():
            raise TrialUnavailableError("the tuning budget ended while it was measured")
        for candidate in order_of_round(candidates, number):
            taken[candidate].append(sample(candidate))
    timed = {one: tuple(times) for one, times in taken.items() if all(0 < time < math.inf for time in times)}
    if candidates[0] not in timed:
        raise TrialUnavailableError("the fixed launch could not be timed")
    return timed


def median_ratio(candidate: Candidate, fixed: Candidate, samples: Samples) -> float:
    """Return the median ratio of a candidate's times to the fixed launch's of the same rounds."""
    return statistics.median(_ratios(samples[candidate], samples[fixed]))


def _ratios(times: tuple[float, ...], fixed: tuple[float, ...]) -> list[float]:
    return [ours / theirs for ours, theirs in zip(times, fixed, strict=True)]


def _standard_error(ratios: list[float]) -> float:
    """Return the standard error of the ratios' median, from their median absolute deviation."""
    centre = statistics.median(ratios)
    deviation = statistics.median(abs(ratio - centre) for ratio in ratios)
    return _MAD_TO_SIGMA * deviation * _MEDIAN_INEFFICIENCY / math.sqrt(len(ratios))
