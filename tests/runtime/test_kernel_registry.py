"""Dispatch: which implementation a name, a device and a mode give, and what every refusal says."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from rl_engine import settings
from rl_engine.backends import catalog, spec
from rl_engine.backends.spec import Case, Inputs, Tolerance, implements, operator
from rl_engine.errors import BackendError
from rl_engine.platforms.tuning import events
from rl_engine.runtime import registry
from rl_engine.runtime.registry import KernelRegistry, get_op, kernel_registry

REFERENCE, FIRST, SECOND, TUNED = (f"rlkernel.{name}.test_twice" for name in ("pytorch", "first", "second", "tuned"))
SetMode = Callable[[str], None]


@pytest.fixture
def twice(monkeypatch: pytest.MonkeyPatch) -> KernelRegistry:
    """Declare one more operator with three backends, for this test only; return a registry of its own."""
    catalog.load()
    monkeypatch.setattr(spec, "_specs", dict(spec.specs()))
    monkeypatch.setattr(spec, "_implementations", dict(spec.implementations()))
    declare(operator, "test_twice")
    register_three("test_twice")
    return KernelRegistry()


def declare(declaration: Callable[..., Callable[[Callable[..., float]], object]], name: str) -> None:
    @declaration(
        name,
        family="test",
        contract=f"{name}.v1: 2 * x",
        inputs=lambda _make, n: Inputs((float(n),)),
        cases=(Case("tiny", {"n": 3}),),
        tolerance=Tolerance({}, "exact"),
    )
    def twice(x: float) -> float:
        return x + x


def register_three(name: str) -> None:
    reasons = {FIRST: {"cpu": "needs a card", "meta": "needs storage"}, SECOND: {"meta": "needs bytes"}, TUNED: {}}
    for backend_id, refused in reasons.items():

        @implements(name, backend_id=backend_id, unavailable=refused.get, explicit_only=backend_id == TUNED)
        def twice(x: float, *, scale: float = 2.0) -> float:
            return scale * x


@pytest.fixture
def set_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[SetMode]:
    def choose(mode: str) -> None:
        monkeypatch.setenv("RL_KERNEL_MODE", mode)
        settings.current.cache_clear()

    yield choose
    settings.current.cache_clear()


@pytest.fixture(autouse=True)
def auto(set_mode: SetMode) -> None:
    set_mode("auto")


def test_an_operator_says_what_it_is_and_computes(twice: KernelRegistry) -> None:
    chosen = twice.get_op("test_twice", "cpu")
    assert chosen(21.0) == 42.0
    assert chosen(21.0, scale=3.0) == 63.0
    assert (chosen.backend_id, chosen.contract) == (SECOND, "test_twice.v1: 2 * x")
    assert (chosen.is_deterministic, chosen.is_batch_invariant) == (True, True)
    reference = twice.get_op("test_twice", "cpu", backend=REFERENCE)
    assert (reference.backend_id, reference.contract) == (REFERENCE, chosen.contract)
    assert (reference.is_deterministic, reference.is_batch_invariant) == (False, False)


@pytest.mark.parametrize(
    ("mode", "device", "backend_id"),
    [
        ("auto", "cuda", FIRST),
        ("auto", "cpu", SECOND),
        ("auto", "meta", REFERENCE),  # nothing else runs there
        ("strict", "cuda:1", FIRST),
        ("strict", "cpu", SECOND),
        ("audit", "cpu", SECOND),
        ("off", "cuda", REFERENCE),
        ("off", "meta", REFERENCE),
    ],
)
def test_dispatch_takes_the_first_that_runs_there(
    twice: KernelRegistry, set_mode: SetMode, mode: str, device: str, backend_id: str
) -> None:
    set_mode(mode)
    assert twice.get_op("test_twice", device).backend_id == backend_id
    assert twice.get_op("test_twice", torch.device(device)).backend_id == backend_id


@pytest.mark.parametrize("mode", ["strict", "audit"])
def test_strict_modes_fail_instead_of_falling_back_and_say_why(
    twice: KernelRegistry, set_mode: SetMode, mode: str
) -> None:
    set_mode(mode)
    with pytest.raises(BackendError) as refused:
        twice.get_op("test_twice", "meta")
    assert str(refused.value) == (
        f"get_op('test_twice') on meta: RL_KERNEL_MODE={mode} takes only deterministic, batch-invariant operators "
        f"({FIRST}: needs storage; {SECOND}: needs bytes; {REFERENCE}: claims neither determinism nor batch "
        "invariance); use a supported device or RL_KERNEL_MODE=auto"
    )


def test_audit_reports_every_dispatch_and_the_other_modes_none(twice: KernelRegistry, set_mode: SetMode) -> None:
    heard: list[events.TuningEvent] = []
    leave = events.log().subscribe(heard.append)
    try:
        for mode in ("auto", "strict", "off", "audit"):
            set_mode(mode)
            twice.get_op("test_twice", "cpu")
            twice.get_op("test_twice", "cpu", backend=REFERENCE)
    finally:
        leave()
    assert heard == [
        events.TuningEvent("dispatch", "test_twice", reason=f"{SECOND} on cpu"),
        events.TuningEvent("dispatch", "test_twice", reason=f"{REFERENCE} on cpu"),
    ]


@pytest.mark.parametrize("name", ["", "silu ", "SiLU", "no_such_operator", "rlkernel.pytorch.silu"])
def test_an_unknown_operator_is_an_error_that_lists_those_that_exist(name: str) -> None:
    with pytest.raises(BackendError) as refused:
        get_op(name)
    assert str(refused.value) == f"get_op({name!r}): no such operator; there are {', '.join(sorted(catalog.specs()))}"
    assert {"silu", "swiglu", "rms_norm", "logp", "grpo_loss"} <= set(catalog.specs())


@pytest.mark.parametrize("backend", ["", "first", FIRST.upper(), FIRST + " ", "rlkernel.pytorch.silu", "cuda"])
def test_an_explicit_backend_that_does_not_exist_for_it_is_an_error_that_lists_the_ids(
    twice: KernelRegistry, backend: str
) -> None:
    before = twice.get_op("test_twice", "cpu")
    with pytest.raises(BackendError) as refused:
        twice.get_op("test_twice", "cpu", backend=backend)
    assert str(refused.value) == (
        f"get_op('test_twice', backend={backend!r}): no such backend for it; there are "
        f"{REFERENCE}, {FIRST}, {SECOND}, {TUNED}"
    )
    assert twice.get_op("test_twice", "cpu") is before


@pytest.mark.parametrize("mode", ["auto", "strict", "audit", "off"])
def test_an_explicit_backend_is_that_one_or_an_error_in_every_mode(
    twice: KernelRegistry, set_mode: SetMode, mode: str
) -> None:
    set_mode(mode)
    before = twice.get_op("test_twice", "cpu")
    for backend in (SECOND, TUNED, REFERENCE):
        assert twice.get_op("test_twice", "cpu", backend=backend).backend_id == backend
    with pytest.raises(BackendError) as refused:
        twice.get_op("test_twice", "cpu", backend=FIRST)
    assert str(refused.value) == f"get_op('test_twice', backend={FIRST!r}) on cpu: needs a card"
    assert twice.get_op("test_twice", "cpu") is before
    assert twice.get_op("test_twice", "cpu", backend=None) is before


def test_eight_threads_get_the_same_object(twice: KernelRegistry) -> None:
    for backend in (None, TUNED):
        start, got = threading.Barrier(8), []

        def ask(backend: str | None = backend, start: threading.Barrier = start, got: list[object] = got) -> None:
            start.wait(10)
            got.append(twice.get_op("test_twice", "cpu", backend=backend))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(got) == 8
        assert len({id(one) for one in got}) == 1


def test_without_a_device_it_is_the_accelerator_or_the_cpu(twice: KernelRegistry) -> None:
    here = "cuda" if torch.cuda.device_count() else "cpu"
    assert twice.get_op("test_twice").backend_id == twice.get_op("test_twice", here).backend_id


def test_the_module_offers_one_registry() -> None:
    assert registry.get_op == kernel_registry.get_op
    assert get_op("silu", "meta", backend="rlkernel.pytorch.silu") is kernel_registry.get_op(
        "silu", torch.device("meta"), backend="rlkernel.pytorch.silu"
    )


def test_a_declaration_is_all_that_is_known_of_an_operator(twice: KernelRegistry) -> None:
    assert twice is not kernel_registry
    declared = catalog.specs()["test_twice"]
    assert (declared.name, declared.family, declared.contract) == ("test_twice", "test", "test_twice.v1: 2 * x")
    assert (declared.dtypes, declared.differentiable, declared.rowwise) == (
        ("float32", "float16", "bfloat16"),
        True,
        True,
    )
    assert declared.reference is catalog.implementations()[REFERENCE].call
    assert declared.inputs(None, 3) == Inputs((3.0,), {}, (0,))
    with pytest.raises(TypeError):
        catalog.specs()["test_twice"] = declared  # type: ignore[index]  # read-only on purpose


def test_names_and_ids_are_declared_once(twice: KernelRegistry) -> None:
    with pytest.raises(
        ValueError, match=r"operator 'test_twice' is declared twice: in .*test_kernel_registry and here"
    ):
        declare(operator, "test_twice")
    with pytest.raises(ValueError, match=f"backend id '{FIRST}' is registered twice"):
        register_three("test_twice")
    with pytest.raises(ValueError, match=f"{FIRST}: operator 'test_thrice' has no declaration"):
        register_three("test_thrice")


def test_without_triton_the_references_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog.load()
    before = catalog.implementations()
    monkeypatch.setitem(sys.modules, "triton", None)  # what the import system makes of a package that is not installed
    catalog.load.cache_clear()
    assert catalog.implementations() == before


def test_every_declared_operator_has_its_reference_first() -> None:
    catalog.load()
    by_op: dict[str, list[str]] = {}
    for one in catalog.implementations().values():
        by_op.setdefault(one.op, []).append(one.backend_id)
    assert set(by_op) == set(catalog.specs())
    for name, ids in by_op.items():
        assert ids[0] == f"rlkernel.pytorch.{name}"
        assert all(one.startswith("rlkernel.") for one in ids)
