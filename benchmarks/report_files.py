"""The files that runs leave and reports are made of: rows as JSON with a schema, and the folder of a report."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.training.history import replace_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from _typeshed import DataclassInstance

ENVIRONMENT_FILE = "environment.json"
REASONS_FILE = "reasons.json"


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


def main(text: str | None, run: str, write: Callable[[Path, Path], None]) -> None:
    """Call ``write(runs, out)`` with the folders that the command line names; ``run`` is who made the first."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help=f"folder of {run}")
    parser.add_argument("--out", type=Path, required=True, help="the report's folder")
    options = parser.parse_args()
    write(options.runs, options.out)
