"""Which launches are offered on which card, and which are left out because they could not run there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_engine.backends import catalog
from rl_engine.backends.shared.triton import autotuning
from rl_engine.backends.shared.triton.resources import LIMITS, Needs, fits
from rl_engine.platforms import device
from rl_engine.platforms.tuning.key import Candidate
from tests.support.bits_toys import ALIGNED
from tests.support.offline import TARGETS, Offline, compile_offline

catalog.load()
KIB = 1 << 10
FUSED = autotuning.kernels()["_rms_norm_bwd_kernel"]
SILU = autotuning.kernels()["_silu_fwd_kernel"]


@pytest.mark.parametrize(
    ("arch", "launch", "needs", "runs"),
    [
        ("sm_90", {"num_warps": 32}, Needs(), True),
        ("sm_90", {"num_warps": 64}, Needs(), False),  # 2048 threads
        ("gfx942", {"num_warps": 16}, Needs(), True),
        ("gfx942", {"num_warps": 32}, Needs(), False),  # 64 lanes a warp
        ("sm_90", {"num_warps": 4}, Needs(shared_bytes=227 * KIB), True),
        ("sm_90", {"num_warps": 4}, Needs(shared_bytes=227 * KIB + 1), False),
        ("sm_80", {"num_warps": 4}, Needs(shared_bytes=164 * KIB), False),
        ("gfx942", {"num_warps": 4}, Needs(shared_bytes=65 * KIB), False),
        ("gfx950", {"num_warps": 4}, Needs(shared_bytes=65 * KIB), True),
        ("sm_90", {"num_warps": 4}, Needs(registers=255 * 128), True),
        ("sm_90", {"num_warps": 4}, Needs(registers=255 * 128 + 1), False),  # spills
        ("gfx942", {"num_warps": 4}, Needs(registers=512 * 256), True),
        ("sm_90", {"num_warps": 16, "maxnreg": 64}, Needs(registers=65 * 512), False),
        ("sm_90", {"num_warps": 16}, Needs(registers=(1 << 16) + 1), False),  # no multiprocessor has so many
        ("sm_90", {}, Needs(registers=255 * 128 + 1), False),  # Triton's four warps
    ],
)
def test_resource_rules(arch: str, launch: dict[str, int], needs: Needs, runs: bool) -> None:
    assert fits(launch, needs, LIMITS[arch]) is runs


def _fused(dtype: torch.dtype, columns: int, leaves: int) -> Offline:
    names = FUSED.fn.arg_names
    values: dict[str, Any] = dict.fromkeys(names, 16)
    values |= {name: torch.empty(0, dtype=dtype) for name in names if name.endswith("_ptr")}
    values |= {"rstd_ptr": torch.empty(0), "root_ptr": torch.empty(0), "inverse_cols": 0.5, "CASTING": 0}
    values |= {"X_UNIT": 0, "DY_UNIT": 0, "N_COLS": columns, "COLS": columns, "LEAVES": leaves, "SPAN": 1}
    return Offline(FUSED, values, {"num_warps": 4})


def _stages(launch: Offline, target: str) -> set[int]:
    return {dict(one.options)["STAGES"] for one in launch.candidates(TARGETS[target].identity)}


def test_stages_that_no_card_of_that_kind_can_hold_are_not_compiled() -> None:
    wide = _fused(torch.float32, 8192, 1)
    assert _stages(wide, "sm_90") == {1, 2, 3, 4}
    assert _stages(wide, "sm_80") == {1, 2, 3}
    assert _stages(_fused(torch.bfloat16, 8192, 1), "sm_80") == {1, 2, 3, 4}
    assert _stages(wide, "gfx950") == {1}  # the same binary whatever the stages


def test_what_is_left_out_would_not_have_fitted_and_what_is_offered_needs_no_less_than_declared() -> None:
    wide, target = _fused(torch.float32, 8192, 1), TARGETS["sm_80"]
    assert FUSED.declaration.needs is not None
    for stages in (2, 3, 4):
        candidate = Candidate.of(STAGES=stages, num_warps=16)
        needed = compile_offline(wide.with_candidate(candidate), target, ALIGNED).metadata.shared
        declared = FUSED.declaration.needs({**wide.values, "x_ptr": 4, "dy_ptr": 4}, {"STAGES": stages})
        assert declared.shared_bytes <= needed <= 1.1 * declared.shared_bytes
        assert (needed <= target.shared_bytes) is (stages < 4)


def test_waves_are_an_axis_on_amd_only() -> None:
    values = {"x_ptr": torch.empty(0), "y_ptr": torch.empty(0), "n_rows": 1, "n_cols": 1 << 20, "ONE_ROW": True}

    def waves(target: str) -> set[int | None]:
        return {dict(one.options).get("waves_per_eu") for one in SILU.candidates(values, TARGETS[target].identity)}

    assert waves("sm_90") == {None}
    assert waves("gfx942") == {None, 0, 2, 4}  # None: the fixed launch


def test_a_card_of_unknown_limits_is_offered_everything() -> None:
    wide = _fused(torch.float32, 8192, 1)
    assert {dict(one.options)["STAGES"] for one in wide.candidates(device.UNKNOWN)} == {1, 2, 3, 4}


@pytest.mark.parametrize("target", TARGETS)
def test_the_fixed_launch_comes_first_even_where_nothing_else_runs(target: str) -> None:
    first, *_others = _fused(torch.float32, 1 << 20, 1).candidates(TARGETS[target].identity)
    sizes = _fused(torch.float32, 1 << 20, 1).values
    assert dict(first.options) == FUSED.declaration.fixed(sizes, TARGETS[target].identity)
