"""What lies on disk: a round trip, and a complaint that names the field for everything else."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from rl_engine.errors import InvalidRecordError
from rl_engine.platforms.tuning.key import Candidate, TuningKey
from rl_engine.platforms.tuning.record import TuningRecord
from tests.support.tuning import CANDIDATES, FAST, FIXED, SLOW, make_key, make_record

MISSING = "(missing)"


def as_data(record: TuningRecord | None = None) -> dict[str, Any]:
    return json.loads((record or make_record()).to_json())


def test_a_record_comes_back_as_it_was_written() -> None:
    key = make_key(none=None, flag=True, count=1, text="Größe \ud800")
    record = make_record(key, ratio=1 / 3, noise=5e-324, reason="…", final={FIXED: (1e-9, 1e300)})
    text = record.to_json()
    again = TuningRecord.from_json(text)
    assert again == record
    assert [type(value) for _name, value in again.key.parts] == [type(value) for _name, value in key.parts]
    assert again.to_json() == text
    assert text.isascii()


def test_the_text_is_what_schema_2_says() -> None:
    key_text = '["_silu_fwd_kernel",[["bucket.n",1024],["device.name","card"],["launch.x_ptr.dtype","fp32"]]]'
    assert as_data() == {
        "schema": 2,
        "kernel": "_silu_fwd_kernel",
        "key": {"bucket.n": 1024, "device.name": "card", "launch.x_ptr.dtype": "fp32"},
        "digest": hashlib.sha256(key_text.encode()).hexdigest(),
        "candidates": [
            {"BLOCK": 1024, "num_warps": 4},
            {"BLOCK": 1024, "num_warps": 8},
            {"BLOCK": 2048, "num_warps": 4},
        ],
        "winner": 1,
        "ratio": 0.8,
        "noise": 0.001,
        "reason": "20.0% faster than the fixed launch",
        "screening_us": {"0": [10.0, 10.5], "1": [8.0, 8.5]},
        "final_us": {"0": [10.0, 10.25, 10.5], "1": [8.0, 8.25, 8.5]},
        "rejections": [{"candidate": 2, "reason": "other bytes"}],
        "evidence": {
            "protocol": 2,
            "bits": "5eed-c0de",
            "comparisons": 12,
            "repeats": 2,
            "inputs": ["live", "perturbed"],
            "timer": "fake",
            "cache": "cold",
        },
        "provenance": {"device.uuid": "GPU-1", "ranks": 8},
        "created_s": 1_700_000_000,
    }


def test_a_record_with_a_time_that_is_none_is_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        make_record(final={FIXED: (float("nan"),)}).to_json()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nonsense",
        "[" * 100_000,
        '{"a":' * 100_000,
        make_record().to_json() + "{}",
        make_record().to_json()[:-9],
    ],
    ids=["empty", "cut", "words", "deep lists", "deep objects", "trailing", "torn"],
)
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidRecordError, match="not JSON"):
        TuningRecord.from_json(text)


@pytest.mark.parametrize("text", ["[]", "null", "1", '"schema"'])
def test_json_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidRecordError, match="not a JSON object"):
        TuningRecord.from_json(text)


WRONG = [
    (name, value)
    for name in as_data()
    for value in (MISSING, None, True, -1, 1.5, "7", [[]], {"a": []})
    if (name, type(value)) not in {("ratio", float), ("noise", float), ("reason", str), ("kernel", str)}
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_field_of_another_type_is_refused_by_name(name: str, value: object) -> None:
    data = as_data()
    if value is MISSING:
        del data[name]
    else:
        data[name] = value
    with pytest.raises(InvalidRecordError, match=rf"^{name}\b"):
        TuningRecord.from_json(json.dumps(data))


@pytest.mark.parametrize("name", ["protocol", "bits", "comparisons", "repeats", "inputs", "timer", "cache"])
@pytest.mark.parametrize("value", [MISSING, None, True, -1, 1.5, [1], {}], ids=repr)
def test_a_field_of_the_evidence_is_refused_by_name(name: str, value: object) -> None:
    data = as_data()
    if value is MISSING:
        del data["evidence"][name]
    else:
        data["evidence"][name] = value
    with pytest.raises(InvalidRecordError, match=rf"^evidence\.{name}: "):
        TuningRecord.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("schema", 1, "schema: not 2"),
        ("schema", 1.0, "schema: not a whole number"),
        ("digest", "0" * 64, "digest: not the digest of the key beside it"),
        ("key", {"device.name": 1.0}, "key: a part is neither"),
        ("key", {"device.name": []}, "key: a part is neither"),
        ("candidates", [], "winner: not the number of a candidate"),
        ("candidates", [{"BLOCK": 1024.0}], "candidates: options are not whole numbers"),
        ("candidates", [{"BLOCK": True}], "candidates: options are not whole numbers"),
        ("candidates", [{"a": 1, "b": 2}, {"b": 2, "a": 1}], "candidates: the same options twice"),
        ("winner", 3, "winner: not the number of a candidate"),
        ("winner", 1.0, "winner: not the number of a candidate"),
        ("ratio", 0, "ratio: not a positive number"),
        ("ratio", -0.5, "ratio: not a positive number"),
        ("ratio", 10**400, "ratio: not a positive number"),
        ("noise", -1e-9, "noise: not a positive number"),
        ("noise", False, "noise: not a positive number"),
        ("screening_us", {"3": [1.0]}, "screening_us: '3' is not the number of a candidate"),
        ("screening_us", {"01": [1.0]}, "screening_us: '01' is not the number of a candidate"),
        ("screening_us", {"²": [1.0]}, "screening_us: '²' is not the number of a candidate"),
        ("final_us", {"9" * 5000: [1.0]}, "final_us: '99999999999999999999' is not the number of a candidate"),
        ("final_us", {"0": 1.0}, "final_us: not lists of positive times"),
        ("final_us", {"0": []}, "final_us: not lists of positive times"),
        ("final_us", {"0": [1.0, 0]}, "final_us: not lists of positive times"),
        ("final_us", {"0": [True]}, "final_us: not lists of positive times"),
        ("final_us", {"0": [10**400]}, "final_us: not lists of positive times"),
        ("rejections", [1], "rejections: not a list of JSON objects"),
        ("rejections", [{"reason": "?"}], "rejections.candidate: missing"),
        ("rejections", [{"candidate": 3, "reason": "?"}], "rejections.candidate: not the number"),
        ("rejections", [{"candidate": 2, "reason": None}], "rejections.reason: not a str"),
        ("provenance", {"x": 1.5}, "provenance: a part is neither"),
        ("created_s", 253_402_300_800, "created_s: not a whole number in range"),
    ],
)
def test_a_value_without_meaning_is_refused_by_name(name: str, value: object, complaint: str) -> None:
    with pytest.raises(InvalidRecordError) as refused:
        TuningRecord.from_json(json.dumps({**as_data(), name: value}))
    assert str(refused.value).startswith(complaint)


@pytest.mark.parametrize("name", ["ratio", "noise", "winner", "created_s", "final_us", "key"])
@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_has_no_words_for_are_refused(name: str, word: str) -> None:
    data = {**as_data(), name: {"final_us": {"0": ["@"]}, "key": {"device.name": "@"}}.get(name, "@")}
    text = json.dumps(data).replace('"@"', word)
    with pytest.raises(InvalidRecordError, match=rf"^{name}: "):
        TuningRecord.from_json(text)


@pytest.mark.parametrize("option", ["cls", "self", "options", ""])
def test_any_name_of_an_option_is_data(option: str) -> None:
    data = {**as_data(), "candidates": [{option: 1}, {option: 2}, {option: 3}]}
    assert TuningRecord.from_json(json.dumps(data)).winner == Candidate(((option, 2),))


def test_zero_noise_and_whole_numbers_are_numbers() -> None:
    record = TuningRecord.from_json(json.dumps({**as_data(), "noise": 0, "ratio": 1, "final_us": {"0": [3]}}))
    assert (record.noise, record.ratio, record.final) == (0.0, 1.0, {FIXED: (3.0,)})
    assert type(record.final[FIXED][0]) is float


def test_a_record_answers_for_its_own_key_and_todays_candidates() -> None:
    make_record().check(make_key(), CANDIDATES)
    make_record().check(make_key(), (FIXED, FAST))


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        (make_key("_other_kernel"), "key: kernel is '_silu_fwd_kernel', not '_other_kernel'"),
        (make_key(**{"device.name": "other card"}), "key: device.name is 'card', not 'other card'"),
        (make_key(extra=None), "key: extra is None, not None"),
        (make_key(**{"bucket.n": True}), "key: bucket.n is 1024, not True"),
    ],
)
def test_a_record_does_not_answer_for_another_key(key: TuningKey, complaint: str) -> None:
    with pytest.raises(InvalidRecordError) as refused:
        make_record().check(key, CANDIDATES)
    assert str(refused.value) == complaint


def test_a_record_of_another_protocol_or_with_a_winner_of_yesterday_does_not_answer() -> None:
    data = as_data()
    data["evidence"]["protocol"] = 1
    with pytest.raises(InvalidRecordError, match=r"^evidence: protocol 1, not 2$"):
        TuningRecord.from_json(json.dumps(data)).check(make_key(), CANDIDATES)
    with pytest.raises(InvalidRecordError, match=r"^winner: BLOCK=1024 num_warps=8 is not among today's candidates$"):
        make_record().check(make_key(), (FIXED, SLOW))
