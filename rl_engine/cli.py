"""The command rl-kernel: what was tuned, on what evidence, how fast. It parses, calls and prints."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from rl_engine import settings
from rl_engine.errors import InvalidRecordError, SettingsError, StoreUnusableError
from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import FileStore, PackStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rl_engine.platforms.tuning.key import Candidate

SHORT = 12  # hexadecimal digits of a key that the table shows


class _RefusedError(Exception):
    """A command cannot do what was asked; the message is the one line the user sees."""


@dataclass(frozen=True)
class _Found:
    """A record's text and the folder it lies in."""

    digest: str
    folder: Path
    text: str | None

    def record(self) -> TuningRecord:
        if self.text is None:
            raise _RefusedError(
                f"{self.folder}/{self.digest}.json: not a plain file of ours that nobody else may write to"
            )
        try:
            record = TuningRecord.from_json(self.text)
        except InvalidRecordError as error:
            raise _RefusedError(f"{self.folder}/{self.digest}.json: {error}") from error
        if record.key.digest != self.digest:
            raise _RefusedError(
                f"{self.folder}/{self.digest}.json: holds the record of another key, {record.key.digest}"
            )
        return record


@dataclass(frozen=True)
class _Command:
    """One sub-command: its help, its own arguments, and the function that runs it and returns the exit code."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 after one line on stderr, or exits with 2 where ``argv`` makes no sense."""
    parser = argparse.ArgumentParser(prog="rl-kernel", description="Look at what the autotuner recorded.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        its_parser = commands.add_parser(name, help=command.help, description=command.help)
        its_parser.add_argument(
            "--cache-dir", type=Path, metavar="DIR", help="look only there (default: as RL_KERNEL_AUTOTUNE_* say)"
        )
        its_parser.add_argument("--json", action="store_true", help="print JSON")
        command.add_arguments(its_parser)
        its_parser.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (_RefusedError, SettingsError, StoreUnusableError) as error:
        return _complain(error)


def _list(arguments: argparse.Namespace) -> int:
    stores = _stores(arguments)
    found = [*_records(stores)]
    rows = [(one, record) for one in found if (record := _readable(one)) is not None]
    if arguments.json:
        sys.stdout.write(json.dumps([_summary(*row) for row in rows], indent=1) + "\n")
    elif rows:
        _print_table(("key", "kernel", "winner", "gain %", "noise %", "when", "folder"), itertools.starmap(_row, rows))
    elif not found:
        _print(f"no records in {', '.join(str(store.folder) for store in stores)}")
    return int(len(rows) < len(found))


def _show(arguments: argparse.Namespace) -> int:
    stores, wanted = _stores(arguments), arguments.key.lower()
    matching = {found.digest: found for found in reversed([*_records(stores)]) if found.digest.startswith(wanted)}
    if not matching:
        places = ", ".join(str(store.folder) for store in stores)
        raise _RefusedError(f"no record whose key begins with {arguments.key!r} in {places}; rl-kernel list shows them")
    if len(matching) > 1:
        keys = ", ".join(digest[:SHORT] for digest in sorted(matching))
        raise _RefusedError(f"{arguments.key!r} is ambiguous: {keys}; give more digits")
    (found,) = matching.values()
    record = found.record()
    if arguments.json:
        sys.stdout.write(record.to_json())
    else:
        for line in _description(found, record):
            _print(line)
    return 0


def _no_arguments(_parser: argparse.ArgumentParser) -> None:
    """Add nothing."""


def _key_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", metavar="KEY", help="a record's key, or as many of its first digits as make it unique")


_COMMANDS = {
    "list": _Command("List the records, one a line.", _no_arguments, _list),
    "show": _Command("Show one record with everything it was judged by.", _key_argument, _show),
}


def _stores(arguments: argparse.Namespace) -> list[FileStore | PackStore]:
    """Return where to look: the folder asked for, else this user's own and the packs, as a launch would."""
    if arguments.cache_dir is not None:
        return [FileStore(arguments.cache_dir)]
    chosen = settings.current()
    stores: list[FileStore | PackStore] = [PackStore(folder) for folder in chosen.shared]
    if chosen.cache_dir is not None:
        stores.insert(0, FileStore(chosen.cache_dir))
    if not stores:
        raise _RefusedError("this user has no home and so no cache folder; name one with --cache-dir")
    return stores


def _records(stores: Iterable[FileStore | PackStore]) -> Iterator[_Found]:
    for store in stores:
        for digest in store.digests():
            yield _Found(digest, store.folder, store.load(digest))


def _readable(found: _Found) -> TuningRecord | None:
    """Return the record, or None after a line of complaint: the others are still worth a look."""
    try:
        return found.record()
    except _RefusedError as error:
        _complain(error)
        return None


def _summary(found: _Found, record: TuningRecord) -> dict[str, object]:
    return {
        "key": found.digest,
        "kernel": record.key.kernel,
        "winner": dict(record.winner.options),
        "gain_percent": _gain(record),
        "noise_percent": 100 * record.noise,
        "created": _when(record),
        "folder": str(found.folder),
    }


def _row(found: _Found, record: TuningRecord) -> tuple[str, ...]:
    return (
        found.digest[:SHORT],
        record.key.kernel,
        _name(record, record.winner),
        f"{_gain(record):.1f}",
        f"{100 * record.noise:.1f}",
        _when(record),
        str(found.folder),
    )


def _description(found: _Found, record: TuningRecord) -> Iterator[str]:
    fixed, evidence = record.candidates[0], record.evidence
    yield f"{record.key.kernel}  {found.digest}"
    yield f"from    {found.folder}, {_when(record)}"
    yield f"winner  {_name(record, record.winner)}: {_median(record, record.winner)}"
    yield f"fixed   {fixed}: {_median(record, fixed)}"
    yield f"gain    {_gain(record):.1f}% (noise {100 * record.noise:.1f}%): {record.reason}"
    yield ""
    yield "candidates"
    width = max(len(str(candidate)) for candidate in record.candidates)
    for candidate in record.candidates:
        yield f"  {candidate!s:{width}}  {_median(record, candidate):>12}  {_fate(record, candidate)}"
    yield ""
    yield "evidence"
    yield f"  {evidence.comparisons} byte comparisons, {evidence.repeats} launches an input set each"
    yield f"  inputs: {', '.join(evidence.inputs)}"
    yield f"  bit class: {evidence.bits or 'none, interpreted'}"
    yield f"  timer: {evidence.timer}, {evidence.cache} cache, {len(record.final.get(fixed, ()))} rounds in the final"
    for title, parts in _groups(record):
        yield ""
        yield title
        width = max(len(name) for name, _value in parts)
        for name, value in parts:
            yield f"  {name:{width}}  {json.dumps(value, ensure_ascii=False)}"


def _groups(record: TuningRecord) -> Iterator[tuple[str, list[tuple[str, object]]]]:
    """Yield the key's parts by what stands before the first dot, then the provenance."""
    for group, parts in itertools.groupby(sorted(record.key.parts), key=lambda part: part[0].partition(".")[0]):
        yield f"key: {group}", [(name.partition(".")[2] or name, value) for name, value in parts]
    if record.provenance:
        yield "provenance (not part of the key)", list(record.provenance)


def _name(record: TuningRecord, candidate: Candidate) -> str:
    return f"{candidate} (fixed)" if candidate == record.candidates[0] else str(candidate)


def _fate(record: TuningRecord, candidate: Candidate) -> str:
    """Say what became of a candidate."""
    rejections = {one.candidate: one.reason for one in record.rejections}
    if candidate == record.winner:
        fate = "won"
    elif candidate in rejections:
        fate = f"rejected: {rejections[candidate]}"
    elif candidate == record.candidates[0]:
        fate = "the fixed launch"
    elif candidate in record.final:
        fate = "not the fastest beyond the noise"
    elif candidate in record.screening:
        fate = "not among the fastest in the first rounds"
    else:
        fate = "gave no time, or was the same launch as another"
    return fate


def _median(record: TuningRecord, candidate: Candidate) -> str:
    times_us = record.final.get(candidate) or record.screening.get(candidate)
    return f"{statistics.median(times_us):.2f} µs" if times_us else "not timed"


def _gain(record: TuningRecord) -> float:
    return 100 * (1 - record.ratio)


def _when(record: TuningRecord) -> str:
    return datetime.fromtimestamp(record.created_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _print_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        _print("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


def _print(line: str) -> None:
    # a record's texts may hold what would steer a terminal, or what this one cannot show
    plain = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in line)
    sys.stdout.write(plain.encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding) + "\n")


def _complain(problem: object) -> int:
    sys.stderr.write(f"rl-kernel: {problem}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
