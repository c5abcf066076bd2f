"""Launches with fp32 outputs in the place of half-precision ones: they show what rounding hides, and change no more."""

from __future__ import annotations

import pytest
import torch

from benchmarks.operators.launches import Launch, recorded
from benchmarks.qualification.families import of_family
from rl_engine.backends.shared.triton.qualification import BoundLaunch, Sandbox, gate, widened
from rl_engine.errors import TrialUnavailableError
from rl_engine.platforms.tuning.key import Candidate
from rl_engine.platforms.tuning.trial import Rejection
from rl_engine.runtime.policy import autotune
from tests.ops.test_autotuning_candidates import fitting, with_wide_outputs
from tests.support.ops_inputs import DEVICE, of_cases, run_sample, samples, triton_op
from tests.support.ops_toys import add_one, nudged_kernel

OPERATORS = {
    "_silu_fwd_kernel": "silu",
    "_swiglu_bwd_kernel": "swiglu",
    "_rms_norm_fwd_kernel": "rms_norm",
    "_gemm_tiles_kernel": "det_gemm",
}
PLAIN, NUDGED = Candidate.of(PART=0), Candidate.of(PART=1)


def nudged(y: torch.Tensor) -> Launch:
    x = torch.linspace(1, 2, 100, device=DEVICE).to(torch.float16)
    return Launch(nudged_kernel, (1,), (x, y, 100), {"BLOCK": 128})


def bound(outputs: dict[str, torch.Tensor], **others: torch.Tensor) -> BoundLaunch:
    return BoundLaunch(lambda _values, _candidate: None, {**outputs, **others}, tuple(outputs), (), ())


def test_a_difference_that_half_precision_rounds_away_is_seen_in_fp32() -> None:
    launch = nudged(torch.empty(100, dtype=torch.float16, device=DEVICE))
    assert gate(launch.bound(), (PLAIN, NUDGED)).survivors == (PLAIN, NUDGED)
    wide = widened(launch.bound())
    assert wide is not None
    found = gate(wide, (PLAIN, NUDGED))
    assert (found.survivors, found.rejections) == ((PLAIN,), (Rejection(NUDGED, "not_bit_exact"),))
    comparisons, fallen = with_wide_outputs(launch)
    assert (comparisons > 0, fallen) == (True, [Rejection(NUDGED, "not_bit_exact")])


@pytest.mark.parametrize("kernel", OPERATORS)
def test_wide_outputs_round_to_the_narrow_ones_and_candidates_agree_on_them(kernel: str) -> None:
    operator = OPERATORS[kernel]
    (sample,) = (one for one in samples(of_cases("odd")) if (one.spec.name, one.dtype) == (operator, "float16"))
    with recorded() as made, autotune("off"):
        run_sample(triton_op(operator), sample, of_family(sample.inputs(), "cancelling"))
    launch = next(one for one in made if one.kernel.__name__ == kernel)
    narrow, wide = launch.bound(), widened(launch.bound())
    assert wide is not None
    fixed, *others = launch.candidates()
    ours, theirs = Sandbox(wide), Sandbox(narrow)
    for sandbox, one in ((ours, wide), (theirs, narrow)):
        sandbox.reset()
        one.run(sandbox.values, fixed)
    changed = [name for name in narrow.outputs if wide.values[name] is not narrow.values[name]]
    assert changed
    for name in changed:
        assert ours.values[name].dtype == torch.float32
        torch.testing.assert_close(ours.values[name].half(), theirs.values[name], rtol=0, atol=0, equal_nan=True)
    cheapest = min(others, key=launch.programs)
    assert gate(wide, (fixed, cheapest), repeats=1).survivors == (fixed, cheapest)


def test_new_outputs_have_the_old_ones_geometry_in_memory_of_their_own() -> None:
    memory = torch.zeros(4, 24, dtype=torch.bfloat16, device=DEVICE)
    outputs = {
        "left_ptr": memory[:, :8],  # rows of two outputs interleave
        "right_ptr": memory[:, 8:24:2],
        "same_ptr": torch.zeros(1, dtype=torch.float16, device=DEVICE).expand(5),
        "odd_ptr": torch.zeros(65, dtype=torch.float16, device=DEVICE)[1:],
    }
    kept = torch.zeros(4, device=DEVICE)
    wide = widened(bound({**outputs, "kept_ptr": kept}, x_ptr=torch.zeros(4, dtype=torch.float16, device=DEVICE)))
    assert wide is not None
    for name, old in outputs.items():
        new = wide.values[name]
        assert (new.dtype, new.shape, new.stride()) == (torch.float32, old.shape, old.stride()), name
        assert (new.data_ptr() % 16 == 0) == (old.data_ptr() % 16 == 0), name
        assert new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr()
    left, right = wide.values["left_ptr"], wide.values["right_ptr"]
    assert right.data_ptr() - left.data_ptr() == 8 * left.element_size()
    left.fill_(1)
    right.fill_(2)
    assert (left == 1).all()
    assert wide.values["kept_ptr"] is kept
    assert wide.values["x_ptr"].dtype == torch.float16


def test_nothing_is_widened_that_is_wide_or_read_or_empty() -> None:
    halves = torch.zeros(8, dtype=torch.float16, device=DEVICE)
    assert widened(bound({"y_ptr": torch.zeros(8, device=DEVICE)}, x_ptr=halves)) is None
    assert widened(bound({"y_ptr": halves[:4]}, x_ptr=halves)) is None
    assert widened(bound({"y_ptr": halves[:0]})) is None
    assert widened(bound({"y_ptr": halves, "bits_ptr": halves.view(torch.int16)})) is None
    assert widened(BoundLaunch(lambda _values, _candidate: None, {"y_ptr": halves}, (), ("y_ptr",), ())) is None


def test_a_fixed_launch_that_does_not_fit_with_wide_outputs_leaves_the_others_to_each_other() -> None:
    with recorded() as made, autotune("off"):
        add_one(torch.ones(600, dtype=torch.float16, device=DEVICE))
    (launch,) = made
    site, (fixed, second, *others) = launch.site(), launch.candidates()
    site.failures.specialised["", fixed] = "failed: OutOfResources: shared memory"
    kept, fallen = fitting(site, (fixed, second, *others))
    assert (kept[0], fallen[0]) == (second, Rejection(fixed, "failed: OutOfResources: shared memory"))
    site.failures.specialised["", fixed] = "failed: CompilationError: no"
    with pytest.raises(TrialUnavailableError, match="CompilationError"):
        fitting(site, (fixed, second))
