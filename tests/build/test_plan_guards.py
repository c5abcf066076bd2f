"""When a plan that fits must not be used: hooks, globals, other devices, forks, unknown compilers, failed proofs."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from rl_engine.backends.shared.triton import plan
from rl_engine.platforms import device
from rl_engine.platforms.device import DeviceIdentity
from rl_engine.platforms.tuning import events
from rl_engine.runtime.policy import autotune
from tests.support.fake_card import FakeCard, on_card
from tests.support.plan_toys import BASE, MEMORY, blocks, shifted_kernel, start, warm

THREADS = 16
JITTED = shifted_kernel.fn


def _warnings() -> list[str]:
    return [one.reason for one in events.log().events("warning") if one.reason.startswith("shifted_kernel")]


@pytest.mark.parametrize("side", ["launch_enter_hook", "launch_exit_hook"])
def test_profilers_that_install_launch_hooks_see_every_launch(side: str, card: FakeCard) -> None:
    warm(card)
    seen: list[str] = []
    hooks = getattr(triton.knobs.runtime, side)

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    hooks.add(hook)
    try:
        for _launch in range(3):
            assert not start(card).by_address
    finally:
        hooks.remove(hook)
    assert seen == ["shifted_kernel"] * 3
    assert start(card).by_address


def test_another_chain_of_hooks_is_called(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    warm(card)
    seen: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "launch_enter_hook", seen.append)
        assert not start(card).by_address
    assert len(seen) == 1
    assert start(card).by_address


def test_hooks_before_a_run_are_called(card: FakeCard) -> None:
    warm(card)
    seen: list[dict[str, Any]] = []
    JITTED.add_pre_run_hook(lambda *_args, **kwargs: seen.append(kwargs))
    try:
        assert not start(card).by_address
    finally:
        JITTED.pre_run_hooks.clear()
    assert [one["CUTOFF"] for one in seen] == [0.5]
    assert start(card).by_address


def test_a_signature_met_first_under_a_hook_is_not_planned_and_its_kind_not_condemned(card: FakeCard) -> None:
    hooks, before = triton.knobs.runtime.launch_enter_hook, len(_warnings())
    hooks.add(print)
    try:
        start(card)
    finally:
        hooks.remove(print)
    assert not start(card).by_address
    assert len(_warnings()) == before
    warm(card, stride=48)


@pytest.mark.parametrize("value", [tl.constexpr(3.0), 2.0, None])
def test_a_captured_global_that_changed_is_tritons_to_refuse(value: Any, card: FakeCard) -> None:
    warm(card)
    scope = JITTED.__globals__
    before = scope["SHIFT"]
    if value is None:
        del scope["SHIFT"]
    else:
        scope["SHIFT"] = value
    try:
        if value == 2.0:  # equal, though not the same: the ordinary path judges
            start(card)
        else:
            with pytest.raises(RuntimeError, match="Global variable SHIFT has changed"):
                start(card)
    finally:
        scope["SHIFT"] = before
    assert start(card).by_address


def test_what_a_captured_global_holds_is_looked_at_too(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    warm(card)
    with monkeypatch.context() as patch:
        patch.setattr(JITTED.__globals__["SHIFT"], "value", 3.0)
        with pytest.raises(RuntimeError, match="Global variable SHIFT has changed"):
            start(card)
    assert start(card).by_address


def test_debugging_switched_on_by_hand_compiles_another_kernel(card: FakeCard) -> None:
    planned = warm(card)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.debug = True
        debugged = start(card)
    assert not debugged.by_address
    assert debugged.function != planned.function
    assert start(card).by_address


def test_instrumentation_switched_on_by_hand_is_tritons(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    warm(card)
    compiled: list[str] = []
    monkeypatch.setattr(JITTED, "run", lambda *_args, **_kwargs: compiled.append("by Triton"))
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.compilation, "instrumentation_mode", "fpsan")
        shifted_kernel[blocks](**BASE)
    assert compiled == ["by Triton"]
    shifted_kernel[blocks](**BASE)
    assert compiled == ["by Triton"]


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0+git1234"])
def test_a_version_that_is_not_in_the_table_takes_the_ordinary_path_with_one_line(
    version: str, card: FakeCard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    caplog.set_level(logging.DEBUG, events.logger.name)
    for stride in (32, 48):
        for _launch in range(2):
            assert not start(card, stride=stride).by_address
    lines = [one.getMessage() for one in caplog.records if "launch plans" in one.getMessage()]
    assert lines == [
        f"no launch plans, every launch goes through Triton: Triton {version} is none of 3.6, 3.7, 3.8, 3.9"
    ]


def test_other_makes_of_cards_take_the_ordinary_path(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    start(card)
    hip = triton.backends.compiler.GPUTarget("hip", "gfx942", 64)
    monkeypatch.setattr(FakeCard, "get_current_target", lambda _self: hip)
    plan._unsupported.cache_clear()
    assert "hip" in (plan._unsupported() or "")


def test_a_failed_proof_means_the_ordinary_path_and_one_warning(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events.log(), "_warned", set())
    before = len(_warnings())
    card.broken = True
    for stride in (32, 48, 64):
        start(card, stride=stride)
        assert not start(card, stride=stride).by_address
    found = _warnings()[before:]
    assert len(found) == 1
    assert "its launch plan gave other bytes than Triton's launch; please report it" in found[0]


def test_a_plan_that_cannot_be_started_means_the_ordinary_path(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(compiled: Any) -> Any:
        call, head = plan._safe_entry(compiled)
        return call, head[:-1]  # one argument short

    monkeypatch.setattr(plan, "_VERSIONS", {plan._version(): replace(plan._SAFE, entry=entry)})
    monkeypatch.setattr(events.log(), "_warned", set())
    start(card)
    assert not start(card).by_address
    assert "its launch plan failed" in _warnings()[-1]


def test_a_fault_while_a_plan_is_made_costs_no_launch(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: Any) -> None:
        raise AttributeError("a newer Triton has no such thing")

    monkeypatch.setattr(plan, "obstacle", broken)
    monkeypatch.setattr(events.log(), "_warned", set())
    for _launch in range(2):
        assert not start(card).by_address
    assert _warnings()[-1].endswith("please report it (AttributeError: a newer Triton has no such thing)")


def test_a_launch_that_writes_nothing_proves_nothing(card: FakeCard) -> None:
    before = len(_warnings())
    del card.compute["shifted_kernel"]
    start(card)
    assert not start(card).by_address
    assert shifted_kernel._plans._proofs == {}
    assert len(_warnings()) == before


def test_a_launch_that_writes_much_proves_nothing_and_a_smaller_one_does(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_PROOF_BYTES", 4 * 512)
    start(card)
    assert not start(card).by_address
    assert len(card.starts) == 2, "something was launched beside the two"
    small = {"y_ptr": on_card(MEMORY[2048 : 2048 + 512]), "n": 5}
    warm(card, **small)
    assert shifted_kernel._plans._proofs.values()


def test_a_proof_is_made_once_for_each_kind_of_arguments(card: FakeCard) -> None:
    warm(card)
    proving = len(card.starts) - 2
    assert proving > 0
    for stride in (48, 64, 80):  # the same kinds
        before = len(card.starts)
        start(card, stride=stride)
        assert len(card.starts) == before + 1
        assert start(card, stride=stride).by_address
    before = len(card.starts)
    start(card, x_ptr=on_card(MEMORY.view(torch.float16)[:1024]))
    assert len(card.starts) == before + 1 + proving


REFUSED: dict[str, Callable[[Any], None]] = {
    "scratch": lambda one: one.metadata.update(global_scratch_size=128),
    "profile scratch": lambda one: one.metadata.update(profile_scratch_size=128),
    "descriptors": lambda one: one.metadata.update(tensordesc_meta=[{"swizzle": 1}]),
    "clusters that wait": lambda one: one.metadata.update(launch_cooperative_grid=True),
    "programmatic launches": lambda one: one.metadata.update(launch_pdl=True),
    "instrumentation": lambda one: one.metadata.update(instrumentation_mode="gsan"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_kernels_that_need_more_than_their_arguments_have_no_plan(what: str, card: FakeCard) -> None:
    start(card)
    (compiled,) = next(iter(JITTED.device_caches.values()))[0].values()
    values = shifted_kernel._signature.values(**BASE) | {"BLOCK": 64}
    assert plan.obstacle(JITTED, shifted_kernel._signature, compiled, values, 0) is None

    class Facts(dict):  # metadata is a named tuple
        __getattr__ = dict.__getitem__

    facts = Facts(compiled.metadata._asdict())
    before, compiled.metadata = compiled.metadata, facts
    try:
        REFUSED[what](compiled)
        assert plan.obstacle(JITTED, shifted_kernel._signature, compiled, values, 0) is not None
    finally:
        compiled.metadata = before


@pytest.mark.parametrize(
    ("name", "kind", "marks"),
    [
        ("stride", "constexpr", []),  # a rule that makes 32 a constant
        ("stride", "i32", [["tt.divisibility", 32]]),
        ("n", "i32", [["tt.divisibility", 16]]),  # a length that is specialised after all
        ("n", "constexpr", []),
        ("scale", "fp64", []),
        ("x_ptr", "*fp32", [["tt.pointer_range", 32]]),
        ("extra_ptr", "*i8", []),
    ],
)
def test_a_rule_of_specialisation_that_is_not_known_here_means_no_plan(
    name: str, kind: str, marks: list[Any], card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(card)
    (compiled,) = next(iter(JITTED.device_caches.values()))[0].values()
    values = shifted_kernel._signature.values(**BASE) | {"BLOCK": 64}
    monkeypatch.setitem(compiled.src.signature, name, kind)
    monkeypatch.setitem(compiled.src.attrs, (JITTED.arg_names.index(name),), marks)
    reason = plan.obstacle(JITTED, shifted_kernel._signature, compiled, values, 0)
    assert reason == f"Triton specialised {name} in a way not known here"


def test_the_current_stream_is_asked_for_at_every_launch(card: FakeCard) -> None:
    warm(card)
    for stream in (11, 12, 7):
        card.stream = stream
        again = start(card)
        assert (again.by_address, again.stream) == (True, stream)


@pytest.mark.parametrize("mode", ["off", "on"])
def test_b03_tensors_of_another_device_are_launched_there(
    mode: str, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "identify", lambda _index: DeviceIdentity("cuda", "card", "sm_90", 132))
    there = {"x_ptr": on_card(MEMORY[:1024], 1), "y_ptr": on_card(MEMORY[2048:3072], 1)}
    with autotune(mode):
        for _launch in range(3):
            here, far = start(card), start(card, **there)
            assert (here.device, far.device, card.device) == (0, 1, 0)
        card.device = 1
        far, here = start(card, **there), start(card)
        assert (here.device, far.device, card.device) == (0, 1, 1)
    assert far.by_address == (mode == "on")


def test_tensors_of_two_devices_have_no_plan(card: FakeCard) -> None:
    mixed = {"x_ptr": on_card(MEMORY[:1024], 1)}
    warm(card)
    for _launch in range(3):
        assert not start(card, **mixed).by_address


def test_sixteen_threads_start_what_each_asked_for_and_prove_once(card: FakeCard) -> None:
    barrier = threading.Barrier(THREADS)
    outputs = [on_card(torch.zeros(64)) for _ in range(THREADS)]

    def act(number: int) -> None:
        with autotune("on"):
            barrier.wait(timeout=60)
            for step in range(40):
                shifted_kernel[blocks](
                    **{**BASE, "y_ptr": outputs[number], "n": 33 + step % 16, "scale": 100.0 * number + step}
                )

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(act, range(THREADS)))
    at = {name: JITTED.arg_names.index(name) for name in ("y_ptr", "scale")}
    mine = {one.data_ptr(): number for number, one in enumerate(outputs)}
    found: dict[int, list[float]] = {number: [] for number in range(THREADS)}
    for one in card.starts:
        address = one.args[at["y_ptr"]]
        number = mine.get(address if isinstance(address, int) else address.data_ptr())
        if number is not None:
            found[number].append(one.args[at["scale"]])
    assert found == {number: [100.0 * number + step for step in range(40)] for number in range(THREADS)}
    assert sum(one.by_address for one in card.starts) > THREADS * 20
    assert len(shifted_kernel._plans._proofs) == len(shifted_kernel._settled) == 1


def test_a_forked_child_uses_no_plan_and_unloads_nothing(card: FakeCard) -> None:
    warm(card)
    hold, held = threading.Event(), threading.Event()

    def keep_lock() -> None:
        with shifted_kernel._plans._lock:
            held.set()
            hold.wait(60)

    thread = threading.Thread(target=keep_lock)
    thread.start()
    held.wait(60)
    child = os.fork()
    if not child:
        code = 1
        try:
            before = len(card.starts)
            first = start(card)
            gc.collect()
            proved = len(card.starts) > before + 1  # anew, with a lock of its own
            code = 0 if not first.by_address and proved and card.unloaded == [] else 2
        finally:
            os._exit(code)
    hold.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert start(card).by_address


def test_a_kernel_that_a_plan_launched_is_never_unloaded(card: FakeCard) -> None:
    warm(card)
    shifted_kernel.forget()
    JITTED.device_caches.clear()
    gc.collect()
    assert card.unloaded == []
    warm(card)


def test_plans_keep_no_tensor(card: FakeCard) -> None:
    y = on_card(torch.zeros(64))
    warm(card, y_ptr=y)
    gc.collect()
    card.starts.clear()
    references = len(gc.get_referrers(y))
    for _launch in range(10):
        shifted_kernel[blocks](**{**BASE, "y_ptr": y})
        card.starts.clear()
    assert len(gc.get_referrers(y)) == references
