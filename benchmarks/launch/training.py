"""A launch-bound training step with tuning off and on: trainers of one seed, a step each in turns, in one process.

A host's speed drifts by half from one process to the next (reports/experiments/h200_main_job), so runs one after the
other say nothing of a few percent; of steps in turns the drift is everyone's. A second trainer with tuning off shows
what is left of it.
"""

from __future__ import annotations

import gc
import statistics
from typing import TYPE_CHECKING

from benchmarks.launch.rows import TrainingRow
from benchmarks.training import environment
from benchmarks.training.history import timed_ms
from benchmarks.training.operators import Operators
from benchmarks.training.trainer import Trainer
from rl_engine.platforms.tuning.decision import order_of_round
from rl_engine.runtime.policy import autotune

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.launch.rows import Results
    from benchmarks.training.history import StepRecord
    from benchmarks.training.presets import RunSettings
    from rl_engine.settings import AutotuneMode

TRAINERS: Mapping[str, AutotuneMode] = {"off": "off", "on": "on", "off again": "off"}


def training(results: Results, settings: RunSettings) -> None:
    """Add a row for every trainer; a fault where losses or weights are not those of the first."""
    environment.make_deterministic()
    operators = Operators.load(settings.operators, settings.device)
    trainers = {name: Trainer(settings, operators) for name in TRAINERS}
    histories: dict[str, list[StepRecord]] = {name: [] for name in trainers}
    for name, trainer in trainers.items():
        with autotune(TRAINERS[name]):
            histories[name] += trainer.warm_start()
        trainer.begin_grpo()
    for number in range(settings.grpo_steps):
        for name in order_of_round(list(trainers), number):
            gc.collect()  # a collection inside a step would be counted against whoever runs then
            with autotune(TRAINERS[name]):
                histories[name].append(trainers[name].grpo_step())
    digests = {name: trainer.digest() for name, trainer in trainers.items()}
    losses = {name: [step.losses for step in history] for name, history in histories.items()}
    for name, digest in digests.items():
        results.training.append(TrainingRow(name, statistics.median(timed_ms(histories[name])), digest))
        if losses[name] != losses["off"]:
            results.faults.append(f"training, tuning {name}: other losses than with tuning off")
        if digest != digests["off"]:
            results.faults.append(f"training, tuning {name}: other weights than with tuning off")
