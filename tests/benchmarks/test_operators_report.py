"""The report on the operators' benchmark: what it says of planted rows."""

from __future__ import annotations

import json

import pytest

from benchmarks import report_files
from benchmarks.operators import report
from benchmarks.operators.rows import Results
from benchmarks.operators.targets import TARGETS_US
from benchmarks.provenance import ROOT
from tests.benchmarks.test_operators_benchmark import planted

ENVIRONMENT = {
    "device": {"name": "NVIDIA H200", "sm_count": 132},
    "driver": "580",
    "toolkit": "13.0",
    "python": "3.12.3",
    "packages": {"torch": "2.11.0", "triton": "3.6.0", "liger-kernel": "0.8.5"},
}


def test_the_summary_has_every_field_of_a_row():
    (row,) = report.summary(Results([planted()]), {})["rows"]
    assert set(row) >= {
        "operator", "preset", "phase", "shape", "time_us", "limit_us", "share", "target_share", "target_us", "peers",
        "naive_us", "bytes_checked", "check", "note",
    }  # fmt: skip
    assert (row["reached"], row["reason"]) == (True, "")


def test_the_readme_says_what_was_reached_and_lists_the_rest():
    missed = planted("logp", "thr", "bwd", time_us=1300.0, spread_us=(1290.0, 1310.0), target_us=1232.0, share=0.89)
    slower = planted("swiglu", "thr", "bwd", peers={"eager": 156.2, "compile": 60.0, "liger": None})
    results = Results([planted(), missed, slower], {"rope thr": "its declaration has no traffic"}, {})
    text = report.readme(results, ENVIRONMENT, {"swiglu thr bwd": "It stores two gradients."})
    assert text.startswith("# ")
    assert "2 of 3 rows reach their target" in text
    assert (
        "| logp | thr | bwd | rows=16384 hidden=4096 | **1300** | 0.89 | 1232 missed | 156.2 | 80.00 | 133.2 |" in text
    )
    known, unknown = text.split("### Not reached, reason not known")
    assert "`swiglu` thr bwd: torch.compile takes 60.00, this 66.00. It stores two gradients." in known
    assert "`logp` thr bwd: 1300 µs of 1232" in unknown
    assert "`rms_norm`" not in text
    assert "rope thr: not timed, its declaration has no traffic." in text
    assert "3,000 bytes in all were compared equal" in text


def test_a_reason_is_not_shown_where_nothing_needs_one():
    reasons = {"rms_norm thr fwd": "Because."}
    assert report.reason(planted(), reasons) == ""
    assert report.reason(planted(time_us=99.0, spread_us=(98.0, 100.0)), reasons) == "Because."


def test_the_reports_reasons_are_of_rows_that_exist():
    path = ROOT / "reports" / "experiments" / "h200_operators" / report_files.REASONS_FILE
    known = {f"{operator} {preset} {phase}" for (operator, preset), aimed in TARGETS_US.items() for phase in aimed}
    assert json.loads(path.read_bytes()).keys() <= known


def test_a_report_is_written_from_a_run(tmp_path):
    pytest.importorskip("matplotlib")
    runs, out = tmp_path / "runs", tmp_path / "out"
    runs.mkdir()
    Results([planted(), planted(preset="small")]).write(runs / "rows.json")
    (runs / "environment.json").write_text(json.dumps(ENVIRONMENT))
    out.mkdir()
    (out / report_files.REASONS_FILE).write_text(json.dumps({"rms_norm small fwd": "It waits."}))
    report.write(runs, out)
    assert {path.name for path in out.iterdir()} == {
        "README.md",
        "summary.json",
        "environment.json",
        "shares.png",
        "reasons.json",
    }
    assert (out / "shares.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((out / "summary.json").read_text())["rows"]) == 2
