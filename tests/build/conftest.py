"""Tests that compile kernels for cards that are not there: they need Triton's compiler, not its interpreter."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def _reason_to_skip(module: Path) -> str | None:
    if module.name == "test_sources.py":  # reads files only
        return None
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    if os.environ.get("TRITON_INTERPRET", "") == "1":
        return "kernels are interpreted in this process; run tests/build without TRITON_INTERPRET"
    return None


class _SkippedModule(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(_reason_to_skip(self.path) or "", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip a module before it is imported, where it cannot compile."""
    return _SkippedModule.from_parent(parent, path=module_path) if _reason_to_skip(module_path) else None


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a card that is not there, on which the kernel of `tests.support.plan_toys` is launched."""
    from tests.support.plan_toys import toy_card  # imports the package

    with toy_card(monkeypatch) as made:
        yield made
