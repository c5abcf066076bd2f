"""Measure what launching costs the host: single launches, whole operator calls, and a launch-bound training step.

    python -m benchmarks.launch.run --out runs/launch
    python -m benchmarks.launch.report --runs runs/launch --out reports/experiments/h200_launch

Everything is compared byte for byte before it is timed; the command ends with exit status 1 where something differed,
or a hot launch had no plan. Results are written after every part, so a run that is stopped keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from pathlib import Path

import torch

from benchmarks import provenance
from benchmarks.launch import measure
from benchmarks.launch.rows import RESULTS_FILE, Results
from benchmarks.launch.training import training
from benchmarks.report_files import ENVIRONMENT_FILE
from benchmarks.training import environment as job_environment
from benchmarks.training import presets
from rl_engine.platforms.autotuner import PersistentAutotuner, installed
from rl_engine.platforms.tuning.store import MemoryStore

COMMAND = textwrap.dedent((__doc__ or "").split("\n\n")[1])
PARTS = ("launches", "operators", "training")
_BUDGET_S = 600.0  # of measuring candidates: an operator whose launches are not settled has no plan


def main() -> int:
    """Run the benchmark; returns 1 where bytes differed or a plan was missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {RESULTS_FILE} and {ENVIRONMENT_FILE}")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, separated by commas; default: all")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts: pass some of {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks.launch.run times launches on a GPU and found none; see benchmarks.launch.host_cost"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    environment = provenance.environment(torch.cuda.current_device(), COMMAND, "launch", "operators", "training")
    environment["packages"]["liger-kernel"] = provenance.version("liger-kernel")
    (options.out / ENVIRONMENT_FILE).write_text(json.dumps(environment, indent=1) + "\n")
    settings = presets.comparison("launch")
    job_environment.prepare(settings, None, None)  # before cuBLAS is used
    results = Results()
    work = {
        "launches": lambda: measure.launches(results),
        "operators": lambda: measure.operators(results),
        "training": lambda: training(results, settings),  # the last: it makes PyTorch deterministic, on one thread
    }
    with installed(PersistentAutotuner(MemoryStore(), budget_s=_BUDGET_S)):
        for part in PARTS:
            if part in parts:
                began = time.monotonic()
                work[part]()
                results.write(options.out / RESULTS_FILE)
                print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
    for row in (*results.launches, *results.operators, *results.training):
        print(row)
    for fault in results.faults:
        print(f"FAILED: {fault}")
    return 1 if results.faults else 0


if __name__ == "__main__":
    sys.exit(main())
