"""Qualify a card and a compiler: every kernel's candidates compared byte for byte, and what choosing is worth.

    python -m benchmarks.qualification.run --out runs/qualification
    python -m benchmarks.qualification.report --runs runs/qualification --out reports/experiments/h200_qualification

Part ``kernels`` compiles every candidate of every kernel at small sizes, tells launches of their own and bit classes
apart, and compares bytes over inputs that would show another order of a sum. Part ``speed`` times naive, fixed, tuned
and searched launches in turns. The command ends with exit status 1 where a selectable launch differed or something
failed. Rows are written one by one, so a run that is stopped keeps what it has.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks import provenance
from benchmarks.operators.launches import library_kernels
from benchmarks.operators.timing import brief, release, side_stream
from benchmarks.qualification import counterexamples, processes, speed
from benchmarks.qualification.rows import ROWS_FILE, KernelRow, Results
from benchmarks.report_files import ENVIRONMENT_FILE
from rl_engine.backends import catalog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COMMAND = textwrap.dedent((__doc__ or "").split("\n\n")[1])
PARTS = ("kernels", "speed")
_SHARE_OF_KERNELS = 0.5  # of the time, after which no further kernel is begun where speed is to follow


def qualify_kernels(results: Results, place: str, only: Sequence[str], out_of_time: Callable[[], bool]) -> None:
    """Fill in the row of every kernel, tuned backend's question and counterexample."""
    missing = sorted(library_kernels().keys() - processes.sources(place).keys())
    results.failed |= {name: "no declared case launches it" for name in missing if not only}
    rows: dict[str, KernelRow] = {}
    for name, number, found in processes.studies(place, only, out_of_time):
        label = f"{name}, launch {number}"
        if isinstance(found, str):
            (results.skipped if found == processes.NO_TIME else results.failed)[label] = found
            print(f"{label}: {found}", flush=True)
            continue
        if name not in rows:
            rows[name] = KernelRow(name)
            (results.counterexamples if name in counterexamples.NAMES else results.kernels).append(rows[name])
        rows[name].add(found)
        print(label, found, flush=True)
        if found.mismatches:
            results.failed[label] = f"{found.mismatches} selectable launches gave other bytes"
    results.kernels.sort(key=lambda row: row.kernel)


def time_choices(results: Results, only: Sequence[str], out_of_time: Callable[[], bool]) -> None:
    """Add a row for every timed case and phase."""
    for spec, case, phase in speed.cases():
        label = f"{spec.name} {case.name} {phase}"
        if only and spec.name not in only:
            continue
        if out_of_time():
            results.skipped[label] = processes.NO_TIME
            continue
        try:
            results.speed.append(speed.measure(spec, case, phase))
            print(results.speed[-1], flush=True)
        except Exception as error:  # noqa: BLE001  # the other cases still count; the exit status tells
            results.failed[label] = brief(error)
            print(f"{label}: FAILED: {results.failed[label]}", flush=True)
        release()


def main() -> int:
    """Run the qualification; returns 1 where something differed or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {ROWS_FILE} and {ENVIRONMENT_FILE}")
    parser.add_argument("--parts", default=",".join(PARTS), help="of kernels,speed; default: both")
    parser.add_argument("--only", default="", help="kernels, tuned backends and operators; default: all")
    parser.add_argument("--seconds", type=float, default=500.0, help="begin nothing further after this long")
    options = parser.parse_args()
    parts, only = options.parts.split(","), tuple(filter(None, options.only.split(",")))
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts: pass some of {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.qualification.run qualifies a GPU and found none")
    catalog.load()
    options.out.mkdir(parents=True, exist_ok=True)
    environment = provenance.environment(torch.cuda.current_device(), COMMAND, "qualification", "operators", "gemm")
    (options.out / ENVIRONMENT_FILE).write_text(json.dumps(environment, indent=1) + "\n")
    results, began_s = Results(), time.monotonic()

    def out_of_time(share: float = 1.0) -> bool:
        results.write(options.out / ROWS_FILE)  # it is asked before every row: a run that is stopped keeps what it has
        return time.monotonic() - began_s > share * options.seconds

    with side_stream():
        if "kernels" in parts:
            share = _SHARE_OF_KERNELS if "speed" in parts else 1.0
            qualify_kernels(results, "cuda", only, functools.partial(out_of_time, share))
        if "speed" in parts:
            time_choices(results, only, out_of_time)
    results.write(options.out / ROWS_FILE)
    counts = (
        f"{len(results.kernels)} kernels, {results.selectable} selectable launches, {len(results.speed)} speed rows"
    )
    print(f"{counts}, {len(results.skipped)} skipped, {len(results.failed)} failed, {time.monotonic() - began_s:.0f} s")
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
