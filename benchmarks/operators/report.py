"""Turn a run of the operators' benchmark into what `reports/experiments/h200_operators` holds.

    python -m benchmarks.operators.run --out runs/operators
    python -m benchmarks.operators.report --runs runs/operators --out reports/experiments/h200_operators

README.md, summary.json, environment.json and the figure are written from the run; why a row falls behind is written by
hand into reasons.json of the report's folder, {"operator preset phase": "why"}: only what measuring has shown.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks import report_files
from benchmarks.operators import figures
from benchmarks.operators.rows import PEERS, ROWS_FILE, Results, Row
from benchmarks.operators.targets import BYTES_PER_US, KERNEL_US, SAMPLES, is_throughput

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

COMMAND = textwrap.dedent((__doc__ or "").split("\n\n")[1])


_PEER_NAMES = {"eager": "torch eager", "compile": "torch.compile", "liger": "Liger"}

_CHECKS = """
## What was checked first

Before a case was timed, {total:,} bytes in all were compared equal: outputs and gradients of a run into memory full of
NaN with those of a second run, and rows computed in a smaller batch with the same rows of the whole. The largest error
against float64 of each case, as a share of its declared tolerance:

| operator | preset | bytes compared | largest error / tolerance |
|---|---|---|---|
"""

_LIMITS = """
## How to read it

- Limit: the bytes that must move, at {tera:.1f} TB/s, what a copy reaches on this card. Small cases run from the L2, so
  their limit is nominal; they are asked for {kernel} µs a kernel.
- Times are medians of {samples} CUDA-graph replays, everyone's in turns in one process. Training sizes rotate through
  sets of arguments so that 120 MB pass before one is used again. Slowest sample over fastest, at most: {spread:.0%}.
- The forward is a training forward: its inputs ask for gradients. The backward computes the gradients of the
  differentiable inputs. Both: captured together.
- Naive: the same kernels with blocks of 1024, one row a program, 4 warps.
- A dash: nothing to compare with, or it could not be timed (see the notes on rows).
- One card, one process, tuning off.
"""


def summary(results: Results, reasons: Mapping[str, str]) -> dict[str, Any]:
    """Return the numbers of a run, each row with the reason that is known for it."""
    rows = [{**asdict(row), "reached": row.reached, "reason": reason(row, reasons)} for row in results.rows]
    return {"rows": rows, "skipped": results.skipped, "failed": results.failed}


def reason(row: Row, reasons: Mapping[str, str]) -> str:
    """Return why a row falls behind its target or a peer; the empty text where it does not, or nobody knows."""
    behind = not row.reached or row.slower_than()
    return reasons.get(f"{row.operator} {row.preset} {row.phase}", "") if behind else ""


def readme(results: Results, environment: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Return the report's text."""
    rows = results.rows
    parts = [
        "# The operators on an H200: fixed launches against the memory limit and against peers",
        _claim(rows),
        f"```\n{COMMAND.strip()}\n```",
        report_files.machine(environment),
        "## Training sizes, cold L2\n\n![Share of the limit](shares.png)\n\n"
        + _table(row for row in rows if is_throughput(row.preset)),
        "## Decode sizes, warm L2\n\n" + _table(row for row in rows if not is_throughput(row.preset)),
        "## Where it falls behind\n\n" + _behind(rows, reasons),
        _others(results),
        _checks(rows),
        _limits(rows),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _claim(rows: Sequence[Row]) -> str:
    reached = sum(row.reached for row in rows)
    lines = [f"**Claim.** {reached} of {len(rows)} rows reach their target with the fixed launch, tuning off."]
    for name in PEERS:
        ratios = [us / row.time_us for row in rows if (us := row.peers.get(name)) is not None]
        if ratios:
            faster = sum(ratio >= 1 for ratio in ratios)
            low, high = min(ratios), max(ratios)
            lines.append(f"Against {_PEER_NAMES[name]}: as fast or faster in {faster} of {len(ratios)} rows")
            lines[-1] += f" ({low:.2f} to {high:.2f} times as fast)."
    naive = [row.naive_us / row.time_us for row in rows if row.naive_us is not None]
    if naive:
        lines.append(
            f"Against the naive launch of the same kernels: {min(naive):.2f} to {max(naive):.2f} times as fast."
        )
    return "\n".join(lines)


def _table(rows: Iterable[Row]) -> str:
    lines = [
        "| operator | preset | phase | shape | µs | share of limit | target, µs | eager | compile | Liger | naive |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        target = "-" if row.target_us is None else f"{_us(row.target_us)}{'' if row.reached else ' missed'}"
        cells = [row.operator, row.preset, row.phase, row.shape, f"**{_us(row.time_us)}**", f"{row.share:.2f}", target]
        cells += [_us(row.peers.get(name)) for name in PEERS] + [_us(row.naive_us)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _us(time_us: float | None) -> str:
    if time_us is None:
        return "-"
    return f"{time_us:.2f}" if time_us < 100 else f"{time_us:.1f}" if time_us < 1000 else f"{time_us:.0f}"


def _behind(rows: Sequence[Row], reasons: Mapping[str, str]) -> str:
    known, unknown = [], []
    for row in rows:
        slower = {name: us for name, us in row.slower_than().items() if name != "eager"} or row.slower_than()
        if row.reached and not slower:
            continue
        what = [] if row.reached else [f"{_us(row.time_us)} µs of {_us(row.target_us)}"]
        what += [f"{_PEER_NAMES[name]} takes {_us(us)}, this {_us(row.time_us)}" for name, us in slower.items()]
        text = f"- `{row.operator}` {row.preset} {row.phase}: {'; '.join(what)}."
        why = reason(row, reasons)
        (known if why else unknown).append(f"{text} {why}".rstrip())
    if not known and not unknown:
        return "Nowhere: every row reaches its target, and no peer is faster."
    found = "\n".join(known)
    rest = "### Not reached, reason not known\n\n" + "\n".join(unknown) if unknown else ""
    return "\n\n".join(part for part in (found, rest) if part)


def _others(results: Results) -> str:
    lines = [f"- {label}: not timed, {why}." for label, why in results.skipped.items()]
    lines += [f"- {label}: **failed**, {why}." for label, why in results.failed.items()]
    noted: dict[tuple[str, str], list[str]] = {}
    for row in results.rows:
        if row.note:
            noted.setdefault((row.operator, row.note), []).append(f"{row.preset} {row.phase}")
    lines += [f"- `{operator}` ({', '.join(where)}): {note}." for (operator, note), where in noted.items()]
    return "## Notes on rows\n\n" + "\n".join(lines) if lines else ""


def _checks(rows: Sequence[Row]) -> str:
    cases = {(row.operator, row.preset): row for row in rows}
    lines = [_CHECKS.format(total=sum(row.bytes_checked for row in cases.values())).strip()]
    for (operator, preset), row in cases.items():
        worst = max(row.check.values(), default=0.0)
        lines.append(f"| {operator} | {preset} | {row.bytes_checked:,} | {worst:.2f} |")
    return "\n".join(lines)


def _limits(rows: Sequence[Row]) -> str:
    spread = max((row.spread_us[1] / row.spread_us[0] - 1 for row in rows), default=0.0)
    return _LIMITS.format(tera=BYTES_PER_US / 1e6, kernel=KERNEL_US, samples=SAMPLES, spread=spread).strip()


def write(runs: Path, out: Path) -> None:
    """Write the report on ``runs`` into ``out``."""
    results, where, reasons = Results.read(runs / ROWS_FILE), report_files.environment(runs), report_files.reasons(out)
    text = readme(results, where, reasons)
    report_files.write_report(out, readme=text, summary=summary(results, reasons), where=where)
    figures.draw_shares([row for row in results.rows if is_throughput(row.preset)], out / "shares.png")


def main() -> None:
    """Write README.md, summary.json, environment.json and the figure into the report's folder."""
    report_files.main(__doc__, "benchmarks.operators.run", write)


if __name__ == "__main__":
    main()
