"""Trials from public bug reports (cases), each for its whole kind: offsets, batches, precision, layouts, one column."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.gemm.pieces import addresses
from rl_engine.platforms.tuning.store import MemoryStore
from rl_engine.runtime.policy import autotune
from tests.support.ops_gemm import KINDS, gemm, gradients, pair
from tests.support.ops_inputs import DEVICE, DTYPES, LAYOUTS, ON_GPU, Maker, assert_same_bytes
from tests.support.ops_launches import new_process

SIZES = (1, 17, 63, 64, 65, 511) if ON_GPU else (1, 17, 65)
# the interpreter takes one step of K after the other, and tuning launches dozens of times
DEPTHS = [(k, mode) for k in (512, 768, 1024, 1536, 2048, 4096) for mode in ("off", "on")]
DEPTHS = DEPTHS if ON_GPU else [(512, "off"), (16, "on")]
STRIDE = 2**28 + 16  # elements: row 8 begins behind 2^31
ROWS = 12


@TunableKernel(outputs=("offsets_ptr",), fixed=lambda _sizes, _device: {"num_warps": 4})
@triton.jit
def _offsets_kernel(base_ptr, offsets_ptr, row_stride, WIDE: tl.constexpr):
    tile = tl.arange(0, 16)
    found = addresses(base_ptr, tile, tile, row_stride, 1, WIDE)
    offset = (found.to(tl.int64) - base_ptr.to(tl.int64)) // 2
    tl.store(offsets_ptr + tile[:, None] * 16 + tile[None, :], offset)


def test_b15_addresses_of_a_tile_that_reaches_behind_two_to_the_31_are_64_bits_wide() -> None:
    base = torch.empty(1, dtype=torch.float16, device=DEVICE)
    offsets = torch.empty(16, 16, dtype=torch.int64, device=DEVICE)
    _offsets_kernel[(1,)](base, offsets, STRIDE, WIDE=True)
    tile = torch.arange(16, device=DEVICE)
    assert torch.equal(offsets, tile[:, None] * STRIDE + tile)
    assert int(offsets[-1, -1]) > 2**31


@pytest.mark.skipif(ON_GPU, reason="files are no memory of a card")
@autotune("off")  # a trial would copy all 6 GB between the rows, several times
def test_b15_rows_and_columns_far_apart_have_the_bytes_of_a_copy(tmp_path: Path) -> None:
    far = torch.from_file(str(tmp_path / "sparse"), shared=True, size=ROWS * STRIDE, dtype=torch.float16)
    matrix = far.as_strided((ROWS, 24), (STRIDE, 1))
    matrix.copy_(Maker(torch.float16).normal(ROWS, 24))
    b, dy = Maker(torch.float16, seed=2).normal(24, 16), Maker(torch.float16, seed=3).normal(ROWS, 16)
    near = matrix.contiguous()
    assert_same_bytes(gemm(matrix, b), gemm(near, b), "far rows")
    assert_same_bytes(gemm(b.T, matrix.T), gemm(b.T, near.T), "far columns")
    assert_same_bytes(gemm(matrix.T, dy), gemm(near.T, dy), "far along K")
    offsets = torch.tensor([0, 2, 9, ROWS])
    weights = Maker(torch.float16).normal(3, 24, 16)
    for found, wanted in zip(
        (gemm(matrix, weights, offsets=offsets), *gradients(matrix, weights, dy, offsets=offsets)),
        (gemm(near, weights, offsets=offsets), *gradients(near, weights, dy, offsets=offsets)),
        strict=True,
    ):
        assert found is not None
        assert wanted is not None
        assert_same_bytes(found, wanted, "far rows in groups")


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
def test_b15_more_than_two_to_the_31_elements_of_a_and_of_the_product(transposed: bool) -> None:
    make = torch.Generator("cuda").manual_seed(15)
    for rows, k, n in ((70_000, 32_768, 64), (140_000, 32, 16_384)):
        a = torch.randn(k, rows, generator=make, device="cuda", dtype=torch.bfloat16).T
        a = a if transposed else a.contiguous()
        b = torch.randn(k, n, generator=make, device="cuda", dtype=torch.bfloat16)
        assert rows * max(k, n) > 2**31
        whole = gemm(a, b)
        for start in (0, 2**31 // max(k, n) - 8, rows - 16):
            assert_same_bytes(gemm(a[start : start + 16], b), whole[start : start + 16], f"rows from {start}")
        del a, b, whole
        torch.cuda.empty_cache()


@pytest.mark.parametrize(("k", "mode"), DEPTHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"] if ON_GPU else ["float16"])
def test_b16_powers_of_two_of_k_are_batch_invariant_too(dtype: str, k: int, mode: str) -> None:
    rows, cols = (2048, 3072) if ON_GPU else (140, 48)
    a, b = pair(dtype, rows, k, cols)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(16)).to(DEVICE)
    with new_process(MemoryStore()), autotune(mode):
        whole = gemm(a, b)
        for size in (1, 8, 64, 128, 1000) if ON_GPU else (1, 64):
            assert_same_bytes(gemm(a[:size], b), whole[:size], f"the first {size} rows")
            assert_same_bytes(gemm(a[7 : 7 + size], b), whole[7 : 7 + size], f"{size} rows from the seventh")
        assert_same_bytes(gemm(a[order], b), whole[order], "another order")


@pytest.mark.parametrize("torchs", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_b17_fp32_operands_keep_all_their_digits_whatever_torchs_setting(torchs: bool, transposed: bool) -> None:
    width = 8192 if ON_GPU else 3000  # 2049 is the first that TF32 rounds
    a, b = torch.zeros(1, 16, device=DEVICE), torch.zeros(16, width, device=DEVICE)
    a[0, 0], b[0] = 1, torch.arange(width)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torchs
    try:
        found = gemm(a, b.T.contiguous().T if transposed else b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert_same_bytes(found, torch.arange(width, device=DEVICE).float()[None], "positions")


@pytest.mark.parametrize("m", SIZES)  # a test each, for workers to share: on a GPU all of them compile for minutes
@pytest.mark.parametrize("dtype", KINDS)
def test_b69_any_size_and_layout_gives_float64s_values_and_the_bytes_of_contiguous_copies(dtype: str, m: int) -> None:
    layouts = [lambda t: t, *(LAYOUTS[name] for name in ("sliced", "transposed", "packed", "odd_stride", "shifted"))]
    for number, (n, k) in enumerate(itertools.product(SIZES, repeat=2), start=SIZES.index(m) * len(SIZES) ** 2):
        a, b = pair(dtype, m, k, n)
        plain = gemm(a, b)
        # one rounding of the result, and a chain of K roundings towards zero at the most
        allowed = torch.finfo(plain.dtype).eps * plain.double().abs() + 1e-6 * k
        assert ((plain.double() - a.double() @ b.double()).abs() <= allowed).all(), (m, n, k)
        left, right = layouts[number % 6], layouts[number // 6 % 6]
        assert_same_bytes(gemm(left(a), right(b)), plain, f"{m}x{n}x{k}")


@pytest.mark.parametrize("dtype", KINDS)
def test_b69_rows_padded_to_a_round_vocabulary(dtype: str) -> None:
    vocab, padded = (50_257, 50_304) if ON_GPU else (257, 304)
    make = Maker(DTYPES[dtype])
    weight = torch.full((24, padded), torch.nan, dtype=DTYPES[dtype], device=DEVICE)
    weight[:, :vocab] = make.normal(24, vocab)
    a, dy = make.normal(5, 24), make.normal(5, vocab)
    view, copy = weight[:, :vocab], weight[:, :vocab].contiguous()
    assert_same_bytes(gemm(a, view), gemm(a, copy), "logits")
    for found, wanted in zip(gradients(a, view, dy), gradients(a, copy, dy), strict=True):
        assert found is not None
        assert wanted is not None
        assert_same_bytes(found, wanted, "a gradient")


@pytest.mark.parametrize("dtype", KINDS)
def test_b70_a_value_head_of_one_column_has_a_rows_bytes_alone_and_in_a_batch(dtype: str) -> None:
    for k, n in itertools.product((768, 2048) if ON_GPU else (96,), (1, 2, 16)):
        a, b = pair(dtype, 512 if ON_GPU else 140, k, n)
        whole = gemm(a, b)
        for m in (1, 7):
            assert_same_bytes(gemm(a[:m], b), whole[:m], f"{m}x{n}x{k}")
