"""RMSNorm: y = x * rstd * w, rstd = rsqrt(mean(x^2) + eps), in fp32, rounded once; dx by rows, dw by leaves of rows.

The tree of a row sum folds neighbours over the row padded with zeros to a power of two, so a tile that is an aligned
part of it is a subtree: tile width, rows a program and warps are free (H200: a whole-row fold runs [16384, 4096] in
67.5 us and [64, 4096] in 2.0, fixed lanes folded once in 66.5 and 2.5; the small shapes decided).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from rl_engine.backends.reference.norm.rms_norm import check_rms_norm
from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import TunableKernel, pin_autotune, pinned_backward
from rl_engine.backends.shared.triton.compiler import is_interpreter, unavailable
from rl_engine.backends.shared.triton.graph import differentiate, empty_like, graph_operator
from rl_engine.backends.shared.triton.operands import power_of_two
from rl_engine.backends.shared.triton.primitives.folds import fold_columns, fold_rows, rounded_product
from rl_engine.backends.spec import implements

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_engine.platforms.device import DeviceIdentity

LEAF = tl.constexpr(32)  # rows of one ascending chain of dw: contract
_LEAVES = 64  # leaves that one program folds: an aligned subtree, whatever their number
_TILE = 8192  # widest tile: 32 fp32 registers a thread with 8 warps
_INTERPRETED_TILE = 1 << 18  # an interpreted program costs milliseconds whatever its size


def _fixed_rows(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    """Return about 2048 elements a program, whole rows, and fewer rows where multiprocessors would stay idle."""
    tile = sizes["TILE"]
    if is_interpreter(device.arch):
        return {"ROWS": operands.rows_a_program(sizes["n_rows"], _INTERPRETED_TILE // tile, 1), "num_warps": 4}
    rows = operands.rows_a_program(sizes["n_rows"], 2048 // tile, device.sm_count)
    return {"ROWS": rows, "num_warps": 8 if rows * tile >= 4096 else 4}


def _admits_rows(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    """Let through 4 to 64 elements a thread."""
    return 4 <= launch["ROWS"] * sizes["TILE"] // (32 * launch["num_warps"]) <= 64


def _fixed_leaves(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    leaves = power_of_two(-(-sizes["n_rows"] // LEAF.value))
    if is_interpreter(device.arch):
        block = min(power_of_two(sizes["n_cols"]), _TILE)
        return {"BLOCK": block, "LEAVES": min(leaves, _INTERPRETED_TILE // block), "num_warps": 4}
    block = min(power_of_two(sizes["n_cols"]), 512)
    return {"BLOCK": block, "LEAVES": max(1, min(leaves, 512 // block)), "num_warps": 4}


def _admits_leaves(_sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    return 2 <= launch["BLOCK"] * launch["LEAVES"] // (32 * launch["num_warps"]) <= 16


def _fixed_fold(sizes: Mapping[str, Any], _device: DeviceIdentity) -> dict[str, int]:
    return {"BLOCK": min(power_of_two(sizes["n_cols"]), 32), "num_warps": 8 if sizes["LEAVES"] == _LEAVES else 4}


@TunableKernel(
    outputs=("y_ptr", "rstd_ptr"),
    data=("x_ptr", "w_ptr"),
    dynamic=("n_rows",),
    fixed=_fixed_rows,
    # every sum is a fold of two values at a time over the same tree: warps and rows only say who computes it
    neutral={"ROWS": (1, 2, 4, 16), "num_warps": (4, 8, 16)},
    admits=_admits_rows,
)
@triton.jit(do_not_specialize=["n_rows"])
def _rms_norm_fwd_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr, n_rows, n_cols, x_stride, inverse_cols, eps,
    COLS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < n_rows)[:, None]
    x_rows = x_ptr + (row * x_stride)[:, None]
    y_rows = y_ptr + (row * n_cols)[:, None]
    lane = tl.arange(0, TILE)
    if COLS == TILE:
        mask = inside & (lane < n_cols)[None, :]
        x = tl.load(x_rows + lane[None, :], mask=mask, other=0.0).to(tl.float32)
        total = fold_columns(rounded_product(x, x), ROWS, TILE)
        rstd = tl.rsqrt(tl.fma(total, inverse_cols, eps))
        w = tl.load(w_ptr + lane, mask=lane < n_cols, other=0.0).to(tl.float32)
        tl.store(y_rows + lane[None, :], (x * rstd[:, None] * w[None, :]).to(y_ptr.dtype.element_ty), mask=mask)
    else:
        total = _row_sum_of_squares(x_rows, inside, n_cols, COLS, ROWS, TILE)
        rstd = tl.rsqrt(tl.fma(total, inverse_cols, eps))
        for start in range(0, COLS, TILE):
            col = start + lane
            mask = inside & (col < n_cols)[None, :]
            x = tl.load(x_rows + col[None, :], mask=mask, other=0.0).to(tl.float32)
            w = tl.load(w_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
            tl.store(y_rows + col[None, :], (x * rstd[:, None] * w[None, :]).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < n_rows)


@triton.jit
def _row_sum_of_squares(x_rows, inside, n_cols, COLS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Return the row sums of rows wider than a tile: subtrees by tile, then the tree above them."""
    lane = tl.arange(0, TILE)
    slot = tl.arange(0, COLS // TILE)
    sums = tl.zeros((ROWS, COLS // TILE), tl.float32)
    for tile in range(COLS // TILE):
        col = tile * TILE + lane
        x = tl.load(x_rows + col[None, :], mask=inside & (col < n_cols)[None, :], other=0.0).to(tl.float32)
        part = fold_columns(rounded_product(x, x), ROWS, TILE)
        sums = tl.where(slot[None, :] == tile, part[:, None], sums)
    return fold_columns(sums, ROWS, COLS // TILE)


@TunableKernel(
    outputs=("dx_ptr",),
    data=("x_ptr", "w_ptr", "dy_ptr"),
    dynamic=("n_rows",),
    fixed=_fixed_rows,
    neutral={"ROWS": (1, 2, 4, 16), "num_warps": (4, 8, 16)},  # as forward
    admits=_admits_rows,
)
@triton.jit(do_not_specialize=["n_rows"])
def _rms_norm_dx_kernel(
    x_ptr, w_ptr, dy_ptr, rstd_ptr, dx_ptr, n_rows, n_cols, x_stride, dy_stride, inverse_cols,
    COLS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < n_rows)[:, None]
    x_rows = x_ptr + (row * x_stride)[:, None]
    dy_rows = dy_ptr + (row * dy_stride)[:, None]
    dx_rows = dx_ptr + (row * n_cols)[:, None]
    rstd = tl.load(rstd_ptr + row, mask=row < n_rows, other=0.0)[:, None]
    slot = tl.arange(0, COLS // TILE)
    sums = tl.zeros((ROWS, COLS // TILE), tl.float32)
    for tile in range(COLS // TILE):
        x, m = _x_and_m(x_rows, w_ptr, dy_rows, inside, tile * TILE, n_cols, TILE)
        part = fold_columns(rounded_product(m, x), ROWS, TILE)
        sums = tl.where(slot[None, :] == tile, part[:, None], sums)
    dot = fold_columns(sums, ROWS, COLS // TILE)[:, None]
    # dx = rstd * m - x * (rstd^3 * dot / H): one product and one fused multiply-add, spelled out
    scale = rstd * rstd * rstd * (dot * inverse_cols)
    for start in range(0, COLS, TILE):
        x, m = _x_and_m(x_rows, w_ptr, dy_rows, inside, start, n_cols, TILE)
        dx = tl.fma(tl.broadcast_to(rstd, (ROWS, TILE)), m, -rounded_product(x, tl.broadcast_to(scale, (ROWS, TILE))))
        col = start + tl.arange(0, TILE)
        tl.store(dx_rows + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside & (col < n_cols)[None, :])


@triton.jit
def _x_and_m(x_rows, w_ptr, dy_rows, inside, start, n_cols, TILE: tl.constexpr):
    """Return x and m = dy * w of one tile, in fp32."""
    col = start + tl.arange(0, TILE)
    mask = inside & (col < n_cols)[None, :]
    x = tl.load(x_rows + col[None, :], mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_rows + col[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
    return x, dy * w[None, :]


@TunableKernel(
    outputs=("leaf_ptr",),
    data=("x_ptr", "dy_ptr"),
    dynamic=("n_rows",),
    fixed=_fixed_leaves,
    # a column's chain over the 32 rows of a leaf is one thread's, whichever columns and leaves share a program
    neutral={"LEAVES": (1, 4), "BLOCK": (128, 256, 512), "num_warps": (4, 8)},
    admits=_admits_leaves,
)
@triton.jit(do_not_specialize=["n_rows"])
def _rms_norm_dw_kernel(
    x_ptr, dy_ptr, rstd_ptr, leaf_ptr, n_rows, n_cols, x_stride, dy_stride,
    LEAVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    leaf = tl.program_id(0).to(tl.int64) * LEAVES + tl.arange(0, LEAVES)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = col < n_cols
    chain = tl.zeros((LEAVES, BLOCK), tl.float32)
    for step in range(LEAF):
        row = leaf * LEAF + step
        mask = (row < n_rows)[:, None] & used[None, :]
        x = tl.load(x_ptr + (row * x_stride)[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + (row * dy_stride)[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < n_rows, other=0.0)
        chain = tl.fma(dy, x * rstd[:, None], chain)
    tl.store(
        leaf_ptr + (leaf * n_cols)[:, None] + col[None, :],
        chain,
        mask=(leaf * LEAF < n_rows)[:, None] & used[None, :],
    )


@TunableKernel(
    outputs=("root_ptr",),
    data=("leaf_ptr",),
    dynamic=("n_leaves",),
    fixed=_fixed_fold,
    neutral={"BLOCK": (32, 64, 128), "num_warps": (4, 8)},  # columns do not meet
)
@triton.jit(do_not_specialize=["n_leaves"])
def _rms_norm_fold_kernel(leaf_ptr, root_ptr, n_leaves, n_cols, LEAVES: tl.constexpr, BLOCK: tl.constexpr):
    leaf = tl.program_id(0).to(tl.int64) * LEAVES + tl.arange(0, LEAVES)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = col < n_cols
    mask = (leaf < n_leaves)[:, None] & used[None, :]
    # -0.0 is the one value whose sum with any other is that other, bit for bit: a missing leaf changes nothing
    leaves = tl.load(leaf_ptr + (leaf * n_cols)[:, None] + col[None, :], mask=mask, other=-0.0)
    root = fold_rows(leaves, LEAVES, BLOCK).to(root_ptr.dtype.element_ty)
    tl.store(root_ptr + tl.program_id(0).to(tl.int64) * n_cols + col, root, mask=used)


_by_rows = operands.blocks("n_rows", "ROWS")


def _forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and rstd [rows]."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = operands.as_rows(x)
    n_rows, n_cols = rows.shape
    rstd = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    if n_rows:
        cols = power_of_two(n_cols)
        _rms_norm_fwd_kernel[_by_rows](
            rows, weight.contiguous(), y, rstd, n_rows, n_cols, rows.stride(0), 1.0 / n_cols, eps,
            COLS=cols, TILE=min(cols, _TILE),
        )  # fmt: skip
    return y, rstd


def _backward_dx(x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, dy = operands.as_rows(x), operands.as_rows(dy)
    n_rows, n_cols = x.shape
    if n_rows:
        cols = power_of_two(n_cols)
        _rms_norm_dx_kernel[_by_rows](
            x, weight.contiguous(), dy, rstd, dx, n_rows, n_cols, x.stride(0), dy.stride(0), 1.0 / n_cols,
            COLS=cols, TILE=min(cols, _TILE),
        )  # fmt: skip
    return dx


def _backward_dw(x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Return the sum over rows: chains over leaves of 32 rows, then a tree over the leaves, 64 a launch."""
    x, dy = operands.as_rows(x), operands.as_rows(dy)
    n_rows, n_cols = x.shape
    if not n_rows:
        return torch.zeros_like(weight)
    leaves = torch.empty(-(-n_rows // LEAF.value), n_cols, dtype=torch.float32, device=x.device)
    _rms_norm_dw_kernel[lambda meta: (-(-len(leaves) // meta["LEAVES"]), -(-n_cols // meta["BLOCK"]))](
        x, dy, rstd, leaves, n_rows, n_cols, x.stride(0), dy.stride(0)
    )
    while True:
        count, last = len(leaves), len(leaves) <= _LEAVES
        shape = (n_cols,) if last else (-(-count // _LEAVES), n_cols)
        roots = torch.empty(shape, dtype=weight.dtype if last else torch.float32, device=x.device)
        width = min(power_of_two(count), _LEAVES)
        _rms_norm_fold_kernel[lambda meta, n=-(-count // width): (n, -(-n_cols // meta["BLOCK"]))](
            leaves, roots, count, n_cols, LEAVES=width
        )
        if last:
            return roots
        leaves = roots


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        pin_autotune(ctx)
        y, rstd = _forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    @pinned_backward
    def backward(ctx, dy):
        saved = ctx.saved_tensors
        dx = _backward_dx(*saved, dy) if ctx.needs_input_grad[0] else None
        dw = _backward_dw(*saved, dy) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def _fake_forward(x: torch.Tensor, _weight: torch.Tensor, _eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.numel() // x.shape[-1]
    return empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)


_graph_forward = graph_operator("rms_norm", _forward, fake=_fake_forward)
_graph_dx = graph_operator("rms_norm_dx", _backward_dx, fake=empty_like, phase="backward")
_graph_dw = graph_operator(
    "rms_norm_dw", _backward_dw, fake=lambda _x, weight, *_others: empty_like(weight), phase="backward"
)
differentiate(
    _graph_forward,
    lambda x, weight, rstd, dy, _drstd: (_graph_dx(x, weight, rstd, dy), _graph_dw(x, weight, rstd, dy), None),
    lambda inputs, outputs: (*inputs[:2], outputs[1]),
)


@implements("rms_norm", backend_id="rlkernel.triton.rms_norm", unavailable=unavailable)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return ``x / sqrt(mean(x**2, -1) + eps) * weight``, computed in fp32 and rounded once.

    A row's bits depend on that row alone; the weight's gradient on the rows and their order, not on grid or card.

    Args:
        x: [..., hidden], bf16, fp16 or fp32; rows of neighbouring columns are read in place, others copied.
        weight: [hidden], bf16, fp16 or fp32; it may be wider than x.
        eps: added to the mean square (Zhang and Sennrich, arXiv:1910.07467).

    Returns:
        [..., hidden], x's dtype, contiguous.

    Raises:
        ValueError: weight's shape is not [hidden], hidden is 0, different devices, or one Triton does not run on.
        TypeError: another dtype, or a tensor subclass.
    """
    operands.require_tensors("rms_norm", x=x, weight=weight)
    operands.require_floats("rms_norm", x=x, weight=weight)
    check_rms_norm(x, weight)
    if torch.compiler.is_compiling():
        return _graph_forward(x, weight, eps)[0]
    return _RMSNorm.apply(x, weight, eps) if operands.grad_enabled(x, weight) else _forward(x, weight, eps)[0]
