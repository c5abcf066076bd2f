"""Checks and times of one product: the fixed rule, an exhaustive search of the space, the tuner, and peers."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from benchmarks.gemm.rows import PEERS
from benchmarks.operators.timing import brief
from rl_engine.backends.shared.triton.descriptors import describable
from rl_engine.backends.shared.triton.gemm import launch, product
from rl_engine.backends.shared.triton.gemm.rule import Plan
from rl_engine.backends.shared.triton.gemm.space import Choice, Sizes, space
from rl_engine.platforms import device
from rl_engine.platforms.tuning.decision import order_of_round

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.gemm.operands import Step
    from rl_engine.platforms.tuning.timer import Timer

_THREADS = 16  # that compile
_ROUGH, _FINE = 3, 9  # samples of every choice, and of the best few
_FINALISTS = 6
_CHECKED_ROWS = 64
NAIVE = {  # the one tile of batch-invariant GEMMs in use, and a wider one
    PEERS[2]: Choice(Plan(128, 128, 64), 8, 3),
    PEERS[3]: Choice(Plan(128, 256, 64), 8, 3),
}


@dataclass
class Checks:
    """What was compared before anything was timed; ``faults`` stop a product."""

    bytes_checked: int = 0
    error: float = 0.0
    faults: list[str] = field(default_factory=list)


def by_rule(step: Step) -> None:
    """Multiply as the library does."""
    if step.offsets is None:
        product.multiply(step.a, step.b, step.out, "half")
    else:
        launch.multiply_segments(step.a, step.b, step.offsets, step.out, "half")


def by_choice(step: Step, choice: Choice) -> None:
    """Multiply in a given way."""
    launch.multiply_as(choice.plan, step.a, step.b, step.out, "half", **choice.options)


def by_torch(step: Step) -> None:
    """Multiply as torch does."""
    if step.offsets is None:
        torch.mm(step.a, step.b, out=step.out)
    else:
        torch._grouped_mm(step.a, step.b, offs=step.offsets[1:])  # noqa: SLF001  # its only name


def check(steps: Sequence[Step]) -> Checks:
    """Compare the fixed rule with itself in poisoned memory, with a smaller batch, and with float64."""
    found = Checks()
    for step in steps:
        step.out.fill_(float("nan"))
        by_rule(step)
        first = step.out.clone()
        step.out.fill_(float("nan"))
        by_rule(step)
        _compare(found, step.out, first, f"{step.name}: a second run")
        if step.offsets is None:
            count = min(_CHECKED_ROWS, max(1, len(first) // 2))
            fewer = torch.empty_like(first[:count])
            product.multiply(step.a[-count:], step.b, fewer, "half")
            _compare(found, fewer, first[-count:], f"{step.name}: {count} rows alone")
            exact = step.a[-count:].double() @ step.b.double()
        else:
            count = len(first) // len(step.b)
            exact = step.a[-count:].double() @ step.b[-1].double()
        error = float((first[-count:].double() - exact).abs().max() / exact.abs().max())
        found.error = max(found.error, error)
        if not error < _most_error(first.dtype):
            found.faults.append(f"{step.name}: error {error:.2g} of the largest value")
    return found


def _most_error(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps  # half of it is one rounding; the chain's own is far below


def _compare(found: Checks, seen: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    ours, theirs = (one.contiguous().view(torch.uint8) for one in (seen, expected))
    found.bytes_checked += ours.numel()
    if not torch.equal(ours, theirs):
        found.faults.append(f"{what} differs in {int((ours != theirs).sum())} bytes")


def in_turns(
    runs: Mapping[str, Callable[[int], None]], rotation: int, timer: Timer, samples: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return samples of every run, taken in rounds, and why those without samples have none."""
    ready, reasons = {}, {}
    for name, run in runs.items():
        try:
            for number in range(rotation):
                run(number)
            ready[name] = timer.prepare(run, rotation)
        except Exception as error:  # noqa: BLE001  # peers and choices fail in their own ways; the row says how
            reasons[name] = brief(error)
    times: dict[str, list[float]] = {name: [] for name in ready}
    for number in range(samples):
        for name in order_of_round(list(ready), number):
            times[name].append(ready[name]())
    return times, reasons


def search(sets: Sequence[Step], timer: Timer, checks: Checks, failed: dict[str, str]) -> tuple[Choice | None, int]:
    """Return the fastest choice of the whole space for one multiplication, and how many were compared.

    Every choice's bytes are compared with the rule's first; one that differs is a fault, one that fails a note.
    """
    first = sets[0]
    can_describe = all(describable(one) for one in (first.a, first.b, first.out))
    sizes = Sizes(*first.sizes, itemsize=first.out.element_size(), describable=can_describe)
    choices = space(sizes, device.identify(first.out.get_device()))
    by_rule(first)
    expected = first.out.clone()
    alive: dict[str, Choice] = {}
    for choice, reason in zip(choices, _compiled(first, choices), strict=True):
        if reason:
            failed[str(choice)] = reason
            continue
        first.out.fill_(float("nan"))
        try:
            by_choice(first, choice)
            _compare(checks, first.out, expected, f"{first.name}, {choice}")
            alive[str(choice)] = choice
        except RuntimeError as error:
            failed[str(choice)] = brief(error)
    rough, _reasons = in_turns(_runs(sets, alive), len(sets), timer, _ROUGH)
    best = sorted(rough, key=lambda name: statistics.median(rough[name]))[:_FINALISTS]
    fine, _reasons = in_turns(_runs(sets, {name: alive[name] for name in best}), len(sets), timer, _FINE)
    if not fine:
        return None, len(choices)
    return alive[min(fine, key=lambda name: statistics.median(fine[name]))], len(choices)


def _runs(sets: Sequence[Step], choices: Mapping[str, Choice]) -> dict[str, Callable[[int], None]]:
    def of(choice: Choice) -> Callable[[int], None]:
        return lambda number: by_choice(sets[number], choice)

    return {name: of(choice) for name, choice in choices.items()}


def _compiled(step: Step, choices: Sequence[Choice]) -> list[str]:
    """Run every choice once from many threads, so that compilers work side by side; returns why one failed, or ""."""

    def one(choice: Choice) -> str:
        try:
            scratch = torch.empty_like(step.out)  # threads write at once
            launch.multiply_as(choice.plan, step.a, step.b, scratch, "half", **choice.options)
        except Exception as error:  # noqa: BLE001  # a choice that does not compile or fit is no choice
            return brief(error)
        return ""

    _wait()  # threads have streams of their own, and the operands are to be there
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(one, choices))
    _wait()
    return found


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def contenders(sets: Sequence[Sequence[Step]], best: Mapping[str, Choice]) -> dict[str, Callable[[int], None]]:
    """Return what is timed of a product beside the tuner: every step of a phase, one after the other."""

    def all_of(run: Callable[[Step], None]) -> Callable[[int], None]:
        def launch_all(number: int) -> None:
            for step in sets[number]:
                run(step)

        return launch_all

    found = {"fixed": all_of(by_rule), "torch.mm": all_of(by_torch)}
    if sets[0][0].offsets is None:
        for name, choice in NAIVE.items():
            found[name] = all_of(lambda step, choice=choice: by_choice(step, choice))  # type: ignore[misc]
        if len(best) == len(sets[0]):
            found["best"] = all_of(lambda step: by_choice(step, best[step.name]))
    return found


def _torchs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def compiled_run(sets: Sequence[Sequence[Step]]) -> dict[str, Callable[[int], None]]:
    """Return torch.compile's max-autotune of the same products by its name; nothing for grouped ones."""
    if sets[0][0].offsets is not None:
        return {}
    torch.compiler.reset()
    multiply = torch.compile(_torchs, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")
    kept: dict[tuple[int, str], torch.Tensor] = {}

    def run(number: int) -> None:
        for step in sets[number]:
            kept[number, step.name] = multiply(step.a, step.b)

    return {"compile": run}
