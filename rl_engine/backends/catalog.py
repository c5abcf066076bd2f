"""Import every operator module once, so that the tables of `rl_engine.backends.spec` are complete."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from typing import TYPE_CHECKING

from rl_engine.backends import reference, spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType


@functools.cache
def load() -> None:
    """Import the operator modules. A module that breaks raises; only an absent ``triton`` package is passed over."""
    for module in _modules(reference):
        importlib.import_module(module)
    if importlib.util.find_spec("triton") is not None:
        triton_backend = importlib.import_module("rl_engine.backends.shared.triton")
        for module in _modules(triton_backend):
            importlib.import_module(module)


def specs() -> Mapping[str, spec.OpSpec]:
    """Return every declared operator by name."""
    load()
    return spec.specs()


def implementations() -> Mapping[str, spec.Implementation]:
    """Return every implementation by backend id."""
    load()
    return spec.implementations()


def _modules(package: ModuleType) -> Iterator[str]:
    # walk_packages passes over packages that fail to import: importing such a one again raises its own error
    found = pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=importlib.import_module)
    return iter(sorted(module.name for module in found if not module.ispkg))
