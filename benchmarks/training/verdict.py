"""What a comparison may claim: pure functions from run records to faults, each said in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.training.history import RunRecord

Runs = Mapping[str, "RunRecord"]  # by label: off, on, replay, off again


def faults(runs: Runs) -> tuple[str, ...]:
    """Return why the comparison fails; empty where tuning kept every bit and the replay measured nothing.

    runs: the records of ``off``, ``on``, ``replay`` and ``off again``.
    """
    unrepeatable = difference(runs, "off", "off again")
    if unrepeatable:
        return (f"{unrepeatable}: PyTorch itself is not deterministic here, so this says nothing of tuning",)
    found = [difference(runs, "off", label) for label in ("on", "replay")]
    return (*(fault for fault in found if fault), *_launch_faults(runs))


def difference(runs: Runs, one: str, other: str) -> str | None:
    """Return where two runs first differ: in a loss, bit for bit, in a reward, or in the weights; None if nowhere."""
    history, other_history = runs[one].history, runs[other].history
    for step, other_step in zip(history, other_history, strict=False):
        where = f"{one} and {other} differ first at {step.phase} step {step.step}"
        if step.losses != other_step.losses:
            return f"{where}: losses {', '.join(step.losses)} and {', '.join(other_step.losses)}"
        if step.reward != other_step.reward:
            return f"{where}: equal losses, rewards {step.reward} and {other_step.reward}"
    if len(history) != len(other_history):
        return f"{one} and {other} differ in length: {len(history)} and {len(other_history)} steps"
    if runs[one].digest != runs[other].digest:
        digests = f"{runs[one].digest} and {runs[other].digest}"
        return f"{one} and {other} differ in their final weights after equal losses: {digests}"
    return None


def _launch_faults(runs: Runs) -> list[str]:
    on, replay = runs["on"].launches, runs["replay"].launches
    found = []
    tuned, from_disk = on.keys_from("tuned"), replay.keys_from("disk")
    if not tuned:
        found.append("on tuned no launch: the cache was not cold, or no operator that tunes was used")
    if replay.counts.get("tuned", 0):
        found.append(f"replay measured {replay.counts['tuned']} launches; it may use records only")
    lost = sorted(tuned - from_disk)
    if lost:
        missing = " ".join(lost[0])
        found.append(f"replay took {len(tuned) - len(lost)} of {len(tuned)} tuned launches from disk, not {missing}")
    if replay.counts.get("quarantined", 0):
        found.append(f"replay quarantined {replay.counts['quarantined']} records: other bytes than the fixed launch's")
    return found
