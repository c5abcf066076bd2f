"""Every candidate of every kernel gives the fixed launch's bytes: over dtypes and inputs that would show a difference.

``pytest tests/ops/test_autotuning_candidates.py`` qualifies a card and a compiler. Launches with fp16 or bf16 outputs
are compared with fp32 outputs too, which hide no difference by rounding. A candidate that the card cannot run is no
failure; what was compared, and what fell out and why, stands in the report of ``--junit-xml``.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.operators.launches import Launch, library_kernels, recorded
from benchmarks.qualification.families import FAMILIES, of_family
from benchmarks.qualification.kernels import REPEATS, busy_stream
from rl_engine.backends import catalog
from rl_engine.backends.shared.triton.distinct import LaunchSite
from rl_engine.backends.shared.triton.qualification import gate, widened
from rl_engine.errors import TrialUnavailableError
from rl_engine.platforms.tuning.key import Candidate
from rl_engine.platforms.tuning.trial import Rejection
from rl_engine.runtime.policy import autotune
from tests.support.ops_inputs import ON_GPU, run_sample, samples, triton_op

catalog.load()
# descriptors read 16 bytes at a time, which NumPy adds in an order of its own: no case takes such kernels there
NEVER_INTERPRETED = {name for name, one in library_kernels().items() if one.declaration.descriptors}
NEVER_INTERPRETED.add("_gemm_segment_table_kernel")  # it serves one of them
KERNELS = sorted(name for name in library_kernels() if ON_GPU or name not in NEVER_INTERPRETED)
DTYPES = ("bfloat16", "float16", "float32") if ON_GPU else ("float32",)
TRIED = tuple(FAMILIES) if ON_GPU else ("cancelling",)  # the interpreter takes a minute for each
MOST_LAUNCHES = 8 if ON_GPU else 3  # of a kernel, from all over the cases
INTERPRETED_PROGRAMS = 50  # of a launch's candidates in all: some take half a second each
# What may happen to a candidate; other bytes may not. A card has only so many registers and so much shared memory.
EXPECTED_REJECTIONS = ("same launch as", "failed: OutOfResources")


@functools.cache
def _launches(family: str, dtype: str) -> dict[str, list[Launch]]:
    """Return what the declared cases launch, by kernel; operators of one dtype alone count to every dtype."""
    found = defaultdict(list)
    for sample in samples(lambda one: one.dtype == dtype or dtype not in one.spec.dtypes):
        with recorded() as made, autotune("off"):
            run_sample(triton_op(sample.spec.name), sample, of_family(sample.inputs(), family))
        for launch in made:
            found[launch.kernel.__name__].append(launch)
    different = {name: list({one.code: one for one in ones}.values()) for name, ones in found.items()}
    return {name: _some(ones) for name, ones in different.items()}


def _some(launches: list[Launch]) -> list[Launch]:
    """Return a few launches from all over the cases, the one with the most candidates among them."""
    widest = max(launches, key=lambda one: len(one.candidates()))
    chosen = launches[:: -(-len(launches) // MOST_LAUNCHES)]
    return chosen if any(one is widest for one in chosen) else [*chosen, widest]


@pytest.mark.parametrize("family", TRIED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_candidate_gives_the_fixed_launchs_bytes(
    kernel: str, dtype: str, family: str, record_property: Callable[[str, object], None]
) -> None:
    launches = _launches(family, dtype).get(kernel, [])
    if not launches:
        assert any(_launches(family, other).get(kernel) for other in DTYPES), "no case of any spec launches it"
        return
    with busy_stream(idle=not ON_GPU):
        comparisons, fallen = compared(kernel, launches)
    record_property("comparisons", comparisons)
    record_property("fell out", "; ".join(map(_text, fallen)))


def compared(kernel: str, launches: list[Launch]) -> tuple[int, list[Rejection]]:
    """Compare every candidate of some launches; fail where one gives other bytes, or where nothing was compared."""
    comparisons, fallen = 0, []
    for launch in launches:
        count, rejections = _on_a_card(launch) if ON_GPU else _by_the_interpreter(launch)
        comparisons += count
        fallen += rejections
    unexpected = [_text(one) for one in fallen if not one.reason.startswith(EXPECTED_REJECTIONS)]
    assert not unexpected
    blind = not ON_GPU and set(library_kernels()[kernel].declaration.neutral) == {"num_warps"}  # nothing it could see
    assert comparisons > 0 or blind
    return comparisons, fallen


def _text(rejection: Rejection) -> str:
    return f"{rejection.candidate}: {rejection.reason}"


def _on_a_card(launch: Launch) -> tuple[int, list[Rejection]]:
    distinct = launch.site().distinct(launch.candidates())
    found = gate(launch.bound(), distinct.kept, repeats=REPEATS)
    comparisons, fallen = with_wide_outputs(launch)
    return found.comparisons + comparisons, [*distinct.rejections, *found.rejections, *fallen]


def with_wide_outputs(launch: Launch) -> tuple[int, list[Rejection]]:
    """Compare the candidates of a launch once more, with fp32 outputs; nothing where none can be widened."""
    wide = widened(launch.bound())
    if wide is None:
        return 0, []
    other = replace(launch, args=(), kwargs=wide.values)
    kept, fallen = fitting(other.site(), other.candidates())
    found = gate(wide, kept, repeats=REPEATS)
    return found.comparisons, [*fallen, *found.rejections]


def fitting(site: LaunchSite, candidates: tuple[Candidate, ...]) -> tuple[tuple[Candidate, ...], list[Rejection]]:
    """Return the launches to compare, in the place of a fixed one that does not fit the card the first that does.

    A product's largest tile with its four stages fills an H200's shared memory when it is stored in bf16.
    """
    fallen: list[Rejection] = []
    while True:
        first, *others = candidates
        try:
            distinct = site.distinct(candidates)
        except TrialUnavailableError as error:
            reason = str(error).removeprefix("the fixed launch ")
            if not others or not reason.startswith("failed: OutOfResources"):
                raise
            fallen.append(Rejection(first, reason))
            candidates = tuple(others)
        else:
            return distinct.kept, [*fallen, *distinct.rejections]


def _by_the_interpreter(launch: Launch) -> tuple[int, list[Rejection]]:
    # without warps, and the cheapest: most candidates have many more programs than the fixed launch
    distinct = {tuple(one for one in candidate.options if one[0] != "num_warps"): candidate
                for candidate in reversed(launch.candidates())}  # fmt: skip
    fixed = launch.candidates()[0]
    cheapest = sorted((one for one in distinct.values() if one != fixed), key=launch.programs)
    programs = list(itertools.accumulate(map(launch.programs, cheapest)))
    others = cheapest[: max(1, sum(total <= INTERPRETED_PROGRAMS for total in programs))]
    found = gate(launch.bound(), (fixed, *others), repeats=1)
    return found.comparisons, list(found.rejections)
