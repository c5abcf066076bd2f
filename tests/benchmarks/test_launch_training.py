"""Trainers that take turns: the same losses and weights each, and what is said where they are not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.launch import run, training
from benchmarks.launch.rows import Results
from benchmarks.training import presets
from benchmarks.training.trainer import Trainer

SETTINGS = replace(presets.training("cpu"), warm_steps=3, grpo_steps=4, warm_batch=8, prompts_per_step=2, group_size=4)


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def test_trainers_in_turns_do_not_touch_each_other() -> None:
    results = Results()
    training.training(results, SETTINGS)
    assert [row.mode for row in results.training] == ["off", "on", "off again"]
    assert all(row.step_ms > 0 for row in results.training)
    assert results.faults == []
    alone = Trainer(SETTINGS, training.Operators.load(SETTINGS.operators, SETTINGS.device))
    list(alone.warm_start())
    alone.begin_grpo()
    for _step in range(SETTINGS.grpo_steps):
        alone.grpo_step()
    assert {row.digest for row in results.training} == {alone.digest()}


def test_other_losses_and_weights_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Trainer] = []

    class Odd(Trainer):
        """The second of them begins with another weight."""

        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            made.append(self)
            if len(made) == 2:
                with torch.no_grad():
                    next(self.policy.parameters()).mul_(1.5)

    monkeypatch.setattr(training, "Trainer", Odd)
    results = Results()
    training.training(results, SETTINGS)
    assert results.faults == [
        "training, tuning on: other losses than with tuning off",
        "training, tuning on: other weights than with tuning off",
    ]


def test_training_changes_torch_so_it_runs_last_and_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []
    monkeypatch.setattr(run.measure, "launches", lambda _results: ran.append("launches"))
    monkeypatch.setattr(run, "training", lambda _results, _settings: ran.append("training"))
    monkeypatch.setattr(run.provenance, "environment", lambda *_asked: {"packages": {}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # put back afterwards
    monkeypatch.setattr(sys, "argv", ["run", "--out", str(tmp_path), "--parts", "training,launches,training"])
    assert run.main() == 0
    assert ran == ["launches", "training"]
    assert Results.read(tmp_path / run.RESULTS_FILE) == Results()
