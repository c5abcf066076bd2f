"""One tuning result as it lies on disk: versioned JSON, data only, validated field by field on the way in."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rl_engine.errors import InvalidRecordError
from rl_engine.platforms.tuning.key import Candidate, Part, TuningKey
from rl_engine.platforms.tuning.trial import Evidence, Rejection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_engine.platforms.tuning.decision import Samples

SCHEMA = 2  # 2 stores the bit class
PROTOCOL = 2  # how candidates are compared and timed; a record made under another protocol is not trusted
_LAST_SECOND = 253_402_300_799  # of the year 9999: what a date can hold
_SHOWN = 100  # characters of a stored value that a message quotes
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class TuningRecord:
    """What was tuned, what won, and everything it was judged by.

    Attributes:
        key: what the record is valid for.
        candidates: all that were considered, the fixed launch first.
        winner: one of them.
        ratio: the winner's time over the fixed launch's; 1.0 where the fixed launch stays.
        noise: standard error of that ratio.
        reason: why this winner.
        screening: microseconds of every candidate, in rounds.
        final: microseconds of the finalists, in rounds; these decided.
        rejections: candidates that fell out before timing.
        evidence: what was compared, and how it was timed.
        provenance: facts that are not part of the key (which card, when identical cards share).
        created_s: seconds since the epoch.
    """

    key: TuningKey
    candidates: tuple[Candidate, ...]
    winner: Candidate
    ratio: float
    noise: float
    reason: str
    screening: Samples
    final: Samples
    rejections: tuple[Rejection, ...]
    evidence: Evidence
    provenance: tuple[tuple[str, Part], ...]
    created_s: int

    def to_json(self) -> str:
        """Return the record as JSON text."""
        index = {candidate: number for number, candidate in enumerate(self.candidates)}
        data = {
            "schema": SCHEMA,
            "kernel": self.key.kernel,
            "key": dict(self.key.parts),
            "digest": self.key.digest,
            "candidates": [dict(candidate.options) for candidate in self.candidates],
            "winner": index[self.winner],
            "ratio": self.ratio,
            "noise": self.noise,
            "reason": self.reason,
            "screening_us": {str(index[candidate]): list(times) for candidate, times in self.screening.items()},
            "final_us": {str(index[candidate]): list(times) for candidate, times in self.final.items()},
            "rejections": [{"candidate": index[one.candidate], "reason": one.reason} for one in self.rejections],
            "evidence": asdict(self.evidence),
            "provenance": dict(self.provenance),
            "created_s": self.created_s,
        }
        return json.dumps(data, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TuningRecord:
        """Parse ``text``; raises InvalidRecordError that names the field which is not as `to_json` writes it."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRecordError(f"not JSON: {type(error).__name__}") from error
        if not isinstance(data, dict):
            raise InvalidRecordError("not a JSON object")
        fields = _Fields(data)
        if fields.whole("schema") != SCHEMA:
            raise InvalidRecordError(f"schema: not {SCHEMA}")
        key = TuningKey.of(fields.text("kernel"), fields.parts("key"))
        if fields.text("digest") != key.digest:
            raise InvalidRecordError("digest: not the digest of the key beside it")
        candidates = tuple(_candidate(item) for item in fields.sequence("candidates"))
        if len(set(candidates)) != len(candidates):
            raise InvalidRecordError("candidates: the same options twice")
        return cls(
            key=key,
            candidates=candidates,
            winner=fields.one_of("winner", candidates),
            ratio=fields.positive("ratio"),
            noise=fields.positive("noise", or_zero=True),
            reason=fields.text("reason"),
            screening=fields.samples("screening_us", candidates),
            final=fields.samples("final_us", candidates),
            rejections=tuple(_rejection(item, candidates) for item in fields.sequence("rejections")),
            evidence=_evidence(fields.mapping("evidence")),
            provenance=tuple(sorted(fields.parts("provenance").items())),
            created_s=fields.whole("created_s", most=_LAST_SECOND),
        )

    def check(self, key: TuningKey, candidates: tuple[Candidate, ...]) -> None:
        """Raise InvalidRecordError unless this record answers for ``key`` with one of today's ``candidates``."""
        differing = self.key.differs_from(key)
        if differing:
            name, stored, wanted = differing[0]
            raise InvalidRecordError(f"key: {_short(name)} is {_short(repr(stored))}, not {_short(repr(wanted))}")
        if self.evidence.protocol != PROTOCOL:
            raise InvalidRecordError(f"evidence: protocol {self.evidence.protocol}, not {PROTOCOL}")
        if self.winner not in candidates:
            raise InvalidRecordError(f"winner: {_short(str(self.winner))} is not among today's candidates")


class _Fields:
    """Reads typed fields of a JSON object; every complaint names the field."""

    def __init__(self, data: Mapping[str, Any], within: str = "") -> None:
        self._data = data
        self._within = within

    def text(self, name: str) -> str:
        return self._typed(name, str)

    def mapping(self, name: str) -> Mapping[str, Any]:
        return self._typed(name, dict)

    def sequence(self, name: str) -> Sequence[Any]:
        return self._typed(name, list)

    def texts(self, name: str) -> tuple[str, ...]:
        found = self.sequence(name)
        if not all(isinstance(item, str) for item in found):
            raise self._invalid(name, "not a list of texts")
        return tuple(found)

    def whole(self, name: str, *, most: int = sys.maxsize) -> int:
        value = self._get(name)
        if type(value) is not int or not 0 <= value <= most:
            raise self._invalid(name, "not a whole number in range")
        return value

    def positive(self, name: str, *, or_zero: bool = False) -> float:
        value = self._get(name)
        if not _is_time(value) and not (or_zero and type(value) in (int, float) and value == 0):
            raise self._invalid(name, "not a positive number")
        return float(value)

    def parts(self, name: str) -> dict[str, Part]:
        found = self.mapping(name)
        if not all(part is None or type(part) in (str, int, bool) for part in found.values()):
            raise self._invalid(name, "a part is neither text, whole number, truth value nor null")
        return dict(found)

    def one_of(self, name: str, candidates: tuple[Candidate, ...]) -> Candidate:
        index = self._get(name)
        if type(index) is not int or not 0 <= index < len(candidates):
            raise self._invalid(name, "not the number of a candidate")
        return candidates[index]

    def samples(self, name: str, candidates: tuple[Candidate, ...]) -> Samples:
        by_number = {str(number): candidate for number, candidate in enumerate(candidates)}
        found: dict[Candidate, tuple[float, ...]] = {}
        for number, times in self.mapping(name).items():
            if number not in by_number:
                raise self._invalid(name, f"{number[:20]!r} is not the number of a candidate")
            if not isinstance(times, list) or not times or not all(_is_time(time) for time in times):
                raise self._invalid(name, "not lists of positive times")
            found[by_number[number]] = tuple(map(float, times))
        return found

    def _get(self, name: str) -> Any:
        if name not in self._data:
            raise self._invalid(name, "missing")
        return self._data[name]

    def _typed(self, name: str, kind: type[_Item]) -> _Item:
        value = self._get(name)
        if not isinstance(value, kind):
            raise self._invalid(name, f"not a {kind.__name__}")
        return value

    def _invalid(self, name: str, problem: str) -> InvalidRecordError:
        return InvalidRecordError(f"{self._within}{name}: {problem}")


def _short(text: str) -> str:
    """Return ``text`` fit for a warning: what lies on disk may hold a megabyte, line breaks, or no text at all."""
    return ascii(text)[1:-1][:_SHOWN]


def _candidate(item: Any) -> Candidate:
    if not isinstance(item, dict) or not all(type(value) is int for value in item.values()):
        raise InvalidRecordError("candidates: options are not whole numbers by name")
    return Candidate.of(**item)


def _rejection(item: Any, candidates: tuple[Candidate, ...]) -> Rejection:
    if not isinstance(item, dict):
        raise InvalidRecordError("rejections: not a list of JSON objects")
    fields = _Fields(item, "rejections.")
    return Rejection(fields.one_of("candidate", candidates), fields.text("reason"))


def _evidence(data: Mapping[str, Any]) -> Evidence:
    fields = _Fields(data, "evidence.")
    return Evidence(
        protocol=fields.whole("protocol"),
        bits=fields.text("bits"),
        comparisons=fields.whole("comparisons"),
        repeats=fields.whole("repeats"),
        inputs=fields.texts("inputs"),
        timer=fields.text("timer"),
        cache=fields.text("cache"),
    )


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max
