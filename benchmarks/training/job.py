"""One run in this process: warm start or resume, GRPO steps, checkpoints, and the record it leaves in its folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.training import checkpoint, environment, figures
from benchmarks.training.history import RunRecord, StepRecord, final_reward, settings_json
from benchmarks.training.operators import Operators
from benchmarks.training.progress import Progress
from benchmarks.training.trainer import Trainer
from rl_engine.settings import current

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.training.presets import RunSettings

RECORD_FILE = "run.json"
REWARD_FILE = "reward.png"
CHECKPOINT_FILE = "checkpoint.pt"


@dataclass(frozen=True)
class JobOptions:
    """How a run is carried out; none of it may touch its bits.

    Attributes:
        out: the folder of everything it writes.
        checkpoint_every: GRPO steps between checkpoints; 0 writes none.
        resume: go on from the folder's checkpoint, if there is one.
        target_reward: stop once the mean reward of the last steps reaches it.
        quiet: print nothing and draw nothing.
    """

    out: Path
    checkpoint_every: int = 0
    resume: bool = False
    target_reward: float | None = None
    quiet: bool = False


def run(settings: RunSettings, options: JobOptions) -> RunRecord:
    """Carry the run out and return what was written to ``run.json``. `environment.prepare` comes before."""
    environment.make_deterministic()
    options.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(settings, Operators.load(settings.operators, settings.device))
    history = _begin(trainer, options)
    _improve(trainer, history, options)
    autotune = current().autotune
    record = RunRecord(
        settings=settings_json(settings),
        autotune=autotune,
        environment=environment.describe(settings.device),
        parameters=trainer.parameters(),
        total_s=sum(step.step_s for step in history),
        final_reward=final_reward(history),
        digest=trainer.digest(),
        launches=environment.launches(autotune),
        history=tuple(history),
    )
    record.write(options.out / RECORD_FILE)
    if not options.quiet:
        _present(record, options)
    return record


def _begin(trainer: Trainer, options: JobOptions) -> list[StepRecord]:
    """Bring ``trainer`` to the start of GRPO, or to its checkpoint; return the steps that led there."""
    path = options.out / CHECKPOINT_FILE
    if options.resume and path.exists():
        history = checkpoint.load(path, trainer)
        _say(options, f"resumed after GRPO step {trainer.steps_done} from {path}")
        return history
    if options.resume:
        _say(options, f"no checkpoint at {path}: starting from the beginning")
    history = []
    with Progress("warm start", trainer.settings.warm_steps, quiet=options.quiet) as progress:
        for step in trainer.warm_start():
            history.append(step)
            progress.advance(f"loss {step.loss:.3f}")
    trainer.begin_grpo()
    return history


def _improve(trainer: Trainer, history: list[StepRecord], options: JobOptions) -> None:
    """Take the GRPO steps that are left, appending to ``history``."""
    total = trainer.settings.grpo_steps
    with Progress("GRPO", total, done=trainer.steps_done, quiet=options.quiet) as progress:
        while trainer.steps_done < total:
            step = trainer.grpo_step()
            history.append(step)
            progress.advance(f"reward {step.reward:.2f}, KL {step.kl:.3f}, {step.step_s * 1e3:.0f} ms")
            if options.checkpoint_every and trainer.steps_done % options.checkpoint_every == 0:
                checkpoint.save(options.out / CHECKPOINT_FILE, trainer, history)
            if options.target_reward is not None and final_reward(history) >= options.target_reward:
                break


def _present(record: RunRecord, options: JobOptions) -> None:
    rewards = [step.reward for step in record.history if step.reward is not None]
    if rewards:
        risen = f"reward {rewards[0]:.2f} -> {record.final_reward:.2f}"
        print(f"{risen} in {len(rewards)} GRPO steps; {record.total_s:.0f} s with the warm start")
    print(f"weights {record.digest[:16]}; record: {options.out / RECORD_FILE}")
    if figures.is_available():
        figures.draw_reward(record, options.out / REWARD_FILE)
        print(f"figure: {options.out / REWARD_FILE}")
    else:
        print("no figure: matplotlib is not installed")


def _say(options: JobOptions, text: str) -> None:
    if not options.quiet:
        print(text)
