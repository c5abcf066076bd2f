"""Group-normalised advantages: the declaration and the PyTorch operator."""

from __future__ import annotations

import itertools
from typing import Literal

import torch

from rl_engine.backends.reference.dtypes import require_float, wide
from rl_engine.backends.reference.words import require_word
from rl_engine.backends.spec import Case, InputMaker, Inputs, Tolerance, Traffic, operator

StandardDeviation = Literal["population", "sample", "none"]
EpsMode = Literal["max", "add"]


def _sizes(groups: int, samples: int, spread: int) -> list[int]:
    """Return sizes from ``samples - spread`` to ``samples + spread``: smallest, largest, next smallest, and so on."""
    steps = [group // 2 % (2 * spread + 1) for group in range(groups)]
    return [samples - spread + n if group % 2 == 0 else samples + spread - n for group, n in enumerate(steps)]


def _traffic(_itemsize: int, groups: int, samples: int, spread: int = 0, **_options: object) -> Traffic:
    """Count fp32 rewards read and advantages written."""
    return Traffic(forward=sum(_sizes(groups, samples, spread)) * 8)


def _inputs(make: InputMaker, groups: int, samples: int, spread: int = 0) -> Inputs:
    """Make groups of equal size; of different ones, given by boundaries, where they spread."""
    if not spread:
        return Inputs((make.normal(groups * samples),), {"samples_per_prompt": samples}, differentiable=())
    sizes = _sizes(groups, samples, spread)
    rewards = make.normal(sum(sizes))
    boundaries = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=rewards.device)
    return Inputs((rewards,), {"group_boundaries": boundaries}, differentiable=())


def check_groups(rewards: torch.Tensor, samples_per_prompt: int | None, group_boundaries: torch.Tensor | None) -> None:
    """Raise unless ``rewards`` are 1-D and exactly one way to group them is given and fits."""
    if rewards.dim() != 1:
        raise ValueError(f"group_advantages: rewards are {list(rewards.shape)}; pass one reward a sample, [samples]")
    if (samples_per_prompt is None) == (group_boundaries is None):
        raise ValueError("group_advantages: pass exactly one of samples_per_prompt and group_boundaries")
    if samples_per_prompt is not None and (samples_per_prompt < 1 or rewards.numel() % samples_per_prompt):
        raise ValueError(
            f"group_advantages: {rewards.numel()} rewards do not split into groups of {samples_per_prompt}; "
            "pass samples_per_prompt that divides their number"
        )
    if group_boundaries is not None and group_boundaries.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"group_advantages: group_boundaries are {group_boundaries.dtype}; pass int32 or int64 offsets")
    if group_boundaries is not None and (group_boundaries.dim() != 1 or group_boundaries.numel() < 1):
        raise ValueError(
            f"group_advantages: group_boundaries are {list(group_boundaries.shape)}; pass [groups + 1] offsets from 0"
        )


def check_words(std: str, eps_mode: str) -> None:
    """Raise ValueError for a word that says nothing."""
    require_word("group_advantages", "std", std, StandardDeviation)
    require_word("group_advantages", "eps_mode", eps_mode, EpsMode)


@operator(
    "group_advantages",
    family="loss",
    contract=(
        "group_advantages.v1: two passes; sums fold neighbours inside tiles of 1024 samples, tiles ascending;"
        " the mean is kept inside its group's range; squares / n or max(n - 1, 1);"
        " (r - mean) / max(std, eps), / (std + eps) or r - mean"
    ),
    inputs=_inputs,
    cases=(
        Case("tiny", {"groups": 2, "samples": 3}),
        Case("odd", {"groups": 5, "samples": 17}),
        Case("single", {"groups": 4, "samples": 1}),
        Case("empty", {"groups": 0, "samples": 4}),
        Case("ragged", {"groups": 9, "samples": 36, "spread": 28}, {"std": "sample", "eps_mode": "add"}),
        Case("mean-only", {"groups": 3, "samples": 5}, {"std": "none"}),
        Case("small", {"groups": 113, "samples": 36, "spread": 28}, tags=frozenset({"speed"})),  # 4096 rewards
    ),
    tolerance=Tolerance({"float32": 64}, "two sums over the group, a root and a division; cancellation in r - mean"),
    dtypes=("float32",),
    differentiable=False,
    rowwise=False,
    traffic=_traffic,
)
def group_advantages(
    rewards: torch.Tensor,
    *,
    samples_per_prompt: int | None = None,
    group_boundaries: torch.Tensor | None = None,
    eps: float = 1e-6,
    std: StandardDeviation = "population",
    eps_mode: EpsMode = "max",
) -> torch.Tensor:
    """Return each reward minus its group's mean, over its standard deviation (Shao et al., arXiv:2402.03300, 4.1.1).

    The deviation is computed in two passes, so large rewards do not cancel. A group whose rewards are all equal, a
    single sample included, gets zeros whatever ``std`` says. TRL is std="sample", eps_mode="add", eps=1e-4; verl the
    same with 1e-6, but for a single sample, to which it gives its reward; both without scaling are std="none", as
    Dr.GRPO (arXiv:2503.20783) is.

    Args:
        rewards: [samples], bf16, fp16, fp32 or fp64; samples of a group are neighbours.
        samples_per_prompt: size of every group.
        group_boundaries: [groups + 1], int32 or int64, ascending from 0 to samples, for groups of different sizes.
        eps: what keeps the divisor from 0.
        std: ``population`` (squares over the group's size), ``sample`` (over its size minus 1) or ``none``: undivided.
        eps_mode: ``max`` divides by ``max(std, eps)``, ``add`` by ``std + eps``.

    Returns:
        [samples], fp32 (fp64 for fp64); it carries no gradient.

    Raises:
        ValueError: not exactly one of the two groupings, it does not fit the rewards, or an unknown word.
        TypeError: rewards are not floating point, or group_boundaries not int32 or int64.
    """
    require_float("group_advantages", rewards=rewards)
    check_groups(rewards, samples_per_prompt, group_boundaries)
    check_words(std, eps_mode)
    value = wide(rewards.detach())
    if samples_per_prompt is not None:
        sizes = torch.full((rewards.numel() // samples_per_prompt,), samples_per_prompt, device=rewards.device)
    else:
        assert group_boundaries is not None, "check_groups asks for exactly one"
        sizes = group_boundaries.diff().to(rewards.device)
    group = torch.repeat_interleave(torch.arange(sizes.numel(), device=rewards.device), sizes)
    zeros = value.new_zeros(sizes.numel())
    # a rounded mean may lie outside its rewards: equal rewards would get advantages other than 0
    low, high = (zeros.scatter_reduce(0, group, value, kind, include_self=False) for kind in ("amin", "amax"))
    mean = (zeros.index_add(0, group, value) / sizes).clamp(low, high)
    centred = value - mean[group]
    if std == "none":
        return centred
    freedom = sizes if std == "population" else (sizes - 1).clamp_min(1)
    deviation = (zeros.index_add(0, group, centred.square()) / freedom).sqrt()
    return centred / (deviation + eps if eps_mode == "add" else deviation.clamp_min(eps))[group]
