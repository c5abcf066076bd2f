"""The same run in four fresh processes: tuning off, on with an empty cache, replay of its records, off again.

Off comes first and last, so that a machine that grows faster or slower meanwhile shows in their difference.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.training import figures, job
from benchmarks.training.history import SCHEMA, RunRecord, replace_bytes, timed_ms
from benchmarks.training.verdict import faults

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.training.presets import RunSettings
    from rl_engine.settings import AutotuneMode

RUNS: Mapping[str, AutotuneMode] = {"off": "off", "on": "on", "replay": "replay", "off again": "off"}
COMPARISON_FILE = "compare.json"
TIMES_FILE = "step_times.png"
_ROOT = Path(__file__).resolve().parents[2]


class ChildFailedError(RuntimeError):
    """A compared process ended with an error; its own message stands above."""


@dataclass(frozen=True)
class ModeSummary:
    """One row of the table; times are those of `timed_ms`."""

    label: str
    autotune: str
    median_ms: float
    min_ms: float
    max_ms: float
    tuning_s: float
    launches: Mapping[str, int]
    digest: str

    @classmethod
    def of(cls, label: str, run: RunRecord) -> ModeSummary:
        """Summarise ``run``, which has at least one GRPO step."""
        steps_ms = timed_ms(run.history)
        return cls(
            label=label,
            autotune=run.autotune,
            median_ms=statistics.median(steps_ms),
            min_ms=min(steps_ms),
            max_ms=max(steps_ms),
            tuning_s=run.launches.seconds,
            launches=dict(sorted(run.launches.by_source().items())),
            digest=run.digest,
        )


def compare(settings: RunSettings, out: Path) -> tuple[str, ...]:
    """Run ``settings`` in every mode, write ``compare.json`` and a figure into ``out``, print a table.

    Returns:
        What is wrong, a sentence each; empty where all bytes are equal and the replay measured nothing.

    Raises:
        ChildFailedError: a run did not end.
    """
    out.mkdir(parents=True, exist_ok=True)
    cache_dir = Path(tempfile.mkdtemp(prefix="cache-", dir=out))  # 0700: the cache refuses folders others may write to
    runs = {}
    for number, (label, autotune) in enumerate(RUNS.items(), 1):
        print(f"run {number} of {len(RUNS)}: tuning {label}", flush=True)
        runs[label] = _run_fresh(settings, autotune, cache_dir, out / label.replace(" ", "-"))
    modes = [ModeSummary.of(label, run) for label, run in runs.items()]
    found = faults(runs)
    _write(out / COMPARISON_FILE, modes, runs["off"], found, cache_dir)
    print(table(modes))
    print(f"records: {cache_dir}\nnumbers: {out / COMPARISON_FILE}")
    if figures.is_available():
        where = "interpreted: says nothing of a GPU" if settings.device == "cpu" else runs["off"].environment["device"]
        title = f"One GRPO step, {settings.preset} preset, {where}"
        figures.draw_step_times(modes, title, out / TIMES_FILE)
        print(f"figure: {out / TIMES_FILE}")
    return found


def table(modes: Sequence[ModeSummary]) -> str:
    """Return the modes as lines of aligned columns."""
    head = ("tuning", "ms a step", "min to max", "tuning s", "launches from", "weights")
    rows = [
        (
            mode.label,
            f"{mode.median_ms:.1f}",
            f"{mode.min_ms:.1f} to {mode.max_ms:.1f}",
            f"{mode.tuning_s:.1f}",
            ", ".join(f"{source} {count}" for source, count in mode.launches.items()) or "-",
            mode.digest[:12],
        )
        for mode in modes
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows))


def _run_fresh(settings: RunSettings, autotune: AutotuneMode, cache_dir: Path, out: Path) -> RunRecord:
    command = [
        *(sys.executable, "-m", "benchmarks.training.grpo", "--quiet"),
        *("--preset", settings.preset, "--operators", settings.operators, "--seed", str(settings.seed)),
        *("--warm-steps", str(settings.warm_steps), "--steps", str(settings.grpo_steps)),
        *("--autotune", autotune, "--cache-dir", str(cache_dir.absolute()), "--out", str(out.absolute())),
    ]
    ended = subprocess.run(command, cwd=_ROOT, check=False)
    if ended.returncode != 0:
        raise ChildFailedError(f"tuning {autotune}: the run ended with code {ended.returncode}: {' '.join(command)}")
    return RunRecord.read(out / job.RECORD_FILE)


def _write(path: Path, modes: Sequence[ModeSummary], run: RunRecord, found: Sequence[str], cache_dir: Path) -> None:
    content = {
        "schema": SCHEMA,
        "equal": not found,
        "faults": list(found),
        "settings": run.settings,
        "environment": run.environment,
        "cache_dir": str(cache_dir),
        "modes": [asdict(mode) for mode in modes],
    }
    replace_bytes(path, json.dumps(content, indent=1).encode())
