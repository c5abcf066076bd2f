"""What the operators would launch on a card that is not there, compiled for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rl_engine.backends import catalog
from rl_engine.backends.shared.triton import bits_ir, bits_sums, compiler, operands, resources
from rl_engine.backends.shared.triton.autotuning import KernelLauncher
from rl_engine.backends.spec import OpSpec
from rl_engine.platforms import device
from rl_engine.platforms.device import DeviceIdentity
from rl_engine.platforms.tuning.key import Candidate
from rl_engine.runtime.policy import autotune
from tests.support.ops_inputs import DTYPES, Maker, run

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "waves_per_eu")
MOST_ROWS = 64  # of a recorded case: nothing is computed, but inputs are made
# sizes beside the declared cases', at which an operator takes another kernel; their rows are not cut to MOST_ROWS
MORE_SIZES = {
    "rms_norm": [{"rows": 1 << 17, "hidden": 181}, {"rows": 1 << 14, "hidden": 8192}],
    "embedding": [{"rows": 1025, "vocab": 97, "hidden": 8}],
    "det_gemm": [
        {"rows": 8192, "inner": 4096, "cols": 6144, "weight": 1},
        {"rows": 300, "inner": 64, "cols": 72, "groups": 3},
    ],
}
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip
Integers = Literal["sixteen", "one", "odd", "own"]


@dataclass(frozen=True)
class Target:
    """A card that kernels are compiled for; ``shared_bytes`` is what one program may use."""

    triton: GPUTarget
    identity: DeviceIdentity
    shared_bytes: int


def _target(kind: Literal["cuda", "hip"], arch: str, sm_count: int) -> Target:
    triton_arch = int(arch.removeprefix("sm_")) if kind == "cuda" else arch
    limits = resources.LIMITS[arch]
    identity = DeviceIdentity(kind, arch, arch, sm_count)
    return Target(GPUTarget(kind, triton_arch, limits.lanes), identity, limits.shared_bytes)


TARGETS = {
    "sm_80": _target("cuda", "sm_80", 108),
    "sm_90": _target("cuda", "sm_90", 132),
    "sm_100": _target("cuda", "sm_100", 148),
    "gfx942": _target("hip", "gfx942", 304),
    "gfx950": _target("hip", "gfx950", 256),
}


@dataclass(frozen=True)
class Specialisation:
    """What a compiler may assume of arguments: where pointers begin, and what integers are ("own": as recorded)."""

    aligned: bool = True
    integers: Integers = "sixteen"


@dataclass(frozen=True)
class Offline:
    """One launch as it would be compiled: dtypes of pointers, values of constants, launch options."""

    kernel: KernelLauncher
    values: Mapping[str, Any]
    options: Mapping[str, int]

    def with_candidate(self, candidate: Candidate) -> Offline:
        """Return the same launch with a candidate's options."""
        chosen = dict(candidate.options)
        values = {name: chosen.get(name, value) for name, value in self.values.items()}
        return replace(self, values=values, options={name: chosen[name] for name in OPTIONS if name in chosen})

    def candidates(self, identity: DeviceIdentity) -> tuple[Candidate, ...]:
        """Return every launch that a tuner would consider on that card."""
        return self.kernel.candidates(self.values, identity)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Everything but the integers that the compiler does not see."""
        jitted = self.kernel.fn
        constants = tuple((one.name, self.values[one.name]) for one in jitted.params if one.is_constexpr)
        dtypes = tuple(one.dtype for one in self.values.values() if isinstance(one, torch.Tensor))
        return (self.kernel.__name__, constants, dtypes, tuple(sorted(self.options.items())))


def record(monkeypatch: pytest.MonkeyPatch, target: Target, dtype: str) -> list[Offline]:
    """Return what every declared case launches on ``target``, forward and backward, without launching it."""
    made: list[Offline] = []

    def note(self: KernelLauncher, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        values = {**dict(zip(self.fn.arg_names, args, strict=False)), **kwargs}
        found = compiler.launch_grid(grid, values, {})
        assert all(axis >= 1 for axis in found), f"{self.__name__}: grid {found}"
        made.append(
            Offline(
                self,
                {name: values[name] for name in self.fn.arg_names},
                {name: values[name] for name in OPTIONS if name in values},
            )
        )

    with monkeypatch.context() as patch, autotune("off"):
        patch.setattr(KernelLauncher, "_run", note)
        patch.setattr(operands, "unavailable", lambda _device_type: None)
        patch.setattr(device, "identify", lambda _index: target.identity)
        for spec in catalog.specs().values():
            if dtype in spec.dtypes:
                _call_every_case(spec, dtype)
    return made


class _UnfilledMaker(Maker):
    """Makes numbers that nobody wrote: no launch reads them, and a table of a vocabulary takes seconds to draw."""

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        del scale
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)


def _call_every_case(spec: OpSpec, dtype: str) -> None:
    op = catalog.implementations()[f"rlkernel.triton.{spec.name}"].call
    calls = [(_cut(case.sizes), case.options) for case in spec.cases]
    calls += [(sizes, {}) for sizes in MORE_SIZES.get(spec.name, ())]
    for sizes, options in calls:
        inputs = spec.inputs(_UnfilledMaker(DTYPES[dtype], device="cpu"), **sizes)
        inputs = replace(inputs, kwargs={**inputs.kwargs, **options})
        run(op, inputs, differentiate=spec.differentiable, gradients=_unfilled, spare=lambda one: one.view_as(one))


def _cut(sizes: Mapping[str, int]) -> dict[str, int]:
    first = next(iter(sizes))
    return {**sizes, first: min(sizes[first], MOST_ROWS)}


def _unfilled(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(torch.empty_like(one) if one.requires_grad else None for one in outputs)


def _is_own(value: Any, assumed: Specialisation, wanted: int) -> bool:
    """Return whether the compiler is to assume of a recorded integer that it is 1, or a multiple of 16."""
    return assumed.integers == "own" and (value == 1 if wanted == 1 else value % wanted == 0)


def compile_offline(launch: Offline, target: Target, assumed: Specialisation) -> Any:
    """Compile a launch as Triton would for arguments of which ``assumed`` holds; returns the compiled kernel."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.fn.params):
        name, value = parameter.name, launch.values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[index,] = "constexpr", value
        elif name in launch.kernel.declaration.descriptors:
            block = launch.kernel.declaration.descriptors[name]({**launch.values, **launch.options})
            signature[name] = f"tensordesc<{_TYPES[value.dtype]}{block}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            if assumed.aligned:
                attributes[index,] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif not parameter.do_not_specialize and (assumed.integers == "one" or _is_own(value, assumed, 1)):
            signature[name], constants[index,] = "constexpr", 1
        else:
            signature[name] = "i32"
            if not parameter.do_not_specialize and (assumed.integers == "sixteen" or _is_own(value, assumed, 16)):
                attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel.fn, signature, constants, attributes)
    options = {**launch.options, **compiler.FIXED_OPTIONS}
    return triton.compile(source, target=target.triton, options=options)


def open_sums(compiled: Any) -> list[str]:
    """Return the sums of a compiled kernel whose order is left to layouts or to chance, without what decides it."""
    ttir, ttgir = bits_ir.parse(compiled.asm["ttir"]), bits_ir.parse(compiled.asm["ttgir"])
    lines = [*bits_sums.reductions(ttgir), *bits_sums.exposed(ttir, ttgir), *bits_sums.atomics(ttir)]
    return [f"open sum: {one.partition(':')[0]}" for one in lines if not one.startswith("fold of ")]
