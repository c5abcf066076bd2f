"""Launches studied by several processes at once: compiling candidates takes the time, and one process one core."""

from __future__ import annotations

import functools
import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING

from benchmarks.operators.timing import brief, side_stream
from benchmarks.qualification import counterexamples, kernels, subjects
from rl_engine.backends import catalog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benchmarks.qualification.rows import KernelRow
    from benchmarks.qualification.subjects import Source

_SPARE = 2  # cores left to the driver and to this process
NO_TIME = "no time left"


def studies(
    place: str, only: Sequence[str], out_of_time: Callable[[], bool]
) -> Iterator[tuple[str, int, KernelRow | str]]:
    """Yield kernel, number of its launch and what was found, or why nothing was, as they come."""
    with ProcessPoolExecutor(
        max(1, (os.cpu_count() or 1) - _SPARE),
        multiprocessing.get_context("spawn"),  # CUDA does not survive a fork
    ) as pool:
        asked: dict[Future[KernelRow], tuple[str, int]] = {
            pool.submit(_study, place, name, number): (name, number)
            for name, found in sources(place).items()
            for number in range(len(found))
            if not only or name in only
        }
        for future in as_completed(asked):
            name, number = asked[future]
            if future.cancelled():
                yield name, number, NO_TIME
            elif (error := future.exception()) is not None:
                yield name, number, brief(error)
            else:
                yield name, number, future.result()
            if out_of_time():
                for waiting in asked:
                    waiting.cancel()  # those that run are waited for


@functools.cache
def sources(place: str) -> Mapping[str, Sequence[Source]]:
    """Return the launches to look at, by kernel, tuned backend or counterexample; those that take longest first."""
    catalog.load()
    return {**subjects.question_sources(place), **subjects.kernel_sources(place), **counterexamples.sources(place)}


def _study(place: str, name: str, number: int) -> KernelRow:
    with side_stream():
        return kernels.study(name, sources(place)[name][number])
