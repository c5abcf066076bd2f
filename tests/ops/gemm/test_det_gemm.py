"""det_gemm: an element's bits depend on K, its row of a and its column of b; values, layouts, forms, gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from rl_engine.backends.shared.triton.gemm import launch as launching
from rl_engine.backends.shared.triton.gemm.rule import LEAST, Plan, launch, plan
from rl_engine.platforms.device import DeviceIdentity
from tests.support.offline import TARGETS
from tests.support.ops_inputs import DEVICE, DTYPES, LAYOUTS, ON_GPU, Maker, assert_same_bytes, triton_op
from tests.support.ops_launches import recorded

SIZES = (1, 17, 63, 64, 65, 511) if ON_GPU else (1, 17, 65)
KINDS = tuple(name for name in DTYPES if ON_GPU or name != "bfloat16")
ROWS, INNER, COLS = (8192, 2048, 768) if ON_GPU else (300, 24, 40)
BATCHES = [size for size in (1, 2, 3, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 2048, 4099)
           if size < ROWS]  # fmt: skip


def _op(*args: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    result: torch.Tensor = triton_op("det_gemm")(*args, **kwargs)
    return result


def _pair(dtype: str, m: int, k: int, n: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    make = Maker(DTYPES[dtype], seed=seed)
    return make.normal(m, k), make.normal(k, n)


def _gradients(
    a: torch.Tensor, b: torch.Tensor, dy: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of a and b."""
    x, y = a.detach().requires_grad_(), b.detach().requires_grad_()
    _op(x, y, **kwargs).backward(dy)
    return x.grad, y.grad


# Values.


@pytest.mark.parametrize("dtype", KINDS)
def test_any_size_and_layout_gives_float64s_values_and_the_bytes_of_contiguous_copies(dtype: str) -> None:
    layouts = [lambda t: t, *(LAYOUTS[name] for name in ("sliced", "transposed", "packed", "odd_stride", "shifted"))]
    for number, (m, n, k) in enumerate(itertools.product(SIZES, repeat=3)):
        a, b = _pair(dtype, m, k, n)
        plain = _op(a, b)
        # one rounding of the result, and a chain of K roundings towards zero at the most
        allowed = torch.finfo(plain.dtype).eps * plain.double().abs() + 1e-6 * k
        assert ((plain.double() - a.double() @ b.double()).abs() <= allowed).all(), (m, n, k)
        left, right = layouts[number % 6], layouts[number // 6 % 6]
        assert_same_bytes(_op(left(a), right(b)), plain, f"{m}x{n}x{k}")


@pytest.mark.parametrize("torchs", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_fp32_operands_keep_all_their_digits_whatever_torchs_setting(torchs: bool, transposed: bool) -> None:
    width = 8192 if ON_GPU else 3000  # 2049 is the first that TF32 rounds
    a, b = torch.zeros(1, 16, device=DEVICE), torch.zeros(16, width, device=DEVICE)
    a[0, 0], b[0] = 1, torch.arange(width)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torchs
    try:
        found = _op(a, b.T.contiguous().T if transposed else b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert_same_bytes(found, torch.arange(width, device=DEVICE).float()[None], "positions")


def test_special_values_reach_their_own_rows_and_columns_alone() -> None:
    a, b = _pair("float32", 20, 40, 24)
    wanted = _op(a, b)
    a[3, 5], a[4, 6], b[7, 9] = math.nan, math.inf, -math.inf
    found = _op(a, b)
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
    found = _op(a, b)
    assert torch.equal(found[0], torch.full((3,), 1e-40, device=DEVICE))
    assert_same_bytes(found[1], torch.zeros(3, device=DEVICE), "a sum of signed zeros")


@pytest.mark.parametrize("dtype", [name for name in KINDS if name != "float32"])
def test_a_wide_result_is_rounded_once(dtype: str) -> None:
    a, b = _pair(dtype, 33, 70, 48)
    wide = _op(a, b, out_dtype=torch.float32)
    assert_same_bytes(wide.to(a.dtype), _op(a, b), "rounded after or inside")
    bias = Maker(torch.float32).normal(48)
    assert_same_bytes((wide + bias).to(a.dtype), _op(a, b, bias), "the bias is added before rounding")


# Bits.


@pytest.mark.parametrize("dtype", KINDS)
def test_a_row_has_its_bytes_in_a_batch_of_any_size_at_any_place(dtype: str) -> None:
    a, b = _pair(dtype, ROWS, INNER, COLS)
    b = b.T.contiguous().T
    whole = _op(a, b)
    for size in BATCHES:
        start = (ROWS - size) // 2
        assert_same_bytes(_op(a[start : start + size], b), whole[start : start + size], f"{size} rows")
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    assert_same_bytes(_op(a[order], b), whole[order], "another order")
    row = a[ROWS // 3].expand(ROWS, INNER)
    assert_same_bytes(_op(row, b), whole[ROWS // 3].expand(ROWS, COLS).contiguous(), "one row everywhere")


@pytest.mark.skipif(not ON_GPU, reason="the sizes at which libraries switch kernels")
@pytest.mark.parametrize("k", [512, 768, 1024, 1536, 2048, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_powers_of_two_of_k_are_batch_invariant_too(dtype: str, k: int) -> None:
    a, b = _pair(dtype, 2048, k, 3072)
    whole = _op(a, b)
    for size in (1, 8, 64, 128, 1000):
        assert_same_bytes(_op(a[:size], b), whole[:size], f"the first {size} rows")
        assert_same_bytes(_op(a[7 : 7 + size], b), whole[7 : 7 + size], f"{size} rows from the seventh")


@pytest.mark.parametrize("dtype", KINDS)
def test_operands_swapped_give_the_transposed_bytes(dtype: str) -> None:
    for m, n in ((1, 129), (5, 70), (70, 5), (96, 96)):
        a, b = _pair(dtype, m, 50, n)
        assert_same_bytes(_op(b.T, a.T), _op(a, b).T.contiguous(), f"{m}x{n}")


@pytest.mark.parametrize("dtype", KINDS)
def test_a_value_head_of_one_column(dtype: str) -> None:
    for k, n in itertools.product((768, 2048) if ON_GPU else (96,), (1, 2, 16)):
        a, b = _pair(dtype, 512 if ON_GPU else 140, k, n)
        whole = _op(a, b)
        for m in (1, 7):
            assert_same_bytes(_op(a[:m], b), whole[:m], f"{m}x{n}x{k}")


def test_zeros_behind_k_up_to_a_multiple_of_16_change_nothing() -> None:
    a, b = _pair("float16", 9, 41, 24)
    padded = _op(torch.nn.functional.pad(a, (0, 7)), torch.nn.functional.pad(b, (0, 0, 0, 7)))
    assert_same_bytes(padded, _op(a, b), "K of 48 and 41")


# Paths.


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("layouts", list(itertools.product((False, True), repeat=2)))
def test_persistent_tiles_through_descriptors_give_the_same_product(
    layouts: tuple[bool, bool], swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the interpreter computes whole tiles in NumPy's order, so there only values can be compared
    (a, b), bias = _pair("float16", 72, 40, 136), Maker(torch.float32).normal(136)
    a, b = (one.T.contiguous().T if turned else one for one, turned in zip((a, b), layouts, strict=True))
    wanted = _op(a, b, bias)
    for columns in (16, 64):
        forced = Plan(described=True, swapped=swapped, block_m=32, block_n=columns, block_k=16)
        monkeypatch.setattr(launching, "plan", lambda *_args, forced=forced, **_more: forced)
        with recorded() as launches:
            found = _op(a, b, bias)
        assert [one.kernel.__name__ for one in launches] == ["_gemm_persistent_kernel"]
        if ON_GPU:
            assert_same_bytes(found, wanted, f"{columns} columns")
        torch.testing.assert_close(found, wanted)


# Forms.


def test_zero_sizes() -> None:
    bias = torch.arange(3.0, device=DEVICE)
    for m, k, n in ((0, 4, 3), (2, 0, 3), (2, 4, 0)):
        a, b = torch.ones(m, k, device=DEVICE), torch.ones(k, n, device=DEVICE)
        found = _op(a, b, bias[:n])
        assert found.shape == (m, n)
        assert torch.equal(found, a @ b + bias[:n])
        da, db = _gradients(a, b, torch.ones_like(found))
        assert torch.equal(da, torch.full_like(a, float(n)))
        assert torch.equal(db, torch.full_like(b, float(m)))


@pytest.mark.parametrize("dtype", KINDS)
def test_a_batch_has_the_bytes_of_its_members(dtype: str) -> None:
    make = Maker(DTYPES[dtype])
    a, b = make.normal(2, 3, 19, 24), make.normal(2, 3, 24, 16)
    dy = make.normal(2, 3, 19, 16)
    found, (da, db) = _op(a, b), _gradients(a, b, dy)
    assert da is not None
    assert db is not None
    for one in itertools.product(range(2), range(3)):
        assert_same_bytes(found[one], _op(a[one], b[one]), f"member {one}")
        alone = _gradients(a[one], b[one], dy[one])
        assert alone[0] is not None
        assert alone[1] is not None
        assert_same_bytes(da[one], alone[0], f"gradient of a, member {one}")
        assert_same_bytes(db[one], alone[1], f"gradient of b, member {one}")


GROUPS = {
    "even": (0, 10, 20, 30, 40), "uneven": (0, 1, 35, 36, 40), "empty": (0, 0, 40, 40, 40),
    "rows of nobody": (5, 9, 9, 20, 33),
}  # fmt: skip


@pytest.mark.parametrize("bounds", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("dtype", KINDS)
def test_a_groups_rows_have_the_bytes_they_have_alone(dtype: str, bounds: tuple[int, ...]) -> None:
    make = Maker(DTYPES[dtype])
    a, b, dy = make.normal(40, 24), make.normal(4, 16, 24).mT, make.normal(40, 16)
    offsets = torch.tensor(bounds, device=DEVICE, dtype=torch.int32)
    found, (da, db) = _op(a, b, offsets=offsets), _gradients(a, b, dy, offsets=offsets)
    assert da is not None
    assert db is not None
    owned = torch.zeros(40, dtype=torch.bool, device=DEVICE)
    for group, (start, end) in enumerate(itertools.pairwise(bounds)):
        owned[start:end] = True
        assert_same_bytes(found[start:end], _op(a[start:end], b[group]), f"group {group}")
        alone = _gradients(a[start:end], b[group], dy[start:end])
        assert alone[0] is not None
        assert alone[1] is not None
        assert_same_bytes(da[start:end], alone[0], f"gradient of a, group {group}")
        assert_same_bytes(db[group], alone[1], f"gradient of b, group {group}")
    assert not found[~owned].any()
    assert not da[~owned].any()


def test_wild_offsets_stay_inside_the_rows() -> None:
    make = Maker(torch.float32)
    memory = torch.full((60, 24), math.nan, device=DEVICE)
    memory[10:50] = make.normal(40, 24)
    a, b = memory[10:50], make.normal(3, 24, 16)
    offsets = torch.tensor([-7, 2**40, 3, 90], device=DEVICE)
    found, (da, db) = _op(a, b, offsets=offsets), _gradients(a, b, make.normal(40, 16), offsets=offsets)
    assert_same_bytes(found, _op(a, b[0]), "all rows are the first group's")
    assert da is not None
    assert db is not None
    assert torch.isfinite(da).all()
    assert torch.isfinite(db).all()
    assert not db[1:].any()


# Gradients of weights, continued.


@pytest.mark.parametrize("dtype", KINDS)
def test_micro_batches_of_whole_groups_leave_the_bits_of_one_batch(dtype: str) -> None:
    x, w = _pair(dtype, 160, 40, 24)
    dy = Maker(DTYPES[dtype], seed=5).normal(160, 24)
    whole = _op(x.T, dy, out_dtype=torch.float32)
    for cuts in ((0, 160), (0, 16, 160), (0, 48, 64, 128, 160)):
        into = torch.zeros(40, 24, device=DEVICE)
        for start, end in itertools.pairwise(cuts):
            version = into._version
            _da, db = _gradients(x[start:end], w, dy[start:end], accumulate_into=into)
            assert db is None
            assert into._version > version
        assert_same_bytes(into, whole, f"cut at {cuts}")


def test_chains_continue_from_what_is_there_in_groups_too() -> None:
    make = Maker(torch.float32)
    a, b, dy = make.normal(40, 24), make.normal(3, 24, 16), make.normal(40, 16)
    offsets = torch.tensor([0, 16, 16, 40], device=DEVICE)
    before = make.normal(3, 24, 16)
    into = before.clone()
    _gradients(a, b, dy, offsets=offsets, accumulate_into=into)
    for group, (start, end) in enumerate(((0, 16), (16, 16), (16, 40))):
        alone = before[group].clone()
        _gradients(a[start:end], b[group], dy[start:end], accumulate_into=alone)
        assert_same_bytes(into[group], alone, f"group {group}")
    torch.testing.assert_close(into[0], before[0] + a[:16].T @ dy[:16])


def test_a_bias_gradient_is_one_chain_over_the_rows() -> None:
    a, b = _pair("float16", 90, 24, 33)
    bias, dy = torch.zeros(33, device=DEVICE, requires_grad=True), Maker(torch.float16, seed=7).normal(90, 33)
    _op(a, b, bias).backward(dy)
    assert bias.grad is not None
    assert_same_bytes(bias.grad, _op(torch.ones_like(dy[:, :1]).T, dy, out_dtype=torch.float32)[0], "1^T dy")


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
        _op(*args, **kwargs)


# The rule.

SHAPES = [(1, 6144, 4096), (16, 24576, 4096), (64, 4096, 12288), (128, 6144, 4096), (8192, 8192, 8192),
          (1 << 17, 1, 768), (3, 5, 7), (2048, 4096, 4096)]  # fmt: skip


def _sizes(found: Plan, precision: str) -> dict[str, Any]:
    sizes = {"BLOCK_M": found.block_m, "BLOCK_N": found.block_n, "BLOCK_K": found.block_k}
    parts = {"PARTS": 1 if found.block_n < 64 else 2} if found.described else {}
    return {**sizes, **parts, "PRECISION": None if precision == "half" else precision}


@pytest.mark.parametrize("precision", ["half", "tf32", "ieee"])
@pytest.mark.parametrize("name", TARGETS)
def test_the_rule_fits_every_card_and_keeps_the_groups_of_k_whole(name: str, precision: Any) -> None:
    target = TARGETS[name]
    for shape, describable in itertools.product(SHAPES, (True, False)):
        found = plan(*shape, precision, target.identity, describable=describable)
        assert found.block_k % LEAST == 0
        assert min(found.block_m, found.block_n) >= LEAST
        chosen = launch(_sizes(found, precision), target.identity)
        itemsize = 2 if precision == "half" else 4
        buffers = chosen["num_stages"] - (target.identity.kind == "hip")  # the last one is in registers
        assert (found.block_m + found.block_n) * found.block_k * itemsize * buffers <= target.shared_bytes
        assert found.block_m * found.block_n <= 128 * 32 * chosen["num_warps"] * (
            2 if target.identity.kind == "hip" else 1
        )
        assert not found.described or (describable and name in ("sm_90", "sm_100"))


def test_an_amd_card_has_one_tile_a_precision() -> None:
    for name in ("gfx942", "gfx950"):
        for precision in ("half", "tf32", "ieee"):
            found = {plan(*shape, precision, TARGETS[name].identity, describable=True) for shape in SHAPES}
            assert len(found) == 1


def test_decode_computes_the_transposed_product_and_training_the_largest_tile() -> None:
    card = TARGETS["sm_90"].identity
    assert plan(1, 6144, 4096, "half", card, describable=True).swapped
    assert not plan(1 << 17, 1, 768, "half", card, describable=True).swapped
    large = plan(8192, 8192, 8192, "half", card, describable=True)
    assert (large.block_m, large.block_n, large.described) == (128, 256, True)
    assert plan(8192, 8192, 8192, "half", DeviceIdentity("cuda", "?", "sm_89", 128), describable=True).block_n == 128
