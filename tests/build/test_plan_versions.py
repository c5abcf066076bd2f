"""The table of versions that plans rest on, against the sources of the four Tritons and of the one installed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from rl_engine.backends.shared.triton import plan
from tests.support.launcher_signatures import RECORDED, signatures, version

KNOWN: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())
BEFORE = "gridX, gridY, gridZ, stream, "


def _compiled() -> SimpleNamespace:
    """Return a compiled kernel whose parts are the names that Triton's sources give them."""
    run = SimpleNamespace(
        launch="the C function", launch_cooperative_grid="self.launch_cooperative_grid", launch_pdl="self.launch_pdl"
    )
    return SimpleNamespace(
        run=run, function="function", packed_metadata="kernel_metadata", metadata=SimpleNamespace(tensordesc_meta=[])
    )


def test_the_table_has_exactly_the_versions_whose_sources_were_read() -> None:
    assert list(plan._VERSIONS) == list(KNOWN) == ["3.6", "3.7", "3.8", "3.9"]


def test_the_installed_triton_starts_kernels_as_its_version_did_when_it_was_read() -> None:
    folder = Path(triton.__file__).parents[1]
    assert version(folder) == plan._version()
    assert signatures(folder) == KNOWN[plan._version()]


@pytest.mark.parametrize("known", KNOWN)
def test_what_every_version_must_have_in_common(known: str) -> None:
    found = KNOWN[known]
    assert found["jit"] == (
        "grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata, "
        "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values()"
    )
    assert found["takes_addresses"]
    assert found["hooks"] == ["HookChain"]
    assert found["unloads"] == (known in ("3.8", "3.9"))


@pytest.mark.parametrize("known", KNOWN)
def test_the_safe_entry_takes_what_the_jit_hands_it(known: str) -> None:
    call, head = plan._safe_entry(_compiled())
    assert call is not None
    assert head == ("function", "kernel_metadata", None, None, None)
    parameters = KNOWN[known]["run"].removeprefix(BEFORE).split(", ")
    named = dict(zip(parameters, head, strict=False))
    assert named["function"] == "function"
    if known != "3.6":  # there everything behind the function is *args, handed down to C
        assert parameters == [
            "function", "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "*args",
        ]  # fmt: skip
        assert named["kernel_metadata"] == "kernel_metadata"


def test_the_c_function_is_used_where_it_takes_what_is_listed_here() -> None:
    used = [known for known, version in plan._VERSIONS.items() if version.entry is plan._c_entry]
    assert used == ["3.6"]
    call, head = plan._c_entry(_compiled())
    assert call == "the C function"
    handed = KNOWN["3.6"]["c"].removeprefix(BEFORE).removesuffix(", *args").split(", ")
    scratch = [name for name in handed if name.endswith("_scratch")]
    expected = [None if name in scratch else name for name in handed]
    # behind them what `run` was given behind the function: metadata of the kernel, of the launch, and two hooks
    assert list(head) == [*expected, "kernel_metadata", None, None, None]
    assert len(KNOWN["3.6"]["c_format"]) == 4 + len(head)


@pytest.mark.parametrize("known", KNOWN)
def test_the_table_says_how_many_arguments_stand_before_the_kernels(known: str) -> None:
    version = plan._VERSIONS[known]
    assert len(version.entry(_compiled())[1]) == version.head_length
