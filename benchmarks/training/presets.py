"""What a run is made of, and the four sizes it comes in. Equal settings on equal machines give equal bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from benchmarks.training.operators import OperatorFamily

PresetName = Literal["gpu", "launch", "cpu", "interpreter"]
PRESET_NAMES: tuple[PresetName, ...] = get_args(PresetName)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the decoder: ``width`` of the residual stream, ``hidden`` of the MLP."""

    width: int
    layers: int
    heads: int
    hidden: int


@dataclass(frozen=True)
class RunSettings:
    """Everything that decides the bits of a run, tuning apart: that may not.

    Attributes:
        largest_number: that is added to another.
        teacher_error_rate: share of wrong answers that the supervised warm start is taught.
        updates_per_step: optimizer updates on one batch of samples; from the second on, ratios leave 1 and clipping
            has a meaning.
        kl_weight: of the distance to the warm-started policy.
    """

    preset: PresetName
    operators: OperatorFamily
    device: Literal["cuda", "cpu"]
    compute_dtype: Literal["bfloat16", "float32"]
    shape: ModelShape
    largest_number: int
    warm_steps: int
    warm_batch: int
    warm_learning_rate: float
    grpo_steps: int
    prompts_per_step: int
    group_size: int
    learning_rate: float
    teacher_error_rate: float = 0.5
    updates_per_step: int = 2
    clip_eps: float = 0.2
    kl_weight: float = 0.01
    max_gradient_norm: float = 1.0
    seed: int = 0


_GPU = RunSettings(
    preset="gpu",
    operators="triton",
    device="cuda",
    compute_dtype="bfloat16",
    shape=ModelShape(width=768, layers=8, heads=12, hidden=2048),
    largest_number=99,
    warm_steps=1000,
    warm_batch=1024,
    warm_learning_rate=3e-4,
    grpo_steps=200,
    prompts_per_step=64,
    group_size=16,
    learning_rate=3e-5,
)
# So few tokens, and so narrow, that a step's time is the host's: what launching costs shows.
_LAUNCH = replace(
    _GPU,
    preset="launch",
    shape=ModelShape(width=256, layers=8, heads=4, hidden=512),
    warm_steps=20,
    warm_batch=32,
    prompts_per_step=4,
    group_size=8,
)
_CPU = RunSettings(
    preset="cpu",
    operators="pytorch",
    device="cpu",
    compute_dtype="float32",
    shape=ModelShape(width=64, layers=2, heads=4, hidden=128),
    largest_number=9,
    warm_steps=300,
    warm_batch=128,
    warm_learning_rate=3e-3,
    grpo_steps=150,
    prompts_per_step=16,
    group_size=8,
    learning_rate=3e-4,
    teacher_error_rate=0.65,
)
_INTERPRETER = replace(
    _CPU,
    preset="interpreter",
    operators="triton",
    shape=ModelShape(width=32, layers=1, heads=2, hidden=64),
    largest_number=1,  # four sums: some samples are right after a few steps, so that advantages are not all zero
    warm_steps=4,
    warm_batch=8,
    warm_learning_rate=1e-2,
    grpo_steps=3,
    prompts_per_step=2,
    group_size=4,
)
_TRAINING = {preset.preset: preset for preset in (_GPU, _LAUNCH, _CPU, _INTERPRETER)}
_COMPARISON_STEPS = {
    "gpu": (20, 60),
    "launch": (20, 45),
    "cpu": (20, 20),
    "interpreter": (4, 3),
}  # of the warm start, of GRPO


def training(name: PresetName) -> RunSettings:
    """Return the settings that learn."""
    return _TRAINING[name]


def comparison(name: PresetName) -> RunSettings:
    """Return the same run cut to as many steps as a comparison of bytes and times needs."""
    warm_steps, grpo_steps = _COMPARISON_STEPS[name]
    return replace(_TRAINING[name], warm_steps=warm_steps, grpo_steps=grpo_steps)
