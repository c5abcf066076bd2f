"""Where a report's numbers come from: the machine, the software, and a digest of the sources that were run."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_engine.platforms.device import identify
from rl_engine.platforms.tuning.identity import machine_parts

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "rl_engine"
_PACKAGES = ("torch", "triton", "filelock", "numpy", "matplotlib")


def sources_digest(packages: Iterable[str], root: Path = ROOT) -> str:
    """Return the SHA-256 over the path and text of every Python file of some packages, in the order of their paths."""
    digest = hashlib.sha256()
    for path in sorted(path for package in packages for path in (root / package).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def environment(index: int, command: str, *benchmarks: str) -> dict[str, Any]:
    """Return what a reader needs to repeat a measurement.

    Args:
        index: of the accelerator, -1 for the CPU.
        command: that measures everything; how it was run, with which options, is kept beside it.
        benchmarks: the packages under ``benchmarks`` that the measurement depends on, beside the library.
    """
    packages = (LIBRARY, *(f"benchmarks/{name}" for name in benchmarks))
    identity = asdict(identify(index))
    return {
        "command": command,
        "runs": [as_given()],
        "sources": packages,
        "sources_sha256": sources_digest(packages),
        "device": {name: identity[name] for name in ("kind", "name", "arch", "sm_count", "memory_bytes", "l2_bytes")},
        "driver": machine_parts(index, "model")["runtime.driver"],
        "toolkit": machine_parts(index, "model")["runtime.toolkit"],
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
    }


def as_given() -> str:
    """Return this process's command line with its options, of paths that mean nothing elsewhere the last part."""
    return shlex.join(Path(word).name if word.startswith("/") else word for word in sys.orig_argv)


def version(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
