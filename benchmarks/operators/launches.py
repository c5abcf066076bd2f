"""What operators launch, written down as it happens: the calls of wrapped kernels, ready to be made again."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_engine.backends.shared.triton import autotuning, compiler
from rl_engine.backends.shared.triton.autotuning import KernelLauncher
from rl_engine.backends.shared.triton.distinct import Failures, LaunchSite, one_kernel
from rl_engine.backends.shared.triton.launch_trial import LaunchTrial
from rl_engine.platforms import device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rl_engine.backends.shared.triton.qualification import BoundLaunch
    from rl_engine.platforms.tuning.key import Candidate, TuningKey


@dataclass(frozen=True)
class Launch:
    """One launch of a wrapped kernel, as its operator asked for it."""

    kernel: KernelLauncher
    grid: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        """Every argument by name."""
        return self.kernel.values(*self.args, **self.kwargs)

    @property
    def index(self) -> int:
        """The device's index, -1 for the interpreter."""
        return next(one for one in self.values.values() if isinstance(one, torch.Tensor)).get_device()

    def bound(self) -> BoundLaunch:
        """Return it as the byte gate takes it."""
        return self.kernel.bound(self.grid, self.values)

    def candidates(self) -> tuple[Candidate, ...]:
        """Return every launch that a tuner would consider, the fixed one first."""
        return self.kernel.candidates(self.values, device.identify(self.index))

    @property
    def sizes(self) -> dict[str, Any]:
        """What a fixed rule is given: scalars by name."""
        return {name: value for name, value in self.values.items() if not name.endswith("_ptr")}

    def has(self, key: TuningKey) -> bool:
        """Return whether a tuning record of this key is about it."""
        return key.kernel == self.kernel.__name__ and key.agrees_with(self.kernel.parts(self.values))

    @property
    def code(self) -> tuple[object, ...]:
        """What tells its compiled code from another launch's: dtypes, constants, what is None.

        An interpreted launch has none; there every scalar counts.
        """
        constants = {one.name for one in self.kernel.fn.params if one.is_constexpr} if self.index >= 0 else self.values

        def seen(name: str, value: Any) -> object:
            if isinstance(value, torch.Tensor):
                return value.dtype
            return value if name in constants or value is None else type(value)

        return tuple(seen(name, value) for name, value in self.values.items())

    def programs(self, candidate: Candidate) -> int:
        """Return how many programs it takes with a candidate's options."""
        return math.prod(compiler.launch_grid(self.grid, self.values, dict(candidate.options)))

    def site(self) -> LaunchSite:
        """Return what compiling its candidates takes."""
        launches = one_kernel(self.kernel.fn, self.grid, self.values, self.kernel.declaration.descriptors)
        return LaunchSite(launches, self.index, "", Failures())

    def trial(self) -> LaunchTrial:
        """Return the trial that a tuner would be handed."""
        identity = device.identify(self.index)
        return LaunchTrial(self.site(), self.bound(), identity=identity, warm=self.kernel.declaration.warm)


@contextlib.contextmanager
def recorded(*, running: bool = True) -> Iterator[list[Launch]]:
    """Write down every launch made inside the block; the kernels run as ever, or, if not ``running``, not at all."""
    launches: list[Launch] = []
    launcher = KernelLauncher.__getitem__

    def noted(self: KernelLauncher, grid: Any) -> Callable[..., None]:
        launch = launcher(self, grid)

        def call(*args: Any, **kwargs: Any) -> None:
            launches.append(Launch(self, grid, args, kwargs))
            if running:
                launch(*args, **kwargs)

        return call

    KernelLauncher.__getitem__ = noted  # type: ignore[method-assign]  # put back below
    try:
        yield launches
    finally:
        KernelLauncher.__getitem__ = launcher  # type: ignore[method-assign]  # as it was


def library_kernels() -> dict[str, KernelLauncher]:
    """Return the package's own kernels by name, without those that tests declare."""
    return {name: one for name, one in autotuning.kernels().items() if one.__module__.startswith("rl_engine.")}
