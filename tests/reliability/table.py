"""The table of docs/design/reliability.md, from a run's counts.

RELIABILITY_OUT=out.json pytest tests/reliability && python -m tests.reliability.table out.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def table(facts: dict[str, Any]) -> str:
    """Return what a run threw, how often and what came of it, as Markdown."""
    versions = f"Python {facts['python']} and filelock {facts['filelock']}"
    lines = [
        f"Run on {facts['date']} with {versions} on {facts['cores']} cores; {facts['failed']} tests failed.",
        "",
        "| What was thrown at it | How often | What came of it |",
        "|---|---:|---|",
    ]
    lines += [f"| {row['thrown']} | {row['times']:,} | {row['outcome']} |" for row in facts["rows"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))) + "\n")
