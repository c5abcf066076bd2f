"""The files that runs leave and reports are made of: rows as JSON with a schema, and the folder of a report."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.training.history import replace_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from _typeshed import DataclassInstance

ENVIRONMENT_FILE = "environment.json"
REASONS_FILE = "reasons.json"
SUMMARY_FILE = "summary.json"
RUNS = "runs"  # of an environment: command lines as they were given
_OF_REPORTS = {ENVIRONMENT_FILE, REASONS_FILE, SUMMARY_FILE}
# What tells a row from others of its list, where it has it.
_NAMED_BY = ("kernel", "path", "arguments", "mode", "operator", "preset", "phase", "provider")
_LEFT_OUT = ("skipped", "failed")


def write_rows(path: Path, results: DataclassInstance, schema: int) -> None:
    """Write everything as JSON, in place of what stood at ``path``."""
    replace_bytes(path, json.dumps({"schema": schema, **asdict(results)}, indent=1).encode())


def read_rows(path: Path, schema: int) -> dict[str, Any]:
    """Return what `write_rows` wrote, by name; raises ValueError for another schema."""
    fields: dict[str, Any] = json.loads(path.read_bytes())
    seen = fields.pop("schema", None)
    if seen != schema:
        raise ValueError(f"{path}: schema {seen}, this code reads {schema}; run the benchmark again")
    return fields


def reasons(out: Path) -> dict[str, Any]:
    """Return what was written by hand beside a report, empty where nothing was."""
    path = out / REASONS_FILE
    return json.loads(path.read_bytes()) if path.exists() else {}


def environment(runs: Path) -> dict[str, Any]:
    """Return where the numbers of a run come from."""
    found: dict[str, Any] = json.loads((runs / ENVIRONMENT_FILE).read_bytes())
    return found


def machine(environment: Mapping[str, Any]) -> str:
    """Return what a report says of where its numbers come from."""
    device, packages = environment["device"], environment["packages"]
    software = [f"{name} {packages[name]}" for name in ("torch", "triton", "liger-kernel") if name in packages]
    card = f"{device['sm_count']} SMs, driver {environment['driver']}, CUDA {environment['toolkit']}"
    runs = ", then ".join(f"`{one}`" for one in environment.get(RUNS, ()))  # reports older than it have none
    given = f"Run as {runs}.\n" if runs else ""
    return (
        f"One {device['name']} ({card}), Python {environment['python']}, {', '.join(software)}.\n{given}"
        "[environment.json](environment.json) has a digest of the sources, [summary.json](summary.json) every number."
    )


def write_report(out: Path, *, readme: str, summary: Mapping[str, Any], where: Mapping[str, Any]) -> None:
    """Write README.md, summary.json and environment.json (``where``) into a report's folder."""
    out.mkdir(parents=True, exist_ok=True)
    for name, content in ((SUMMARY_FILE, summary), (ENVIRONMENT_FILE, where)):
        (out / name).write_text(json.dumps(content, indent=1) + "\n")
    (out / "README.md").write_text(readme)


def joined(runs: Sequence[Path], into: Path) -> Path:
    """Join runs of one command in the folder ``into``, and return it: a run that ended early, and what it left out.

    Where two have a row of the same name, the later one's counts; what one skipped and another has a row of was not
    skipped. A report's folder stands for the run it was made of.

    Raises:
        ValueError: they are of other sources, another card or other software, or none of them is a run.
    """
    first, *others = runs
    where = environment(first)
    given = list(where.get(RUNS, ()))
    for other in others:
        seen = environment(other)
        given += [one for one in seen.get(RUNS, ()) if one not in given]
        changed = sorted(name for name in (where.keys() | seen.keys()) - {RUNS} if where.get(name) != seen.get(name))
        if changed:
            raise ValueError(f"{other} cannot be joined to {first}: other {', '.join(changed)}; run all of it again")
    names = {path.name for run in runs for path in run.glob("*.json")} - _OF_REPORTS
    if len(names) != 1:
        raise ValueError(f"{', '.join(map(str, runs))}: no rows of one benchmark there, but {sorted(names)}")
    (name,) = names
    like = json.loads(next(run / name for run in runs if (run / name).exists()).read_bytes())
    found = _joined([_document(run, name, like) for run in runs])
    replace_bytes(into / name, json.dumps(found, indent=1).encode())
    replace_bytes(into / ENVIRONMENT_FILE, json.dumps({**where, RUNS: given} if given else where, indent=1).encode())
    return into


def _document(run: Path, name: str, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of a run; of a report's folder those of its summary, with the fields that ``like`` has."""
    if (run / name).exists():
        document: dict[str, Any] = json.loads((run / name).read_bytes())
        return document
    summary = json.loads((run / SUMMARY_FILE).read_bytes())
    found = {key: summary.get(key, value) for key, value in like.items()}
    for key, rows in found.items():
        if isinstance(rows, list) and like[key]:
            known = like[key][0]
            found[key] = [{field: row[field] for field in known} for row in rows]
    return found


def _joined(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found = dict(documents[0])
    labels: set[str] = set()
    for name, value in found.items():
        if isinstance(value, list):
            every = [row for document in documents for row in document[name]]
            rows = {_label(row): row for row in every}
            labels |= {" ".join(label[left:]) for label in rows for left in range(2)}  # with the operator, and without
            found[name] = list(rows.values())
    for name in _LEFT_OUT:
        if name in found:
            reasons = {label: why for document in documents for label, why in document[name].items()}
            found[name] = {label: why for label, why in reasons.items() if label not in labels}
    return found


def _label(row: Mapping[str, Any] | str) -> tuple[str, ...]:
    return (row,) if isinstance(row, str) else tuple(str(row[name]) for name in _NAMED_BY if name in row)


def main(text: str | None, run: str, write: Callable[[Path, Path], None]) -> None:
    """Call ``write(runs, out)`` with the folders that the command line names; ``run`` is who made the first."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs_help = f"folder of {run}, or several, which are joined"
    parser.add_argument("--runs", type=Path, required=True, nargs="+", help=runs_help)
    parser.add_argument("--out", type=Path, required=True, help="the report's folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write(joined(options.runs, Path(folder)), options.out)
