"""Turn a run of the launch benchmark into what `reports/experiments/h200_launch` holds.

    python -m benchmarks.launch.run --out runs/launch
    python -m benchmarks.launch.report --runs runs/launch --out reports/experiments/h200_launch

README.md, summary.json, environment.json and the figure are written from the run; why a target is missed is written by
hand into reasons.json of the report's folder, {"target": "why"}.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import report_files
from benchmarks.launch.rows import PATHS, RESULTS_FILE, Results
from benchmarks.pictures import new_figure, save

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

COMMAND = textwrap.dedent((__doc__ or "").split("\n\n")[1])
PLAN_SHARES = {4: 0.55, 10: 0.5, 20: 0.5}  # of Triton's own launch, by arguments
OFF_US = 1.0  # above Triton's own launch
LIGER_TIMES = 5.0
STEP_SHARE = 0.85  # of a step with tuning off
_COLOURS = {"triton": "#7a7a7a", "autotune": "#b03a3a", "adapter_off": "#d98b1f", "plan": "#1f77b4"}

_LIMITS = """
## How to read it

- Host time: what a call takes before it returns, in loops that never wait for the card; medians of loops in turns.
- `triton` is `kernel[grid](...)` with the same options, `autotune` the hot path of `@triton.autotune` with one
  configuration, `adapter_off` this library's launch with tuning off, `plan` a hot launch with tuning on.
- Operators at their declared case `small`; `fwd` without grad, `both` forward and backward.
- Training: the preset `launch` of the main job, eager: trainers of one seed, a GRPO step each in turns, in one process;
  medians of the last two thirds. `off again` shows what noise is left.
- One card, Triton as above. Plans under other versions of Triton, and with two cards, were not run here.
"""


@dataclass(frozen=True)
class Claim:
    """One target and what was measured; None where it was not."""

    text: str
    seen: float | None
    bound: float

    @property
    def held(self) -> bool | None:
        """Whether it holds."""
        return None if self.seen is None else self.seen <= self.bound


def claims(results: Results) -> Iterator[Claim]:
    """Yield every target with what was measured."""
    for count, share in PLAN_SHARES.items():
        own = results.launch_us("triton", count)
        yield Claim(
            f"plan over Triton's own launch, {count} arguments", _over(results.launch_us("plan", count), own), share
        )
        off = results.launch_us("adapter_off", count)
        above = None if off is None or own is None else off - own
        yield Claim(f"µs that the adapter, off, adds at {count} arguments", above, OFF_US)
    for operator in ("swiglu", "rms_norm"):
        ours = results.operator_us(operator, "fwd", "plan")
        for peer, bound in (("eager", 1.0), ("compile", 1.0), ("liger", 1 / LIGER_TIMES)):
            text = f"{operator}, forward without grad, over {peer}"
            yield Claim(text, _over(ours, results.operator_us(operator, "fwd", peer)), bound)
    steps = {one.mode: one.step_ms for one in results.training}
    yield Claim("training step with tuning on, over off", _over(steps.get("on"), steps.get("off")), STEP_SHARE)


def readme(results: Results, environment: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Return the report's text; ``reasons`` say of targets, by their text, why they were missed."""
    found = list(claims(results))
    held = sum(one.held is True for one in found)
    digests = {one.digest for one in results.training}
    same = "no training was run" if not digests else "equal" if len(digests) == 1 else "DIFFERENT"
    parts = [
        "# What launching costs the host on an H200: Triton's own way, and launch plans",
        f"**Claim.** {held} of {len(found)} targets hold. Bytes of the training runs: {same}.",
        f"```\n{COMMAND.strip()}\n```",
        report_files.machine(environment),
        "## Targets\n\n" + _claim_table(found),
        _missed(found, reasons),
        "## One launch, µs\n\n![Host time of a launch](launches.png)\n\n" + _launch_table(results),
        "## One operator call, µs\n\n" + _operator_table(results),
        "## One training step\n\n" + _training_table(results),
        "## Faults\n\n" + "\n".join(f"- {one}" for one in results.faults) if results.faults else "",
        _LIMITS.strip(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _over(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _claim_table(found: list[Claim]) -> str:
    words = {True: "yes", False: "**no**", None: "not measured"}
    rows = [f"| {one.text} | {_number(one.seen)} | {_number(one.bound)} | {words[one.held]} |" for one in found]
    return "\n".join(["| what | measured | at most | holds |", "|---|---|---|---|", *rows])


def _missed(found: list[Claim], reasons: Mapping[str, str]) -> str:
    return "\n".join(
        f"- {one.text}: {reasons.get(one.text, 'reason not known.')}" for one in found if one.held is not True
    )


def _launch_table(results: Results) -> str:
    lines = [f"| arguments | {' | '.join(PATHS)} |", "|---" * (len(PATHS) + 1) + "|"]
    for count in PLAN_SHARES:
        cells = [_number(results.launch_us(path, count)) for path in PATHS]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _operator_table(results: Results) -> str:
    providers = list(dict.fromkeys(one.provider for one in results.operators))
    calls = list(dict.fromkeys((one.operator, one.phase) for one in results.operators))
    lines = [f"| operator | phase | {' | '.join(providers)} |", "|---" * (len(providers) + 2) + "|"]
    for operator, phase in calls:
        cells = [_number(results.operator_us(operator, phase, provider)) for provider in providers]
        lines.append(f"| {operator} | {phase} | {' | '.join(cells)} |")
    lines += [""] + [
        f"- {one.operator} {one.phase} {one.provider}: {one.note}." for one in results.operators if one.note
    ]
    return "\n".join(lines).rstrip()


def _training_table(results: Results) -> str:
    rows = [f"| {one.mode} | {one.step_ms:.2f} | `{one.digest[:12]}` |" for one in results.training]
    return "\n".join(["| tuning | ms a step | weights |", "|---|---|---|", *rows])


def draw(results: Results, path: Path) -> None:
    """Draw the host time of a launch by path and number of arguments, as a PNG."""
    figure, axes = new_figure(7, 3.5)
    for place, name in enumerate(PATHS):
        seen = [(number, results.launch_us(name, count)) for number, count in enumerate(PLAN_SHARES)]
        known = [(number + 0.2 * place - 0.3, us) for number, us in seen if us is not None]
        bars = axes.bar([x for x, _us in known], [us for _x, us in known], 0.19, color=_COLOURS[name], label=name)
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(PLAN_SHARES)), [f"{count} arguments" for count in PLAN_SHARES])
    axes.set(ylabel="host time of a launch, µs")
    axes.legend(frameon=False, ncols=len(PATHS), loc="upper left", fontsize=8)
    save(figure, path)


def write(runs: Path, out: Path) -> None:
    """Write the report on ``runs`` into ``out``."""
    results, where = Results.read(runs / RESULTS_FILE), report_files.environment(runs)
    claimed = [{**asdict(one), "held": one.held} for one in claims(results)]
    text = readme(results, where, report_files.reasons(out))
    report_files.write_report(out, readme=text, summary={**asdict(results), "claims": claimed}, where=where)
    draw(results, out / "launches.png")


def main() -> None:
    """Write README.md, summary.json, environment.json and the figure into the report's folder."""
    report_files.main(__doc__, "benchmarks.launch.run", write)


if __name__ == "__main__":
    main()
