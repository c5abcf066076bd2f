"""Every report names what it measured; a report whose sources have changed since is listed as stale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.provenance import ROOT, sources_digest

REPORTS = sorted(path.parent for path in (ROOT / "reports" / "experiments").glob("*/environment.json"))


PACKAGES = ("rl_engine", "benchmarks/gemm")


def copy_of_sources(target: Path) -> Path:
    for package in (*PACKAGES, "benchmarks/other"):
        (target / package).mkdir(parents=True)
        (target / package / "one.py").write_text("x = 1\n")
    return target


def test_the_digest_sees_text_and_names(tmp_path):
    root = copy_of_sources(tmp_path)
    before = sources_digest(PACKAGES, root)
    (root / "benchmarks" / "other" / "one.py").write_text("x = 2\n")
    assert sources_digest(PACKAGES, root) == before
    (root / "rl_engine" / "one.py").write_text("x = 2\n")
    changed = sources_digest(PACKAGES, root)
    (root / "rl_engine" / "one.py").rename(root / "rl_engine" / "two.py")
    assert len({before, changed, sources_digest(PACKAGES, root)}) == 3


def test_there_are_reports():
    assert REPORTS, "no report under reports/experiments"


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.name)
def test_a_report_says_how_it_was_made(report, record_property, capsys):
    environment = json.loads((report / "environment.json").read_text())
    assert set(environment) >= {"command", "sources_sha256", "device", "driver", "python", "packages"}
    assert json.loads((report / "summary.json").read_text())
    assert (report / "README.md").read_text().startswith("# ")
    stale = environment["sources_sha256"] != sources_digest(environment.get("sources", ("rl_engine", "benchmarks")))
    record_property("stale", stale)
    if stale:
        with capsys.disabled():
            print(f"\nstale: {report.name} was measured on other sources", end=" ")  # noqa: T201  # listed, not failed
