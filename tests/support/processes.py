"""Real processes for tests, started without this machine's settings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without the library's variables, and with these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RL_KERNEL_", "COV_CORE"))}
    return {**kept, "PYTHONPATH": str(ROOT), **changes}


def start(code: str, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a Python process that runs ``code``; its output and errors are pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=environment() if env is None else dict(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(code: str, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Return what a Python process that runs ``code`` prints; a failure shows what it said."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment() if env is None else dict(env),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout
