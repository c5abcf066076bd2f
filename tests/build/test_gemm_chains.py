"""Every tile and launch of a matrix product, compiled for five cards: one chain over K, of the same groups of K."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from rl_engine.backends.shared.triton.autotuning import KernelLauncher, TunableKernel
from rl_engine.backends.shared.triton.gemm import launch, product
from rl_engine.backends.shared.triton.gemm.rule import Plan, Precision
from rl_engine.backends.shared.triton.resources import shared_bytes
from rl_engine.platforms import device
from rl_engine.platforms.device import DeviceIdentity
from rl_engine.runtime.policy import autotune
from tests.support.offline import TARGETS, Offline, Specialisation, Target, compile_offline
from tests.support.offline_chains import broken_chains

OWN = Specialisation(integers="own")
JOBS = 2
DTYPES: dict[Precision, torch.dtype] = {"half": torch.bfloat16, "tf32": torch.float32, "ieee": torch.float32}
SHAPES = [(1, 6144, 4096), (64, 4096, 12288), (128, 4096, 4096), (8192, 6144, 4096), (512, 512, 88)]
# what the rule does not take, and a tuner may: other sides, depths, and the operands exchanged
MORE = [Plan(128, 128, 64, described=True), Plan(256, 128, 64, described=True), Plan(64, 256, 64),
        Plan(64, 32, 128, described=True, swapped=True), Plan(16, 64, 128), Plan(32, 128, 32)]  # fmt: skip


def _launches(
    monkeypatch: pytest.MonkeyPatch, target: Target, shape: tuple[int, int, int], precision: Precision, **kwargs: Any
) -> Offline:
    """Return what a product launches on ``target``: nothing is computed, and the operands have no memory."""
    m, n, k = shape
    make = {"dtype": DTYPES[precision], "device": "cpu"}
    a, b = torch.empty(m, k, **make), torch.empty(n, k, **make).mT
    out = torch.empty(m, n, dtype=kwargs.pop("out_dtype", DTYPES[precision]))
    (made,) = _noted(monkeypatch, target, lambda: product.multiply(a, b, out, precision, **kwargs))
    return made


def _noted(monkeypatch: pytest.MonkeyPatch, target: Target, multiply: Callable[[], None]) -> list[Offline]:
    """Return what ``multiply`` would launch on ``target``."""
    made: list[Offline] = []

    def note(self: KernelLauncher, _grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = {**dict(zip(self.fn.arg_names, args, strict=False)), **kwargs}
        options = {name: values.pop(name) for name in ("num_warps", "num_stages") if name in values}
        made.append(Offline(self, {name: values[name] for name in self.fn.arg_names}, options))

    with monkeypatch.context() as patch, autotune("off"):
        patch.setattr(KernelLauncher, "_run", note)
        patch.setattr(device, "identify", lambda _index: target.identity)
        multiply()
    return made


def _problems(launch: Offline, target: Target) -> list[str]:
    compiled = compile_offline(launch, target, OWN)
    found = broken_chains(launch, target, compiled)
    if compiled.metadata.shared > target.shared_bytes:
        found.append(f"{compiled.metadata.shared} bytes of shared memory, {target.shared_bytes} are there")
    sizes = [launch.values[f"BLOCK_{axis}"] for axis in "MNK"]
    return [f"{launch.kernel.__name__} {sizes} {dict(launch.options)}: {one}" for one in found]


def _all(launches: list[Offline], target: Target) -> list[str]:
    different = {one.shape: one for one in launches}.values()
    with ThreadPoolExecutor(JOBS) as pool:
        return list(itertools.chain(*pool.map(lambda one: _problems(one, target), different)))


@pytest.mark.parametrize("name", TARGETS)
def test_every_launch_of_the_rule_is_one_chain_of_the_same_groups_and_fits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TARGETS[name]
    launches = [_launches(monkeypatch, target, shape, "half") for shape in SHAPES]
    launches += [_launches(monkeypatch, target, SHAPES[3], "half", out_dtype=torch.float32, bias=torch.empty(6144))]
    launches += [_launches(monkeypatch, target, SHAPES[number], "tf32") for number in (1, 3)]
    launches += [_launches(monkeypatch, target, SHAPES[2], "ieee")]
    assert _all(launches, target) == []


@pytest.mark.parametrize("name", ["sm_80", "sm_90"])
def test_other_tiles_are_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, launches = TARGETS[name], []
    for more in MORE:
        forced = more if name == "sm_90" else replace(more, described=False)
        if forced.block_m * forced.block_n * forced.block_k > 128 * 128 * 64 and name == "sm_80":
            continue  # more registers than there are
        monkeypatch.setattr(product, "plan", lambda *_args, forced=forced, **_more: forced)
        launches.append(_launches(monkeypatch, target, (512, 512, 4096), "half"))
    assert _all(launches, target) == []


@pytest.mark.parametrize("transposed", [False, True], ids=["as it is", "transposed"])
@pytest.mark.parametrize("name", ["sm_90", "sm_100"])
def test_segments_through_descriptors_are_too(name: str, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target, make = TARGETS[name], {"dtype": torch.bfloat16, "device": "cpu"}
    a, out = torch.empty(8192, 2048, **make), torch.empty(8192, 1536, **make)
    b = torch.empty(8, 1536, 2048, **make).mT if transposed else torch.empty(8, 2048, 1536, **make)
    offsets = torch.zeros(9, dtype=torch.int32)
    table, by_table = _noted(monkeypatch, target, lambda: launch.multiply_segments(a, b, offsets, out, "half"))
    assert [one.kernel.__name__ for one in (table, by_table)] == ["_gemm_segment_table_kernel", "_gemm_segments_kernel"]
    assert _all([by_table], target) == []
    text = compile_offline(by_table, target, OWN).asm["ptx"]
    assert "st.global.v4" in text
    assert "st.global.b16" not in text, "the last tile's mask narrows the stores"


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]], ids=["decode", "training"])
def test_candidates_are_too(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    target = TARGETS["sm_90"]
    launch = _launches(monkeypatch, target, shape, "half")
    others = launch.candidates(target.identity)[1:]
    assert len(others) >= 3, "nothing to tune"
    assert _all([launch.with_candidate(one) for one in (others[0], others[len(others) // 2], others[-1])], target) == []


# Sums that are not one chain, each caught by the check above.


@TunableKernel(outputs=("c_ptr",), fixed=lambda _sizes, _device: {"num_warps": 4})
@triton.jit
def _halved_kernel(
    a_ptr, b_ptr, c_ptr, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Two chains over K, one a half, added in the end."""
    side = tl.arange(0, 32)
    square = side[:, None] * 32 + side[None, :]
    left, right = tl.zeros((32, 32), tl.float32), tl.zeros((32, 32), tl.float32)
    for _ in range(k // 64):
        left = tl.dot(tl.load(a_ptr + square), tl.load(b_ptr + square), left, input_precision=PRECISION)
        right = tl.dot(tl.load(a_ptr + 4096 + square), tl.load(b_ptr + 4096 + square), right, input_precision=PRECISION)
        a_ptr += 1024
        b_ptr += 1024
    tl.store(c_ptr + square, left + right + 0.0)


def _halved(dtype: torch.dtype, precision: str | None) -> Offline:
    values = {name: torch.empty(16, dtype=dtype) for name in ("a_ptr", "b_ptr")}
    values |= {"c_ptr": torch.empty(16), "k": 4096, "BLOCK_M": 32, "BLOCK_N": 32, "PRECISION": precision}
    return Offline(_halved_kernel, values, {"num_warps": 4, "num_stages": 2})


def test_a_second_chain_is_noticed() -> None:
    target, launch = TARGETS["sm_90"], _halved(torch.bfloat16, None)
    found = broken_chains(launch, target, compile_offline(launch, target, OWN))
    assert found == ["2 sums an element beside the dots, not 1"]


def test_another_precision_is_noticed() -> None:
    target, launch = TARGETS["sm_90"], _halved(torch.float32, "tf32")
    compiled = compile_offline(launch, target, OWN)
    claimed = replace(launch, values={**launch.values, "PRECISION": "ieee"})
    assert "groups of K [(8, 1)], not (1, 1)" in broken_chains(claimed, target, compiled)


@pytest.mark.parametrize("n", [1, 2, 16])
def test_b70_one_column_needs_no_more_shared_memory_than_a_small_card_has(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Target(GPUTarget("cuda", 86, 32), DeviceIdentity("cuda", "small", "sm_86", 28), shared_bytes("sm_86"))
    launches = [_launches(monkeypatch, small, (m, n, k), "ieee") for m in (1, 7, 512) for k in (768, 2048)]
    launches += [_launches(monkeypatch, small, (512, n, 768), "half")]
    assert _all(launches, small) == []
