"""Check and time every operator's fixed launches, beside the memory limit and what a user would call instead.

    python -m benchmarks.operators.run --out runs/operators
    python -m benchmarks.operators.report --runs runs/operators --out reports/experiments/h200_operators

Each case is compared with float64 and with itself, byte for byte, before it is timed; one that fails is not timed, and
the command ends with exit status 1. Rows are written after every phase, so a run that is stopped keeps what it has.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import textwrap
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import provenance
from benchmarks.operators import arguments, peers
from benchmarks.operators.correctness import check
from benchmarks.operators.naive import naive_launches
from benchmarks.operators.rows import PEERS, ROWS_FILE, Results, Row, Timed, Times, make_row
from benchmarks.operators.targets import PHASES, Phase, is_throughput, phases
from benchmarks.operators.timing import Contender, Sampled, brief, launches_of, release, side_stream, time_in_turns
from benchmarks.report_files import ENVIRONMENT_FILE
from rl_engine.backends import catalog
from rl_engine.backends.shared.triton import autotuning
from rl_engine.runtime.policy import autotune
from rl_engine.runtime.registry import get_op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rl_engine.backends.spec import Case, Inputs, OpSpec

COMMAND = textwrap.dedent((__doc__ or "").split("\n\n")[1])
_OURS, _NAIVE = "ours", "naive"
_WRONG = 0.02  # a peer that is further from our output, by its largest value, computes something else; bf16 rounds 0.4%
_JUDGED = 64  # rows of a peer's output that are looked at
_COMPILE_SHARE = 0.85  # of the time budget, after which nothing is compiled any more


@dataclass(frozen=True)
class Options:
    """What to run: empty selections mean everything; ``seconds`` is when no further case is begun."""

    out: Path
    only: tuple[str, ...]
    presets: tuple[str, ...]
    phases: tuple[Phase, ...]
    peers: tuple[str, ...]
    seconds: float
    began_s: float

    def spent(self) -> float:
        """Return the share of the time budget that is gone."""
        return (time.monotonic() - self.began_s) / self.seconds


def speed_cases(options: Options) -> Iterator[tuple[OpSpec, Case]]:
    """Yield the cases that are timed, of the operators and presets asked for; benchmarks.gemm times matrix products."""
    known = catalog.specs()
    unknown = sorted(set(options.only) - set(known))
    if unknown:
        raise SystemExit(f"--only: no operator {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    for name in options.only or sorted(known):
        for case in known[name].cases:
            timed = "speed" in case.tags and "matrix" not in case.tags
            if timed and (not options.presets or case.name in options.presets):
                yield known[name], case


def run(options: Options) -> Results:
    """Time every case, writing what there is after each phase."""
    results, path = Results(), options.out / ROWS_FILE
    for spec, case in speed_cases(options):
        label = f"{spec.name} {case.name}"
        if spec.traffic is None:
            results.skipped[label] = "its declaration has no traffic"
        elif options.spent() > 1:
            results.skipped[label] = f"the time budget of {options.seconds:.0f} s was spent"
        else:
            try:
                for row in time_case(spec, case, options, results):
                    results.rows.append(row)
                    print(line(row), flush=True)
                    results.write(path)
            except Exception as error:  # noqa: BLE001  # the other cases still count; the exit status tells
                results.failed[label] = brief(error)
            release()
        for kind, reasons in (("skipped", results.skipped), ("FAILED", results.failed)):
            if label in reasons:
                print(f"{label}: {kind}: {reasons[label]}", flush=True)
        results.write(path)
    return results


def time_case(spec: OpSpec, case: Case, options: Options, results: Results) -> Iterator[Row]:
    """Yield the rows of one case; a fault of its check goes to ``results.failed`` instead."""
    assert spec.traffic is not None, "run() passes over operators without traffic"
    traffic = spec.traffic(arguments.itemsize_of(spec), **case.sizes, **case.options)
    op = get_op(spec.name, "cuda", backend=f"rlkernel.triton.{spec.name}")
    inputs = arguments.make(spec, case)
    overwrites = arguments.OVERWRITES in case.options
    checked = check(spec, arguments.fed(op, torch.clone) if overwrites else op, inputs)
    if checked.faults:
        results.failed[f"{spec.name} {case.name}"] = "; ".join(checked.faults)
        return
    release()
    timed = Timed(spec.name, case.name, arguments.describe(case), traffic.forward, traffic.backward)
    smaller = min(size for size in (traffic.forward, traffic.backward) if size)
    count = arguments.sets_needed(case.name, smaller)
    sets = [inputs, *(arguments.make(spec, case, arguments.SEED + number) for number in range(1, count))]
    torch.compiler.reset()
    compiled = functools.cache(peers.compiled)
    for phase in phases(spec.name, case.name):
        if phase in options.phases and (phase == "fwd" or (spec.differentiable and traffic.backward)):
            called = arguments.fed(op, lambda first: first.view_as(first)) if overwrites else op
            ours = Contender(called, sets, restores=overwrites)
            contenders, notes = _contenders(spec.name, case.name, phase, ours, options, compiled)
            sampled = time_in_turns(contenders, phase)
            yield make_row(timed, phase, len(launches_of(ours, phase)), _times(sampled, notes), checked)


def line(row: Row) -> str:
    """Return a row as one line of text."""
    others = {"naive": row.naive_us, **row.peers}
    shown = ", ".join(f"{name} {'-' if us is None else f'{us:.2f}'}" for name, us in others.items())
    aim = "no target" if row.target_us is None else f"target {row.target_us:.2f}"
    judged = "" if row.reached else ", NOT REACHED"
    return (
        f"{row.operator} {row.preset} {row.phase} {row.shape}: {row.time_us:.2f} us, {row.share:.3f} of the limit,"
        f" {aim}{judged}; {shown}" + (f" ({row.note})" if row.note else "")
    )


def _contenders(
    operator: str,
    preset: str,
    phase: Phase,
    ours: Contender,
    options: Options,
    compiled: Callable[[str], peers.Peer | None],
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return who is timed in a phase, ours first, and what there is to say of those who are or are not."""
    naively = functools.partial(naive_launches, autotuning.kernels())
    found = {_OURS: ours, _NAIVE: replace(ours, around=naively)}
    notes: dict[str, str] = {}
    with torch.no_grad():  # without a gradient nothing is overwritten
        expected = arguments.flat(ours.call(*ours.sets[0].args, **ours.sets[0].kwargs))[0]
    for name in options.peers:
        if name == "compile" and options.spent() > _COMPILE_SHARE:
            notes[name] = "no time left to compile"
            continue
        make = {
            "eager": lambda: peers.eager(operator),
            "compile": lambda: compiled(operator),
            "liger": lambda: peers.liger(operator, phase),
        }[name]
        try:
            peer = make()
            if peer is None or phase not in peer.phases:
                continue
            if not peer.captured and not is_throughput(preset):
                notes[name] = "waits for the host, so it cannot be captured"
                continue
            found[name] = _contender(peer, ours.sets)
            reason = _judge(peer, found[name].sets[0], expected)
        except Exception as error:  # noqa: BLE001  # a peer that cannot is reported, whatever it raised
            reason = brief(error)
        if reason:
            found.pop(name, None)
        if reason or peer.note:
            notes[name] = reason or peer.note
    return found, notes


def _contender(peer: peers.Peer, sets: Any) -> Contender:
    own = [arguments.leaves(peer.prepare(one)) for one in sets]
    if peer.writes:
        own = [arguments.changed(one, torch.clone) for one in own]
    return Contender(peer.call, own, restores=peer.writes, captured=peer.captured, forward_only=peer.forward_only)


def _judge(peer: peers.Peer, inputs: Inputs, expected: torch.Tensor) -> str:
    """Return why a peer's time says nothing: its first output is not ours; the empty text where it is."""
    if peer.writes:
        inputs = arguments.changed(inputs, torch.clone)
    seen = arguments.flat(peer.call(*inputs.args, **inputs.kwargs))[0].detach()
    if seen.numel() != expected.numel():
        return f"its output is {list(seen.shape)}, ours {list(expected.shape)}"
    error = _distance(seen.reshape(expected.shape), expected)
    return "" if error <= _WRONG else f"its output differs from ours by {error:.2g} of the largest value"


def _distance(seen: torch.Tensor, expected: torch.Tensor) -> float:
    seen, expected = (one[:_JUDGED] if one.dim() else one for one in (seen, expected))
    largest = float(expected.double().abs().max())
    return float((seen.double() - expected.double()).abs().max()) / largest if largest else 0.0


def _times(sampled: dict[str, Sampled], notes: dict[str, str]) -> Times:
    ours = sampled[_OURS]
    if ours.median_us is None:
        raise RuntimeError(f"the operator could not be timed: {ours.reason}")
    reasons = {name: one.reason for name, one in sampled.items() if one.reason}
    medians = {name: one.median_us for name, one in sampled.items() if name not in (_OURS, _NAIVE)}
    absent = {name: None for name in PEERS if name in notes and name not in medians}
    return Times(
        time_us=ours.median_us,
        spread_us=(min(ours.samples_us), max(ours.samples_us)),
        naive_us=sampled[_NAIVE].median_us,
        peers={**medians, **absent},
        notes={**notes, **reasons},
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {ROWS_FILE} and {ENVIRONMENT_FILE}")
    parser.add_argument("--only", default="", help="operators, separated by commas; default: all")
    parser.add_argument("--presets", default="", help="presets, e.g. small,thr; default: all")
    parser.add_argument("--phases", default=",".join(PHASES), help="of fwd,bwd,both; default: all with a target")
    parser.add_argument("--peers", default=",".join(PEERS), help="of eager,compile,liger; empty: none")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no further case after this long")
    given = parser.parse_args()
    chosen = {}
    for name, allowed in (("phases", PHASES), ("peers", PEERS)):
        chosen[name] = _words(getattr(given, name))
        wrong = sorted(set(chosen[name]) - set(allowed))
        if wrong:
            parser.error(f"--{name}: {', '.join(wrong)}; pass some of {', '.join(allowed)}")
    return Options(
        given.out,
        _words(given.only),
        _words(given.presets),
        tuple(phase for phase in PHASES if phase in chosen["phases"]),
        chosen["peers"],
        given.seconds,
        time.monotonic(),
    )


def main() -> int:
    """Run the benchmark; returns 1 where a case failed its check or could not be timed."""
    options = _options()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.operators.run times a GPU and found none")
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")  # Inductor's, of every large vocabulary
    options.out.mkdir(parents=True, exist_ok=True)
    environment = provenance.environment(torch.cuda.current_device(), COMMAND, "operators")
    environment["packages"] |= {name: provenance.version(name) for name in ("liger-kernel", "transformers")}
    (options.out / ENVIRONMENT_FILE).write_text(json.dumps(environment, indent=1) + "\n")
    with side_stream(), autotune("off"):
        results = run(options)
    counts = f"{len(results.rows)} rows, {len(results.skipped)} skipped, {len(results.failed)} failed"
    print(f"{counts}, in {time.monotonic() - options.began_s:.0f} s", flush=True)
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
