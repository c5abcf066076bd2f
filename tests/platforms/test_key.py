"""Keys are the same in every process, and differ wherever anything that matters differs."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import pytest

from rl_engine.platforms.tuning.key import Candidate, TuningKey, bucket, candidates_digest
from rl_engine.platforms.tuning.limits import KeyLimits
from rl_engine.platforms.tuning.store import FileStore
from tests.support.processes import environment, run
from tests.support.tuning import CANDIDATES, FAST, FIXED, SLOW, FakeTrial, Lab, make_key

PRINT_DIGESTS = """
import sys
if sys.argv[1:]: import json, hashlib, decimal, rl_engine.platforms.autotuner  # another import order
from rl_engine.platforms.tuning.key import Candidate, TuningKey, candidates_digest
parts = {"device.name": "card", "b": None, "a": True, "launch.n": 7, "bucket.n": 1024}
names = sorted(parts, key=hash)  # another order under every seed
key = TuningKey.of("_kernel", {name: parts[name] for name in names})
options = [dict(b=1, a=2), dict(a=1, c=3), dict(z=0)]
candidates = tuple(Candidate.of(**{n: o[n] for n in sorted(o, key=hash)}) for o in options)
print(key.digest, key.static_digest, candidates_digest(candidates))
"""


def test_digests_are_the_same_in_every_process(tmp_path: Path) -> None:
    printed = {run(PRINT_DIGESTS, env=environment(PYTHONHASHSEED=seed)) for seed in ("0", "1", "2", "random")}
    printed.add(run(PRINT_DIGESTS, "other order", cwd=tmp_path))
    printed.add(run(PRINT_DIGESTS, env=environment(PYTHONOPTIMIZE="2")))
    static = '["a",true],["b",null],["device.name","card"],["launch.n",7]'
    texts = (
        static.replace('["dev', '["bucket.n",1024],["dev').join(('["_kernel",[', "]]")),
        f'["_kernel",[{static}]]',
        '["candidates",[["fixed","a=2 b=1"],["others","a=1 c=3; z=0"]]]',
    )
    assert printed == {" ".join(hashlib.sha256(text.encode()).hexdigest() for text in texts) + "\n"}


ALIKE = [1, True, 0, False, "1", "True", None, "", "None"]


@pytest.mark.parametrize(("ours", "theirs"), list(itertools.combinations(ALIKE, 2)))
def test_values_that_python_takes_for_equal_are_different_parts(ours: object, theirs: object) -> None:
    first, second = make_key(scalar=ours), make_key(scalar=theirs)  # type: ignore[arg-type]  # parts of any type
    assert first.digest != second.digest
    assert first != second
    assert len({first: 0, second: 0}) == 2
    assert first.differs_from(second) == (("scalar", ours, theirs),)


@pytest.mark.parametrize(("ours", "theirs"), [("1.0", "1"), ("0.0", "-0.0"), ("nan", "0.0")])
def test_floats_are_parts_by_their_text(ours: str, theirs: str) -> None:
    assert make_key(scalar=ours) != make_key(scalar=theirs)
    assert make_key(scalar="nan") == make_key(scalar="nan")  # unlike the float, which never meets itself


def test_equal_parts_are_one_key_in_any_order() -> None:
    forward = TuningKey.of("_kernel", {"a": 1, "b": "x"})
    backward = TuningKey.of("_kernel", {"b": "x", "a": 1})
    assert forward == backward
    assert hash(forward) == hash(backward)
    assert forward.differs_from(backward) == ()
    assert forward != "_kernel"


def test_differences_are_named_in_order() -> None:
    ours = TuningKey.of("_kernel", {"same": 1, "z": 1, "gone": "x", "none": None})
    theirs = TuningKey.of("_other", {"same": 1, "z": 2, "come": True})
    assert ours.differs_from(theirs) == (
        ("kernel", "_kernel", "_other"),
        ("come", None, True),
        ("gone", "x", None),
        ("none", None, None),  # absent is not None
        ("z", 1, 2),
    )
    assert ours.digest != theirs.digest


def test_a_boundary_between_name_and_value_cannot_be_moved() -> None:
    assert TuningKey.of("k", {"a": "b"}) != TuningKey.of("k", {"ab": ""})
    assert TuningKey.of("k", {"a": '","b'}) != TuningKey.of("k", {"a": "", "b": ""})


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (-1, 0),
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 4),
        (4, 4),
        (5, 8),
        (1000, 1024),
        (1024, 1024),
        (1025, 2048),
        (2**40 + 1, 2**41),
    ],
)
def test_sizes_are_rounded_up_to_powers_of_two(size: int, expected: int) -> None:
    assert bucket(size) == expected


def test_buckets_change_the_key_and_not_the_static_signature() -> None:
    small, large, other = make_key(**{"bucket.n": 1}), make_key(**{"bucket.n": 2}), make_key(n=2)
    assert small.digest != large.digest
    assert small.static_digest == large.static_digest != other.static_digest


def test_two_hundred_lengths_are_two_measurements_then_none(tmp_path: Path) -> None:
    keys = [make_key(**{"bucket.n": bucket(length)}) for length in range(1000, 1201)]
    lab, trial = Lab(FileStore(tmp_path / "cache")), FakeTrial()
    assert {lab.select(trial, key).winner for key in keys} == {FAST}
    assert trial.count("qualify") == len(FileStore(tmp_path / "cache").digests()) == 2
    samples = trial.count("sample")
    assert {lab.select(trial, key).source for key in keys} == {"memory"}
    assert trial.count("sample") == samples
    fresh, replayed = Lab(FileStore(tmp_path / "cache")), FakeTrial()
    assert {fresh.select(replayed, key).winner for key in keys} == {FAST}
    assert (replayed.count("sample"), replayed.count("canary")) == (0, 2)


def test_candidates_are_what_their_options_are() -> None:
    assert Candidate.of(num_warps=4, BLOCK=1024) == FIXED
    assert str(FIXED) == "BLOCK=1024 num_warps=4"
    assert str(Candidate.of(cls=1)) == "cls=1"


def test_a_candidate_set_is_its_fixed_launch_and_the_others_in_any_order() -> None:
    assert candidates_digest((FIXED, SLOW, FAST)) == candidates_digest(CANDIDATES)
    different = {candidates_digest(one) for one in [CANDIDATES, (FAST, FIXED, SLOW), (FIXED, FAST), (FIXED,)]}
    assert len(different) == 4


def test_a_signature_that_was_let_through_stays_so() -> None:
    limits = KeyLimits()
    keys = [make_key(n=n) for n in range(64)]
    assert [limits.refuse(key) for key in keys] == [None] * 64
    assert (limits.refuse(make_key(n=64)) or "").startswith("_silu_fwd_kernel: more than 64 signatures")
    assert [limits.refuse(key) for key in keys] == [None] * 64
    sizes = [make_key(n=0, **{"bucket.n": 1 << power}) for power in range(16)]  # 1024 among them
    assert [limits.refuse(key) for key in sizes] == [None] * 16
    assert limits.refuse(make_key(n=0, **{"bucket.n": 1 << 16})) is not None
    assert limits.refuse(sizes[3]) is None
    assert limits.refuse(make_key("_other_kernel", n=64)) is None


def test_one_and_true_count_as_two_values_of_a_part() -> None:
    limits = KeyLimits()
    parts = itertools.product(range(3), range(3), range(2), (0, False, 1, True))
    keys = [make_key(a=a, b=b, c=c, four_values=four) for a, b, c, four in parts]
    refusals = [limits.refuse(key) for key in keys]
    assert refusals.index(next(filter(None, refusals))) == 64
    assert "four_values keeps changing" in (refusals[-1] or "")
