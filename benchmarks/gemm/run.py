"""Check and time matrix products: the fixed rule, the tuner, an exhaustive search, cuBLAS, torch.compile, one tile.

    python -m benchmarks.gemm.run --out runs/gemm
    python -m benchmarks.gemm.report --runs runs/gemm --out reports/experiments/h200_gemm

A product is compared with float64 and with itself, byte for byte, before it is timed, and every choice of the search
with the fixed rule; one that differs is a failure, and the command ends with exit status 1. All that is timed of a
product takes turns, since a warm card is a slower one. Rows are written after every product, so a run that is stopped
keeps what it has.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks import provenance
from benchmarks.gemm import measure
from benchmarks.gemm.operands import sets_needed, steps
from benchmarks.gemm.rows import PEERS, ROWS_FILE, TARGETS_US, Product, Results, Row, products
from benchmarks.operators.targets import SAMPLES
from benchmarks.operators.timing import brief, release, side_stream
from benchmarks.operators.tuners import NewTuner
from benchmarks.report_files import ENVIRONMENT_FILE
from rl_engine.platforms.tuning.timer import GraphTimer
from rl_engine.runtime.policy import autotune

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.gemm.operands import Step
    from rl_engine.backends.shared.triton.gemm.space import Choice
    from rl_engine.platforms.tuning.timer import Timer

COMMAND = textwrap.dedent((__doc__ or "").split("\n\n")[1])
_SEED = 1234
_SEARCH_SHARE = 0.9  # of the time budget, after which no product is searched any more
_COMPILE_SHARE = 0.8  # likewise for torch.compile


@dataclass(frozen=True)
class Options:
    """What to run: no presets mean all; ``seconds`` is when no further product is begun."""

    out: Path
    presets: tuple[str, ...]
    seconds: float
    began_s: float
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    def spent(self) -> float:
        """Return the share of the time budget that is gone."""
        return (time.monotonic() - self.began_s) / self.seconds


def run(options: Options, chosen: Sequence[Product], timer: Timer) -> Results:
    """Time every product, writing what there is after each."""
    results, path = Results(), options.out / ROWS_FILE
    for product in chosen:
        _try(options, product, results, functools.partial(_time, options, product, results, timer))
        results.write(path)
    return results


def line(row: Row) -> str:
    """Return a row as one line of text."""
    others = {"fixed": row.fixed_us, "tuned": row.tuned_us, "best": row.best_us, **row.peers}
    shown = ", ".join(f"{name} {'-' if us is None else f'{us:.2f}'}" for name, us in others.items())
    return (
        f"{row.preset} {row.phase} {row.shape}: {row.time_us:.2f} us, {row.share:.3f} of the limit; {shown};"
        f" best of {row.candidates}: {row.best or '-'}" + (f" ({row.note})" if row.note else "")
    )


def _try(options: Options, product: Product, results: Results, call: Callable[[], None]) -> None:
    label = f"{product.preset} {product.phase}"
    if options.spent() > 1:
        results.skipped[label] = f"the time budget of {options.seconds:.0f} s was spent"
    else:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # the other products still count; the exit status tells
            results.failed[label] = brief(error)
    if label in results.failed:
        print(f"{label}: FAILED: {results.failed[label]}", flush=True)
    if torch.cuda.is_available():
        release()


def _sets(options: Options, product: Product) -> list[list[Step]]:
    count = sets_needed(product)
    return [steps(product, _SEED + number, options.device, options.dtype) for number in range(count)]


def _time(options: Options, product: Product, results: Results, timer: Timer) -> None:
    label, sets = f"{product.preset} {product.phase}", _sets(options, product)
    notes: list[str] = []
    with autotune("off"):
        checks = measure.check(sets[0])
        best, candidates = {}, 0
        if product.kind != "depth" and not product.groups and options.spent() < _SEARCH_SHARE:
            best, candidates = _search(sets, timer, checks, notes)
        if checks.faults:
            results.failed[label] = "; ".join(checks.faults[:3])
            return
        runs = measure.contenders(sets, best)
        tuner = NewTuner()
        runs["tuned"] = _tuned(runs["fixed"], tuner)
        if options.spent() < _COMPILE_SHARE:
            runs |= measure.compiled_run(sets)
        times, reasons = measure.in_turns(runs, len(sets), timer, SAMPLES)
    medians: dict[str, float | None] = {name: statistics.median(samples) for name, samples in times.items()}
    notes += [f"{name}: {reason}" for name, reason in reasons.items()]
    fixed, tuned = medians.get("fixed"), medians.get("tuned")
    if fixed is None:
        results.failed[label] = reasons["fixed"]
        return
    chosen, limit = "; ".join(f"{one.winner} ({one.reason})" for one in tuner.taken()), product.limit_us
    fastest = fixed
    if tuned is not None:  # of one launch and the same there are twice as many samples
        fastest = min(fixed, tuned) if chosen else (fixed + tuned) / 2
    row = Row(
        "det_gemm", product.preset, product.phase, product.kind, product.shape, fastest, fixed, limit,
        limit / fastest, TARGETS_US.get((product.preset, product.phase)), (min(times["fixed"]), max(times["fixed"])),
        checks.bytes_checked, checks.error, tuned, medians.get("best"),
        "; ".join(f"{name}: {choice}" for name, choice in best.items()), candidates,
        {name: medians.get(name) for name in PEERS}, "; ".join(notes), chosen,
    )  # fmt: skip
    results.rows.append(row)
    print(line(row), flush=True)


def _search(
    sets: Sequence[Sequence[Step]], timer: Timer, checks: measure.Checks, notes: list[str]
) -> tuple[dict[str, Choice], int]:
    """Return the best choice of every step of a phase, and how many were compared in all."""
    best: dict[str, Choice] = {}
    candidates = 0
    for number, step in enumerate(sets[0]):
        failed: dict[str, str] = {}
        choice, count = measure.search([one[number] for one in sets], timer, checks, failed)
        candidates += count
        if choice is not None:
            best[step.name] = choice
        if failed:
            notes.append(f"{step.name}: {len(failed)} choices failed, as {next(iter(failed.items()))}")
    return best, candidates


def _tuned(ours: Callable[[int], None], tuner: NewTuner) -> Callable[[int], None]:
    """Return the same launches under a tuner."""

    def launch(number: int) -> None:
        with tuner.on():
            ours(number)

    return launch


def _options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {ROWS_FILE} and {ENVIRONMENT_FILE}")
    parser.add_argument("--presets", default="", help="presets, e.g. small,thr,k4096; default: all")
    parser.add_argument("--seconds", type=float, default=480.0, help="begin no further product after this long")
    given = parser.parse_args()
    return Options(given.out, tuple(filter(None, given.presets.split(","))), given.seconds, time.monotonic())


def chosen(options: Options) -> list[Product]:
    """Return the products that were asked for; ends the command where a preset is unknown."""
    everything = products()
    known = {product.preset for product in everything}
    unknown = sorted(set(options.presets) - known)
    if unknown:
        raise SystemExit(f"--presets: no preset {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return [product for product in everything if not options.presets or product.preset in options.presets]


def main() -> int:
    """Run the benchmark; returns 1 where a product failed its check or could not be timed."""
    options = _options()
    wanted = chosen(options)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gemm.run times a GPU and found none")
    options.out.mkdir(parents=True, exist_ok=True)
    environment = provenance.environment(torch.cuda.current_device(), COMMAND, "gemm", "operators")
    (options.out / ENVIRONMENT_FILE).write_text(json.dumps(environment, indent=1) + "\n")
    with side_stream():
        results = run(options, wanted, GraphTimer())
    counts = f"{len(results.rows)} rows, {len(results.skipped)} skipped, {len(results.failed)} failed"
    print(f"{counts}, in {time.monotonic() - options.began_s:.0f} s", flush=True)
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
