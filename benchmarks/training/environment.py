"""The process around a run: variables that must stand before libraries read them, and what makes PyTorch repeatable."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from benchmarks.training.history import Launches

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.training.presets import RunSettings
    from rl_engine.settings import AutotuneMode


def prepare(settings: RunSettings, autotune: AutotuneMode | None, cache_dir: Path | None) -> None:
    """Set the variables of this process; call it before the first operator is chosen.

    ``autotune`` None leaves RL_KERNEL_AUTOTUNE as the caller has it; ``off`` removes it, so that the run is one of a
    user who never heard of tuning.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS splits some sums differently without its workspace
    if settings.device == "cpu" and settings.operators == "triton":
        os.environ["TRITON_INTERPRET"] = "1"
    if autotune == "off":
        os.environ.pop("RL_KERNEL_AUTOTUNE", None)
    elif autotune is not None:
        os.environ["RL_KERNEL_AUTOTUNE"] = autotune
    if cache_dir is not None:
        os.environ["RL_KERNEL_AUTOTUNE_CACHE_DIR"] = str(cache_dir.absolute())


def make_deterministic() -> None:
    """Let PyTorch use only algorithms that repeat their bits, or raise."""
    torch.use_deterministic_algorithms(mode=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by its module hook
    torch.set_num_threads(1)  # how a CPU product is cut among threads decides its bits


def describe(device: str) -> dict[str, str]:
    """Return what a reader needs in order to repeat the run."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
    }


def launches(autotune: AutotuneMode) -> Launches:
    """Return what the tuner did in this process; with tuning off it is not even imported."""
    if autotune == "off":
        return Launches()
    report = importlib.import_module("rl_engine.platforms.autotuner").report()
    return Launches(dict(report.counts), report.seconds, tuple(asdict(selection) for selection in report.selections))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
