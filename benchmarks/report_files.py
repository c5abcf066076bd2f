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
    return (
        f"One {device['name']} ({card}), Python {environment['python']}, {', '.join(software)}.\n"
        "[environment.json](environment.json) has a digest of the sources, [summary.json](summary.json) every number."
    )


def write_report(out: Path, *, readme: str, summary: Mapping[str, Any], where: Mapping[str, Any]) -> None:
    """Write README.md, summary.json and environment.json (``where``) into a report's folder."""
    out.mkdir(parents=True, exist_ok=True)
    for name, content in (("summary.json", summary), (ENVIRONMENT_FILE, where)):
        (out / name).write_text(json.dumps(content, indent=1) + "\n")
    (out / "README.md").write_text(readme)


def joined(runs: Sequence[Path], into: Path) -> Path:
    """Join runs of one command in the folder ``into``, and return it: a run that ended early, and what it left out.

    Where two have a row of the same name, the later one's counts; what one skipped and another has a row of was not
    skipped.

    Raises:
        ValueError: they are of other sources, another card or other software.
    """
    first, *others = runs
    where = environment(first)
    for other in others:
        seen = environment(other)
        changed = sorted(name for name in where.keys() | seen.keys() if where.get(name) != seen.get(name))
        if changed:
            raise ValueError(f"{other} cannot be joined to {first}: other {', '.join(changed)}; run all of it again")
    for path in sorted(first.glob("*.json")):
        documents = [json.loads((run / path.name).read_bytes()) for run in runs]
        replace_bytes(into / path.name, json.dumps(_joined(documents), indent=1).encode())
    return into


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
