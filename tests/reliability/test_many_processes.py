"""Thirty-two processes on one cache: nobody waits, nobody fails, one winner a key, whatever the locks are worth."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import FileStore
from tests.support.processes import start
from tests.support.reliability_ranks import keys
from tests.support.tuning import CANDIDATES

RANKS, KEYS = 32, 64
LONGEST_S = 5.0  # of one select, with sixteen processes on a core; a waiter would take as long as the measurements
CODE = "import sys\nfrom tests.support.reliability_ranks import together\ntogether(*sys.argv[1:3], {}, {}, {})"


def together(method: str, folder: Path, n_ranks: int, n_keys: int, *, exclusive: bool = True) -> list[dict[str, Any]]:
    process = start(CODE.format(n_ranks, n_keys, exclusive), method, str(folder))
    try:
        out, error = process.communicate(timeout=150)
    finally:
        process.kill()
    assert process.returncode == 0, error[-3000:]
    assert error == ""
    return list(json.loads(out))


def recorded(folder: Path, n_keys: int) -> dict[str, str]:
    """Return the winner of every key on disk, once each record is checked."""
    store, found = FileStore(folder), {}
    assert store.digests() == tuple(sorted(key.digest for key in keys(n_keys)))
    for key in keys(n_keys):
        record = TuningRecord.from_json(store.load(key.digest) or "")
        record.check(key, CANDIDATES)
        found[key.digest] = str(record.winner)
    assert {path.name.partition(".")[2] for path in folder.iterdir()} == {"json", "lock"}, "no temporary file"
    return found


@pytest.mark.timeout(170)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_thirty_two_processes_and_sixty_four_keys_give_one_winner_a_key(
    tmp_path: Path, method: str, tally: Callable[..., None]
) -> None:
    # B08, B41
    folder = tmp_path / "cache"
    ranks = together(method, folder, RANKS, KEYS)
    winners = recorded(folder, KEYS)
    assert [rank["warnings"] for rank in ranks] == [[]] * RANKS
    assert sum(rank["measured"] for rank in ranks) == KEYS, "each key was measured once, by one process"
    for rank in ranks:
        assert {digest: winner for digest, (winner, _source) in rank["answers"].items()} == winners
        assert {source for _winner, source in rank["answers"].values()} <= {"tuned", "disk"}
    slowest_s = max(rank["slowest_s"] for rank in ranks)
    assert slowest_s < LONGEST_S
    again = together("fork", folder, RANKS // 4, KEYS)
    for rank in again:
        assert {(winner, source) for winner, source in rank["answers"].values()} <= {
            (winner, "disk") for winner in winners.values()
        }
        assert {digest: winner for digest, (winner, _source) in rank["answers"].items()} == winners
        assert rank["measured"] == 0
    asked = sum(rank["asked"] for rank in ranks)
    outcome = (
        f"{KEYS} records, each measured once; no failure, no warning; a select took {slowest_s:.2f} s at most; "
        f"{sum(rank['pending'] for rank in ranks)} keys found busy and picked up later; a restart takes all from disk"
    )
    tally(f"{RANKS} processes ({method}) on {KEYS} keys and one cache, asking", asked, outcome)


@pytest.mark.timeout(120)
def test_locks_that_everybody_gets_still_leave_whole_records_and_one_winner(
    tmp_path: Path, tally: Callable[..., None]
) -> None:
    # B19 (c): no exclusion on this mount; the last writer wins
    folder, n_ranks, n_keys = tmp_path / "cache", 8, 24
    ranks = together("fork", folder, n_ranks, n_keys, exclusive=False)
    winners = recorded(folder, n_keys)
    assert sum(rank["measured"] for rank in ranks) >= n_keys
    assert [rank["warnings"] for rank in ranks] == [[]] * n_ranks
    for rank in together("fork", folder, n_ranks, n_keys, exclusive=False):
        assert {digest: winner for digest, (winner, _source) in rank["answers"].items()} == winners
        assert rank["measured"] == 0
    tally("processes whose locks exclude nobody", n_ranks, "whole records, one winner a key after a restart")
