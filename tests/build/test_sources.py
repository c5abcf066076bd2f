"""What every source file of the package keeps to, read from its syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_engine.backends import catalog

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rl_engine"
TRITON = PACKAGE / "backends" / "shared" / "triton"
MOST_LINES = 400
SOURCES = sorted(PACKAGE.rglob("*.py"))
OPERATORS = [
    path
    for folder in (TRITON, PACKAGE / "backends" / "reference")
    for path in sorted(folder.glob("*/*.py"))
    if path.name != "__init__.py" and path.parent.name != "primitives"
]
# where operators keep jitted pieces for more than one file
SHARED = {path.name for path in OPERATORS} - {path.name for path in (PACKAGE / "backends" / "reference").glob("*/*.py")}
SHARED |= {path.name for path in (TRITON / "primitives").glob("*.py")}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))


def _decorators(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    calls = [one.func if isinstance(one, ast.Call) else one for one in function.decorator_list]
    return [ast.unparse(one) for one in calls]


def _jitted(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [one for one in _functions(_tree(path)) if "triton.jit" in _decorators(one)]


def lint(path: Path) -> list[str]:
    """Return what a file of the package does that it must not."""
    text = path.read_text(encoding="utf-8")
    found = [f"{len(text.splitlines())} lines"] if len(text.splitlines()) > MOST_LINES else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and path.name != "cli.py":
            found.append(f"line {node.lineno}: prints")
        if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) == "BaseException"):
            found.append(f"line {node.lineno}: catches everything")
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "os.environ" and path.name != "settings.py":
            found.append(f"line {node.lineno}: reads the environment")
        if TRITON in path.parents and isinstance(node, ast.UnaryOp) and ast.unparse(node) == "-0.0":
            found.append(f"line {node.lineno}: a literal -0.0, of which Triton 3.6 makes +0.0; use minus_zero")
    if path.name not in SHARED:
        found += [f"{one.name}: jitted, but not private" for one in _jitted(path) if not one.name.startswith("_")]
    for function in _functions(ast.parse(text)):
        tunable, jitted = "TunableKernel" in _decorators(function), "triton.jit" in _decorators(function)
        if tunable != (jitted and function.name.endswith("_kernel")):
            found.append(f"{function.name}: a kernel is jitted, tunable and named _kernel, or none of these")
    return found


def unannotated(path: Path) -> list[str]:
    """Return the public functions of an operator's file that lack a type."""
    found = []
    for function in _tree(path).body:
        if not isinstance(function, FUNCTIONS) or function.name.startswith("_"):
            continue
        if "triton.jit" in _decorators(function):  # Triton's parameters have no types
            continue
        parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        if function.returns is None or any(one.annotation is None for one in parameters):
            found.append(function.name)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_every_file_keeps_the_house_rules(path: Path) -> None:
    assert lint(path) == []


@pytest.mark.parametrize("path", OPERATORS, ids=_name)
def test_public_functions_of_operators_are_annotated(path: Path) -> None:
    assert unannotated(path) == []


def test_kernel_names_are_unique_since_the_kernel_table_goes_by_name() -> None:
    names = [one.name for path in SOURCES for one in _jitted(path) if one.name.endswith("_kernel")]
    assert len(names) == len(set(names)) >= 14


def test_every_reference_has_its_triton_file_of_the_same_family() -> None:
    families = {(path.parent.name, path.name) for path in OPERATORS if TRITON in path.parents}
    assert families >= {(path.parent.name, path.name) for path in OPERATORS if TRITON not in path.parents}


def test_every_operator_stands_in_the_documentation() -> None:
    page = (ROOT / "docs" / "operators" / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert listed == set(catalog.specs())


BROKEN = """
import os
import triton

@triton.jit
def public(x):
    print(x)

@TunableKernel(outputs=("y_ptr",), fixed=None)
@triton.jit
def _silu(x):
    try:
        return os.environ["X"]
    except:
        pass

@triton.jit
def _forgotten_kernel(x):
    return -0.0

def operator(x) -> int:
    return 1
"""


def test_the_checks_catch_a_file_that_breaks_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TRITON", tmp_path)
    path = tmp_path / "broken.py"
    path.write_text(BROKEN + "\n" * MOST_LINES, encoding="utf-8")
    found = " | ".join(lint(path))
    for wanted in ("lines", "prints", "environment", "everything", "public: jitted, but not private", "_silu: a kernel",
                   "_forgotten_kernel: a kernel", "a literal -0.0"):  # fmt: skip
        assert wanted in found
    assert unannotated(path) == ["operator"]
