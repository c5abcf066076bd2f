"""What is qualified: launches of the catalog's kernels at the declared small cases, and questions of tuned backends."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from benchmarks.operators import arguments
from benchmarks.operators.launches import Launch, library_kernels, recorded
from benchmarks.qualification.families import of_family
from rl_engine.backends import catalog
from rl_engine.backends.shared.triton.distinct import Failures, LaunchSite
from rl_engine.backends.shared.triton.gemm import product
from rl_engine.backends.shared.triton.rows import selected_logps
from rl_engine.platforms import device
from rl_engine.runtime.policy import autotune
from rl_engine.runtime.registry import get_op

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_engine.backends.shared.triton.asking import Question
    from rl_engine.backends.shared.triton.qualification import BoundLaunch
    from rl_engine.backends.spec import Case, OpSpec
    from rl_engine.platforms.tuning.key import Candidate

NORMAL = "normal"  # the family that launches are chosen by
DTYPES = ("bfloat16", "float16", "float32")
MOST_LAUNCHES = 4  # of a kernel, from all over the cases
MOST_CANDIDATES = 40  # of a question, from all over its space
# What the tuned backends are asked at: decode, a middle size, training; rows as chunks and whole.
_ASKED: Mapping[str, Sequence[Mapping[str, int]]] = {
    "tuned_gemm": [
        {"rows": 16, "inner": 512, "cols": 1024, "weight": 1},
        {"rows": 128, "inner": 512, "cols": 1024, "weight": 1},
        {"rows": 1024, "inner": 512, "cols": 1024, "weight": 1},
    ],
    "tuned_logp": [{"rows": 8, "vocab": 50257}, {"rows": 300, "vocab": 4099}],
}
_OPERATORS = {"tuned_gemm": "det_gemm", "tuned_logp": "logp"}


@dataclass(frozen=True)
class Subject:
    """One launch with everything that may be chosen for it.

    Attributes:
        site: what compiling a candidate takes.
        bound: what running one takes.
        candidates: the fixed launch first.
        site_of: the site of the same launch on other tensors, for outputs in fp32; None where there is none.
    """

    site: LaunchSite
    bound: BoundLaunch
    candidates: tuple[Candidate, ...]
    site_of: Callable[[BoundLaunch], LaunchSite] | None = None


Source = Callable[[str], Subject]  # family of inputs -> the launch on them


def kernel_sources(place: str) -> dict[str, list[Source]]:
    """Return the launches to look at, by kernel, on device ``place``: cuda, or cpu for the interpreter."""
    found: dict[str, dict[object, tuple[int, Source]]] = defaultdict(dict)
    for dtype in DTYPES if place == "cuda" else ("float32",):
        for spec in catalog.specs().values():
            if dtype not in spec.dtypes and dtype != DTYPES[-1]:
                continue
            for case in spec.cases:
                if "speed" in case.tags or (place == "cpu" and "gpu" in case.tags):
                    continue
                known = dtype if dtype in spec.dtypes else spec.dtypes[0]  # operators of one dtype alone
                launches = functools.lru_cache(2)(functools.partial(_launched, spec, case, known, place))
                for number, launch in enumerate(_launched(spec, case, known, place, NORMAL, running=False)):
                    source = functools.partial(_numbered, launches, number)
                    widest = len(launch.candidates())
                    found[launch.kernel.__name__].setdefault(launch.code, (widest, source))
    return {name: _some(list(found[name].values())) for name in sorted(library_kernels()) if name in found}


def question_sources(place: str) -> dict[str, list[Source]]:
    """Return what the tuned backends ask, by the backend's name."""
    return {
        backend: [functools.partial(_asked, backend, sizes, place) for sizes in every]
        for backend, every in _ASKED.items()
    }


def _launched(spec: OpSpec, case: Case, dtype: str, place: str, family: str, *, running: bool = True) -> list[Launch]:
    """Return what a case launches on inputs of a family, forward and backward, with tuning off.

    Where they are not ``running`` nothing is compiled, and their tensors hold anything.
    """
    op = get_op(spec.name, place, backend=f"rlkernel.triton.{spec.name}")
    if arguments.OVERWRITES in case.options:
        op = arguments.fed(op, torch.clone)
    inputs = _inputs(spec, case.sizes, dtype, place, family)
    with autotune("off"), recorded(running=running) as found:
        arguments.evaluate(op, replace(inputs, kwargs={**inputs.kwargs, **case.options}))
    return found


def _inputs(spec: OpSpec, sizes: Mapping[str, int], dtype: str, place: str, family: str) -> Any:
    make = arguments.DeviceMaker(getattr(torch, dtype), arguments.SEED, place)
    return arguments.leaves(of_family(spec.inputs(make, **sizes), family))


def _numbered(launches: Callable[[str], list[Launch]], number: int, family: str) -> Subject:
    launch = launches(family)[number]

    def site_of(bound: BoundLaunch) -> LaunchSite:
        return replace(launch, args=(), kwargs=bound.values).site()

    return Subject(launch.site(), launch.bound(), launch.candidates(), site_of)


def _some(found: list[tuple[int, Source]]) -> list[Source]:
    """Return a few launches from all over the cases, the one with the most candidates among them."""
    chosen = found[:: -(-len(found) // MOST_LAUNCHES)]
    widest = max(found, key=lambda one: one[0])
    return [source for _count, source in (chosen if widest in chosen else [widest, *chosen[1:]])]


class _NotedError(Exception):
    """What a tuned backend asked: enough, nothing need run."""


def _asked(backend: str, sizes: Mapping[str, int], place: str, family: str) -> Subject:
    """Return what a tuned backend asks at a forward of these sizes."""
    name = _OPERATORS[backend]
    questions: list[Question] = []

    def note(question: Question, *_policy: Any, **_measures: Any) -> Any:
        questions.append(question)
        raise _NotedError

    op = get_op(name, place, backend=f"rlkernel.triton.{backend}")
    inputs = _inputs(catalog.specs()[name], sizes, "bfloat16" if place == "cuda" else "float16", place, family)
    with (
        autotune("on"),
        torch.no_grad(),
        mock.patch.object(product, "ask", note),
        mock.patch.object(selected_logps, "ask", note),
        contextlib.suppress(_NotedError),
    ):
        op(*inputs.args, **inputs.kwargs)
    (question,) = questions
    first, *others = question.candidates(device.identify(question.index))
    some = others[:: max(1, -(-len(others) // MOST_CANDIDATES))]
    return Subject(LaunchSite(question.launches, question.index, "", Failures()), question.bound, (first, *some))
