"""The bit class of kernels whose sums are known: which launches share one, and which do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_engine.backends.shared.triton import bits_code, compiler
from rl_engine.backends.shared.triton.bits import BitClass, bit_class, structure_digest, structure_of
from tests.support import bits_toys as toys
from tests.support.bits_toys import RAW, ROUNDED, SELECTED, compiled
from tests.support.offline import TARGETS

BF16 = {"dtype": torch.bfloat16, "PRECISION": "ieee"}
MORE_WARPS, ANYWHERE, MORE_STAGES = {"num_warps": 8}, {"aligned": False}, {"num_stages": 5}
# name: (kernel, what all launches of a row share, launches in the class of the first, launches outside of it)
ELSEWHERE = {
    "elementwise": (toys.elementwise_kernel, {}, [{"BLOCK": 512}, MORE_WARPS, ANYWHERE], []),
    "sum": (toys.row_sum_kernel, {}, [MORE_STAGES], [MORE_WARPS, ANYWHERE]),
    "fold": (toys.fold_kernel, {}, [MORE_WARPS, ANYWHERE, {"ROWS": 4}], [{"BLOCK": 512}]),
    "fold of squares": (toys.fold_kernel, {"SQUARES": RAW}, [], [ANYWHERE]),
    "GEMM": (toys.gemm_kernel, BF16, [{"BLOCK_N": 128}, {"BLOCK_K": 32}, MORE_WARPS], [{"SPLIT": 2}]),
}
CASES = {
    **ELSEWHERE,
    "sum in bf16": (toys.row_sum_kernel, BF16, [], [MORE_WARPS, ANYWHERE]),
    "maximum, count": (toys.row_max_kernel, {}, [MORE_WARPS, ANYWHERE], []),
    "scan": (toys.scan_kernel, {}, [MORE_STAGES], [MORE_WARPS, ANYWHERE]),
    "fold of rounded squares": (toys.fold_kernel, {"SQUARES": ROUNDED}, [MORE_WARPS, ANYWHERE, {"ROWS": 4}], []),
    "fold of selected squares": (toys.fold_kernel, {"SQUARES": SELECTED}, [MORE_WARPS, ANYWHERE, {"ROWS": 4}], []),
    "fold of a few squares": (toys.fold_kernel, {"SQUARES": RAW, "BLOCK": 256}, [], [{"num_warps": 16}, ANYWHERE]),
    "two values": (toys.pairs_kernel, {}, [MORE_WARPS, ANYWHERE, {"num_warps": 1}], []),
    "two squares, reshaped": (toys.pairs_kernel, {"SQUARES": 1}, [], [MORE_WARPS, {"BLOCK": 64}]),
    "product and sum in one round": (toys.decay_kernel, {}, [MORE_WARPS, ANYWHERE], []),
    "product of the round before": (toys.decay_kernel, {"CARRIED": True}, [], [MORE_WARPS, ANYWHERE]),
    "GEMM of fp32": (
        toys.gemm_kernel,
        {},
        [{"BLOCK_M": 64}, {"BLOCK_K": 32}],
        [{"PRECISION": "ieee"}, {"PRECISION": "tf32x3"}],
    ),
    "GEMM of fp32 in three passes": (toys.gemm_kernel, {"PRECISION": "tf32x3"}, [{"BLOCK_N": 32}], [{"BLOCK_K": 32}]),
    "row sum of a GEMM": (toys.gemm_kernel, {**BF16, "SUM": True}, [{"BLOCK_M": 64}], [{"BLOCK_M": 16}]),
    "integer atomics": (toys.atomic_kernel, {"dtype": torch.int32}, [MORE_WARPS], []),
}  # fmt: skip


def _check(kernel: Any, target: str, shared: dict[str, Any], same: list[Any], others: list[Any]) -> None:
    first = bit_class(compiled(kernel, TARGETS[target], shared))
    assert first.agrees_with(first)
    for given in same:
        other = bit_class(compiled(kernel, TARGETS[target], {**shared, **given}))
        assert first.difference(other) == "", f"{given} is in another class"
        assert first.agrees_with(other)
        assert first.digest == other.digest
    for given in others:
        other = bit_class(compiled(kernel, TARGETS[target], {**shared, **given}))
        assert not first.agrees_with(other), f"{given} is in the same class"
        assert " against " in first.difference(other)
        assert first.digest != other.digest


@pytest.mark.parametrize("name", CASES)
def test_launches_share_a_class_where_nothing_can_change_the_order_of_a_sum(name: str) -> None:
    kernel, shared, same, others = CASES[name]
    _check(kernel, "sm_90", shared, same, others)


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("target", [name for name in TARGETS if name != "sm_90"])
def test_they_do_on_other_cards_too(target: str, name: str) -> None:
    kernel, shared, same, others = ELSEWHERE[name]
    _check(kernel, target, shared, same, others)


def test_small_tiles_of_a_gemm_share_a_class_only_where_that_was_measured() -> None:
    small = {"BLOCK_M": 16, "BLOCK_N": 32}  # a warp's instruction instead of a warp group's
    for target, same in {"sm_90": True, "sm_100": False, "gfx942": False}.items():
        first, other = (bit_class(compiled(toys.gemm_kernel, TARGETS[target], {**BF16, **one})) for one in ({}, small))
        assert first.agrees_with(other) is same, target


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_with_float_atomics_is_in_no_class_not_even_its_own(target: str) -> None:
    found = bit_class(compiled(toys.atomic_kernel, TARGETS[target], {}))
    assert not found.ordered
    assert not found.agrees_with(found)
    assert found.difference(found) == "atomics add in any order"


def test_cards_share_no_class() -> None:
    found = {name: bit_class(compiled(toys.elementwise_kernel, target, {})) for name, target in TARGETS.items()}
    assert len({one.digest for one in found.values()}) == len(TARGETS)
    assert "Triton" in found["sm_80"].difference(found["sm_90"])


def test_what_a_class_says_of_itself() -> None:
    found = bit_class(compiled(toys.gemm_kernel, TARGETS["sm_90"], {**BF16, "SUM": True}))
    identity, *lines = found.structure
    assert identity.startswith("Triton ")
    assert identity.endswith(" for sm_90, fusion on")
    assert len(lines) == 3
    assert lines[0].startswith(
        "tt.reduce by arith.addf over 64: nvidia_mma versionMajor=3 versionMinor=0 warpsPerCTA=1 "
    )
    assert lines[1] == (
        "dot of bf16 and bf16 into f32, onto what tt.dot left of the last step, K from get_program_id(z) to "
        "divsi(addi(argument, 1 step - 1), 1 step) by 1"
    )
    assert lines[2] == "multiply-accumulate of bf16 into f32 16 deep"
    assert found.code == ()  # no addition reads a product: nothing was disassembled


@pytest.mark.parametrize(("precision", "said"), [("tf32x3", "tf32x3, 64 at a time"), ("tf32", "tf32, onto")])
def test_the_precision_of_a_dot_is_part_of_it(precision: str, said: str) -> None:
    found = bit_class(compiled(toys.gemm_kernel, TARGETS["sm_90"], {"PRECISION": precision}))
    assert [line for line in found.structure if line.startswith(f"dot of f32 and f32 into f32, {said}")]


def test_the_cheap_half_of_a_digest_needs_no_disassembly(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compiled(toys.elementwise_kernel, TARGETS["sm_90"], {})
    whole = bit_class(kernel).digest
    monkeypatch.setattr(compiler, "nvdisasm", lambda: "/nonexistent/nvdisasm")
    bits_code.of_sass.cache_clear()
    assert structure_of(kernel) == structure_digest(whole)
    unread = bit_class(kernel)
    assert unread.digest != whole
    assert "not disassembled (FileNotFoundError" in unread.code[0]
    other = bit_class(compiled(toys.elementwise_kernel, TARGETS["sm_90"], MORE_WARPS))
    assert not unread.agrees_with(other), "what cannot be read is in a class of its own"


def test_classes_compare_what_was_read_not_where_it_came_from() -> None:
    one = BitClass(("a", "b"), ("c",))
    assert one.difference(BitClass(("a", "x"), ("c",))) == "b against x"
    assert one.difference(BitClass(("a",), ("c",))) == "b against nothing of that kind"
    assert not one.agrees_with(BitClass(("a", "b"), ()))


# Lines as nvdisasm and LLVM write them.
SASS = """
.text.k:
        /*0000*/                   LDG.E.128 R4, desc[UR6][R2.64] ;
        /*0010*/                   FMUL R8, R4, R5 ;
        /*0020*/                   FADD R9, R8, {addend} ;
        /*0030*/               @P0 FMUL R10, R9, R9 ;
        /*0040*/                   FADD R11, -RZ, |R9| ;
        /*0050*/                   HADD2.F32 R12, -RZ, R4.H0_H0 ;
        /*0060*/                   HFMA2.MMA R3, -RZ, RZ, 0, 0 ;
$__internal_0_$__cuda_sm20_div_rn:
        /*0070*/                   DFMA R20, R4, R4, R4 ;
"""
AMDGCN = """
	v_pk_mul_f32 v[0:1], v[2:3], v[4:5]
	v_add_f32_e32 v6, v1, v7
.LBB0_1:
	v_add_f32_e32 v6, v1, v7
	v_fmac_f32_e32 v8, v1, v7
"""


def test_an_addition_that_reads_a_product_shows_in_the_machine_code() -> None:
    assert bits_code.kinds(bits_code.sass(SASS.format(addend="R6"))) == ("f32 add", "f32 add of a product", "f32 mul")
    overwritten = SASS.replace("FADD R9, R8", "LDS.64 R8, [R3] ;\n        /*0021*/                   FADD R9, R8")
    assert bits_code.kinds(bits_code.sass(overwritten.format(addend="R6"))) == ("f32 add", "f32 mul")
    assert bits_code.kinds(bits_code.amdgcn(AMDGCN)) == ("f32 add", "f32 add of a product", "f32 fma", "f32 mul")
    assert bits_code.kinds(bits_code.amdgcn(AMDGCN.partition(".LBB0_1")[2])) == ("f32 add", "f32 fma")
