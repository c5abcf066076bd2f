"""Turn a run of the qualification into what `reports/experiments/h200_qualification` holds.

    python -m benchmarks.qualification.run --out runs/qualification
    python -m benchmarks.qualification.report --runs runs/qualification --out reports/experiments/h200_qualification

README.md, summary.json, environment.json and the figure are written from the run.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks import report_files
from benchmarks.pictures import new_figure, save
from benchmarks.qualification.rows import LEAST_SELECTABLE, OF_THE_BEST, ROWS_FILE, KernelRow, Results, SpeedRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

COMMAND = textwrap.dedent((__doc__ or "").split("\n\n")[1])
_COUNTS = (
    "launches", "declared", "binaries", "classes", "selectable", "comparisons", "wide", "mismatches", "refused",
    "refused_that_differed", "failed",
)  # fmt: skip
_SPEED = (
    "operator", "preset", "phase", "naive", "fixed", "tuned", "best of the search", "tuned against fixed",
    "tuned of the best",
)  # fmt: skip


def promises(results: Results) -> dict[str, bool]:
    """Return what the library promises of its tuner, and whether this run saw it; of nothing measured, not."""
    kernels, speed = results.kernels, results.speed
    shares = [row.of_the_best for row in speed]
    return {
        "no selectable launch gave other bytes than the fixed one": bool(kernels)
        and not any(row.mismatches for row in kernels),
        f"at least {LEAST_SELECTABLE} distinct selectable launches": results.selectable >= LEAST_SELECTABLE,
        "the tuner's choice was nowhere slower than the fixed launch": bool(speed)
        and not any(row.verdict.endswith("slower") for row in speed),
        f"it reached {OF_THE_BEST} of the speed of the search's everywhere": bool(shares)
        and all(share is not None and share >= OF_THE_BEST for share in shares),
        "everything ran": not results.skipped and not results.failed,
    }


def summary(results: Results) -> dict[str, Any]:
    """Return the numbers of a run."""
    return {
        "kernels": [asdict(row) for row in results.kernels],
        "counterexamples": [asdict(row) for row in results.counterexamples],
        "speed": [asdict(row) for row in results.speed],
        "selectable": results.selectable,
        "promises": promises(results),
        "skipped": results.skipped,
        "failed": results.failed,
    }


def readme(results: Results, environment: Mapping[str, Any]) -> str:
    """Return the report's text."""
    kept = [f"| {name} | {'yes' if held else '**no**'} |" for name, held in promises(results).items()]
    parts = [
        "# Qualification on an H200: which launches keep every bit, and what choosing between them is worth",
        "\n".join(["| promised | seen |", "|---|---|", *kept]),
        f"```\n{COMMAND.strip()}\n```",
        report_files.machine(environment),
        _kernels(results.kernels),
        _counterexamples(results.counterexamples),
        "![Times as fast as the naive launch](speed.png)",
        _speed(results.speed),
        _choices(results.speed),
        _left_out(results),
        _how(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(title: str, names: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    rows = list(cells)
    if not rows:
        return ""
    lines = [f"| {' | '.join(row)} |" for row in (names, *rows)]
    lines.insert(1, "|---" * len(names) + "|")
    return f"## {title}\n\n" + "\n".join(lines)


def _kernels(rows: Sequence[KernelRow]) -> str:
    cells = [_counts(row) for row in rows]
    if rows:
        cells.append(["**all**", *(f"{sum(getattr(row, name) for row in rows):,}" for name in _COUNTS)])
    return _table("Kernels", ["kernel", *(name.replace("_", " ") for name in _COUNTS)], cells)


def _counterexamples(rows: Sequence[KernelRow]) -> str:
    return _table("Counterexamples", ["kernel", *(name.replace("_", " ") for name in _COUNTS)], map(_counts, rows))


def _counts(row: KernelRow) -> list[str]:
    return [row.kernel, *(f"{getattr(row, name):,}" for name in _COUNTS)]


def _speed(rows: Sequence[SpeedRow]) -> str:
    cells = []
    for row in rows:
        times = [_us(one) for one in (row.naive_us, row.fixed_us, row.tuned_us, row.best_us)]
        share = "-" if row.of_the_best is None else f"{row.of_the_best:.3f}"
        cells.append([row.operator, row.preset, row.phase, *times, row.verdict, share])
    return _table("Speed", _SPEED, cells)


def _choices(rows: Sequence[SpeedRow]) -> str:
    lines = []
    for row in rows:
        said = [f"the tuner took {row.tuned}"] if row.tuned else []
        said += [f"the search took {row.best}"] if row.best else []
        said += [row.note] if row.note else []
        lines += [f"- {row.operator} {row.preset} {row.phase}: {'; '.join(said)}."] if said else []
    return "\n".join(lines)


def _us(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us:.2f}" if time_us < 100 else f"{time_us:.0f}"


def _left_out(results: Results) -> str:
    lines = [f"- {name}: not run, {why}." for name, why in results.skipped.items()]
    lines += [f"- {name}: **failed**, {why}." for name, why in results.failed.items()]
    return "## Not seen\n\n" + "\n".join(lines) if lines else ""


def _how() -> str:
    return textwrap.dedent(
        """\
        ## How to read it

        - Counts are summed over a few launches of each kernel at small sizes: other dtypes, constants, arguments that
          are None. Binaries are launches of their own among the declared candidates; classes their bit classes;
          selectable those in the fixed launch's class, the fixed one too. The rest of a class's candidates are refused.
        - Comparisons are of raw bytes with the fixed launch's, in poisoned memory, 20 times for each of eight families
          of inputs (cancelling pairs, exponents over 2^20, subnormals, infinities, NaN, signed zeros, equal values)
          while another stream is busy; "wide" ones with fp32 outputs, which round nothing away.
        - Refused that differed: how often refusing was right on these inputs; equal bytes prove little. The library's
          own kernels declare axes that keep their class, so what a class refuses is seen on counterexamples: a
          ``tl.sum``, and a fold of products that the compiler may fuse, both with warps declared neutral.
        - Microseconds are medians of CUDA-graph replays, taken in turns. Where the tuner, or the search, kept the fixed
          launches, their time is the fixed launches' own: one launch is not told from itself by noise.
        - Naive: blocks of 1,024 elements, one row a program, 4 warps; of products one tile, 128x128x64, 8 warps."""
    )


def draw(rows: Sequence[SpeedRow], path: Path) -> None:
    """Draw how many times as fast as the naive launch the others are, as a PNG."""
    shown = [row for row in rows if row.naive_us]
    figure, axes = new_figure(8, 1.2 + 0.22 * len(shown))
    places = list(range(len(shown)))
    axes.barh(places, [_times(row, row.fixed_us) for row in shown], color="#1f77b4", label="fixed")
    marks: list[tuple[str, str, Callable[[SpeedRow], float | None]]] = [
        ("tuned", "#d98b1f", lambda row: row.tuned_us),
        ("best of the search", "#b03a3a", lambda row: row.best_us),
    ]
    for name, colour, time_of in marks:
        axes.scatter([_times(row, time_of(row)) for row in shown], places, s=12, color=colour, label=name, zorder=4)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(places, [f"{row.operator} {row.preset} {row.phase}" for row in shown], fontsize=7)
    axes.set_ylim(len(shown) - 0.4, -1.6)  # downwards, with room for the legend above
    axes.set(xlabel="times as fast as the naive launch")
    axes.legend(loc="upper right", ncols=3, frameon=False, fontsize=8)
    save(figure, path)


def _times(row: SpeedRow, time_us: float | None) -> float:
    return float("nan") if time_us is None or row.naive_us is None else row.naive_us / time_us


def write(runs: Path, out: Path) -> None:
    """Write the report on ``runs`` into ``out``."""
    results, where = Results.read(runs / ROWS_FILE), report_files.environment(runs)
    report_files.write_report(out, readme=readme(results, where), summary=summary(results), where=where)
    draw(results.speed, out / "speed.png")


def main() -> None:
    """Write README.md, summary.json, environment.json and the figure into the report's folder."""
    report_files.main(__doc__, "benchmarks.qualification.run", write)


if __name__ == "__main__":
    main()
