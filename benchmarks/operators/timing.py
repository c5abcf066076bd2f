"""Device times of contenders for one phase of one case: captured in graphs, sampled in turns, medians."""

from __future__ import annotations

import contextlib
import gc
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.operators.arguments import changed, differentiate, flat, incoming
from benchmarks.operators.launches import recorded
from benchmarks.operators.targets import SAMPLES
from rl_engine.platforms.tuning.decision import order_of_round
from rl_engine.platforms.tuning.timer import GraphTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benchmarks.operators.launches import Launch
    from benchmarks.operators.targets import Phase
    from rl_engine.backends.spec import Inputs

_WARM_RUNS = 2  # compile, and let caches of the libraries below settle


@dataclass(frozen=True)
class Contender:
    """One function to time.

    Attributes:
        call: takes the arguments of its sets.
        sets: its argument sets; a cold case rotates through them.
        around: a context that its launches are captured in.
        restores: it writes into its arguments; they are put back before every sample.
        captured: it is timed inside a graph; one that waits for the host cannot be, and pays its gaps.
        forward_only: its forward does the whole work of forward and backward.
    """

    call: Callable[..., Any]
    sets: Sequence[Inputs]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    restores: bool = False
    captured: bool = True
    forward_only: bool = False


@dataclass(frozen=True)
class Sampled:
    """A contender's samples in microseconds, or why there are none."""

    samples_us: Sequence[float]
    reason: str = ""

    @property
    def median_us(self) -> float | None:
        """The median; None without samples."""
        return statistics.median(self.samples_us) if self.samples_us else None


class EventTimer:
    """Time between two events around one launch, for what cannot be captured: the host's gaps are in it."""

    def prepare(self, launch: Callable[[int], None], rotation: int) -> Callable[[], float]:  # noqa: ARG002
        """Return a function that gives microseconds a launch; one set is enough at the sizes this is for."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def sample() -> float:
            start.record()
            launch(0)
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1000

        return sample


def time_in_turns(contenders: Mapping[str, Contender], phase: Phase, *, samples: int = SAMPLES) -> dict[str, Sampled]:
    """Return every contender's samples, taken in rounds; one that fails is reported, not raised."""
    found = _take(contenders, phase, samples)
    release()
    return found


def _take(contenders: Mapping[str, Contender], phase: Phase, samples: int) -> dict[str, Sampled]:
    ready: dict[str, _Prepared] = {}
    reasons: dict[str, str] = {}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name, contender in contenders.items():
        try:
            ready[name] = _prepare(contender, "fwd" if contender.forward_only else phase)
        except Exception as error:  # noqa: BLE001  # peers fail in their own ways; the row says how
            reasons[name] = brief(error)
        if name in reasons:
            release()  # what it allocated before it failed, after the error let go of it
    for number in range(samples):
        for name in order_of_round(list(ready), number):
            ready[name].restore()
            times[name].append(ready[name].sample())
    return {name: Sampled(times[name], reasons.get(name, "")) for name in contenders}


def brief(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message, at most 200 characters."""
    if isinstance(error.__context__, Exception):  # ending a broken capture raises again, and says less
        error = error.__context__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def release() -> None:
    """Give the memory of finished graphs back: the next case may need all of it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def side_stream() -> Iterator[None]:
    """Work on a stream that can be captured, after the caller's and before what the caller does next.

    All of a run happens on one: a gradient's leaf belongs to the stream it was first used on, and a capture that meets
    a leaf of another one fails.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


@dataclass(frozen=True)
class _Prepared:
    """What samples a contender, and the launch whose memory its graph uses: it must live as long."""

    sample: Callable[[], float]
    restore: Callable[[], None]
    launch: Callable[[int], None]


def _prepare(contender: Contender, phase: Phase) -> _Prepared:
    restore = _restorer(contender.sets) if contender.restores else _nothing
    with contender.around():
        launch = _launch(contender, phase)
        for _run in range(_WARM_RUNS):
            for number in range(len(contender.sets)):
                launch(number)
        torch.cuda.synchronize()
        timer = GraphTimer() if contender.captured else EventTimer()
        return _Prepared(timer.prepare(launch, rotation=len(contender.sets)), restore, launch)


def _nothing() -> None:
    pass


def launches_of(contender: Contender, phase: Phase) -> list[Launch]:
    """Return what one launch of a phase runs of this library; torch's own kernels are not among them."""
    with contender.around():
        launch = _launch(contender, phase)
        with recorded() as found:
            launch(0)
    torch.cuda.synchronize()
    return found


def _launch(contender: Contender, phase: Phase) -> Callable[[int], None]:
    """Return the launch of one argument set; each set's results live until its next launch, as a caller's would."""
    kept: dict[int, Any] = {}
    call, sets = contender.call, contender.sets

    def forward(number: int) -> None:
        kept[number] = flat(call(*sets[number].args, **sets[number].kwargs))

    if phase == "fwd":
        return forward
    for number in range(len(sets)):
        forward(number)
    outputs = dict(kept)
    gradients = {number: incoming(one) for number, one in outputs.items()}
    kept.clear()

    def backward(number: int) -> None:
        kept[number] = differentiate(outputs[number], sets[number], gradients[number], again=True)

    def both(number: int) -> None:
        found = flat(call(*sets[number].args, **sets[number].kwargs))
        kept[number] = found, differentiate(found, sets[number], gradients[number])

    if phase == "bwd":
        return backward
    outputs.clear()
    return both


def _restorer(sets: Sequence[Inputs]) -> Callable[[], None]:
    originals = [changed(one, torch.clone) for one in sets]

    def restore() -> None:
        with torch.no_grad():
            for mine, original in zip(sets, originals, strict=True):
                for arg, saved in zip(mine.args, original.args, strict=True):
                    if isinstance(arg, torch.Tensor):
                        arg.detach().copy_(saved)

    return restore
