"""What a run of the operators' benchmark leaves behind: rows of times and checks, and their JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.operators.targets import Phase, limit_us, target_us
from benchmarks.report_files import read_rows, write_rows

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SCHEMA = 1
ROWS_FILE = "rows.json"
PEERS = ("eager", "compile", "liger")


@dataclass(frozen=True)
class Check:
    """What was found equal before a case was timed.

    Attributes:
        errors: of each output and gradient, the largest error against float64 over what the tolerance allows.
        bytes_checked: bytes compared equal: of a run into poisoned memory with a second run, and of rows computed in
            a smaller batch with the same rows of the whole.
        faults: what was not equal; a case with one is not timed.
    """

    errors: Mapping[str, float]
    bytes_checked: int
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Times:
    """Medians in microseconds; None where something could not be timed, and why in the notes."""

    time_us: float
    spread_us: tuple[float, float]  # fastest and slowest sample
    naive_us: float | None = None
    peers: Mapping[str, float | None] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)  # by peer, or "naive"


@dataclass(frozen=True)
class Row:
    """One operator at one preset in one phase: fixed launch, what it aims at, and what others take."""

    operator: str
    preset: str
    phase: Phase
    shape: str
    kernels: int
    time_us: float
    spread_us: tuple[float, float]
    limit_us: float
    share: float
    target_us: float | None
    target_share: float | None
    peers: Mapping[str, float | None]
    naive_us: float | None
    bytes_checked: int
    check: Mapping[str, float]
    note: str = ""

    @property
    def reached(self) -> bool:
        """Whether the time is within the target; a row without one has nothing to reach."""
        return self.target_us is None or self.time_us <= self.target_us

    def slower_than(self) -> dict[str, float]:
        """Return the peers whose median is below this row's fastest sample, and their times."""
        return {name: us for name, us in self.peers.items() if us is not None and us < self.spread_us[0]}


@dataclass(frozen=True)
class Timed:
    """The case a row is made of."""

    operator: str
    preset: str
    shape: str
    forward_bytes: int
    backward_bytes: int


def make_row(case: Timed, phase: Phase, kernels: int, times: Times, check: Check) -> Row:
    """Return the row of one timed phase."""
    limit = limit_us(phase, case.forward_bytes, case.backward_bytes)
    target = target_us(
        case.operator,
        case.preset,
        phase,
        forward_bytes=case.forward_bytes,
        backward_bytes=case.backward_bytes,
        kernels=kernels,
    )
    return Row(
        operator=case.operator,
        preset=case.preset,
        phase=phase,
        shape=case.shape,
        kernels=kernels,
        time_us=times.time_us,
        spread_us=times.spread_us,
        limit_us=limit,
        share=limit / times.time_us,
        target_us=target,
        target_share=None if target is None else limit / target,
        peers=dict(times.peers),
        naive_us=times.naive_us,
        bytes_checked=check.bytes_checked,
        check=dict(check.errors),
        note="; ".join(f"{name}: {reason}" for name, reason in times.notes.items()),
    )


@dataclass
class Results:
    """All rows of a run so far; ``skipped`` and ``failed`` say why by ``operator preset``."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write everything as JSON, in place of what stood at ``path``."""
        write_rows(path, self, SCHEMA)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read results; raises ValueError for those of another schema."""
        fields = read_rows(path, SCHEMA)
        fields["rows"] = [Row(**{**row, "spread_us": tuple(row["spread_us"])}) for row in fields["rows"]]
        return cls(**fields)
