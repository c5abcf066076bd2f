"""Group-normalised advantages: (r - mean) / max(std, eps) and its relatives, mean and variance in two passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from rl_engine.backends.reference.loss.group_advantages import (
    EpsMode,
    StandardDeviation,
    check_groups,
    check_words,
)
from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.compiler import unavailable
from rl_engine.backends.shared.triton.graph import graph_operator
from rl_engine.backends.shared.triton.operands import power_of_two
from rl_engine.backends.shared.triton.primitives.folds import fold_columns, rounded_product
from rl_engine.backends.spec import implements

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_engine.platforms.device import DeviceIdentity

_TILE = 1024  # samples of one fold: contract
_NARROW = tl.constexpr(64)  # samples of a tile that most groups fit in
_POPULATION = tl.constexpr(1)
_STD = {"none": 0, "population": _POPULATION.value, "sample": 2}


def _fixed(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    """Return 1 warp for narrow groups, and for bounded ones, which mostly are (H200: 1.59 us, 1.97 with 4)."""
    groups = operands.rows_in_tile(sizes["n_groups"], sizes["TILE"], 128, device)
    return {"GROUPS": groups, "num_warps": 1 if sizes["TILE"] <= 128 or not sizes["samples"] else 4}


@TunableKernel(
    outputs=("advantage_ptr",),
    data=("reward_ptr",),
    dynamic=("n_groups",),
    fixed=_fixed,
    neutral={"GROUPS": (1, 2, 4, 8), "num_warps": (1, 2, 4)},  # a group's sums are folds of two values at a time
    warm=True,
)
@triton.jit(do_not_specialize=["n_groups"])
def _group_advantages_kernel(
    reward_ptr, boundary_ptr, advantage_ptr, n_groups, samples, eps,
    STD: tl.constexpr, ADD_EPS: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    used = group < n_groups
    if boundary_ptr is None:
        first = group * samples
        size = tl.where(used, samples, 0)
    else:
        first = tl.load(boundary_ptr + group, mask=used, other=0).to(tl.int64)
        size = tl.load(boundary_ptr + group + 1, mask=used, other=0).to(tl.int64) - first
    longest = tl.max(size, 0)
    # the tree over a tile's first samples is that of a narrower tile, so short groups, whose sizes only the device
    # knows, keep their bits in one
    if longest <= _NARROW:
        _advantages(reward_ptr, advantage_ptr, first, size, longest, eps, STD, ADD_EPS, GROUPS, min(TILE, _NARROW))
    else:
        _advantages(reward_ptr, advantage_ptr, first, size, longest, eps, STD, ADD_EPS, GROUPS, TILE)


@triton.jit
def _advantages(
    reward_ptr, advantage_ptr, first, size, longest, eps,
    STD: tl.constexpr, ADD_EPS: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, TILE)
    count = tl.maximum(size, 1).to(tl.float32)
    total = tl.zeros((GROUPS,), tl.float32)
    low = tl.full((GROUPS,), float("inf"), tl.float32)
    high = tl.full((GROUPS,), -float("inf"), tl.float32)
    for start in range(0, longest, TILE):
        mask = (start + lane)[None, :] < size[:, None]
        reward = tl.load(reward_ptr + first[:, None] + (start + lane)[None, :], mask=mask, other=0.0).to(tl.float32)
        total += fold_columns(reward, GROUPS, TILE)
        low = tl.minimum(low, tl.min(tl.where(mask, reward, float("inf")), 1))
        high = tl.maximum(high, tl.max(tl.where(mask, reward, -float("inf")), 1))
    # a rounded mean may lie outside its rewards: of seven times 0.7, all would get 0.06 instead of 0
    mean = tl.maximum(total / count, low, propagate_nan=tl.PropagateNan.ALL)
    mean = tl.minimum(mean, high, propagate_nan=tl.PropagateNan.ALL)
    divisor = tl.full((GROUPS,), 1.0, tl.float32)
    if STD:
        squares = tl.zeros((GROUPS,), tl.float32)
        for start in range(0, longest, TILE):
            mask = (start + lane)[None, :] < size[:, None]
            reward = tl.load(reward_ptr + first[:, None] + (start + lane)[None, :], mask=mask, other=0.0)
            centred = tl.where(mask, reward.to(tl.float32) - mean[:, None], 0.0)
            squares += fold_columns(rounded_product(centred, centred), GROUPS, TILE)
        freedom = count if STD == _POPULATION else tl.maximum(count - 1.0, 1.0)
        deviation = tl.sqrt(squares / freedom)
        if ADD_EPS:
            divisor = deviation + eps
        else:
            # NaN, from an infinite reward, must reach every advantage of its group: a plain maximum would take eps
            divisor = tl.maximum(deviation, eps, propagate_nan=tl.PropagateNan.ALL)
    for start in range(0, longest, TILE):
        offset = first[:, None] + (start + lane)[None, :]
        mask = (start + lane)[None, :] < size[:, None]
        reward = tl.load(reward_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(advantage_ptr + offset, (reward - mean[:, None]) / divisor[:, None], mask=mask)


def _forward(
    rewards: torch.Tensor, boundaries: torch.Tensor | None, samples: int, eps: float, std: int, add_eps: bool
) -> torch.Tensor:
    """Return the advantages of groups of ``samples``, or of those that ``boundaries`` [groups + 1] bound."""
    advantages = torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device)
    n_groups = rewards.numel() // samples if boundaries is None else boundaries.numel() - 1
    if n_groups and rewards.numel():
        _group_advantages_kernel[operands.blocks("n_groups", "GROUPS")](
            rewards.contiguous(), None if boundaries is None else boundaries.contiguous(), advantages, n_groups,
            samples, eps, STD=std, ADD_EPS=add_eps,
            TILE=_TILE if boundaries is not None else min(power_of_two(samples), _TILE),
        )  # fmt: skip
    return advantages


_graph_forward = graph_operator(
    "group_advantages",
    _forward,
    fake=lambda rewards, *_others: torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device),
)


_door = operands.Door("group_advantages", "rewards", "group_boundaries", any_dtype=("group_boundaries",))


@implements("group_advantages", backend_id="rlkernel.triton.group_advantages", unavailable=unavailable)
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

    Words and conventions are those of `rl_engine.backends.reference.loss.group_advantages.group_advantages`.

    Args:
        rewards: [samples], bf16, fp16 or fp32; samples of a group are neighbours.
        samples_per_prompt: size of every group.
        group_boundaries: [groups + 1], int32 or int64 on rewards' device, ascending from 0 to samples, for groups of
            different sizes. The values are not checked: that would wait for the device.
        eps: what keeps the divisor from 0; a group whose rewards are all equal gets zeros.
        std: ``population``, ``sample`` or ``none``.
        eps_mode: ``max`` or ``add``.

    Returns:
        [samples], fp32; it carries no gradient.

    Raises:
        ValueError: not exactly one of the two groupings, it does not fit, an unknown word, different devices, or one
            Triton does not run on.
        TypeError: rewards of another dtype, group_boundaries that are not int32 or int64, or a tensor subclass.
    """
    _door(rewards, group_boundaries)
    check_groups(rewards, samples_per_prompt, group_boundaries)
    check_words(std, eps_mode)
    compute = _graph_forward if torch.compiler.is_compiling() else _forward
    return compute(rewards.detach(), group_boundaries, samples_per_prompt or 0, eps, _STD[std], eps_mode == "add")
