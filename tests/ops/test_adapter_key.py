"""Everything that may change the code or the speed of a launch changes its keys (cases B48)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from rl_engine.backends.shared.triton import asking, autotuning, compiler
from rl_engine.platforms import device
from rl_engine.platforms.device import DeviceIdentity
from rl_engine.platforms.tuning import identity
from rl_engine.platforms.tuning.key import TuningKey
from rl_engine.platforms.tuning.store import MemoryStore
from rl_engine.runtime.policy import LaunchPolicy, autotune, pinned
from tests.support.ops_inputs import DEVICE
from tests.support.ops_launches import new_process
from tests.support.ops_toys import Stopwatch, by_blocks, keyed_kernel

MEMORY = torch.zeros(4096, device=DEVICE)
BASE: dict[str, Any] = {
    "x_ptr": MEMORY[:1000],
    "extra_ptr": None,
    "y_ptr": MEMORY[2048:3048],
    "n": 1000,
    "stride": 1,
    "scale": 1.5,
    "flag": 7,
}


def _hot(mode: str = "on", phase: str = "forward", **changes: Any) -> tuple[Any, ...]:
    """Return the key that a launch is looked up by in this process."""
    return keyed_kernel._signature.key(mode, phase, **{**BASE, **changes})


def _stored(**changes: Any) -> TuningKey:
    """Return the key of a launch's record, without the machine's parts."""
    return TuningKey.of("keyed_kernel", keyed_kernel._signature.parts({**BASE, **changes}))


DIFFERENT = {
    "dtype": ({}, {"x_ptr": MEMORY[:1000].half()}),
    "dtype of the output": ({}, {"y_ptr": MEMORY[:1000].half()}),
    "last stride 1 or 2": ({}, {"stride": 2}),
    "expanded": ({}, {"stride": 0}),
    "a padded row": ({"stride": 1000}, {"stride": 1001}),
    "a stride of 64 bits": ({"stride": 2**31 - 1}, {"stride": 2**31}),
    "an offset of one element": ({}, {"x_ptr": MEMORY[1:1001]}),
    "an output's offset": ({}, {"y_ptr": MEMORY[2049:3049]}),
    "None or a tensor": ({}, {"extra_ptr": MEMORY[:8]}),
    "1 or 1.0": ({"flag": 1}, {"flag": 1.0}),
    "1 or True": ({"flag": 1}, {"flag": True}),
    "0 or False": ({"flag": 0}, {"flag": False}),
    "0 or 0.0": ({"flag": 0}, {"flag": 0.0}),
    "0 or None": ({"flag": 0}, {"flag": None}),
    "an integer's value": ({"flag": 7}, {"flag": 8}),
    "a length's bucket": ({"n": 1024}, {"n": 1025}),
    "no length": ({"n": 0}, {"n": 1}),
    "a length of 64 bits": ({"n": 2**31 - 1}, {"n": 2**31}),
}
SAME = {  # documented: lengths go by their bucket, of a run-time float only that it is one
    "a length of the same bucket": ({"n": 1000}, {"n": 513}),
    "another float": ({"scale": 1.5}, {"scale": -2.0}),
    "0.0 or -0.0": ({"scale": 0.0}, {"scale": -0.0}),
    "not a number": ({"scale": 1.0}, {"scale": math.nan}),
    "another aligned address": ({}, {"x_ptr": MEMORY[1024:2024]}),
    "another shape behind the same arguments": ({}, {"x_ptr": MEMORY[:4096]}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_b48_what_changes_code_or_speed_changes_both_keys(what: str) -> None:
    before, after = DIFFERENT[what]
    assert _hot(**before) != _hot(**after)
    assert _stored(**before) != _stored(**after)
    assert _stored(**before).differs_from(_stored(**after))


@pytest.mark.parametrize("what", SAME)
def test_b48_what_is_bucketed_changes_neither_key(what: str) -> None:
    before, after = SAME[what]
    assert _hot(**before) == _hot(**after)
    assert _stored(**before) == _stored(**after)


def test_b48_every_length_falls_into_the_same_bucket_hot_and_stored() -> None:
    lengths = [*range(70), 127, 128, 129, 1023, 1024, 1025, 2**20, 2**20 + 1]
    hot = [_hot(n=n) for n in lengths]
    stored = [_stored(n=n).digest for n in lengths]
    for one in range(len(lengths)):
        for other in range(one):
            assert (hot[one] == hot[other]) == (stored[one] == stored[other]), (lengths[one], lengths[other])


def test_b48_phases_and_modes_are_looked_up_apart() -> None:
    assert len({_hot(mode, phase) for mode in ("on", "replay") for phase in ("forward", "backward")}) == 4


def test_b48_phases_have_their_own_records(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch)
    store = MemoryStore()
    with new_process(store):
        for phase in ("forward", "backward", "forward"):
            with pinned(LaunchPolicy("on", phase)):
                keyed_kernel[by_blocks](**BASE)
    assert len(store.digests()) == 2


def test_b48_floats_that_are_not_numbers_do_not_fill_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch)
    with new_process(MemoryStore()) as tuner, autotune("on"):
        for _launch in range(50):
            keyed_kernel[by_blocks](**{**BASE, "scale": float("nan")})
        assert len(keyed_kernel._settled) == 1
        assert tuner.report().counts["tuned"] == 1


def _machine() -> dict[str, Any]:
    """Return the parts that do not change from launch to launch, computed anew."""
    compiler.compiler_parts.cache_clear()
    try:
        return dict(asking.static_parts.__wrapped__((keyed_kernel.fn,), 0 if DEVICE == "cuda" else -1))
    finally:
        compiler.compiler_parts.cache_clear()


CARD = DeviceIdentity("cuda", "H200", "sm_90", 132, 150_000_000_000, 60_000_000, "GPU-1", "0000:01:00")


def _attribute(holder: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(holder, name, value)


MACHINES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "Triton": (_attribute(triton, "__version__", "3.5.99"), "compiler.triton"),
    "torch": (_attribute(torch, "__version__", "2.0.0"), "runtime.torch"),
    "fusion": (_attribute(compiler, "FIXED_OPTIONS", {"enable_fp_fusion": False}), "compiler.fp_fusion"),
    "toolkit": (_attribute(torch.version, "cuda", "11.0"), "runtime.toolkit"),
    "a variable that changes code": (lambda patch: patch.setenv("DISABLE_LLVM_OPT", "1"), "compiler.environment"),
    "source": (_attribute(compiler, "source_digest", lambda _jitted: "another"), "kernel.source"),
}


@pytest.mark.parametrize("what", MACHINES)
def test_b48_another_compiler_library_or_source_is_another_key(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, part = MACHINES[what]
    before = _machine()
    change(monkeypatch)
    after = _machine()
    assert {name for name in before if before[name] != after.get(name)} == {part}


CARDS = {"name": "H100", "sm_count": 108, "memory_bytes": 1, "uuid": "GPU-2", "pci": "0000:02:00", "kind": "hip"}


@pytest.mark.parametrize("field", CARDS)
def test_b48_another_card_is_another_key(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "identify", lambda _index: CARD)
    before = identity.machine_parts(-1, "device")
    monkeypatch.setattr(device, "identify", lambda _index: replace(CARD, **{field: CARDS[field]}))
    after = identity.machine_parts(-1, "device")
    assert {name for name in before if before[name] != after[name]} == {f"device.{field}"}


def test_b48_under_scope_model_identical_cards_share_and_different_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(**changes: Any) -> dict[str, Any]:
        monkeypatch.setattr(device, "identify", lambda _index: replace(CARD, **changes))
        return identity.machine_parts(-1, "model")

    assert parts() == parts(uuid="GPU-2", pci="0000:02:00")
    for field in ("name", "sm_count", "memory_bytes"):
        assert parts() != parts(**{field: CARDS[field]}), field


def test_b48_another_driver_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "identify", lambda _index: CARD)
    found = []
    for version in ("580.1", "590.2"):
        monkeypatch.setattr(identity, "_driver", lambda version=version: version)
        found.append(identity.machine_parts(0, "device")["runtime.driver"])
    assert found == ["580.1", "590.2"]


def test_the_source_digest_covers_helpers_constants_and_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_engine.backends.shared.triton.primitives import logsumexp
    from rl_engine.backends.shared.triton.rows import logp_kernels

    kernel = autotuning.kernels()["_selected_logps_kernel"].fn
    before = compiler.source_digest(kernel)
    assert compiler.source_digest(kernel) == before
    real = compiler.inspect.getsource
    for module in (logp_kernels, logsumexp):  # the helper's module is another file
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                compiler.inspect, "getsource", lambda one, module=module: real(one) + "# edited" * (one is module)
            )
            assert compiler.source_digest(kernel) != before, module.__name__
    monkeypatch.setitem(logsumexp.merge_chunk.fn.__globals__, "LOG2E", triton.language.constexpr(1.0))
    assert compiler.source_digest(kernel) != before
