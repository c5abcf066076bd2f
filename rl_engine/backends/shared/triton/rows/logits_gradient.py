"""The gradient of log-probabilities of selected tokens by their logits: dz = c * (1[v = target] - p), a row's c given.

One launch for every operator on logits; c is a product of an incoming gradient and a slope that the forward saved, or
the sum of two such products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.graph import empty_like
from rl_engine.backends.shared.triton.operands import power_of_two
from rl_engine.backends.shared.triton.primitives.folds import rounded_product
from rl_engine.backends.shared.triton.primitives.logsumexp import probability, scaled

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rl_engine.platforms.device import DeviceIdentity

_TILE = 2048  # elements a program with 4 warps: 0.99 of an H200's copy at [8192, 151936] bf16, with 4096 0.98


def _fixed(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    """Return one block of one row a program, or several short rows."""
    block = min(power_of_two(sizes["n_cols"]), _TILE)
    return {"ROWS": operands.rows_in_tile(sizes["n_rows"], block, _TILE, device), "BLOCK": block, "num_warps": 4}


def _admits(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    """Let through 4 to 32 elements a thread, in blocks as wide as a short row or of at least 1024 columns."""
    per_thread = launch["ROWS"] * launch["BLOCK"] // (32 * launch["num_warps"])
    width = power_of_two(sizes["n_cols"])
    return min(width, 1024) <= launch["BLOCK"] <= width and 4 <= per_thread <= 32


@triton.jit
def _product(dy_ptr, slope_ptr, dy_stride, row, used):
    """Return an incoming gradient times a slope, or the gradient alone."""
    dy = tl.load(dy_ptr + row * dy_stride, mask=used, other=0.0)
    return dy if slope_ptr is None else rounded_product(dy, tl.load(slope_ptr + row, mask=used, other=0.0))


@TunableKernel(
    outputs=("dz_ptr",),
    data=("z_ptr", "dy_ptr", "slope_ptr", "other_dy_ptr", "other_slope_ptr"),
    dynamic=("n_rows",),
    fixed=_fixed,
    # no sum over elements at all
    neutral={"ROWS": (1, 4, 16, 64), "BLOCK": (16, 64, 256, 1024, 2048, 4096), "num_warps": (4, 8)},
    admits=_admits,
)
@triton.jit(do_not_specialize=["n_rows"])
def _logits_gradient_kernel(
    z_ptr, target_ptr, mask_ptr, norm_ptr, dy_ptr, slope_ptr, other_dy_ptr, other_slope_ptr, weight_ptr, dz_ptr,
    n_rows, n_cols, z_stride, dy_stride, other_dy_stride, ignore_index, inverse_temperature,
    SCALED: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n_blocks = tl.cdiv(n_cols, BLOCK)
    row = (tl.program_id(0) // n_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = (tl.program_id(0) % n_blocks) * BLOCK
    used = row < n_rows
    target = tl.load(target_ptr + row, mask=used, other=-1)
    m = tl.load(norm_ptr + row, mask=used, other=0.0)
    log2_sum = tl.load(norm_ptr + n_rows + row, mask=used, other=0.0)
    c = _product(dy_ptr, slope_ptr, dy_stride, row, used)
    if other_dy_ptr is not None:
        c += _product(other_dy_ptr, other_slope_ptr, other_dy_stride, row, used)
    if weight_ptr is not None:
        c = c * tl.load(weight_ptr)
    if SCALED:
        c = c * inverse_temperature
    counted = used & (target >= 0) & (target < n_cols)
    if ignore_index is not None:
        counted = counted & (target != ignore_index)
    if mask_ptr is not None:
        counted = counted & (tl.load(mask_ptr + row, mask=used, other=0) != 0)
    target = target.to(tl.int32)  # half the instructions of comparing 64 bits; rows of wider ids do not count
    z_rows = z_ptr + (row * z_stride)[:, None]
    dz_rows = dz_ptr + (row * n_cols)[:, None]
    col = start + tl.arange(0, BLOCK)
    if not EVEN and start + BLOCK <= n_cols:  # a mask along the row would make accesses narrow
        z = tl.load(z_rows + col[None, :], mask=counted[:, None], other=0.0).to(tl.float32)
        dz = gradient_tile(scaled(z, inverse_temperature, SCALED), m, log2_sum, c, target, counted, col)
        tl.store(dz_rows + col[None, :], dz.to(dz_ptr.dtype.element_ty), mask=used[:, None])
    else:
        inside = (col < n_cols)[None, :]
        z = tl.load(z_rows + col[None, :], mask=counted[:, None] & inside, other=0.0).to(tl.float32)
        dz = gradient_tile(scaled(z, inverse_temperature, SCALED), m, log2_sum, c, target, counted, col)
        tl.store(dz_rows + col[None, :], dz.to(dz_ptr.dtype.element_ty), mask=used[:, None] & inside)


@triton.jit
def gradient_tile(z, m, log2_sum, c, target, counted, col):
    """Return c * (1[col = target] - p) of one tile; exactly 0 in rows that do not count."""
    p = probability(z, m[:, None], log2_sum[:, None])
    dz = c[:, None] * (tl.where(col[None, :] == target[:, None], 1.0, 0.0) - p)
    return tl.where(counted[:, None], dz, 0.0)


def _by_blocks(meta: Mapping[str, Any]) -> tuple[int]:
    return (-(-meta["n_rows"] // meta["ROWS"]) * -(-meta["n_cols"] // meta["BLOCK"]),)


def logits_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    norm: torch.Tensor,
    first: tuple[torch.Tensor, torch.Tensor | None],
    second: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    weight: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    ignore_index: int | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return the gradient by ``logits``, in their dtype; rows that do not count, or whose id is none, get zeros.

    Args:
        logits: [..., vocab].
        targets: [...].
        norm: of `selected_logps`.
        first: incoming fp32 gradient, [...] or a scalar for all rows, and slope [...] to multiply it with, or None.
        second: another such pair, added.
        weight: fp32 [], which multiplies all of them.
        mask: as in `selected_logps`.
        ignore_index: as there.
        temperature: as there.
    """
    dz = empty_like(logits)
    if not targets.numel():
        return dz
    z = operands.as_rows(logits)
    dy, other_dy = first[0].contiguous(), None if second is None else second[0].contiguous()
    _logits_gradient_kernel[_by_blocks](
        z, targets.contiguous(), None if mask is None else mask.contiguous(), norm,
        dy, first[1], other_dy, None if second is None else second[1], weight, dz,
        *z.shape, z.stride(0), int(dy.dim() > 0), int(other_dy is not None and other_dy.dim() > 0),
        ignore_index, 1.0 / temperature, SCALED=temperature != 1.0, EVEN=z.shape[1] % 16 == 0,
    )  # fmt: skip
    return dz
