"""How each supported Triton starts a kernel, read from its sources: what the table of `plan.py` rests on.

    pip download --no-deps triton==3.7.1 && unzip -d triton-3.7 triton-3.7.1-*.whl   # and so on for each version
    python -m tests.support.launcher_signatures triton-3.6 triton-3.7 triton-3.8 triton-3.9 \
        > tests/support/launcher_signatures.json

Nothing of Triton is imported, so a folder may hold any version.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_suffix(".json")


def signatures(folder: Path) -> dict[str, Any]:
    """Return how the Triton below ``folder`` (which holds ``triton/``) starts a kernel on an NVIDIA card.

    jit: what ``JITFunction.run`` hands to ``CompiledKernel.run``.
    run: the parameters of that (``CudaLauncher.__call__``).
    c: what it hands to the C function below it, by name.
    c_format: what that parses, in the letters of ``PyArg_ParseTuple``, without the kernel's own arguments.
    takes_addresses: whether a pointer may be given as an integer.
    hooks: the classes of the launch hooks.
    unloads: whether a compiled kernel that nobody refers to unloads its module.
    """
    nvidia = folder / "triton" / "backends" / "nvidia"
    driver, c_source = (nvidia / "driver.py").read_text(), (nvidia / "driver.c").read_text()
    compiler = (folder / "triton" / "compiler" / "compiler.py").read_text()
    knobs = (folder / "triton" / "knobs.py").read_text()
    call = _function(driver, "CudaLauncher", "__call__")
    return {
        "jit": _passed(_function((folder / "triton/runtime/jit.py").read_text(), "JITFunction", "run"), "kernel.run"),
        "run": ", ".join([*(one.arg for one in call.args.args[1:]), "*args"]),
        "c": _passed(call, "self.launch"),
        "c_format": _format(driver, c_source),
        "takes_addresses": "PyLong_Check(obj)" in driver + c_source,
        "hooks": sorted(set(re.findall(r"launch_(?:enter|exit)_hook: (\w+)", knobs))),
        "unloads": "unload_module" in compiler,
    }


def version(folder: Path) -> str:
    """Return the version of the Triton below ``folder``, major and minor."""
    text = (folder / "triton" / "__init__.py").read_text()
    found = re.search(r"__version__ = '(\d+\.\d+)", text)
    assert found is not None, f"{folder}: no version"
    return found[1]


def _function(source: str, owner: str, name: str) -> ast.FunctionDef:
    for one in ast.walk(ast.parse(source)):
        if isinstance(one, ast.ClassDef) and one.name == owner:
            return next(part for part in one.body if isinstance(part, ast.FunctionDef) and part.name == name)
    raise ValueError(f"no {owner}.{name}")


def _passed(function: ast.FunctionDef, called: str) -> str:
    calls = [one for one in ast.walk(function) if isinstance(one, ast.Call) and ast.unparse(one.func) == called]
    (only,) = calls
    return ", ".join(ast.unparse(one) for one in only.args)


def _format(driver: str, c_source: str) -> str:
    base = re.search(r'_BASE_ARGS_FORMAT = "(\w+)"', driver)
    if base is not None:
        return base[1]
    found = re.search(r'PyArg_ParseTuple\(args, "(iiiKK[^"]+)"', c_source)
    assert found is not None, "no C function that parses a launch"
    return found[1]


def main() -> None:
    found = {version(folder): signatures(folder) for folder in map(Path, sys.argv[1:])}
    sys.stdout.write(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
