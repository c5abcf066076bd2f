"""How long a launch takes: by replay of a captured graph on an ordered stream, or by the wall clock without a card."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_GRAPH_US = 400.0  # what a replay is made to last: events resolve 0.5 us
_MAX_LAUNCHES = 256
_Sample = tuple[float, float]  # microseconds that a replay took on the device, and the host to ask for it


class Timer(Protocol):
    """Turns a launch into a function that samples its time."""

    name: str

    def prepare(self, launch: Callable[[int], None], rotation: int) -> Callable[[], float]:
        """Return a function that gives microseconds a launch.

        ``launch(n)`` launches once on argument set ``n`` of ``rotation``; it has run before.
        """
        ...


class GraphTimer:
    """Device time of launches inside a CUDA graph: no host time, no gaps.

    Captures in thread-local mode, so that another thread's allocation cannot break the capture, and waits for its own
    events only. Everything happens on the stream that is current when it is called.
    """

    name = "cuda-graph"

    def prepare(self, launch: Callable[[int], None], rotation: int) -> Callable[[], float]:
        """Capture enough launches for the clock's resolution, at least one round of the argument sets."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch
        start.record()
        launch(0)
        end.record()
        end.synchronize()
        seems_us = max(start.elapsed_time(end) * 1000, 1.0)  # with the host's gap

        def captured(count: int) -> Callable[[], _Sample]:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for number in range(count):
                    launch(number % rotation)
            finally:
                graph.capture_end()

            def replay() -> _Sample:
                graph.replay()  # a backlog: what is timed is queued while this runs
                began_s = time.perf_counter()
                start.record()
                graph.replay()
                end.record()
                host_us = (time.perf_counter() - began_s) * 1e6
                end.synchronize()
                return float(start.elapsed_time(end)) * 1000, host_us

            replay()  # the first uploads the graph
            return replay

        count, replay = long_enough(captured, min(_GRAPH_US / seems_us, _MAX_LAUNCHES), rotation)
        return lambda: replay()[0] / count


def long_enough(
    captured: Callable[[int], Callable[[], _Sample]], first: float, rotation: int
) -> tuple[int, Callable[[], _Sample]]:
    """Return how many launches a graph needs, and the replay of such a graph.

    A backlog shorter than the host takes to ask for a replay leaves a gap in what is timed: a launch of 2 us was taken
    for one of 16 (H200), and only where its graph was short, so that equal launches differed. A replay that lasted
    twice the host's time has none.

    Args:
        captured: count -> the replay of a graph of so many launches.
        first: the count to begin with.
        rotation: argument sets; counts are multiples of it.
    """
    count, most = _in_rounds(first, rotation), _in_rounds(_MAX_LAUNCHES, rotation)
    while True:
        replay = captured(count)
        took_us, host_us = replay()
        if count >= most or took_us >= max(_GRAPH_US / 2, 2 * host_us):
            return count, replay
        count = min(most, _in_rounds(count * max(2.0, _GRAPH_US / took_us), rotation))


def _in_rounds(count: float, rotation: int) -> int:
    """Return ``count`` in whole rounds of the argument sets, one at least."""
    return max(1, -(-int(count) // rotation)) * rotation


class WallTimer:
    """Wall-clock time of a launch that returns when it is done: Triton's interpreter."""

    name = "wall-clock"

    def prepare(self, launch: Callable[[int], None], rotation: int) -> Callable[[], float]:  # noqa: ARG002
        """Time one launch a sample; the interpreter has no cache to keep cold."""

        def sample() -> float:
            began_s = time.perf_counter()
            launch(0)
            return (time.perf_counter() - began_s) * 1e6

        return sample
