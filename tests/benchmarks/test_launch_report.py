"""The report on the launch benchmark: what it says of planted numbers; what of the benchmark runs without a card."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import report_files
from benchmarks.launch import report
from benchmarks.launch.rows import RESULTS_FILE, LaunchRow, OperatorRow, Results, TrainingRow
from benchmarks.provenance import ROOT
from tests.benchmarks.test_operators_report import ENVIRONMENT


def planted(plan_us: float = 6.0, off_us: float = 12.9) -> Results:
    launches = [
        LaunchRow(path, count, us)
        for count in (4, 10, 20)
        for path, us in (("triton", 12.0), ("autotune", 16.5), ("adapter_off", off_us), ("plan", plan_us))
    ]
    operators = [
        OperatorRow(operator, "fwd", provider, us)
        for operator in ("swiglu", "rms_norm")
        for provider, us in (("plan", 10.0), ("eager", 12.5), ("compile", 31.0), ("liger", 63.0))
    ]
    operators.append(OperatorRow("grpo_loss", "both", "liger", None, "it has none, or is not installed"))
    training = [TrainingRow(mode, ms, "a" * 64) for mode, ms in (("off", 20.0), ("on", 16.0), ("off again", 20.1))]
    return Results(launches, operators, training, [])


def test_targets_hold_and_fail_by_the_numbers():
    assert all(one.held for one in report.claims(planted()))
    failed = [one.text for one in report.claims(planted(plan_us=6.1, off_us=13.1)) if not one.held]
    assert failed == [
        "µs that the adapter, off, adds at 4 arguments",
        "plan over Triton's own launch, 10 arguments",
        "µs that the adapter, off, adds at 10 arguments",
        "plan over Triton's own launch, 20 arguments",
        "µs that the adapter, off, adds at 20 arguments",
    ]


def test_what_was_not_measured_is_no_success():
    assert {one.held for one in report.claims(Results())} == {None}
    why = {"training step with tuning on, over off": "it was not run."}
    text = report.readme(Results(), {**ENVIRONMENT}, why)
    assert "- training step with tuning on, over off: it was not run.\n" in text
    assert "- plan over Triton's own launch, 4 arguments: reason not known.\n" in text
    assert "**Claim.** 0 of 13 targets hold. Bytes of the training runs: no training was run." in text


def test_a_report_is_written_from_a_run(tmp_path):
    pytest.importorskip("matplotlib")
    results = planted()
    results.faults.append("plan, 4 arguments: other bytes than Triton's launch")
    results.training[1] = TrainingRow("on", 16.4, "b" * 64)
    results.write(tmp_path / RESULTS_FILE)
    assert Results.read(tmp_path / RESULTS_FILE) == results
    (tmp_path / report_files.ENVIRONMENT_FILE).write_text(json.dumps(ENVIRONMENT))
    report.write(tmp_path, tmp_path / "out")
    assert {one.name for one in (tmp_path / "out").iterdir()} == {
        "README.md", "summary.json", "environment.json", "launches.png",
    }  # fmt: skip
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| 10 | 12.00 | 16.50 | 12.90 | 6.00 |" in text
    assert "Bytes of the training runs: DIFFERENT." in text
    assert "- plan, 4 arguments: other bytes than Triton's launch" in text
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["launches"][0] == {"path": "triton", "arguments": 4, "host_us": 12.0}
    assert summary["operators"][0].keys() >= {"operator", "phase", "provider", "host_us"}
    assert summary["training"][0] == {"mode": "off", "step_ms": 20.0, "digest": "a" * 64}


def test_what_launching_costs_above_the_driver_is_measured_without_a_card():
    pytest.importorskip("triton")
    code = "from benchmarks.launch import host_cost\nhost_cost._CALLS, host_cost._ROUNDS = 20, 1\nhost_cost.main()\n"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found.keys() == {"4", "10", "20"}
    for one in found.values():
        assert 0 < one["plan"] < one["triton"] < 1000
