"""Hostile records for as long as asked: ``python -m tests.reliability.fuzz --seconds 600 --seed 1``."""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import FileStore, MemoryStore, PackStore
from tests.support.reliability_hostile import KEY, PLACES, TEXTS, may_be_launched
from tests.support.tuning import CANDIDATES, FAST, FIXED, FakeTrial, Lab

LONGEST_WARNING = 500


def throw(folder: Path, seed: int, kinds: tuple[str, ...] = (*TEXTS, *PLACES)) -> tuple[str, str]:
    """Put one hostile record, drawn from ``seed``, before a tuner; return its kind and what the tuner did.

    Every twelfth is met by a tuner that may measure, which must replace it; every fifth lies in a shared pack.
    """
    chance = random.Random(seed)
    kind = chance.choice(kinds)
    own, pack, measuring = FileStore(folder / "own"), FileStore(folder / "pack"), chance.random() < 1 / 12
    own.publish("placeholder", "")  # makes the folder
    pack.publish("placeholder", "")
    place = chance.choice((own, own, own, own, pack)).folder / f"{KEY.digest}.json"
    text = TEXTS[kind](chance) if kind in TEXTS else b""
    try:
        if kind in TEXTS:
            place.write_bytes(text)
            place.chmod(0o600)
        else:
            PLACES[kind](place)
        trial = FakeTrial()
        lab = Lab(own if measuring or place.parent == own.folder else MemoryStore(), PackStore(pack.folder))
        chosen = lab.select(trial, KEY, mode="on" if measuring else "replay")
        _judge(lab, text, chosen.source, chosen.winner)
        if measuring and chosen.source == "tuned" and kind != "folder":
            TuningRecord.from_json(own.load(KEY.digest) or "").check(KEY, CANDIDATES)
        return kind, chosen.source
    finally:
        for path in (place, place.with_name("elsewhere"), own.folder / place.name):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def _judge(lab: Lab, text: bytes, source: str, winner: object) -> None:
    assert winner in CANDIDATES, f"launched {winner}"
    if source in ("disk", "shared"):
        assert may_be_launched(text), "followed a record that it should not"
        assert lab.warnings() == []
    else:
        assert winner == (FAST if source == "tuned" else FIXED), f"{winner}, {source}"
    assert len(lab.warnings()) <= 2, lab.warnings()  # one of the folder, one of the records in it
    for warning in lab.warnings():
        assert len(warning) <= LONGEST_WARNING, f"a warning of {len(warning)} characters"
        assert warning.isprintable(), ascii(warning)


def main(arguments: list[str]) -> int:
    """Throw until the time is over; returns 1 at the first failure, whose seed it prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    logging.getLogger("rl_engine").setLevel(logging.CRITICAL)
    counts: Counter[str] = Counter()
    seed, ends_s = chosen.seed, time.monotonic() + chosen.seconds
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < ends_s:
            try:
                kind, source = throw(Path(folder), seed)
            except Exception:
                sys.stderr.write(f"failed: python -m tests.reliability.fuzz --seconds 1 --seed {seed}\n")
                raise
            counts[f"{kind}: {source}"] += 1
            seed += 1
    for name, count in sorted(counts.items()):
        sys.stdout.write(f"{count:8d}  {name}\n")
    seeds = f"seeds {chosen.seed} to {seed - 1}"
    sys.stdout.write(f"{sum(counts.values())} records, {seeds}: none launched that should not be\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
