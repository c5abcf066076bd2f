"""From a kernel's declared axes to the launches that the tuner may choose between."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from rl_engine.platforms.tuning.key import Candidate

if TYPE_CHECKING:
    from rl_engine.platforms.device import DeviceIdentity

Sizes: TypeAlias = Mapping[str, Any]  # a kernel's scalar arguments by name
Launch: TypeAlias = Mapping[str, int]  # values of its tunable parameters and options
FixedRule: TypeAlias = "Callable[[Sizes, DeviceIdentity], Launch]"
Admits: TypeAlias = Callable[[Sizes, Launch], bool]


def derive(
    fixed: Launch, neutral: Mapping[str, tuple[int, ...]], sizes: Sizes, admits: Admits | None
) -> tuple[Candidate, ...]:
    """Return the fixed launch and every combination of the neutral axes that ``admits`` lets through, without repeats.

    Axes that the fixed launch sets and ``neutral`` does not name keep its value.
    """
    launches = [dict(fixed)]
    for values in itertools.product(*neutral.values()):
        launch = {**fixed, **dict(zip(neutral, values, strict=True))}
        if admits is None or admits(sizes, launch):
            launches.append(launch)
    return tuple(dict.fromkeys(Candidate.of(**launch) for launch in launches))
