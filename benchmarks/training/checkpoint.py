"""Checkpoints: everything that decides the rest of a run, in one file that is old or new but never half."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from benchmarks.training.history import SCHEMA, StepRecord, replace_bytes, settings_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.training.trainer import Trainer


class CheckpointMismatchError(ValueError):
    """A checkpoint belongs to another run; the message says in what it differs."""


def save(path: Path, trainer: Trainer, history: Sequence[StepRecord]) -> None:
    """Write ``trainer``, which is past its warm start, and ``history`` to ``path``."""
    if trainer.reference is None:
        raise RuntimeError("save: no reference policy yet; call begin_grpo first")
    content = io.BytesIO()
    torch.save(
        {
            "schema": SCHEMA,
            "settings": json.dumps(settings_json(trainer.settings)),
            "history": json.dumps([asdict(step) for step in history]),
            "steps_done": trainer.steps_done,
            "policy": trainer.policy.state_dict(),
            "reference": trainer.reference.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "random": trainer.random.get_state(),
        },
        content,
    )
    replace_bytes(path, content.getvalue())


def load(path: Path, trainer: Trainer) -> list[StepRecord]:
    """Bring a new ``trainer`` to where ``path`` was written and return the history up to there.

    Raises CheckpointMismatchError if the file is of another schema or of other settings; the number of GRPO steps may
    differ, since it decides only where a run ends.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["schema"] != SCHEMA:
        raise CheckpointMismatchError(f"{path}: schema {state['schema']}, this code reads {SCHEMA}; start a new run")
    seen, wanted = json.loads(state["settings"]), settings_json(trainer.settings)
    other = [name for name in wanted if name != "grpo_steps" and seen.get(name) != wanted[name]]
    if other:
        differences = ", ".join(f"{name}={seen.get(name)} there and {wanted[name]} here" for name in other)
        raise CheckpointMismatchError(f"{path}: another run's, with {differences}; give its options or another --out")
    trainer.begin_grpo().load_state_dict(state["reference"])
    trainer.policy.load_state_dict(state["policy"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.random.set_state(state["random"])
    trainer.steps_done = state["steps_done"]
    return [StepRecord.from_json(step) for step in json.loads(state["history"])]
