"""Teach a small transformer to add by GRPO, its embedding, norms, rotations, activations and losses from the library.

    python -m benchmarks.training.grpo              train: on a GPU if there is one, else a small model on the CPU
    python -m benchmarks.training.grpo --compare    the same steps with tuning off, off, on and replayed: equal bytes?
    python -m benchmarks.training.grpo --demo       both, one after the other

Exit codes: 0 all claims held, 1 one did not, 2 the command could not be carried out as it was given.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.training import environment, job, presets
from benchmarks.training.checkpoint import CheckpointMismatchError
from benchmarks.training.compare import ChildFailedError, compare
from rl_engine.errors import BackendError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.training.presets import PresetName, RunSettings

DEMO_REWARD = 0.9

_INTERPRETER_SHOWS = """\
No GPU here, so Triton's interpreter runs the kernels on the CPU, in fp32.
It shows: equal bytes with tuning off, on and replayed; records on disk; a replay that measures nothing.
It cannot show: speed (its times say nothing of a GPU) or bf16."""


class UsageError(ValueError):
    """The options do not fit together, or not to this machine; the message says what to change."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        if options.demo:
            return _demo(options)
        if options.compare:
            preset = presets.comparison(options.preset or _default_preset(compare=True))
            return _compare(_settings(options, preset), options.out)
        preset = presets.training(options.preset or _default_preset())
        return _train(_settings(options, preset), options)
    except (UsageError, SettingsError, BackendError, CheckpointMismatchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ChildFailedError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training.grpo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--compare", action="store_true", help="run in four fresh processes and compare the bytes")
    action.add_argument("--demo", action="store_true", help="train, then compare: the whole idea in one command")
    parser.add_argument("--preset", choices=presets.PRESET_NAMES, help="size of the run (default: what fits here)")
    parser.add_argument("--operators", choices=("triton", "pytorch"), help="default: the preset's")
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"), help="folder of all results (%(default)s)")
    parser.add_argument("--seed", type=int, help="of weights, prompts and samples (default: 0)")
    parser.add_argument("--warm-steps", type=_count, help="supervised steps before GRPO (default: the preset's)")
    parser.add_argument("--steps", type=_count, help="GRPO steps (default: the preset's)")
    parser.add_argument("--autotune", choices=("off", "on", "replay"), help="default: RL_KERNEL_AUTOTUNE's")
    parser.add_argument("--cache-dir", type=Path, help="tuning records (default: RL_KERNEL_AUTOTUNE_CACHE_DIR's)")
    parser.add_argument("--checkpoint-every", type=_count, default=0, metavar="STEPS", help="default: never")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
    parser.add_argument("--target-reward", type=float, metavar="MEAN", help="stop there; exit 1 if it is not reached")
    parser.add_argument("--quiet", action="store_true", help="write run.json, print and draw nothing")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _default_preset(*, compare: bool = False) -> PresetName:
    if torch.cuda.is_available():
        return "gpu"
    return "interpreter" if compare else "cpu"


def _settings(options: argparse.Namespace, settings: RunSettings) -> RunSettings:
    """Return the preset's settings with the command's changes; raises UsageError where they cannot run here."""
    changes = {
        "operators": options.operators,
        "seed": options.seed,
        "warm_steps": options.warm_steps,
        "grpo_steps": options.steps,
    }
    settings = replace(settings, **{name: value for name, value in changes.items() if value is not None})
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--preset {settings.preset}: PyTorch sees no GPU here; use --preset cpu or interpreter")
    return settings


def _train(settings: RunSettings, options: argparse.Namespace) -> int:
    environment.prepare(settings, options.autotune, options.cache_dir)
    job_options = job.JobOptions(
        out=options.out,
        checkpoint_every=options.checkpoint_every,
        resume=options.resume,
        target_reward=options.target_reward,
        quiet=options.quiet,
    )
    record = job.run(settings, job_options)
    if options.target_reward is not None and record.final_reward < options.target_reward:
        print(f"FAILED: mean reward {record.final_reward:.3f}, the target is {options.target_reward}", file=sys.stderr)
        return 1
    return 0


def _compare(settings: RunSettings, out: Path) -> int:
    if settings.operators != "triton":
        raise UsageError("--compare: PyTorch operators have no launches to tune; use --operators triton")
    if settings.grpo_steps < 1:
        raise UsageError("--compare: there is nothing to time; use --steps 1 or more")
    return conclude(compare(settings, out))


def conclude(faults: Sequence[str]) -> int:
    """Print what a comparison found and return the exit code."""
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    if not faults:
        print("equal: every loss and the final weights, byte for byte, in all four runs; the replay measured nothing")
    return 1 if faults else 0


def _demo(options: argparse.Namespace) -> int:
    learning = presets.training(_default_preset())
    comparing = presets.comparison(_default_preset(compare=True))
    print(f"1. Learning to add numbers up to {learning.largest_number} ({learning.operators} operators)", flush=True)
    environment.prepare(learning, options.autotune, options.cache_dir)
    record = job.run(learning, job.JobOptions(out=options.out / "learning"))
    print("\n2. The same bits with tuned launches", flush=True)
    if comparing.preset == "interpreter":
        print(_INTERPRETER_SHOWS, flush=True)
    code = _compare(comparing, options.out / "comparison")
    if record.final_reward < DEMO_REWARD:
        print(f"FAILED: mean reward {record.final_reward:.3f}; the demo asks for {DEMO_REWARD}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
