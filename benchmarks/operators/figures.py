"""The picture of the operators' report: each row's share of the memory limit, beside its target and its peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.operators.rows import PEERS
from benchmarks.pictures import new_figure, save

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.operators.rows import Row

_COLOURS = {"eager": "#7a7a7a", "compile": "#d98b1f", "liger": "#b03a3a"}
_MARKS = {"eager": "o", "compile": "s", "liger": "^"}


def draw_shares(rows: Sequence[Row], path: Path) -> None:
    """Draw the shares of the limit as bars, targets and peers as marks, as a PNG."""
    figure, axes = new_figure(8, 1 + 0.28 * len(rows))
    places = range(len(rows))
    axes.barh(places, [row.share for row in rows], color="#1f77b4", height=0.7, label="this library, fixed launch")
    aimed = [(place, row.target_share) for place, row in zip(places, rows, strict=True) if row.target_share is not None]
    axes.scatter(
        [share for _place, share in aimed], [place for place, _share in aimed], marker="|", s=120, color="black",
        label="target", zorder=3,
    )  # fmt: skip
    for name in PEERS:
        seen = [
            (row.limit_us / us, place) for place, row in zip(places, rows, strict=True) if (us := row.peers.get(name))
        ]
        axes.scatter(
            [share for share, _place in seen], [place for _share, place in seen], marker=_MARKS[name], s=18,
            color=_COLOURS[name], label=name, zorder=4,
        )  # fmt: skip
    axes.set_yticks(list(places), [f"{row.operator} {row.preset} {row.phase}" for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -1.6)  # downwards, with room for the legend above
    axes.set(xlabel="share of the memory limit (bytes at 4.3 TB/s)", xlim=(0, 1.05))
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, 1.0), ncols=5, frameon=False, fontsize=8)
    save(figure, path)
