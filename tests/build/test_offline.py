"""Every launch that the declared cases make, compiled for five cards, and what its code promises."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from rl_engine.backends import catalog
from rl_engine.backends.shared.triton import autotuning
from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.bits import bit_class
from tests.support.offline import (
    TARGETS,
    Offline,
    Specialisation,
    Target,
    compile_offline,
    open_sums,
    record,
)
from tests.support.offline_chains import broken_chains
from tests.support.offline_ttir import access

catalog.load()
KERNELS = sorted(name for name, one in autotuning.kernels().items() if one.__module__.startswith("rl_engine."))
ANYTHING = Specialisation()
SPECIALISATIONS = {
    "unaligned": Specialisation(aligned=False, integers="odd"),
    "unaligned-even-strides": Specialisation(aligned=False, integers="sixteen"),
    "odd-strides": Specialisation(aligned=True, integers="odd"),
    "ones": Specialisation(aligned=True, integers="one"),
}
MOST_CANDIDATES = 4
MOST_LAUNCHES = 1  # of a kernel for other cards, dtypes and assumptions; for sm_90 and its narrowest dtype all of them
JOBS = 2


def problems(
    launch: Offline, target: Target, assumed: Specialisation = ANYTHING, like: Offline | None = None
) -> list[str]:
    """Compile a launch and return what its code does that it must not; ``like`` is one whose bits it must have."""
    compiled = compile_offline(launch, target, assumed)
    ttir, declared, found = compiled.asm["ttir"], launch.kernel.declaration, []
    found += open_sums(compiled)
    if like is not None:
        difference = bit_class(compiled).difference(bit_class(compile_offline(like, target, ANYTHING)))
        found += [f"another bit class: {difference}"] if difference else []
    if compiled.metadata.shared > target.shared_bytes:
        found.append(f"{compiled.metadata.shared} bytes of shared memory, {target.shared_bytes} are there")
    seen = access(ttir, _parameters(launch, assumed))
    found += [f"writes {name}, undeclared" for name in seen.written - {*declared.outputs, *declared.inout}]
    wanted = {name for name in (*declared.outputs, *declared.inout) if launch.values[name] is not None}
    found += [f"does not write {name}" for name in wanted - seen.written]
    found += [f"reads {name}, declared as output only" for name in seen.read & {*declared.outputs}]
    if ".gemm." in launch.kernel.__module__ and "PRECISION" in launch.values:  # one that multiplies
        found += broken_chains(launch, target, compiled)
    return sorted(found)


def _parameters(launch: Offline, assumed: Specialisation) -> list[str]:
    """Return the arguments that are none of the compiler's constants."""
    return [
        one.name
        for one in launch.kernel.fn.params
        if not one.is_constexpr and launch.values[one.name] is not None
        and not (
            assumed.integers == "one" and type(launch.values[one.name]) is int and not one.do_not_specialize
        )
    ]  # fmt: skip


@pytest.fixture(scope="module")
def launches() -> dict[tuple[str, str, str], list[Offline]]:
    """Return every different launch of each kernel, by target, dtype and kernel."""
    found: dict[tuple[str, str, str], list[Offline]] = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        for name, target in TARGETS.items():
            for dtype in ("bfloat16", "float16", "float32"):
                for launch in {one.shape: one for one in record(patch, target, dtype)}.values():
                    found[name, dtype, launch.kernel.__name__].append(launch)
    return found


def _all_problems(
    launches: list[Offline], target: Target, assumed: Specialisation = ANYTHING, like: list[Offline] | None = None
) -> list[str]:
    with ThreadPoolExecutor(JOBS) as pool:
        found = list(
            pool.map(
                lambda launch, other: problems(launch, target, assumed, other),
                launches,
                like or [None] * len(launches),
            )
        )
    return [f"{launch.shape}: {one}" for launch, ones in zip(launches, found, strict=True) for one in ones]


def _some(launches: list[Offline]) -> list[Offline]:
    """Return a few launches of a kernel, from all over the cases."""
    return launches[:: -(-len(launches) // MOST_LAUNCHES)] if launches else []


def _narrowest(launches: dict[tuple[str, str, str], list[Offline]], target: str, kernel: str) -> list[Offline]:
    """Return a kernel's launches in bf16, or in the dtype that its operators fix."""
    return launches[target, "bfloat16", kernel] or launches[target, "float32", kernel]


def _taken(launches: dict[tuple[str, str, str], list[Offline]], target: str, kernel: str) -> list[Offline]:
    """Return them where the card's rule takes the kernel at all: descriptors are Hopper's and Blackwell's."""
    assert _narrowest(launches, "sm_90", kernel), "no declared case launches this kernel on any card"
    return _narrowest(launches, target, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("target", TARGETS)
def test_fixed_launches_compile_and_fit_fix_their_sums_and_write_what_they_declare(
    target: str, kernel: str, launches: dict[tuple[str, str, str], list[Offline]]
) -> None:
    found = _taken(launches, target, kernel)
    assert _all_problems(found if target == "sm_90" else _some(found), TARGETS[target]) == []


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_do_too(dtype: str, kernel: str, launches: dict[tuple[str, str, str], list[Offline]]) -> None:
    found = launches["sm_90", dtype, kernel] or _narrowest(launches, "sm_90", kernel)
    assert _all_problems(_some(found), TARGETS["sm_90"]) == []


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("assumed", SPECIALISATIONS)
def test_one_bit_class_whatever_the_compiler_may_assume_of_addresses_and_integers(
    assumed: str, kernel: str, launches: dict[tuple[str, str, str], list[Offline]]
) -> None:
    found = _some(_narrowest(launches, "sm_90", kernel))
    assert _all_problems(found, TARGETS["sm_90"], SPECIALISATIONS[assumed], found) == []


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("target", [name for name in TARGETS if name != "sm_90"])
def test_one_bit_class_on_other_cards_too(
    target: str, kernel: str, launches: dict[tuple[str, str, str], list[Offline]]
) -> None:
    found = _taken(launches, target, kernel)[:1]  # nothing may be assumed of it
    assert _all_problems(found, TARGETS[target], SPECIALISATIONS["unaligned"], found) == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_candidates_compile_into_the_fixed_launchs_bit_class_and_keep_the_promises_too(
    kernel: str, launches: dict[tuple[str, str, str], list[Offline]]
) -> None:
    target = TARGETS["sm_90"]
    widest = max(_narrowest(launches, "sm_90", kernel), key=lambda one: len(one.candidates(target.identity)))
    others = widest.candidates(target.identity)[1:]
    chosen = [widest.with_candidate(one) for one in others[:: max(1, len(others) // MOST_CANDIDATES)]]
    assert chosen, "a tunable kernel without a second candidate is not tunable"
    assert _all_problems(chosen, target, like=[widest] * len(chosen)) == []


def test_integers_that_change_from_step_to_step_are_not_specialised() -> None:
    for name in KERNELS:
        kernel = autotuning.kernels()[name]
        free = {one.name for one in kernel.fn.params if one.do_not_specialize}
        assert free >= set(kernel.declaration.dynamic), name
        # of what is specialised, no integer counts rows: 17 rows would be another kernel than 16
        rows = {one.name for one in kernel.fn.params if one.name in ("n_rows", "n_seqs", "n_groups", "n_leaves")}
        assert rows <= set(kernel.declaration.dynamic), name


def test_pointer_arguments_end_in_ptr_and_nothing_else_does(
    launches: dict[tuple[str, str, str], list[Offline]],
) -> None:
    for ones in launches.values():
        for launch in ones:
            tensors = {name for name, value in launch.values.items() if isinstance(value, torch.Tensor)}
            named = {name for name, value in launch.values.items() if name.endswith("_ptr") and value is not None}
            assert tensors == named, launch.kernel.__name__


# Kernels that break a promise, each caught by the checks above.


def _one(_sizes: Any, _device: Any) -> dict[str, int]:
    return {"num_warps": 4}


@TunableKernel(outputs=("y_ptr",), fixed=_one, neutral={"num_warps": (4, 8)})
@triton.jit
def _plain_sum_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lane, mask=lane < n, other=0.0)
    tl.store(y_ptr + tl.arange(0, 1), tl.sum(tl.reshape(x, (1, BLOCK)), 1))


@TunableKernel(outputs=("y_ptr",), fixed=_one, neutral={"num_warps": (4, 8)})
@triton.jit
def _largest_and_count_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lane, mask=lane < n, other=0.0)
    tl.store(y_ptr, tl.max(x, 0) + tl.sum((x > 0).to(tl.int32), 0))


@TunableKernel(outputs=("y_ptr",), fixed=_one, neutral={"num_warps": (4, 8)})
@triton.jit
def _undeclared_write_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    rows = x_ptr + 1
    for step in range(n):
        rows += step
        tl.store(rows + lane, 0.0)
    tl.store(y_ptr + lane, 0.0)


@TunableKernel(outputs=("y_ptr",), fixed=_one, neutral={"num_warps": (4, 8)})
@triton.jit
def _undeclared_atomic_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    tl.atomic_add(x_ptr + tl.arange(0, BLOCK), 1.0)
    tl.store(y_ptr, 0.0)


@TunableKernel(outputs=("y_ptr", "x_ptr"), fixed=_one, neutral={"num_warps": (4, 8)})
@triton.jit
def _declared_but_only_read_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(y_ptr + lane, tl.load(x_ptr + lane, mask=lane < n))


def _toy(kernel: Any) -> Offline:
    pointers = {"x_ptr": torch.zeros(256), "y_ptr": torch.zeros(256)}
    return Offline(kernel, {**pointers, "n": 100, "BLOCK": 256}, {"num_warps": 4})


@pytest.mark.parametrize(
    ("kernel", "wanted"),
    [
        (_plain_sum_kernel, ["open sum: tt.reduce by arith.addf over 256"]),
        (_largest_and_count_kernel, []),
        (_undeclared_write_kernel, ["writes x_ptr, undeclared"]),
        (_undeclared_atomic_kernel, ["open sum: tt.atomic_rmw, in any order", "writes x_ptr, undeclared"]),
        (_declared_but_only_read_kernel, ["does not write x_ptr", "reads x_ptr, declared as output only"]),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_the_checks_catch_kernels_that_break_a_promise(kernel: Any, wanted: list[str]) -> None:
    for target in TARGETS.values():
        assert problems(_toy(kernel), target) == wanted


def test_the_checks_catch_too_much_shared_memory() -> None:
    small = replace(TARGETS["sm_90"], shared_bytes=8)
    assert "bytes of shared memory, 8 are there" in " ".join(problems(_toy(_plain_sum_kernel), small))


def test_the_checks_catch_a_launch_with_other_bits() -> None:
    toy, target = _toy(_plain_sum_kernel), TARGETS["sm_90"]
    (_sum, other) = problems(replace(toy, options={"num_warps": 8}), target, like=toy)[::-1]
    assert other.startswith("another bit class: tt.reduce by arith.addf over 256: ")


def test_dynamic_integers_that_the_compiler_specialises_are_refused() -> None:
    @triton.jit
    def specialised_kernel(y_ptr, n):
        tl.store(y_ptr, n)

    with pytest.raises(ValueError, match="specialised_kernel: add n to do_not_specialize of @triton"):
        TunableKernel(outputs=("y_ptr",), dynamic=("n",), fixed=_one)(specialised_kernel)
