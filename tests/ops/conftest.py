"""Tests of operators and of the launch adapter: interpreted on a CPU (TRITON_INTERPRET=1), or on a GPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def _reason_to_skip() -> str | None:
    # only a missing package is a reason: an error inside ours must fail
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    if os.environ.get("TRITON_INTERPRET", "") != "1" and not torch.cuda.is_available():
        return "no GPU; on a CPU set TRITON_INTERPRET=1"
    return None


if os.environ.get("TRITON_INTERPRET", "") == "1":
    torch.set_num_threads(1)  # arrays of a few thousand elements: waiting for threads took half the time


class _SkippedModule(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(_reason_to_skip() or "", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip a module before it is imported, where Triton kernels cannot run at all."""
    return _SkippedModule.from_parent(parent, path=module_path) if _reason_to_skip() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` without one."""
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "") != "1":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU, without TRITON_INTERPRET"))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fill what the package allocates with NaN, or with a sentinel, so that memory never written shows in a result.

    Returns the names of the modules that allocated.
    """
    from tests.support.ops_poison import poison_allocations  # imports the package

    return poison_allocations(monkeypatch)
