"""What a run of the launch benchmark leaves behind, and its JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

from benchmarks.training.history import replace_bytes

if TYPE_CHECKING:
    from pathlib import Path

RESULTS_FILE = "launch.json"
LaunchPath = Literal["triton", "autotune", "adapter_off", "plan"]
Phase = Literal["fwd", "both"]
PATHS: tuple[LaunchPath, ...] = ("triton", "autotune", "adapter_off", "plan")


@dataclass(frozen=True)
class LaunchRow:
    """Host time of one launch: by Triton's own way, under ``@triton.autotune``, the adapter off, and a plan."""

    path: LaunchPath
    arguments: int
    host_us: float


@dataclass(frozen=True)
class OperatorRow:
    """Host time of one operator call: ``fwd`` without grad, ``both`` forward and backward; None where it failed."""

    operator: str
    phase: Phase
    provider: str
    host_us: float | None
    note: str = ""


@dataclass(frozen=True)
class TrainingRow:
    """A training step of the launch-bound preset, with tuning ``off``, ``on``, and ``off again``."""

    mode: str
    step_ms: float
    digest: str


@dataclass
class Results:
    """Everything that was measured in one run, and what went wrong."""

    launches: list[LaunchRow] = field(default_factory=list)
    operators: list[OperatorRow] = field(default_factory=list)
    training: list[TrainingRow] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write everything, replacing what was there."""
        replace_bytes(path, (json.dumps(asdict(self), indent=1) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return what `write` wrote."""
        found = json.loads(path.read_bytes())
        return cls(
            [LaunchRow(**one) for one in found["launches"]],
            [OperatorRow(**one) for one in found["operators"]],
            [TrainingRow(**one) for one in found["training"]],
            found["faults"],
        )

    def launch_us(self, path: LaunchPath, arguments: int) -> float | None:
        """Return the host time of a launch, None where it was not measured."""
        return next((one.host_us for one in self.launches if (one.path, one.arguments) == (path, arguments)), None)

    def operator_us(self, operator: str, phase: str, provider: str) -> float | None:
        """Return the host time of an operator call, None where it was not measured."""
        asked = (operator, phase, provider)
        return next((one.host_us for one in self.operators if (one.operator, one.phase, one.provider) == asked), None)
