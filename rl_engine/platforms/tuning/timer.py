"""How long a launch takes: by replay of a captured graph on an ordered stream, or by the wall clock without a card."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_GRAPH_US = 400.0  # what a replay is made to last, by the time of one launch and its gap: events resolve 0.5 us
_MAX_LAUNCHES = 256


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
        estimate_us = max(start.elapsed_time(end) * 1000, 1.0)
        rounds = -(-int(_GRAPH_US / estimate_us) // rotation)
        count = min(max(1, rounds) * rotation, max(_MAX_LAUNCHES, rotation))
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for number in range(count):
                launch(number % rotation)
        finally:
            graph.capture_end()

        def sample() -> float:
            graph.replay()  # a backlog: what is timed is queued while this runs, so no gap of the host's is in the time
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1000 / count

        sample()  # the first replay uploads the graph
        return sample


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
