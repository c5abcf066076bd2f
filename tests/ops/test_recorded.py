"""Launches written down for benchmarks: as they were asked for, run or not, and which tuning key is theirs."""

import pytest
import torch

from benchmarks.operators.launches import Launch, recorded
from rl_engine.platforms.tuning.key import TuningKey
from rl_engine.runtime.policy import autotune
from rl_engine.runtime.registry import get_op
from tests.support.ops_inputs import DEVICE


def _silu(cols: int, *, running: bool = True) -> tuple[Launch, torch.Tensor]:
    """Return the launch of silu on [2, cols] of ones and what the operator returned."""
    op = get_op("silu", DEVICE, backend="rlkernel.triton.silu")
    with autotune("off"), recorded(running=running) as found:
        y = op(torch.ones(2, cols, device=DEVICE))
    (launch,) = found
    return launch, y


@pytest.mark.parametrize("running", [True, False])
def test_a_launch_is_written_down_whether_it_runs_or_not(running: bool) -> None:
    launch, y = _silu(32, running=running)
    assert launch.kernel.__name__ == "_silu_fwd_kernel"
    launch.values["y_ptr"].fill_(7.0)
    torch.testing.assert_close(y, torch.full_like(y, 7.0), rtol=0, atol=0)  # the operator's own memory


def test_without_running_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, _y = _silu(32)
    launched: list[object] = []
    monkeypatch.setattr(launch.kernel, "_launch", lambda *args, **_kwargs: launched.append(args))
    _silu(32, running=False)
    assert not launched
    _silu(32)
    assert len(launched) == 1


def test_a_key_is_about_the_launch_it_was_made_of() -> None:
    first, others = _silu(32)[0], [_silu(64)[0]]
    key = TuningKey.of("_silu_fwd_kernel", {**first.kernel.parts(first.values), "device.name": "a card"})
    assert first.has(key)
    assert not any(one.has(key) for one in others)
    assert not first.has(TuningKey.of("_silu_bwd_kernel", dict(key.parts)))
