"""Turn finished runs into what `reports/experiments/h200_main_job` holds: summary, environment, figures.

    python -m benchmarks.training.grpo --demo --out runs/main
    python -m benchmarks.operators.fold_choice --out runs/main/fold_choice.json
    python -m benchmarks.training.report --runs runs/main --out reports/experiments/h200_main_job

The README beside them is written by hand, from the summary.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import textwrap
from pathlib import Path
from typing import Any

import torch

from benchmarks import provenance
from benchmarks.operators.fold_choice import Timing, best
from benchmarks.training.compare import COMPARISON_FILE, TIMES_FILE
from benchmarks.training.history import RunRecord
from benchmarks.training.job import RECORD_FILE, REWARD_FILE

COMMAND = textwrap.dedent((__doc__ or "").split("\n\n")[1])


def summary(runs: Path) -> dict[str, Any]:
    """Return the numbers of a training run, of a comparison and of the timed sum orders under ``runs``."""
    learning = RunRecord.read(runs / "learning" / RECORD_FILE)
    tuned = RunRecord.read(runs / "comparison" / "on" / RECORD_FILE)
    comparison = json.loads((runs / "comparison" / COMPARISON_FILE).read_bytes())
    folds = json.loads((runs / "fold_choice.json").read_bytes())
    return {
        "training": _training(learning),
        "comparison": {
            "equal": comparison["equal"],
            "faults": comparison["faults"],
            "settings": comparison["settings"],
            "modes": comparison["modes"],
            "selections": [
                {name: selection[name] for name in ("kernel", "winner", "source", "reason")}
                for selection in tuned.launches.selections
            ],
        },
        "folds": [vars(one) for one in best([Timing(**row) for row in folds["rows"]])],
    }


def _training(run: RunRecord) -> dict[str, Any]:
    rewards = [step.reward for step in run.history if step.reward is not None]
    times_s = {phase: [step.step_s for step in run.history if step.phase == phase] for phase in ("warm", "grpo")}
    return {
        "settings": run.settings,
        "autotune": run.autotune,
        "parameters": run.parameters,
        "total_s": run.total_s,
        "warm_step_ms": statistics.median(times_s["warm"]) * 1e3,
        "grpo_step_ms": statistics.median(times_s["grpo"]) * 1e3,
        "rewards": rewards,
        "final_reward": run.final_reward,
        "digest": run.digest,
    }


def main() -> None:
    """Write summary.json, environment.json and the figures into the report's folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of --demo, and of fold_choice.json")
    parser.add_argument("--out", type=Path, required=True, help="the report's folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = 0 if torch.cuda.is_available() else -1
    for name, content in (
        ("summary.json", summary(options.runs)),
        ("environment.json", provenance.environment(device, COMMAND, "training")),
    ):
        (options.out / name).write_text(json.dumps(content, indent=1) + "\n")
    shutil.copy(options.runs / "learning" / REWARD_FILE, options.out)
    shutil.copy(options.runs / "comparison" / TIMES_FILE, options.out)


if __name__ == "__main__":
    main()
