"""Whatever lies where a record should be: nothing is launched from it that may not be, and nothing raises."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_engine.platforms.tuning.store import FileStore
from tests.reliability import fuzz
from tests.support.reliability_hostile import GOOD, PLACES, TEXTS, may_be_launched
from tests.support.tuning import FAST, FakeTrial, Lab, make_key, make_record

SEED, RECORDS = 7_000_000, 6_000


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep thousands of warnings out of pytest's own records of the log."""
    logger = logging.getLogger("rl_engine")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.mark.timeout(120)
def test_six_thousand_hostile_records_are_never_followed_and_never_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Callable[..., None]
) -> None:
    # B04, B05
    monkeypatch.chdir(tmp_path)
    kinds, outcomes = Counter[str](), Counter[str]()
    for seed in range(SEED, SEED + RECORDS):
        try:
            kind, source = fuzz.throw(tmp_path, seed)
        except Exception as error:
            raise AssertionError(f"python -m tests.reliability.fuzz --seconds 1 --seed {seed}") from error
        kinds[kind] += 1
        outcomes[source] += 1
    assert set(kinds) == {*TEXTS, *PLACES}
    assert min(kinds.values()) > RECORDS / len(kinds) / 2
    assert outcomes["fixed"] > RECORDS / 2
    assert outcomes["tuned"] > RECORDS / 50
    assert outcomes["disk"] + outcomes["shared"] > RECORDS / 100, "mutations that leave a record valid are followed"
    for kind, count in kinds.items():
        tally(f"hostile record: {kind}", count, "none followed that may not be, none raised, warnings short")


@pytest.mark.parametrize("kind", TEXTS)
def test_the_generator_is_seeded_and_makes_records_that_may_not_be_launched(kind: str) -> None:
    made = [TEXTS[kind](random.Random(seed)) for seed in range(50)]
    assert made == [TEXTS[kind](random.Random(seed)) for seed in range(50)]
    assert len(set(made)) > 5
    assert GOOD.encode() not in made


def test_a_cache_full_of_bad_records_costs_one_warning(tmp_path: Path, tally: Callable[..., None]) -> None:
    # B05: one traceback a kernel would flood the log
    store = FileStore(tmp_path / "cache")
    for number in range(200):
        store.publish(make_key(n=number).digest, make_record(make_key(n=-1)).to_json())
    lab = Lab(store)
    assert {lab.select(FakeTrial(), make_key(n=number), mode="replay").source for number in range(200)} == {"fixed"}
    assert len(lab.warnings()) == 1
    tally("a cache in which every record is bad", 200, "one warning")


def test_a_good_record_is_followed(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "cache")
    store.publish(make_key().digest, GOOD)
    chosen = Lab(store).select(FakeTrial(), mode="replay")
    assert (chosen.winner, chosen.source, may_be_launched(GOOD.encode())) == (FAST, "disk", True)
