"""What a run leaves behind, as data, and its JSON: written by one process, read by the comparison in another."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from benchmarks.training.presets import RunSettings

SCHEMA = 1
REWARD_WINDOW = 10  # steps that the final reward is the mean of

Phase = Literal["warm", "grpo"]


@dataclass(frozen=True)
class StepRecord:
    """One step. ``losses`` holds the loss of each update as `float.hex`, which keeps every bit of it."""

    phase: Phase
    step: int
    loss: float
    losses: tuple[str, ...]
    step_s: float
    reward: float | None = None
    kl: float | None = None

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> StepRecord:
        """Return the record that ``asdict`` turned into ``fields``."""
        return cls(**{**fields, "losses": tuple(fields["losses"])})


@dataclass(frozen=True)
class Launches:
    """What the tuner reports of a process: events by kind, seconds spent measuring, and each selection's fields."""

    counts: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    selections: Sequence[Mapping[str, Any]] = ()

    def by_source(self) -> Counter[str]:
        """Return how many launch configurations came from where: tuned, disk, shared, memory, fixed."""
        return Counter(str(selection["source"]) for selection in self.selections)

    def keys_from(self, source: str) -> set[tuple[str, str]]:
        """Return kernel and key of every selection that came from ``source``."""
        chosen = (selection for selection in self.selections if selection["source"] == source)
        return {(str(selection["kernel"]), str(selection["key"])) for selection in chosen}


@dataclass(frozen=True)
class RunRecord:
    """A finished run. ``digest`` is the SHA-256 of the final weights; ``environment`` says where it ran."""

    settings: Mapping[str, Any]
    autotune: str
    environment: Mapping[str, str]
    parameters: int
    total_s: float
    final_reward: float
    digest: str
    launches: Launches
    history: tuple[StepRecord, ...]

    def write(self, path: Path) -> None:
        """Write this record as JSON, in place of what stood at ``path``."""
        replace_bytes(path, json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1).encode())

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Read a record; raises ValueError for one of another schema."""
        fields = json.loads(path.read_bytes())
        schema = fields.pop("schema", None)
        if schema != SCHEMA:
            raise ValueError(f"{path}: schema {schema}, this code reads {SCHEMA}; run the job again")
        fields["launches"] = Launches(**fields["launches"])
        fields["history"] = tuple(StepRecord.from_json(step) for step in fields["history"])
        return cls(**fields)


def timed_ms(history: Iterable[StepRecord]) -> list[float]:
    """Return the times of GRPO steps after the first third, which pays for compiling and measuring."""
    steps_ms = [step.step_s * 1e3 for step in history if step.phase == "grpo"]
    return steps_ms[len(steps_ms) // 3 :]


def final_reward(history: Iterable[StepRecord]) -> float:
    """Return the mean reward of the last steps, 0 before the first."""
    rewards = [step.reward for step in history if step.reward is not None][-REWARD_WINDOW:]
    return sum(rewards) / len(rewards) if rewards else 0.0


def settings_json(settings: RunSettings) -> dict[str, Any]:
    """Return the settings as JSON reads them back."""
    fields: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return fields


def replace_bytes(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path`` so that a reader, or a crash, meets the old bytes or the new, never a part."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
