"""The two pictures: the reward as it rises, and the time of a step with fixed and with tuned launches."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from benchmarks.pictures import new_figure, save
from benchmarks.training.history import REWARD_WINDOW

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.training.compare import ModeSummary
    from benchmarks.training.history import RunRecord

_SIZE = (7, 4)  # inches
_COLOURS = {"off": "#7a7a7a", "off again": "#7a7a7a", "on": "#1f77b4", "replay": "#1f77b4"}


def is_available() -> bool:
    """Say whether figures can be drawn here; a run does not need them."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_reward(run: RunRecord, path: Path) -> None:
    """Draw each GRPO step's mean reward, and their running mean, as a PNG."""
    steps = [step for step in run.history if step.reward is not None]
    numbers = [step.step + 1 for step in steps]
    rewards = [step.reward or 0.0 for step in steps]
    means = []
    for end in range(1, len(rewards) + 1):
        window = rewards[max(0, end - REWARD_WINDOW) : end]
        means.append(sum(window) / len(window))
    figure, axes = new_figure(*_SIZE)
    taught = 1 - run.settings["teacher_error_rate"]
    axes.axhline(taught, color="#7a7a7a", linestyle="--", linewidth=1, label="right answers the warm start was taught")
    axes.plot(numbers, rewards, color="#1f77b4", alpha=0.35, linewidth=1, label="mean reward of a step")
    axes.plot(numbers, means, color="#1f77b4", linewidth=2, label=f"mean of {REWARD_WINDOW} steps")
    axes.set(xlabel="GRPO step", ylabel="share of right answers", ylim=(0, 1.02))
    preset, largest = run.settings["preset"], run.settings["largest_number"]
    axes.set_title(f"Sums of numbers up to {largest}, {run.parameters:,} weights, {preset} preset")
    axes.legend(loc="lower right", frameon=False)
    save(figure, path)


def draw_step_times(modes: Sequence[ModeSummary], title: str, path: Path) -> None:
    """Draw each mode's median time a step, with the range of its steps, as a PNG."""
    figure, axes = new_figure(*_SIZE)
    medians = [mode.median_ms for mode in modes]
    below = [mode.median_ms - mode.min_ms for mode in modes]
    above = [mode.max_ms - mode.median_ms for mode in modes]
    labels = [f"{mode.label}\n({'fixed' if mode.autotune == 'off' else 'tuned'})" for mode in modes]
    colours = [_COLOURS[mode.label] for mode in modes]
    bars = axes.bar(labels, medians, yerr=[below, above], color=colours, capsize=6, width=0.6)
    axes.bar_label(bars, fmt="%.1f", label_type="center", color="white")
    axes.set(ylabel="ms a step: median, min to max")
    axes.set_title(title)
    save(figure, path)
