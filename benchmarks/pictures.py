"""Pictures of reports: axes to draw on, and a PNG in a file."""

from __future__ import annotations

import importlib
import io
from typing import TYPE_CHECKING, Any

from benchmarks.training.history import replace_bytes

if TYPE_CHECKING:
    from pathlib import Path


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """Return a figure of so many inches, and its axes without a frame on top and on the right."""
    # Figure rather than pyplot: no window system is looked for
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, path: Path) -> None:
    """Write a figure as a PNG, in place of what stood at ``path``."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    replace_bytes(path, image.getvalue())
