"""Segments of rows through descriptors: the table of tiles, and every row as its group alone would give it."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.operators.launches import recorded
from rl_engine.backends.shared.triton.gemm import launch
from rl_engine.backends.shared.triton.gemm.rule import Plan
from rl_engine.platforms.device import DeviceIdentity
from tests.support.ops_gemm import gemm
from tests.support.ops_inputs import DEVICE, Maker, assert_same_bytes

ROWS, DEPTH = 300, 64
BOUNDS = {
    "even": (0, 100, 200, 300), "uneven": (0, 1, 257, 300), "one": (0, 0, 300, 300), "nobody's": (70, 75, 203, 290),
    "none": (300, 300, 300, 300), "wild": (90, 30, 1 << 30, -5),
}  # fmt: skip


def _operands(dtype: torch.dtype, n: int, *, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    make = Maker(dtype)
    return make.normal(ROWS, DEPTH), make.normal(3, n, DEPTH).mT if transposed else make.normal(3, DEPTH, n)


def _segments(bounds: tuple[int, ...]) -> list[tuple[int, int]]:
    risen = torch.tensor(bounds).clamp(0, ROWS).cummax(0).values.tolist()
    return list(itertools.pairwise(risen))


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("transposed", [False, True], ids=["as it is", "transposed"])
@pytest.mark.parametrize("tile", [Plan(64, 64, 32, described=True), Plan(64, 16, 64, described=True)], ids=str)
def test_a_table_of_tiles_covers_every_row_once(tile: Plan, transposed: bool, bounds: tuple[int, ...]) -> None:
    a, b = _operands(torch.float16, 72, transposed=transposed)
    out = torch.full((ROWS, 72), float("nan"), dtype=torch.float16, device=DEVICE)
    offsets = torch.tensor(bounds, dtype=torch.int64, device=DEVICE)
    launch.multiply_by_table(a, b, offsets, out, tile, DeviceIdentity("cuda", "card", "sm_90", 5))
    expected = torch.zeros(ROWS, 72, dtype=torch.float64, device=DEVICE)
    for group, (start, end) in enumerate(_segments(bounds)):
        expected[start:end] = a[start:end].double() @ b[group].double()
    owned = expected.any(dim=1)
    torch.testing.assert_close(out.double(), expected, rtol=2**-10, atol=1e-4)
    assert torch.equal(out[~owned], torch.zeros_like(out[~owned]))


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True], ids=["as it is", "transposed"])
@pytest.mark.parametrize("n", [136, 144])  # 16 divides one: whole columns are stored
def test_a_groups_rows_through_descriptors_have_the_bytes_they_have_alone(n: int, transposed: bool) -> None:
    for dtype, bounds in itertools.product((torch.bfloat16, torch.float16), BOUNDS.values()):
        a, b = _operands(dtype, n, transposed=transposed)
        offsets = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
        with recorded() as launches:
            found = gemm(a, b, offsets=offsets)
        assert "_gemm_segments_kernel" in [one.kernel.__name__ for one in launches]
        for group, (start, end) in enumerate(_segments(bounds)):
            alone = gemm(a[start:end], b[group])
            assert_same_bytes(found[start:end], alone, f"{dtype}, {bounds}, group {group}")


@pytest.mark.gpu
def test_groups_that_cannot_be_described_are_read_through_pointers() -> None:
    offsets = torch.tensor(BOUNDS["even"], dtype=torch.int32, device=DEVICE)
    a, b = _operands(torch.bfloat16, 136, transposed=False)
    for rows, weights in ((a, b[:, :, :133]), (a[:, :62], b[:, :62]), (a.mT.contiguous().mT, b)):
        with recorded() as launches:
            found = gemm(rows, weights, offsets=offsets)
        assert [one.kernel.__name__ for one in launches] == ["_gemm_groups_kernel"]
        for group, (start, end) in enumerate(_segments(BOUNDS["even"])):
            assert_same_bytes(found[start:end], gemm(rows[start:end], weights[group]), f"group {group}")
