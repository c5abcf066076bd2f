"""What a run of the qualification leaves behind: what was compared of every kernel, and what choices are worth."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from benchmarks.report_files import read_rows, write_rows

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.operators.targets import Phase

SCHEMA = 2
ROWS_FILE = "qualification.json"
LEAST_SELECTABLE = 400  # distinct launches in all that the tuner may choose
OF_THE_BEST = 0.97  # of the speed of an exhaustive search's choice that the tuner's must reach


@dataclass
class KernelRow:
    """One kernel, or one question of a tuned backend; sums over its launches.

    Attributes:
        kernel: its name.
        launches: how many were looked at: other dtypes, constants, or arguments that are None.
        declared: candidates.
        binaries: launches of their own among them.
        classes: bit classes among those.
        selectable: launches of their own in the fixed launch's class; the tuner may choose them.
        comparisons: of bytes, a selectable launch with the fixed one.
        mismatches: selectable launches whose bytes differed at least once. Must be 0.
        refused: launches of another class.
        refused_that_differed: those of them whose bytes differed on some input here.
        failed: candidates that did not compile or load.
        wide: comparisons with fp32 outputs among ``comparisons``.
    """

    kernel: str
    launches: int = 0
    declared: int = 0
    binaries: int = 0
    classes: int = 0
    selectable: int = 0
    comparisons: int = 0
    mismatches: int = 0
    refused: int = 0
    refused_that_differed: int = 0
    failed: int = 0
    wide: int = 0

    def add(self, other: KernelRow) -> None:
        """Add the counts of other launches of the same kernel."""
        for one in fields(self)[1:]:
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass
class SpeedRow:
    """One case in one phase, in a CUDA graph; medians in microseconds, None where it was not timed.

    Attributes:
        operator: its name.
        preset: of the case.
        phase: forward, backward or both.
        shape: sizes as text.
        naive_us: by the pinned naive launch.
        fixed_us: by the fixed launches.
        tuned_us: by the tuner's; ``fixed_us`` itself where it kept them all.
        best_us: by an exhaustive search's over the selectable launches; likewise.
        verdict: the tuner's choice against the fixed launches, in words.
        tuned: what the tuner took instead of the fixed launches.
        best: what the search did.
        note: what there is to say.
    """

    operator: str
    preset: str
    phase: Phase
    shape: str
    naive_us: float | None
    fixed_us: float
    tuned_us: float | None
    best_us: float | None
    verdict: str
    tuned: str = ""
    best: str = ""
    note: str = ""

    @property
    def of_the_best(self) -> float | None:
        """The tuner's speed as a share of the search's."""
        return None if self.tuned_us is None or self.best_us is None else self.best_us / self.tuned_us


@dataclass
class Results:
    """All rows of a run so far; ``skipped`` and ``failed`` say why by name."""

    kernels: list[KernelRow] = field(default_factory=list)
    counterexamples: list[KernelRow] = field(default_factory=list)
    speed: list[SpeedRow] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write everything as JSON, in place of what stood at ``path``."""
        write_rows(path, self, SCHEMA)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read results; raises ValueError for those of another schema."""
        found = read_rows(path, SCHEMA)
        for name in ("kernels", "counterexamples"):
            found[name] = [KernelRow(**row) for row in found[name]]
        found["speed"] = [SpeedRow(**row) for row in found["speed"]]
        return cls(**found)

    @property
    def selectable(self) -> int:
        """Distinct launches that the tuner may choose, over all kernels."""
        return sum(row.selectable for row in self.kernels)
