"""SIGKILL at any moment of tuning, publishing and pruning: nothing published is lost, nothing broken is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import start

SEED, KILLS = 20_240_607, 600


def killed(call: str, folder: Path) -> dict[str, int]:
    """Return the counts that one of `tests.support.reliability_kills` prints."""
    process = start(f"import sys\nfrom tests.support import reliability_kills as kills\nkills.{call}", str(folder))
    try:
        out, error = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, error
    return dict(json.loads(out))


@pytest.mark.timeout(150)
def test_six_hundred_kills_at_random_moments_lose_nothing(tmp_path: Path, tally: Callable[..., None]) -> None:
    counts = killed(f"kill_at_random(sys.argv[1], {KILLS}, seed={SEED})", tmp_path / "cache")
    assert counts["kills"] == KILLS
    assert counts["published"] > KILLS / 4, "children came far enough to publish"
    assert counts["pruning"] > KILLS / 4
    assert counts["pruning"] > counts["pruned"], "some were killed while they pruned"
    assert counts["temporary files"] > 0, "some were killed while they wrote"
    assert counts["records checked"] > KILLS
    outcome = (
        f"{counts['published']} publications and {counts['pruned']} prunings went on meanwhile; none lost, "
        f"{counts['records checked']} records read back whole, every lock free, {counts['temporary files']} temporary "
        "files left and swept"
    )
    tally("SIGKILL at a random moment of tune, publish, prune", counts["kills"], outcome)


@pytest.mark.timeout(150)
def test_a_kill_at_every_line_of_store_and_locks_loses_nothing(tmp_path: Path, tally: Callable[..., None]) -> None:
    counts = killed("kill_at_every_line(sys.argv[1])", tmp_path / "cache")
    assert counts["kills"] > 100, "one a line"
    assert counts["temporary files"] > 0
    outcome = f"none lost, {counts['records checked']} records read back whole, every lock free"
    tally("SIGKILL at each line of the store and the locks in turn", counts["kills"], outcome)
