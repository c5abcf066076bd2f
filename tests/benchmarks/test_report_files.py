"""Runs that are joined: what an early end left out and a later run of the same sources has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import provenance, report_files

WHERE = {"sources_sha256": "ab", "device": {"name": "a card"}, "packages": {"triton": "3.6.0"}}


def _run(folder: Path, rows: dict[str, Any], where: dict[str, Any] = WHERE) -> Path:
    folder.mkdir()
    (folder / "rows.json").write_text(json.dumps({"schema": 1, **rows}))
    (folder / report_files.ENVIRONMENT_FILE).write_text(json.dumps(where))
    return folder


def _row(preset: str, time_us: float) -> dict[str, Any]:
    return {"operator": "silu", "preset": preset, "phase": "fwd", "time_us": time_us}


def test_a_later_run_adds_what_the_first_left_out(tmp_path: Path) -> None:
    early = {
        "rows": [_row("small", 1.0), _row("thr", 2.0)],
        "skipped": {"silu wide fwd": "no time left", "thr-b fwd": "no time left", "silu last fwd": "no time left"},
        "failed": {},
    }
    late = {
        "rows": [_row("wide", 3.0), _row("thr-b", 4.0), _row("thr", 5.0)],
        "skipped": {"silu last fwd": "no time left"}, "failed": {"silu odd fwd": "RuntimeError: no"},
    }  # fmt: skip
    runs = [_run(tmp_path / "early", early), _run(tmp_path / "late", late)]
    into = tmp_path / "both"
    into.mkdir()
    found = json.loads((report_files.joined(runs, into) / "rows.json").read_bytes())
    assert [(row["preset"], row["time_us"]) for row in found["rows"]] == [
        ("small", 1.0), ("thr", 5.0), ("wide", 3.0), ("thr-b", 4.0),
    ]  # fmt: skip
    assert found["skipped"] == {"silu last fwd": "no time left"}
    assert found["failed"] == {"silu odd fwd": "RuntimeError: no"}
    assert found["schema"] == 1
    assert report_files.environment(into) == WHERE


def test_one_run_is_joined_to_nothing(tmp_path: Path) -> None:
    rows = {"rows": [{"path": "plan", "arguments": 4, "host_us": 1.0}], "faults": ["one", "another"], "skipped": {}}
    run = _run(tmp_path / "only", rows)
    into = tmp_path / "same"
    into.mkdir()
    assert json.loads((report_files.joined([run], into) / "rows.json").read_bytes()) == {"schema": 1, **rows}


def test_a_report_stands_for_the_run_it_was_made_of(tmp_path: Path) -> None:
    report, into = tmp_path / "report", tmp_path / "both"
    rows = [{**_row("small", 1.0), "reason": "It waits."}]
    summary = {"rows": rows, "figures": {"mean": 1.0}, "skipped": {"wide fwd": "no time left"}, "failed": {}}
    report_files.write_report(report, readme="", summary=summary, where=WHERE)
    (report / report_files.REASONS_FILE).write_text("{}")
    run = _run(tmp_path / "rest", {"rows": [_row("wide", 3.0)], "skipped": {}, "failed": {}})
    into.mkdir()
    found = json.loads((report_files.joined([report, run], into) / "rows.json").read_bytes())
    expected = {"schema": 1, "rows": [_row("small", 1.0), _row("wide", 3.0)], "skipped": {}, "failed": {}}
    assert found == expected
    with pytest.raises(ValueError, match="no rows of one benchmark there"):
        report_files.joined([report], into)


def test_joined_runs_say_how_each_was_run(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path / name, {"rows": []}, {**WHERE, "runs": given})
        for name, given in (("first", ["python -m run --seconds 9"]), ("rest", ["python -m run --presets thr"]))
    ]
    into = tmp_path / "both"
    into.mkdir()
    where = report_files.environment(report_files.joined([*runs, runs[1]], into))
    assert where == {**WHERE, "runs": ["python -m run --seconds 9", "python -m run --presets thr"]}
    card = {**where, "device": {"name": "a card", "sm_count": 1}, "driver": "1", "toolkit": "13", "python": "3.12"}
    said = report_files.machine(card)
    assert "Run as `python -m run --seconds 9`, then `python -m run --presets thr`.\n" in said
    assert "Run as" not in report_files.machine({**card, "runs": []})


def test_a_command_line_is_kept_without_paths_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "-m", "a.run", "--out", "/tmp/x y", "--presets", "k1"])
    assert provenance.as_given() == "python3 -m a.run --out 'x y' --presets k1"


def test_runs_of_other_sources_are_not_joined(tmp_path: Path) -> None:
    first = _run(tmp_path / "first", {"rows": []})
    second = _run(tmp_path / "second", {"rows": []}, {**WHERE, "sources_sha256": "cd"})
    with pytest.raises(ValueError, match=r"second cannot be joined to .*first: other sources_sha256; run all of it"):
        report_files.joined([first, second], tmp_path)
