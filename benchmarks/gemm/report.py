"""Turn a run of the matrix products' benchmark into what `reports/experiments/h200_gemm` holds.

    python -m benchmarks.gemm.run --out runs/gemm
    python -m benchmarks.gemm.report --runs runs/gemm --out reports/experiments/h200_gemm

README.md, summary.json, environment.json and the figure are written from the run; why a row falls behind is written by
hand into reasons.json of the report's folder, {"preset phase": "why"}: only what measuring has shown.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks import report_files
from benchmarks.gemm.rows import FLOPS_PER_US, NAIVE, PEERS, ROWS_FILE, Kind, Results, Row
from benchmarks.operators.targets import BYTES_PER_US, SAMPLES
from benchmarks.pictures import new_figure, save

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

COMMAND = textwrap.dedent((__doc__ or "").split("\n\n")[1])
PROMISED = (1.0, 0.85, 2.0, 1.1)  # of `Results.means`, in its order; the last one is a most
_HEADINGS: dict[Kind, str] = {"training": "Training sizes", "decode": "Decode sizes", "depth": "Depths"}
_COLOURS = {"torch.mm": "#7a7a7a", "compile": "#d98b1f", "tile 128x128x64": "#b03a3a", "tile 128x256x64": "#7a3ab0"}


def summary(results: Results, reasons: Mapping[str, str]) -> dict[str, Any]:
    """Return the numbers of a run, each row with the reason that is known for it, and the promised figures."""
    rows = [{**asdict(row), "reason": reasons.get(_label(row), "")} for row in results.rows]
    return {"rows": rows, "figures": results.means(), "skipped": results.skipped, "failed": results.failed}


def readme(results: Results, environment: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Return the report's text."""
    parts = [
        "# Matrix products on an H200: one bit class for every shape, against cuBLAS and one tile",
        _claim(results),
        f"```\n{COMMAND.strip()}\n```",
        report_files.machine(environment),
        "![Times as fast as torch.mm](ratios.png)",
        *(_section(kind, [row for row in results.rows if row.kind == kind]) for kind in _HEADINGS),
        "## Slower than torch.mm\n\n" + _losses(results.rows, reasons),
        _others(results),
        _how(results.rows),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _label(row: Row) -> str:
    return f"{row.preset} {row.phase}"


def _claim(results: Results) -> str:
    lines = ["| figure (geometric means) | measured | promised | |", "|---|---|---|---|"]
    for (name, value), promised in zip(results.means().items(), PROMISED, strict=True):
        most = promised == PROMISED[-1]
        kept = value is not None and (value <= promised if most else value >= promised)
        shown = "not measured" if value is None else f"{value:.3f}"
        lines.append(f"| {name} | {shown} | {promised:.2f} | {'kept' if kept else '**missed**'} |")
    return "\n".join(lines)


def _section(kind: Kind, rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = [
        "| preset | phase | rows x columns x K | µs | share of limit | fixed | tuned | best of the search | "
        + " | ".join(PEERS)
        + " |",
        "|---" * (8 + len(PEERS)) + "|",
    ]
    for row in rows:
        cells = [row.preset, row.phase, row.shape, f"**{_us(row.time_us)}**", f"{row.share:.2f}"]
        cells += [_us(row.fixed_us), _us(row.tuned_us), _us(row.best_us)]
        cells += [_us(row.peers.get(name)) for name in PEERS]
        lines.append(f"| {' | '.join(cells)} |")
    return f"## {_HEADINGS[kind]}\n\n" + "\n".join(lines)


def _us(time_us: float | None) -> str:
    if time_us is None:
        return "-"
    return f"{time_us:.2f}" if time_us < 100 else f"{time_us:.1f}" if time_us < 1000 else f"{time_us:.0f}"


def _losses(rows: Sequence[Row], reasons: Mapping[str, str]) -> str:
    lines = []
    for row in rows:
        ratio = row.faster_than("torch.mm")
        if ratio is not None and ratio < 1:
            why = reasons.get(_label(row), "Reason not known.")
            lines.append(f"- {_label(row)} ({row.shape}): {ratio:.3f} times as fast. {why}")
    return "\n".join(lines) or "Nowhere."


def _others(results: Results) -> str:
    lines = [f"- {label}: not timed, {why}." for label, why in results.skipped.items()]
    lines += [f"- {label}: **failed**, {why}." for label, why in results.failed.items()]
    for row in results.rows:
        said = [row.note] if row.note else []
        said += [f"the tuner took {row.tuned}"] if row.tuned else []
        said += [f"the best of {row.candidates} is {row.best}"] if row.best else []
        lines += [f"- {_label(row)}: {'; '.join(said)}."] if said else []
    return "## Notes on rows\n\n" + "\n".join(lines) if lines else ""


def _how(rows: Sequence[Row]) -> str:
    checked = sum(row.bytes_checked for row in rows)
    error = max((row.error for row in rows), default=0.0)
    apart = max((_apart(row) for row in rows if row.tuned_us and not row.tuned), default=0.0)
    return textwrap.dedent(
        f"""\
        ## How to read it

        - Before a product was timed, its bytes were compared with a second run's, with those of its last rows computed
          alone, and with those of every choice of the search: {checked:,} bytes in all were equal. The largest error
          against float64 is {error:.2g} of the largest value; half a unit of bf16 is {2**-9:.2g}.
        - Limit: {FLOPS_PER_US / 1e6:.0f} TFLOP/s or {BYTES_PER_US / 1e6:.1f} TB/s, whichever takes longer.
        - Times are medians of {SAMPLES} CUDA-graph replays, everyone's in turns in one process. Argument sets rotate so
          that 120 MB pass before one is used again.
        - Where the tuner kept the rule's launch, "fixed" and "tuned" are samples of one launch: up to {apart:.1%} apart
          here, since a large product's speed follows the card's temperature and power. Less says nothing.
        - µs: the faster of the fixed rule and the tuner; their mean where both are one launch. Both gradients, and all
          three products, are captured together.
        - {NAIVE} and the wider one are this library's kernel with one tile, 8 warps and 3 stages, as batch-invariant
          GEMMs in use take for every shape. torch.mm is cuBLAS, which may split K and so is not batch-invariant.
        - Experts (thr-moe): "torch.mm" is `torch._grouped_mm`, PyTorch's own for them; torch.compile and one tile have
          no form for groups here. Their search and naive launch are in h200_qualification. Depths are not searched."""
    )


def _apart(row: Row) -> float:
    return abs(row.fixed_us / (row.tuned_us or row.fixed_us) - 1)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw how many times as fast as torch.mm every row is, peers as marks, as a PNG."""
    shown = [row for row in rows if row.peers.get("torch.mm") is not None]
    figure, axes = new_figure(8, 1 + 0.3 * len(shown))
    places = range(len(shown))
    axes.barh(places, [row.faster_than("torch.mm") for row in shown], color="#1f77b4", label="this library")
    for name in PEERS[1:]:
        seen = [
            (row.peers["torch.mm"] / us, place)  # type: ignore[operator]  # shown rows have it
            for place, row in zip(places, shown, strict=True)
            if (us := row.peers.get(name))
        ]
        across, down = [one for one, _place in seen], [place for _one, place in seen]
        axes.scatter(across, down, s=18, color=_COLOURS[name], label=name, zorder=4)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(list(places), [_label(row) for row in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -1.6)  # downwards, with room for the legend above
    axes.set(xlabel="times as fast as torch.mm")
    axes.legend(loc="upper center", ncols=4, frameon=False, fontsize=8)
    save(figure, path)


def write(runs: Path, out: Path) -> None:
    """Write the report on ``runs`` into ``out``."""
    results, where, reasons = Results.read(runs / ROWS_FILE), report_files.environment(runs), report_files.reasons(out)
    text = readme(results, where, reasons)
    report_files.write_report(out, readme=text, summary=summary(results, reasons), where=where)
    draw(results.rows, out / "ratios.png")


def main() -> None:
    """Write README.md, summary.json, environment.json and the figure into the report's folder."""
    report_files.main(__doc__, "benchmarks.gemm.run", write)


if __name__ == "__main__":
    main()
