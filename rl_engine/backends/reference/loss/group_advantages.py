"""Group-normalised advantages: the declaration and the PyTorch operator."""

from __future__ import annotations

import torch

from rl_engine.backends.reference.dtypes import require_float, wide
from rl_engine.backends.spec import Case, InputMaker, Inputs, Tolerance, operator


def _inputs(make: InputMaker, groups: int, samples: int) -> Inputs:
    return Inputs((make.normal(groups * samples),), {"samples_per_prompt": samples}, differentiable=())


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


@operator(
    "group_advantages",
    family="loss",
    contract=(
        "group_advantages.v1: two passes; sums fold neighbours inside tiles of 1024 samples, tiles ascending;"
        " the mean is kept inside its group's range; population variance; (r - mean) / max(std, eps)"
    ),
    inputs=_inputs,
    cases=(
        Case("tiny", {"groups": 2, "samples": 3}),
        Case("odd", {"groups": 5, "samples": 17}),
        Case("single", {"groups": 4, "samples": 1}),
        Case("empty", {"groups": 0, "samples": 4}),
        Case("small", {"groups": 512, "samples": 8}, tags=frozenset({"speed"})),
    ),
    tolerance=Tolerance({"float32": 64}, "two sums over the group, a root and a division; cancellation in r - mean"),
    dtypes=("float32",),
    differentiable=False,
    rowwise=False,
)
def group_advantages(
    rewards: torch.Tensor,
    *,
    samples_per_prompt: int | None = None,
    group_boundaries: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Return each reward minus its group's mean, divided by ``max(std, eps)`` (Shao et al., arXiv:2402.03300, 4.1.1).

    The standard deviation is the population's, computed in two passes, so large rewards do not cancel. A group whose
    rewards are all equal, a single sample included, gets zeros.

    Args:
        rewards: [samples], bf16, fp16, fp32 or fp64; samples of a group are neighbours.
        samples_per_prompt: size of every group.
        group_boundaries: [groups + 1], int32 or int64, ascending from 0 to samples, for groups of different sizes.
        eps: the smallest divisor.

    Returns:
        [samples], fp32 (fp64 for fp64); it carries no gradient.

    Raises:
        ValueError: not exactly one of the two groupings, or it does not fit the rewards.
        TypeError: rewards are not floating point, or group_boundaries not int32 or int64.
    """
    require_float("group_advantages", rewards=rewards)
    check_groups(rewards, samples_per_prompt, group_boundaries)
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
    deviation = (zeros.index_add(0, group, centred.square()) / sizes).sqrt()
    return centred / deviation.clamp_min(eps)[group]
