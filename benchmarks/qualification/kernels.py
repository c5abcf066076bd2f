"""Every kernel's candidates: which are launches of their own, in which bit class, and whose bytes agree on what."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.qualification.families import FAMILIES
from benchmarks.qualification.rows import KernelRow
from benchmarks.qualification.subjects import NORMAL
from rl_engine.backends.shared.triton.qualification import gate, widened
from rl_engine.errors import TrialUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.qualification.subjects import Source, Subject
    from rl_engine.backends.shared.triton.distinct import Compiled, LaunchSite
    from rl_engine.backends.shared.triton.qualification import BoundLaunch
    from rl_engine.platforms.tuning.key import Candidate

REPEATS = 20  # launches of a selectable candidate on each kind of input
_REPEATS_OF_REFUSED = 2
_MATRIX = 4096  # of the products that keep another stream busy: 0.2 ms each on an H200
_PRODUCTS = 200


@dataclass(frozen=True)
class Sorted:
    """The candidates of a launch after they were compiled: the fixed one apart, the others by what became of them."""

    selectable: tuple[Candidate, ...]
    refused: tuple[Candidate, ...]
    binaries: int
    classes: int
    failed: int


def study(name: str, source: Source, families: Sequence[str] = tuple(FAMILIES)) -> KernelRow:
    """Compile the candidates of a launch, and compare their bytes with the fixed launch's on every family."""
    subject = source(NORMAL)
    fixed = subject.candidates[0]
    found = sort(subject.candidates, subject.site)
    row = KernelRow(
        name, launches=1, declared=len(subject.candidates), binaries=found.binaries, classes=found.classes,
        selectable=1 + len(found.selectable), refused=len(found.refused), failed=found.failed,
    )  # fmt: skip
    wide = _wide(subject, (fixed, *found.selectable))
    wrong: set[Candidate] = set()
    differed: set[Candidate] = set()
    for family in families:
        here = source(family)
        with busy_stream(idle=here.site.interpreted):
            wrong |= _compare(here.bound, (fixed, *found.selectable), REPEATS, row)
            if wide:
                before = row.comparisons
                bound = widened(here.bound)
                assert bound is not None, "what is written does not depend on what is read"
                wrong |= _compare(bound, wide, REPEATS, row)
                row.wide += row.comparisons - before
            differed |= _compare(here.bound, (fixed, *found.refused), _REPEATS_OF_REFUSED, None)
    row.mismatches, row.refused_that_differed = len(wrong), len(differed)
    return row


def sort(candidates: Sequence[Candidate], site: LaunchSite) -> Sorted:
    """Compile candidates and tell launches of their own, in the fixed launch's class, from the others."""
    compiled = site.compiled(candidates)
    own: dict[str, Candidate] = {}
    for candidate in candidates:
        found = compiled[candidate]
        if not isinstance(found, Exception):
            own.setdefault(found.identity, candidate)
    fixed = _ready(compiled[candidates[0]])
    others = [one for one in own.values() if one != candidates[0]]
    agree = {one: _agree(_ready(compiled[one]), fixed) for one in others}
    digests = {None if (bits := _ready(compiled[one]).bits) is None else bits.digest for one in own.values()}
    return Sorted(
        tuple(one for one in others if agree[one]),
        tuple(one for one in others if not agree[one]),
        len(own),
        len(digests),
        sum(isinstance(found, Exception) for found in compiled.values()),
    )


def _ready(found: Compiled | Exception) -> Compiled:
    if isinstance(found, Exception):
        raise TrialUnavailableError(f"the fixed launch failed: {found}") from found
    return found


def _agree(one: Compiled, fixed: Compiled) -> bool:
    return one.bits is None or fixed.bits is None or one.bits.agrees_with(fixed.bits)  # none: interpreted


def _wide(subject: Subject, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Return those that compile and fit with fp32 outputs; none where outputs are that wide, or fewer than two fit."""
    bound = widened(subject.bound)
    if bound is None or subject.site_of is None or subject.site.interpreted:
        return ()
    found = subject.site_of(bound).compiled(candidates)
    fitting = tuple(one for one in candidates if not isinstance(found[one], Exception))
    return fitting if len(fitting) > 1 else ()


def _compare(
    bound: BoundLaunch, candidates: tuple[Candidate, ...], repeats: int, row: KernelRow | None
) -> set[Candidate]:
    """Return the candidates whose bytes differ from the first one's, counting comparisons in ``row``."""
    if len(candidates) == 1:
        return set()
    found = gate(bound, candidates, repeats=repeats)
    if row is not None:
        row.comparisons += found.comparisons
    return {one.candidate for one in found.rejections if one.reason in ("not_bit_exact", "unstable")}


@contextlib.contextmanager
def busy_stream(*, idle: bool) -> Iterator[None]:
    """Keep the card busy from another stream, so that programs start and end in other orders.

    Does nothing if ``idle``: the interpreter has no streams.
    """
    if idle:
        yield
        return
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch
    matrix = torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=torch.bfloat16)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _product in range(_PRODUCTS):
            torch.mm(matrix, matrix)
    yield
    torch.cuda.current_stream().wait_stream(stream)
