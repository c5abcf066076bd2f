"""What a tuning record is valid for: named parts, so that a miss can be explained field by field."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

Part: TypeAlias = str | int | bool | None
BUCKET = "bucket."  # parts under this prefix change from step to step; `static_digest` leaves them out


@dataclass(frozen=True)
class Candidate:
    """One way to launch a kernel: options by name, sorted. Equal options are equal candidates."""

    options: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, /, **options: int) -> Candidate:
        """Return the candidate with these options."""
        return cls(tuple(sorted(options.items())))

    def __str__(self) -> str:
        """Return e.g. ``BLOCK=1024 num_warps=4``."""
        return " ".join(f"{name}={value}" for name, value in self.options)


@dataclass(frozen=True, eq=False)
class TuningKey:
    """Everything that may change which launch is fastest, or which bits a launch gives. Equal digests are equal keys.

    Attributes:
        kernel: the kernel's name.
        parts: (dotted name, value), sorted by name: ``device.name``, ``compiler.triton``, ``launch.x_ptr.dtype`` ...
    """

    kernel: str
    parts: tuple[tuple[str, Part], ...]

    @classmethod
    def of(cls, kernel: str, parts: dict[str, Part]) -> TuningKey:
        """Return the key with these parts."""
        return cls(kernel, tuple(sorted(parts.items())))

    def __eq__(self, other: object) -> bool:
        """Compare digests: Python's own comparison takes 1 and True for the same part."""
        return isinstance(other, TuningKey) and self.digest == other.digest

    def __hash__(self) -> int:
        """Return the digest's hash."""
        return hash(self.digest)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over kernel and parts: the record's file name."""
        return _digest(self.kernel, self.parts)

    @functools.cached_property
    def static_digest(self) -> str:
        """The same without the bucketed parts: what one training run should hold few of."""
        return _digest(self.kernel, tuple(part for part in self.parts if not part[0].startswith(BUCKET)))

    def agrees_with(self, parts: Mapping[str, Part]) -> bool:
        """Return whether every one of ``parts`` that this key has too is the same here."""
        ours = dict(self.parts)
        return all(_same(ours[name], value) for name, value in parts.items() if name in ours)

    def differs_from(self, other: TuningKey) -> tuple[tuple[str, Part, Part], ...]:
        """Return (name, ours, theirs) for every part that differs; a part one side lacks is None there."""
        ours, theirs = dict(self.parts), dict(other.parts)
        common = ours.keys() & theirs.keys()
        differing = (ours.keys() ^ theirs.keys()) | {name for name in common if not _same(ours[name], theirs[name])}
        found = tuple((name, ours.get(name), theirs.get(name)) for name in sorted(differing))
        return found if self.kernel == other.kernel else (("kernel", self.kernel, other.kernel), *found)


def bucket(size: int) -> int:
    """Return the power of two that ``size`` is rounded up to: sizes of one bucket share a record."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def candidates_digest(candidates: tuple[Candidate, ...]) -> str:
    """Return a digest of a candidate set: the fixed launch first, then the others in any order."""
    fixed, *others = candidates
    return _digest("candidates", (("fixed", str(fixed)), ("others", "; ".join(sorted(map(str, others))))))


def _same(ours: Part, theirs: Part) -> bool:
    return type(ours) is type(theirs) and ours == theirs  # 1, 1.0 and True are different parts


def _digest(kernel: str, parts: tuple[tuple[str, Part], ...]) -> str:
    text = json.dumps([kernel, [list(part) for part in parts]], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
