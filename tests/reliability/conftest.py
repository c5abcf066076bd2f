"""Tests of the tuner on its worst day count what they threw at it; RELIABILITY_OUT=out.json keeps the counts."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

_rows: dict[str, dict[str, object]] = {}


@pytest.fixture
def tally() -> Callable[[str, int, str], None]:
    """Return a function (what was thrown, how often, what came of it) to call once that is asserted."""

    def count(thrown: str, times: int, outcome: str) -> None:
        row = _rows.setdefault(thrown, {"thrown": thrown, "times": 0, "outcome": outcome})
        row["times"] = int(str(row["times"])) + times

    return count


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was counted to the file that RELIABILITY_OUT names."""
    out = os.environ.get("RELIABILITY_OUT", "")
    if out:
        facts = {
            "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
            "python": platform.python_version(),
            "filelock": importlib.metadata.version("filelock"),
            "cores": os.cpu_count(),
            "failed": session.testsfailed,
            "rows": list(_rows.values()),
        }
        Path(out).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
