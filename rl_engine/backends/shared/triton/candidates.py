"""From a kernel's declared axes to the launches that the tuner may choose between."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from rl_engine.backends.shared.triton.resources import LIMITS, Needs, fits
from rl_engine.platforms.tuning.key import Candidate

if TYPE_CHECKING:
    from rl_engine.backends.shared.triton.autotuning import TunableKernel
    from rl_engine.platforms.device import DeviceIdentity

Sizes: TypeAlias = Mapping[str, Any]  # a kernel's scalar arguments by name
Launch: TypeAlias = Mapping[str, int]  # values of its tunable parameters and options
FixedRule: TypeAlias = "Callable[[Sizes, DeviceIdentity], Launch]"
Admits: TypeAlias = Callable[[Sizes, Launch], bool]
Axes: TypeAlias = Mapping[str, tuple[int, ...]]
NeedsRule: TypeAlias = Callable[[Sizes, Launch], Needs]  # here sizes also hold bytes an element, by pointer


def derive(
    declaration: TunableKernel, sizes: Sizes, widths: Mapping[str, int], identity: DeviceIdentity
) -> tuple[Candidate, ...]:
    """Return the fixed launch and every combination of the neutral axes that makes sense, without repeats.

    Left out is what the declaration does not admit, and what cannot run on an architecture whose limits are known:
    compiling takes a second, and loading would fail. Axes that the fixed launch sets and that are not declared keep its
    value.

    Args:
        declaration: the kernel's.
        sizes: its scalar arguments by name.
        widths: bytes of an element of each pointer that is not None, by name.
        identity: the device.
    """
    fixed = declaration.fixed(sizes, identity)
    axes = {**declaration.neutral, **declaration.on.get(identity.kind, {})}
    limits = LIMITS.get(identity.arch)
    launches = [dict(fixed)]
    for values in itertools.product(*axes.values()):
        launch = {**fixed, **dict(zip(axes, values, strict=True))}
        if declaration.admits is not None and not declaration.admits(sizes, launch):
            continue
        needs = Needs() if declaration.needs is None else declaration.needs({**sizes, **widths}, launch)
        if limits is None or fits(launch, needs, limits):
            launches.append(launch)
    return tuple(dict.fromkeys(Candidate.of(**launch) for launch in launches))
