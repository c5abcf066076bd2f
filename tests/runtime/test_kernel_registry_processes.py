"""Dispatch in processes of its own: the modes on a CPU, the interpreter, a broken backend, an absent Triton."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.processes import environment, run

# torch is imported once; every question is asked in a forked child, which reads its own environment
APART = """
import importlib, json, os, sys, torch
def apart(act):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            answer = act()
        except Exception as error:
            answer = [type(error).__name__, str(error)]
        with os.fdopen(write, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.wait()
    return json.loads(text)
def get(name, *arguments, **options):
    from rl_engine.runtime.registry import get_op
    op = get_op(name, *arguments, **options)
    return [op.backend_id, op.is_deterministic, op.is_batch_invariant]
def in_mode(mode, backend=None):
    from rl_engine.backends import catalog
    catalog.load()  # once, for all children
    def act():
        os.environ["RL_KERNEL_MODE"] = mode
        return get("silu", "cpu", backend=backend)
    return apart(act)
"""
MODES = """
print(json.dumps({
    **{mode: in_mode(mode) for mode in ("auto", "off", "strict", "audit", "Strict ", "lenient")},
    "explicit": in_mode("strict", "rlkernel.pytorch.silu"),
    "unavailable": in_mode("off", "rlkernel.triton.silu"),
}))
"""
BROKEN = """
from pathlib import Path
folder = Path(sys.argv[1])
def broken(name, text, package="rl_engine.backends.shared.triton"):
    def act():
        path = folder / name.replace(".", "_") / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        importlib.import_module(package).__path__.append(str(folder / name.replace(".", "_")))
        answers = []
        for options in ({}, {"backend": "rlkernel.triton.silu"}, {}):
            try:
                answers.append(get("silu", "cpu", **options))
            except ImportError as error:
                answers.append([type(error).__name__, error.name, str(error)])
        return answers
    return apart(act)
def triton_raises():
    (folder / "fake" / "triton").mkdir(parents=True)
    (folder / "fake" / "triton" / "__init__.py").write_text("raise ImportError('libtriton.so is broken')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        del sys.modules[name]
    sys.path.insert(0, str(folder / "fake"))
    return get("silu", "cpu")
def triton_absent(**options):
    def act():
        sys.modules["triton"] = None  # what the import system makes of a package that is not installed
        return get("silu", "cpu", **options)
    return act
print(json.dumps({
    "module": broken("zz_module.py", "import no_such_module_a"),
    "name": broken("zz_name.py", "from rl_engine.backends.spec import no_such_name", "rl_engine.backends.reference"),
    "package": broken("zz_package/__init__.py", "import no_such_module_b"),
    "triton raises": apart(triton_raises),
    "triton absent": apart(triton_absent()),
    "triton absent, asked for": apart(triton_absent(backend="rlkernel.triton.silu")),
}))
"""


@pytest.fixture(scope="module")
def modes() -> dict[str, Any]:
    env = environment()
    env.pop("TRITON_INTERPRET", None)
    return json.loads(run(APART + MODES, env=env))


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return json.loads(
        run(APART + BROKEN, str(tmp_path_factory.mktemp("broken")), env=environment(TRITON_INTERPRET="1"))
    )


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_cpu_gets_the_reference_which_promises_nothing(modes: dict[str, Any], mode: str) -> None:
    assert modes[mode] == ["rlkernel.pytorch.silu", False, False]
    assert modes["explicit"] == ["rlkernel.pytorch.silu", False, False]


@pytest.mark.parametrize("mode", ["strict", "audit", "Strict "])
def test_a_strict_cpu_without_the_interpreter_is_refused_and_told_why(modes: dict[str, Any], mode: str) -> None:
    kind, message = modes[mode]
    assert kind == "BackendError"
    assert message.startswith(f"get_op('silu') on cpu: RL_KERNEL_MODE={mode.strip().lower()} takes only deterministic")
    assert "rlkernel.triton.silu: Triton needs a CUDA or ROCm device; on a CPU set TRITON_INTERPRET=1" in message
    assert "rlkernel.pytorch.silu: claims neither determinism nor batch invariance" in message


def test_a_mode_without_meaning_is_an_error(modes: dict[str, Any]) -> None:
    assert modes["lenient"] == [
        "SettingsError",
        "RL_KERNEL_MODE is 'lenient'; set it to one of auto, strict, audit, off, or unset it",
    ]


def test_an_explicit_backend_that_cannot_run_here_is_refused_and_told_why(modes: dict[str, Any]) -> None:
    kind, message = modes["unavailable"]
    assert kind == "BackendError"
    assert message.startswith("get_op('silu', backend='rlkernel.triton.silu') on cpu: Triton needs a CUDA or ROCm")


def test_the_interpreter_makes_triton_run_on_a_cpu() -> None:
    code = APART + "print(json.dumps([in_mode(mode) for mode in ('auto', 'strict', 'audit', 'off')]))"
    triton = ["rlkernel.triton.silu", True, True]
    assert json.loads(run(code, env=environment(TRITON_INTERPRET="1"))) == [
        triton,
        triton,
        triton,
        ["rlkernel.pytorch.silu", False, False],
    ]


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("module", ["ModuleNotFoundError", "no_such_module_a", "No module named 'no_such_module_a'"]),
        ("package", ["ModuleNotFoundError", "no_such_module_b", "No module named 'no_such_module_b'"]),
    ],
)
def test_a_broken_import_inside_a_backend_surfaces_every_time(
    broken: dict[str, Any], where: str, error: list[str]
) -> None:
    assert broken[where] == [error] * 3


def test_a_broken_import_inside_a_reference_surfaces(broken: dict[str, Any]) -> None:
    for kind, name, message in broken["name"]:
        assert (kind, name) == ("ImportError", "rl_engine.backends.spec")
        assert message.startswith("cannot import name 'no_such_name' from 'rl_engine.backends.spec'")


def test_a_triton_that_is_there_and_breaks_surfaces(broken: dict[str, Any]) -> None:
    assert broken["triton raises"] == ["ImportError", "libtriton.so is broken"]


def test_only_an_absent_triton_is_passed_over(broken: dict[str, Any]) -> None:
    assert broken["triton absent"] == ["rlkernel.pytorch.silu", False, False]
    assert broken["triton absent, asked for"] == [
        "BackendError",
        "get_op('silu', backend='rlkernel.triton.silu'): no such backend for it; there are rlkernel.pytorch.silu",
    ]
