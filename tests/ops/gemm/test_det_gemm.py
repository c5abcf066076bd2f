"""det_gemm: an element's bits depend on K, its row of a and its column of b; values, bits, paths, refusals."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from benchmarks.operators.launches import recorded
from rl_engine.backends.shared.triton.gemm import launch as launching
from rl_engine.backends.shared.triton.gemm import product
from rl_engine.backends.shared.triton.gemm.rule import Plan
from tests.support.ops_gemm import KINDS, gemm, pair
from tests.support.ops_inputs import DEVICE, LAYOUTS, ON_GPU, Maker, assert_same_bytes

ROWS, INNER, COLS = (8192, 2048, 768) if ON_GPU else (300, 24, 40)
BATCHES = [size for size in (1, 2, 3, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 2048, 4099)
           if size < ROWS]  # fmt: skip


# Values.


def test_special_values_reach_their_own_rows_and_columns_alone() -> None:
    a, b = pair("float32", 20, 40, 24)
    wanted = gemm(a, b)
    a[3, 5], a[4, 6], b[7, 9] = math.nan, math.inf, -math.inf
    found = gemm(a, b)
    exact = a @ b
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(found), kind(exact)), kind.__name__
    untouched = torch.ones_like(found, dtype=torch.bool)
    untouched[3], untouched[4], untouched[:, 9] = False, False, False
    assert_same_bytes(found[untouched], wanted[untouched], "other elements")


def test_subnormals_are_kept_and_zeros_are_positive() -> None:
    a, b = torch.zeros(2, 17, device=DEVICE), torch.zeros(17, 3, device=DEVICE)
    a[0, 16], b[16] = 1e-40, 1.0
    a[1], b[0] = -0.0, -1.0
    found = gemm(a, b)
    assert torch.equal(found[0], torch.full((3,), 1e-40, device=DEVICE))
    assert_same_bytes(found[1], torch.zeros(3, device=DEVICE), "a sum of signed zeros")


@pytest.mark.parametrize("dtype", [name for name in KINDS if name != "float32"])
def test_a_wide_result_is_rounded_once(dtype: str) -> None:
    a, b = pair(dtype, 33, 70, 48)
    wide = gemm(a, b, out_dtype=torch.float32)
    assert_same_bytes(wide.to(a.dtype), gemm(a, b), "rounded after or inside")
    bias = Maker(torch.float32).normal(48)
    assert_same_bytes((wide + bias).to(a.dtype), gemm(a, b, bias), "the bias is added before rounding")


# Bits.


@pytest.mark.parametrize("dtype", KINDS)
def test_a_row_has_its_bytes_in_a_batch_of_any_size_at_any_place(dtype: str) -> None:
    a, b = pair(dtype, ROWS, INNER, COLS)
    b = b.T.contiguous().T
    whole = gemm(a, b)
    for size in BATCHES:
        start = (ROWS - size) // 2
        assert_same_bytes(gemm(a[start : start + size], b), whole[start : start + size], f"{size} rows")
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    assert_same_bytes(gemm(a[order], b), whole[order], "another order")
    row = a[ROWS // 3].expand(ROWS, INNER)
    assert_same_bytes(gemm(row, b), whole[ROWS // 3].expand(ROWS, COLS).contiguous(), "one row everywhere")


@pytest.mark.parametrize("dtype", KINDS)
def test_operands_swapped_give_the_transposed_bytes(dtype: str) -> None:
    for m, n in ((1, 129), (5, 70), (70, 5), (96, 96)):
        a, b = pair(dtype, m, 50, n)
        assert_same_bytes(gemm(b.T, a.T), gemm(a, b).T.contiguous(), f"{m}x{n}")


def test_a_chain_that_ends_in_an_underflow_ends_in_a_positive_zero_however_k_is_filled_up() -> None:
    for k in (1, 3, 16, 130, 192):  # as long as a tile and not
        a, b = torch.zeros(70, k, device=DEVICE), torch.zeros(k, 70, device=DEVICE)
        a[:, -1], b[-1] = -1e-30, 1e-30
        assert_same_bytes(gemm(a, b), torch.zeros(70, 70, device=DEVICE), f"K of {k}")
        assert_same_bytes(gemm(a[:1], b), torch.zeros(1, 70, device=DEVICE), f"one row, K of {k}")


@pytest.mark.skipif(not ON_GPU, reason="NumPy knows one precision")
def test_tf32_is_rounded_when_asked_for_and_batch_invariant_too() -> None:
    a, b = pair("float32", 4099, 1000, 768)
    whole = gemm(a, b, input_precision="tf32")
    error = (whole.double() - a.double() @ b.double()).abs().max()
    assert 1e-4 < error < 1  # 10 bits of each factor, 1,000 products of size 1
    for size in (1, 16, 64, 65, 257):
        assert_same_bytes(gemm(a[:size], b, input_precision="tf32"), whole[:size], f"{size} rows")


def test_zeros_behind_k_up_to_a_multiple_of_16_change_nothing() -> None:
    a, b = pair("float16", 9, 41, 24)
    padded = gemm(torch.nn.functional.pad(a, (0, 7)), torch.nn.functional.pad(b, (0, 0, 0, 7)))
    assert_same_bytes(padded, gemm(a, b), "K of 48 and 41")


# Paths.


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("layout", ["sliced", "transposed", "packed", "odd_stride", "shifted"])
def test_tiles_that_reach_behind_the_operands_read_zeros_there(layout: str, swapped: bool) -> None:
    # the interpreter takes one step of K at a time, so only a forced tile has a rest of K there
    a, b = pair("float32", 37, 41, 45)
    left, right, out = LAYOUTS[layout](a), LAYOUTS[layout](b), torch.empty(37, 45, device=DEVICE)
    launching.multiply_as(Plan(32, 16, 16, swapped=swapped), left, right, out, "ieee")
    torch.testing.assert_close(out, a @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("layouts", list(itertools.product((False, True), repeat=2)))
def test_persistent_tiles_through_descriptors_give_the_same_product(
    layouts: tuple[bool, bool], swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the interpreter computes whole tiles in NumPy's order, so there only values can be compared
    (a, b), bias = pair("float16", 72, 40, 136), Maker(torch.float32).normal(136)
    a, b = (one.T.contiguous().T if turned else one for one, turned in zip((a, b), layouts, strict=True))
    wanted = gemm(a, b, bias)
    for columns in (16, 64):
        forced = Plan(described=True, swapped=swapped, block_m=32, block_n=columns, block_k=16)
        monkeypatch.setattr(product, "plan", lambda *_args, forced=forced, **_more: forced)
        with recorded() as launches:
            found = gemm(a, b, bias)
        assert [one.kernel.__name__ for one in launches] == ["_gemm_persistent_kernel"]
        if ON_GPU:
            assert_same_bytes(found, wanted, f"{columns} columns")
        torch.testing.assert_close(found, wanted)


# Refusals.

_A, _B = torch.ones(4, 8, device=DEVICE), torch.ones(8, 6, device=DEVICE)
REFUSED: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any], type[Exception], str]] = {
    "inner": ((_A, _B.T), {}, ValueError, r"a is \[4, 8\], b is \[6, 8\]; pass a \[\.\.\., K\] and b \[\.\.\., K, N\]"),
    "leading": ((_A[None], _B.expand(2, 8, 6)), {}, ValueError, "equal leading axes"),
    "dtypes": ((_A, _B.half()), {}, TypeError, "a is torch.float32, b is torch.float16; pass equal dtypes"),
    "integers": ((_A.int(), _B.int()), {}, TypeError, "a is torch.int32; pass bfloat16, float16 or float32"),
    "out": ((_A, _B), {"out_dtype": torch.float16}, TypeError, "out_dtype is torch.float16"),
    "precision": ((_A, _B), {"input_precision": "tf32x3"}, ValueError, "input_precision is 'tf32x3'"),
    "bias": ((_A, _B, _A[0]), {}, ValueError, r"bias is \[8\].*pass bias \[6\]"),
    "offsets": ((_A, _B[None]), {"offsets": torch.arange(3, device=DEVICE)}, ValueError, r"pass \[2\]"),
    "float offsets": ((_A, _B[None]), {"offsets": torch.zeros(2, device=DEVICE)}, TypeError, "int32 or int64"),
    "accumulator": ((_A, _B), {"accumulate_into": _B.T}, ValueError, "accumulate_into is"),
    "half accumulator": ((_A, _B), {"accumulate_into": _B.half()}, TypeError, "pass float32"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(
    case: tuple[tuple[torch.Tensor, ...], dict[str, Any], type[Exception], str],
) -> None:
    args, kwargs, error, message = case
    with pytest.raises(error, match=message):
        gemm(*args, **kwargs)
