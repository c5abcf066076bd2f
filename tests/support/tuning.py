"""A launch made of strings and floats, a clock that stands still, and what else tests of the tuner need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rl_engine.errors import TrialUnavailableError
from rl_engine.platforms.autotuner import PersistentAutotuner, Selection
from rl_engine.platforms.tuning.events import EventLog
from rl_engine.platforms.tuning.key import Candidate, TuningKey
from rl_engine.platforms.tuning.record import PROTOCOL, TuningRecord
from rl_engine.platforms.tuning.store import PackStore, Store
from rl_engine.platforms.tuning.trial import Canary, Evidence, Qualified, Rejection

FIXED = Candidate.of(BLOCK=1024, num_warps=4)
FAST = Candidate.of(BLOCK=1024, num_warps=8)
SLOW = Candidate.of(BLOCK=2048, num_warps=4)
CANDIDATES = (FIXED, FAST, SLOW)
COSTS_US = {FIXED: 10.0, FAST: 8.0, SLOW: 12.0}
EVIDENCE = Evidence(
    protocol=PROTOCOL,
    bits="5eed-c0de",
    comparisons=12,
    repeats=2,
    inputs=("live", "perturbed"),
    timer="fake",
    cache="cold",
)


def make_key(kernel: str = "_silu_fwd_kernel", **parts: str | int | bool | None) -> TuningKey:
    """Return a key with ordinary parts and these."""
    return TuningKey.of(kernel, {"device.name": "card", "launch.x_ptr.dtype": "fp32", "bucket.n": 1024, **parts})


def make_record(key: TuningKey | None = None, **changes: object) -> TuningRecord:
    """Return a record in which FAST beats FIXED, with these fields changed."""
    fields: dict[str, object] = {
        "key": key or make_key(),
        "candidates": CANDIDATES,
        "winner": FAST,
        "ratio": 0.8,
        "noise": 0.001,
        "reason": "20.0% faster than the fixed launch",
        "screening": {FIXED: (10.0, 10.5), FAST: (8.0, 8.5)},
        "final": {FIXED: (10.0, 10.25, 10.5), FAST: (8.0, 8.25, 8.5)},
        "rejections": (Rejection(SLOW, "other bytes"),),
        "evidence": EVIDENCE,
        "provenance": (("device.uuid", "GPU-1"), ("ranks", 8)),
        "created_s": 1_700_000_000,
    }
    return TuningRecord(**{**fields, **changes})  # type: ignore[arg-type]  # fields of mixed types by name


@dataclass
class FakeClock:
    """Monotonic seconds that pass when told to."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeTrial:
    """Answers from tables, and writes down what it was asked."""

    costs_us: Mapping[Candidate, float] = field(default_factory=lambda: COSTS_US)
    rejected: Mapping[Candidate, str] = field(default_factory=dict)
    verdict: Canary = Canary.EQUAL
    unavailable: str = ""
    before_qualify: Callable[[], None] = lambda: None
    before_sample: Callable[[], None] = lambda: None
    calls: list[str] = field(default_factory=list)

    def __call__(self) -> FakeTrial:
        """Be one's own maker: `PersistentAutotuner.select` takes a function that makes the trial."""
        self.calls.append("make")
        return self

    def qualify(self, candidates: tuple[Candidate, ...]) -> Qualified:
        self.calls.append("qualify")
        self.before_qualify()
        if self.unavailable:
            raise TrialUnavailableError(self.unavailable)
        survivors = tuple(candidate for candidate in candidates if candidate not in self.rejected)
        rejections = tuple(Rejection(candidate, reason) for candidate, reason in self.rejected.items())
        return Qualified(survivors, rejections, EVIDENCE)

    def canary(self, candidate: Candidate, fixed: Candidate, bits: str) -> Canary:
        self.calls.append(f"canary {candidate} | {fixed} | {bits}")
        if self.unavailable:
            raise TrialUnavailableError(self.unavailable)
        return self.verdict

    def sample(self, candidate: Candidate) -> float:
        self.calls.append("sample")
        self.before_sample()
        return self.costs_us[candidate]

    def close(self) -> None:
        self.calls.append("close")

    def count(self, call: str) -> int:
        """Return how many calls began with ``call``."""
        return sum(one.startswith(call) for one in self.calls)


class Lab:
    """One process's tuner over a store, with its own clock and log."""

    def __init__(self, own: Store, *packs: PackStore, budget_s: float = 120.0) -> None:
        self.clock = FakeClock()
        self.log = EventLog()
        self.tuner = PersistentAutotuner(
            own, packs, budget_s=budget_s, clock=self.clock, wall_clock=lambda: 1_700_000_000.9, log=self.log
        )

    def select(self, trial: FakeTrial, key: TuningKey | None = None, **options: object) -> Selection:
        """Ask for the usual key among the usual candidates, unless told otherwise."""
        return self.tuner.select(key or make_key(), CANDIDATES, trial, **options)  # type: ignore[arg-type]  # by name

    def warnings(self) -> list[str]:
        """Return the warnings that were given."""
        return [event.reason for event in self.log.events("warning")]
