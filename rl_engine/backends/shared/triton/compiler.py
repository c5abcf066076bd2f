"""The one file that touches Triton below its public surface: compiling, binary identity, version facts, source.

Supported: Triton 3.6 to 3.9. What is used beyond ``kernel[grid](...)``: ``JITFunction.warmup`` returns the compiled
kernel, whose ``asm``, ``metadata`` and ``run`` (reading it loads the module) exist in all four, as do the paths of
ptxas and nvdisasm in ``triton.knobs``; ``bits_*.py`` read the text in ``asm``;
``libtriton.get_cache_invalidating_env_vars`` lists the environment that changes code.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
from typing import TYPE_CHECKING, Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.errors import TritonError

from rl_engine.platforms import device

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from rl_engine.platforms.tuning.key import Part

# What a candidate may raise while it is compiled, loaded or run for the first time: Triton's own errors, and the
# RuntimeError of a compiler pass that failed ("PassManager::run failed").
CANDIDATE_FAILURES = (TritonError, RuntimeError)

# On every launch: the default flips in Triton 3.10 (triton #11270), and the state is part of the bits.
FIXED_OPTIONS = {"enable_fp_fusion": True}

# Read when the kernels are decorated, as Triton reads it; a call later would stop torch.compile's tracing.
_INTERPRETING = bool(triton.knobs.runtime.interpret)


def interpreted(jitted: Any) -> bool:
    """Return whether a jitted function runs through the interpreter (TRITON_INTERPRET was set at its decoration)."""
    return not hasattr(jitted, "cache_key")


def unavailable(device_type: str) -> str | None:
    """Return None where Triton kernels run on ``device_type``, else why not."""
    if device_type == "cuda" or (device_type == "cpu" and _INTERPRETING):
        return None
    if device_type == "cpu":
        return "Triton needs a CUDA or ROCm device; on a CPU set TRITON_INTERPRET=1 before the first import"
    return f"Triton kernels do not run on {device_type}; use a CUDA or ROCm device"


def quiet_interpreter() -> AbstractContextManager[object]:
    """Keep numpy, which the interpreter computes with, from warning of infinities that a card gives silently."""
    import numpy  # noqa: PLC0415  # needed by Triton's interpreter only, so not a dependency

    return numpy.errstate(all="ignore")


@functools.cache
def compiler_parts(arch: str) -> Mapping[str, Part]:
    """Return the key parts that name the compiler: Triton, assembler, fusion, code-generating environment."""
    parts: dict[str, Part] = {
        "compiler.triton": triton.__version__,
        "compiler.fp_fusion": FIXED_OPTIONS["enable_fp_fusion"],
        "compiler.environment": json.dumps(dict(sorted(get_cache_invalidating_env_vars().items()))),
    }
    if arch.startswith("sm_"):
        parts["compiler.ptxas"] = triton.knobs.nvidia.ptxas.version
    return parts


def source_digest(jitted: Any) -> str:
    """Return a digest of everything a kernel's code is made from, and of the launcher beside it.

    The text of the kernel's module and of the module of every jitted function it reaches (so a comment there is a
    miss too), and the values of the constants they use.
    """
    digest = hashlib.sha256()
    modules: dict[str, None] = {}
    constants: dict[str, str] = {}
    waiting, seen = [jitted.fn], set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        modules[function.__module__] = None
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if hasattr(value, "fn") and inspect.isfunction(value.fn):
                waiting.append(value.fn)
            elif isinstance(value, (triton.language.constexpr, int, float, str)):
                constants[f"{function.__module__}.{name}"] = repr(value)
    for module in sorted(modules):
        digest.update(inspect.getsource(sys.modules[module]).encode())
    digest.update(json.dumps(sorted(constants.items())).encode())
    return digest.hexdigest()


def compile_launch(
    jitted: Any, grid: Any, values: Mapping[str, Any], options: Mapping[str, int], device_index: int
) -> Any:
    """Compile one launch without running or loading it; safe in a thread of its own."""
    import torch  # noqa: PLC0415  # only to set the device of a compile thread, which starts on device 0

    with torch.cuda.device(device_index):
        return jitted.warmup(grid=grid, **values, **options, **FIXED_OPTIONS)


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text, short enough for a record."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def load(compiled: Any) -> None:
    """Load a compiled kernel in this thread; raises OutOfResources where it needs more than the card has."""
    compiled.run  # noqa: B018  # reading the property loads the module


def launch_identity(compiled: Any, grid: tuple[int, ...]) -> str:
    """Return what makes two launches the same one: code, grid, warps, cluster and shared memory.

    The grid is part of it: a persistent kernel has one binary for every grid size.
    """
    code = compiled.asm.get("cubin") or compiled.asm.get("hsaco")
    metadata = compiled.metadata
    facts = (metadata.num_warps, metadata.num_ctas, metadata.shared, grid)
    return hashlib.sha256(code + repr(facts).encode()).hexdigest()


def identity_of(compiled: Any) -> str:
    """Return in a line what compiled a kernel, for which architecture, and whether it may fuse operations."""
    metadata = compiled.metadata
    target = metadata.target
    arch = f"sm_{target.arch}" if target.backend == "cuda" else target.arch
    assembler = f", ptxas {triton.knobs.nvidia.ptxas.version}" if target.backend == "cuda" else ""
    fusion = "on" if metadata.enable_fp_fusion else "off"
    return f"Triton {triton.__version__}{assembler} for {arch}, fusion {fusion}"


def nvdisasm() -> str:
    """Return the path of the disassembler that ships with Triton; raises RuntimeError where it does not."""
    return str(triton.knobs.nvidia.nvdisasm.path)


def launch_grid(grid: Any, values: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the grid of a launch, evaluated as Triton does, filled up to three axes."""
    sizes: Callable[[Mapping[str, Any]], tuple[int, ...]] | tuple[int, ...] = grid
    found = tuple(sizes({**values, **options})) if callable(sizes) else tuple(sizes)
    return found + (1,) * (3 - len(found))


def is_interpreter(arch: str) -> bool:
    """Return whether ``arch`` is the interpreter's."""
    return arch == device.INTERPRETER
