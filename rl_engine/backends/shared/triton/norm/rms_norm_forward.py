"""RMSNorm's forward kernel: y = x * rstd * w with rstd = rsqrt(mean(x^2) + eps), a program a few whole rows.

The tree of a row sum folds neighbours over the row padded with zeros to a power of two, so a tile that is an aligned
part of it is a subtree: tile width, rows a program and warps are free (H200: a whole-row fold runs [16384, 4096] in
67.5 us and [64, 4096] in 2.0, fixed lanes folded once in 66.5 and 2.5; the small shapes decided).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.norm.strided_rows import load_columns, load_tile, row_offset, rows_of, store_tile
from rl_engine.backends.shared.triton.operands import power_of_two
from rl_engine.backends.shared.triton.primitives.folds import fold_columns, rounded_product

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rl_engine.platforms.device import DeviceIdentity

WIDEST = 8192  # columns of a tile: 32 fp32 registers a thread with 8 warps
NONE, LLAMA, GEMMA = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # casting modes
by_rows = operands.blocks("n_rows", "ROWS")


def fixed_rows(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    """Return about 2048 elements a program, whole rows, and fewer rows where multiprocessors would stay idle.

    16 elements a thread (H200: [16384, 4096] 66.3 us with 8 warps, 67.9 with 4; [655360, 128], 16 rows a program, 81.8
    with 4, 83.0 with 8), 32 of rows of 8192 (135.6 us with 8 warps, 171.6 with 16).
    """
    tile = sizes["TILE"]
    rows = operands.rows_in_tile(sizes["n_rows"], tile, 2048, device)
    return {"ROWS": rows, "num_warps": max(1, min(8, rows * tile // 512))}


def _fixed_forward(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    """Return `fixed_rows`, but at most 4 warps where exchanges between warps are what takes long.

    H200: of many rows of 8192, 133.3 us, 136.6 with 8; of a row a multiprocessor, [64, 4096], 1.80 us, 1.90 with 8.
    """
    launch = fixed_rows(sizes, device)
    many = sizes["COLS"] == sizes["TILE"] == WIDEST and sizes["n_rows"] >= 8 * device.sm_count
    if many or (sizes["TILE"] <= 4096 and sizes["n_rows"] <= device.sm_count):
        launch["num_warps"] = min(4, launch["num_warps"])
    return launch


def admits_rows(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    """Let through 4 to 64 elements a thread."""
    return 4 <= launch["ROWS"] * sizes["TILE"] // (32 * launch["num_warps"]) <= 64


@TunableKernel(
    outputs=("y_ptr", "rstd_ptr"),
    data=("x_ptr", "w_ptr"),
    dynamic=("n_rows", "x_block", "x_block_stride"),
    fixed=_fixed_forward,
    # every sum is a fold of two values at a time over the same tree: warps and rows only say who computes it
    neutral={"ROWS": (1, 2, 4, 16), "num_warps": (4, 8, 16)},
    admits=admits_rows,
)
@triton.jit(do_not_specialize=["n_rows", "x_block", "x_block_stride"])
def _rms_norm_fwd_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr, n_rows, x_stride, x_block, x_block_stride, inverse_cols, eps,
    CASTING: tl.constexpr, X_UNIT: tl.constexpr, N_COLS: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    x_rows = x_ptr + row_offset(row, x_stride, x_block, x_block_stride, X_UNIT)[:, None]
    y_rows = y_ptr + (row * N_COLS)[:, None]
    col = tl.arange(0, TILE)
    if COLS == TILE:
        x = load_tile(x_rows, inside, col, N_COLS, TILE)
        # before the fold, whose barriers no load moves across: its latency cost 13% of [16384, 4096] on an H200
        w = load_weight(w_ptr, col, N_COLS, TILE, CASTING)
        rstd = _rstd(fold_columns(rounded_product(x, x), ROWS, TILE), inverse_cols, eps)
        hat = normalized(x, rstd[:, None], x_ptr.dtype.element_ty, CASTING)
        store_tile(y_rows, inside, col, hat * w, N_COLS, TILE)
    else:
        slot = tl.arange(0, COLS // TILE)
        sums = tl.zeros((ROWS, COLS // TILE), tl.float32)
        for start in range(0, N_COLS, TILE):
            x = load_tile(x_rows, inside, start + col, N_COLS, TILE)
            part = fold_columns(rounded_product(x, x), ROWS, TILE)
            sums = tl.where(slot[None, :] == start // TILE, part[:, None], sums)
        rstd = _rstd(fold_columns(sums, ROWS, COLS // TILE), inverse_cols, eps)
        for start in range(0, N_COLS, TILE):
            x = load_tile(x_rows, inside, start + col, N_COLS, TILE)
            w = load_weight(w_ptr, start + col, N_COLS, TILE, CASTING)
            hat = normalized(x, rstd[:, None], x_ptr.dtype.element_ty, CASTING)
            store_tile(y_rows, inside, start + col, hat * w, N_COLS, TILE)
    tl.store(rstd_ptr + row, rstd, mask=inside)


@triton.jit
def _rstd(total, inverse_cols, eps):
    return tl.rsqrt(tl.fma(total, inverse_cols, eps))


@triton.jit
def normalized(x, rstd, DTYPE: tl.constexpr, CASTING: tl.constexpr):
    """Return x * rstd in fp32, x in fp32 and of DTYPE outside."""
    if CASTING == LLAMA:
        return (x * rstd).to(DTYPE).to(tl.float32)
    else:
        return x * rstd


@triton.jit
def load_weight(ptr, col, N_COLS: tl.constexpr, TILE: tl.constexpr, CASTING: tl.constexpr):
    """Return in fp32 what normalized columns are multiplied with: [1, TILE]."""
    if CASTING == GEMMA:
        return load_columns(ptr, col, N_COLS, TILE) + 1.0
    else:
        return load_columns(ptr, col, N_COLS, TILE)


def launch_forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, casting: int, y: torch.Tensor, rstd: torch.Tensor
) -> None:
    """Write y, x's shape and contiguous, and rstd [rows]; x has at least one row."""
    n_cols = x.shape[-1]
    data, *x_rows, unit = rows_of(x)
    cols = power_of_two(n_cols)
    _rms_norm_fwd_kernel[by_rows](
        data, weight.contiguous(), y, rstd, rstd.shape[0], *x_rows, 1.0 / n_cols, eps,
        CASTING=casting, X_UNIT=unit, N_COLS=n_cols, COLS=cols, TILE=min(cols, WIDEST),
    )  # fmt: skip
