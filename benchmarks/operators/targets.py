"""What each timed row aims at: microseconds on one H200 (4.3 TB/s of copy), and shares of the memory limit."""

from __future__ import annotations

from typing import Literal, get_args

Phase = Literal["fwd", "bwd", "both"]
PHASES: tuple[Phase, ...] = get_args(Phase)

BYTES_PER_US = 4.3e6  # a device-to-device copy of the H200, read + write: no kernel moves more
SAMPLES = 15  # of which a time is the median
KERNEL_US = 2.5  # what a small kernel costs inside a CUDA graph

# limit / efficiency aimed at, not below KERNEL_US a kernel
TARGETS_US: dict[tuple[str, str], dict[Phase, float]] = {
    ("silu", "small"): {"fwd": 2.5, "bwd": 2.5, "both": 5.0},
    ("silu", "thr"): {"fwd": 197.0, "bwd": 296.0, "both": 493.0},
    ("swiglu", "small"): {"fwd": 2.5, "bwd": 2.5, "both": 5.0},
    ("swiglu", "thr"): {"fwd": 296.0, "bwd": 493.0, "both": 789.0},
    ("swiglu", "thr-moe"): {"fwd": 149.0, "bwd": 249.0, "both": 398.0},
    ("rope", "small"): {"fwd": 2.5, "bwd": 2.5, "both": 5.0},
    ("rope", "thr"): {"fwd": 83.53, "bwd": 83.53, "both": 167.0},
    ("rope", "thr-mla"): {"fwd": 74.02},
    ("embedding", "small"): {"fwd": 2.5, "bwd": 322.0, "both": 324.0},
    ("embedding", "thr"): {"fwd": 67.89, "bwd": 356.0, "both": 424.0},
    ("embedding", "thr-accum"): {"bwd": 117.0},
    ("rms_norm", "small"): {"fwd": 2.5, "bwd": 5.0, "both": 7.5},
    ("rms_norm", "thr"): {"fwd": 67.14, "bwd": 108.0, "both": 175.0},
    ("rms_norm", "thr-wide"): {"fwd": 134.0, "bwd": 215.0, "both": 349.0},
    ("rms_norm", "qk-thr"): {"fwd": 85.48, "bwd": 138.0},
    ("rms_norm", "qk-small"): {"fwd": 2.5},
    ("rms_norm", "kv_a"): {"fwd": 8.87},
    ("ratio_kl", "small"): {"fwd": 10.05, "bwd": 10.05, "both": 20.1},
    ("ratio_kl", "thr"): {"fwd": 616.0, "bwd": 622.0, "both": 1238.0},
    ("grpo_loss_from_logits", "small"): {"fwd": 17.34, "bwd": 16.96, "both": 34.3},
    ("grpo_loss_from_logits", "thr"): {"fwd": 1286.0, "bwd": 1259.0, "both": 2545.0},
    ("grpo_loss_from_logits", "thr-fused"): {"both": 1447.0},
    ("grpo_loss", "small"): {"both": 7.5},
    ("grpo_loss", "thr"): {"both": 39.02},
    ("group_advantages", "small"): {"fwd": 2.5},
    ("logp", "small"): {"fwd": 5.65, "bwd": 10.64, "both": 16.3},
    ("logp", "thr"): {"fwd": 616.0, "bwd": 1232.0, "both": 1848.0},
    ("logp", "thr-ll"): {"fwd": 520.0, "bwd": 1040.0, "both": 1560.0},
}

# shares of the limit at the preset "thr", forward and backward; they replace the microseconds above
SHARES: dict[str, tuple[float, float]] = {
    "silu": (0.96, 0.96),
    "swiglu": (0.96, 0.96),
    "rope": (0.94, 0.94),
    "embedding": (0.90, 0.90),
    "rms_norm": (0.93, 0.88),
    "logp": (0.94, 0.94),
    "ratio_kl": (0.93, 0.93),
    "grpo_loss_from_logits": (0.91, 0.91),
}


def limit_us(phase: Phase, forward_bytes: int, backward_bytes: int) -> float:
    """Return the time in which the copy moves a phase's bytes; ``both`` is the sum."""
    return {"fwd": forward_bytes, "bwd": backward_bytes, "both": forward_bytes + backward_bytes}[phase] / BYTES_PER_US


def phases(operator: str, preset: str) -> tuple[Phase, ...]:
    """Return the phases that have a target at this preset, all of them where none has."""
    aimed = TARGETS_US.get((operator, preset), {})
    return tuple(phase for phase in PHASES if phase in aimed) or PHASES


def target_us(
    operator: str, preset: str, phase: Phase, *, forward_bytes: int, backward_bytes: int, kernels: int
) -> float | None:
    """Return the microseconds a row aims at; None where nothing was set.

    Args:
        operator: its name.
        preset: name of the case.
        phase: what was timed.
        forward_bytes: what the forward must move.
        backward_bytes: what the backward must move.
        kernels: launches of the phase; a small row is not asked for less than `KERNEL_US` each.
    """
    if preset == "thr" and operator in SHARES:
        forward, backward = SHARES[operator]
        parts = {"fwd": forward_bytes / BYTES_PER_US / forward, "bwd": backward_bytes / BYTES_PER_US / backward}
        return sum(parts.values()) if phase == "both" else parts[phase]
    aimed = TARGETS_US.get((operator, preset), {}).get(phase)
    if aimed is None or is_throughput(preset):
        return aimed
    return max(aimed, KERNEL_US * kernels)


def is_throughput(preset: str) -> bool:
    """Say whether a preset is timed with a cold L2: training sizes are, decode sizes are not."""
    return "small" not in preset
