"""RMSNorm's backward: dx by rows, dw by chains over leaves of 32 rows and a tree over the leaves.

With m = dy * w: dx = rstd * m - x * rstd^3 * (sum(m * x) / H), dw = sum over rows of dy * x * rstd. Many rows go
through one kernel that reads x and dy once; few rows would leave it idle, so dx and dw have kernels of their own, of
the same arithmetic and hence the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.compiler import is_interpreter
from rl_engine.backends.shared.triton.norm.rms_norm_forward import (
    WIDEST,
    admits_rows,
    by_rows,
    fixed_rows,
    load_weight,
    normalized,
)
from rl_engine.backends.shared.triton.norm.strided_rows import load_tile, row_offset, rows_of, store_tile
from rl_engine.backends.shared.triton.operands import INTERPRETED_TILE, power_of_two
from rl_engine.backends.shared.triton.primitives.folds import fold_columns, fold_rows, minus_zero, rounded_product
from rl_engine.backends.shared.triton.resources import Needs
from rl_engine.platforms import device

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_engine.platforms.device import DeviceIdentity

LEAF = tl.constexpr(32)  # rows of one ascending chain of dw: contract
_BESIDE = 4  # leaves that one program of the dw kernel folds
_TWO_IN_TURN = 4096  # columns of rows of which a program of the fused kernel takes two leaves, if they are many
_ONE_LAUNCH = 1024  # roots that are folded by one launch; more are folded 64 at a time first

_LARGEST_SHARED = ("sm_90", "sm_100", "sm_103")  # 192 KiB a program: three fp32 rows of 8192 of x and dy
_LARGE_SHARED = ("sm_80", *_LARGEST_SHARED)  # 128 KiB: two

_FP32 = 4  # bytes
_DYNAMIC = ("n_rows", "x_block", "x_block_stride", "dy_block", "dy_block_stride")


def _fixed_fused(sizes: Mapping[str, Any], identity: DeviceIdentity) -> dict[str, int]:
    """Return 16 elements a thread, and two rows ahead under way (H200: [16384, 8192] 209 us, 300 with one ahead).

    Three rows ahead of a program alone on its multiprocessor (H200: [16384, 8192] 207 us, [16384, 512] 21, 25 with two;
    but [16384, 4096] 114, 105 with two).
    """
    elements = sizes["COLS"] * sizes["LEAVES"]
    programs = -(-sizes["n_rows"] // (LEAF.value * sizes["LEAVES"] * sizes["SPAN"]))
    alone = programs <= identity.sm_count or elements > 4096  # 16 a thread: registers hold no second program
    if identity.arch in _LARGEST_SHARED and alone:
        stages = 4
    else:
        stages = 3 if elements <= 4096 or identity.arch in _LARGE_SHARED else 2
    return {"STAGES": stages if identity.kind == "cuda" else 1, "num_warps": max(4, min(16, elements // 512))}


def _admits_fused(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    """Let through 8 to 32 elements a thread: four fp32 values of each are alive."""
    return 8 <= sizes["COLS"] * sizes["LEAVES"] // (32 * launch["num_warps"]) <= 32


def _needs_fused(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> Needs:
    """Return four fp32 values of each element, and the rows of x and dy that wait in shared memory.

    Rows are copied ahead 4 bytes or more at a time, so of narrower elements only aligned ones: those always fit.
    """
    elements = sizes["COLS"] * sizes["LEAVES"]
    waiting = sum(width for width in (sizes["x_ptr"], sizes["dy_ptr"]) if width == _FP32)
    return Needs(registers=4 * elements, shared_bytes=(launch["STAGES"] - 1) * elements * waiting)


def _fixed_leaves(sizes: Mapping[str, Any], identity: DeviceIdentity) -> dict[str, int]:
    block = power_of_two(sizes["N_COLS"])
    if is_interpreter(identity.arch):
        return {"BLOCK": min(block, INTERPRETED_TILE // sizes["LEAVES"]), "UNROLL": 1, "num_warps": 4}
    # 4 elements a thread and 16 rows ahead (H200: [64, 4096] 3.1 us, 4.2 with 2 elements, 7.2 with 8 rows ahead)
    block = min(block, 128)
    return {"BLOCK": block, "UNROLL": 16, "num_warps": max(1, block * sizes["LEAVES"] // 128)}


def _admits_leaves(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    """Let through 1 to 8 elements a thread, of columns that there are."""
    per_thread = launch["BLOCK"] * sizes["LEAVES"] // (32 * launch["num_warps"])
    return 1 <= per_thread <= 8 and launch["BLOCK"] <= max(64, power_of_two(sizes["N_COLS"]))


def _fixed_fold(sizes: Mapping[str, Any], _device: DeviceIdentity) -> dict[str, int]:
    """Return narrower blocks of many roots, so that there are more programs (H200: 1% of [655360, 128] both ways)."""
    widest = 16 if sizes["ROOTS"] >= 64 else 32
    return {"BLOCK": min(power_of_two(sizes["N_COLS"]), widest), "num_warps": 8 if sizes["ROOTS"] > 64 else 4}


@triton.jit
def _dot(x, m, ROWS: tl.constexpr, TILE: tl.constexpr):
    return fold_columns(rounded_product(m, x), ROWS, TILE)


@triton.jit
def _dx(x, m, rstd, dot, inverse_cols):
    """Return dx = rstd * m - x * (rstd^3 * dot / H) of rows [R, 1]: one product and one fused multiply-add."""
    scale = rstd * rstd * rstd * (dot * inverse_cols)
    return tl.fma(tl.broadcast_to(rstd, x.shape), m, -rounded_product(x, tl.broadcast_to(scale, x.shape)))


@triton.jit
def _longer(chain, x, dy, rstd, DTYPE: tl.constexpr, CASTING: tl.constexpr):
    """Return the chains of dw, one row of each leaf longer."""
    return tl.fma(dy, normalized(x, rstd, DTYPE, CASTING), chain)


@triton.jit
def _present(chain, leaf, n_rows):
    """Return chains, of leaves without rows -0.0, which changes no sum."""
    return tl.where((leaf * LEAF < n_rows)[:, None], chain, minus_zero()[None, :])


@TunableKernel(
    outputs=("dx_ptr", "root_ptr"),
    data=("x_ptr", "w_ptr", "dy_ptr"),
    dynamic=_DYNAMIC,
    fixed=_fixed_fused,
    # warps as forward; stages say when rows are loaded, not when they are added
    neutral={"STAGES": (1, 2, 3, 4), "num_warps": (4, 8, 16)},
    admits=_admits_fused,
    needs=_needs_fused,
    on={"hip": {"STAGES": (1,)}},  # the same binary whatever the stages
)
@triton.jit(do_not_specialize=list(_DYNAMIC))
def _rms_norm_bwd_kernel(
    x_ptr, w_ptr, dy_ptr, rstd_ptr, dx_ptr, root_ptr,
    n_rows, x_stride, x_block, x_block_stride, dy_stride, dy_block, dy_block_stride, inverse_cols,
    CASTING: tl.constexpr, X_UNIT: tl.constexpr, DY_UNIT: tl.constexpr, N_COLS: tl.constexpr, COLS: tl.constexpr,
    LEAVES: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # one leaf, or two neighbours one after the other in one loop that never drains: the lowest level of the tree
    leaf = (tl.program_id(0).to(tl.int64) * LEAVES + tl.arange(0, LEAVES)) * SPAN
    col = tl.arange(0, COLS)
    w = load_weight(w_ptr, col, N_COLS, COLS, CASTING)
    chain = tl.zeros((LEAVES, COLS), tl.float32)
    low = chain
    for step in tl.range(0, SPAN * LEAF, num_stages=STAGES):
        row = leaf * LEAF + step
        inside = row < n_rows
        x_rows = x_ptr + row_offset(row, x_stride, x_block, x_block_stride, X_UNIT)[:, None]
        dy_rows = dy_ptr + row_offset(row, dy_stride, dy_block, dy_block_stride, DY_UNIT)[:, None]
        x = load_tile(x_rows, inside, col, N_COLS, COLS)
        dy = load_tile(dy_rows, inside, col, N_COLS, COLS)
        rstd = tl.load(rstd_ptr + row, mask=inside, other=0.0)[:, None]
        chain = _longer(chain, x, dy, rstd, x_ptr.dtype.element_ty, CASTING)
        m = dy * w
        dx = _dx(x, m, rstd, _dot(x, m, LEAVES, COLS)[:, None], inverse_cols)
        store_tile(dx_ptr + (row * N_COLS)[:, None], inside, col, dx, N_COLS, COLS)
        if SPAN == 2 and step + 1 == LEAF:
            low = chain
            chain = tl.zeros_like(chain)
    chain = _present(chain, leaf + SPAN - 1, n_rows)
    if SPAN == 2:
        chain = _present(low, leaf, n_rows) + chain
    root = fold_rows(chain, LEAVES, COLS)
    tl.store(root_ptr + tl.program_id(0).to(tl.int64) * N_COLS + col, root, mask=col < N_COLS)


@TunableKernel(
    outputs=("dx_ptr",),
    data=("x_ptr", "w_ptr", "dy_ptr"),
    dynamic=_DYNAMIC,
    fixed=fixed_rows,
    neutral={"ROWS": (1, 2, 4, 16), "num_warps": (4, 8, 16)},  # as forward
    admits=admits_rows,
)
@triton.jit(do_not_specialize=list(_DYNAMIC))
def _rms_norm_dx_kernel(
    x_ptr, w_ptr, dy_ptr, rstd_ptr, dx_ptr,
    n_rows, x_stride, x_block, x_block_stride, dy_stride, dy_block, dy_block_stride, inverse_cols,
    CASTING: tl.constexpr, X_UNIT: tl.constexpr, DY_UNIT: tl.constexpr, N_COLS: tl.constexpr, COLS: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    x_rows = x_ptr + row_offset(row, x_stride, x_block, x_block_stride, X_UNIT)[:, None]
    dy_rows = dy_ptr + row_offset(row, dy_stride, dy_block, dy_block_stride, DY_UNIT)[:, None]
    dx_rows = dx_ptr + (row * N_COLS)[:, None]
    col = tl.arange(0, TILE)
    rstd = tl.load(rstd_ptr + row, mask=inside, other=0.0)[:, None]
    if COLS == TILE:
        x = load_tile(x_rows, inside, col, N_COLS, TILE)
        m = load_tile(dy_rows, inside, col, N_COLS, TILE) * load_weight(w_ptr, col, N_COLS, TILE, CASTING)
        dx = _dx(x, m, rstd, _dot(x, m, ROWS, TILE)[:, None], inverse_cols)
        store_tile(dx_rows, inside, col, dx, N_COLS, TILE)
    else:
        slot = tl.arange(0, COLS // TILE)
        sums = tl.zeros((ROWS, COLS // TILE), tl.float32)
        for start in range(0, N_COLS, TILE):
            x = load_tile(x_rows, inside, start + col, N_COLS, TILE)
            w = load_weight(w_ptr, start + col, N_COLS, TILE, CASTING)
            m = load_tile(dy_rows, inside, start + col, N_COLS, TILE) * w
            sums = tl.where(slot[None, :] == start // TILE, _dot(x, m, ROWS, TILE)[:, None], sums)
        dot = fold_columns(sums, ROWS, COLS // TILE)[:, None]
        for start in range(0, N_COLS, TILE):
            x = load_tile(x_rows, inside, start + col, N_COLS, TILE)
            w = load_weight(w_ptr, start + col, N_COLS, TILE, CASTING)
            m = load_tile(dy_rows, inside, start + col, N_COLS, TILE) * w
            store_tile(dx_rows, inside, start + col, _dx(x, m, rstd, dot, inverse_cols), N_COLS, TILE)


@TunableKernel(
    outputs=("root_ptr",),
    data=("x_ptr", "dy_ptr"),
    dynamic=_DYNAMIC,
    fixed=_fixed_leaves,
    # a column's chain over the 32 rows of a leaf is one thread's, whichever columns share a program
    neutral={"BLOCK": (64, 128, 256, 512), "UNROLL": (8, 16, 32), "num_warps": (2, 4, 8)},
    admits=_admits_leaves,
)
@triton.jit(do_not_specialize=list(_DYNAMIC))
def _rms_norm_dw_kernel(
    x_ptr, dy_ptr, rstd_ptr, root_ptr,
    n_rows, x_stride, x_block, x_block_stride, dy_stride, dy_block, dy_block_stride,
    CASTING: tl.constexpr, X_UNIT: tl.constexpr, DY_UNIT: tl.constexpr, N_COLS: tl.constexpr, LEAVES: tl.constexpr,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    leaf = tl.program_id(0).to(tl.int64) * LEAVES + tl.arange(0, LEAVES)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    chain = tl.zeros((LEAVES, BLOCK), tl.float32)
    for start in range(0, LEAF, UNROLL):
        for step in tl.static_range(UNROLL):  # so many rows are loaded before the first is added
            row = leaf * LEAF + start + step
            inside = row < n_rows
            x_rows = x_ptr + row_offset(row, x_stride, x_block, x_block_stride, X_UNIT)[:, None]
            dy_rows = dy_ptr + row_offset(row, dy_stride, dy_block, dy_block_stride, DY_UNIT)[:, None]
            x = load_tile(x_rows, inside, col, N_COLS, BLOCK)
            dy = load_tile(dy_rows, inside, col, N_COLS, BLOCK)
            rstd = tl.load(rstd_ptr + row, mask=inside, other=0.0)[:, None]
            chain = _longer(chain, x, dy, rstd, x_ptr.dtype.element_ty, CASTING)
    root = fold_rows(_present(chain, leaf, n_rows), LEAVES, BLOCK).to(root_ptr.dtype.element_ty)
    tl.store(root_ptr + tl.program_id(0).to(tl.int64) * N_COLS + col, root, mask=col < N_COLS)


@TunableKernel(
    outputs=("root_ptr",),
    data=("leaf_ptr",),
    dynamic=("n_leaves",),
    fixed=_fixed_fold,
    neutral={"BLOCK": (16, 32, 64, 128), "num_warps": (4, 8)},  # columns do not meet
)
@triton.jit(do_not_specialize=["n_leaves"])
def _rms_norm_fold_kernel(leaf_ptr, root_ptr, n_leaves, N_COLS: tl.constexpr, ROOTS: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * ROOTS + tl.arange(0, ROOTS // 8) * 8
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # three levels of the tree by loads: neighbours in one tile would lie in different threads
    low = _four_leaves(leaf_ptr, first, n_leaves, col, N_COLS)
    high = _four_leaves(leaf_ptr, first + 4, n_leaves, col, N_COLS)
    root = fold_rows(low + high, ROOTS // 8, BLOCK).to(root_ptr.dtype.element_ty)
    tl.store(root_ptr + tl.program_id(0).to(tl.int64) * N_COLS + col, root, mask=col < N_COLS)


@triton.jit
def _four_leaves(leaf_ptr, leaf, n_leaves, col, N_COLS: tl.constexpr):
    a = _leaf(leaf_ptr, leaf, n_leaves, col, N_COLS) + _leaf(leaf_ptr, leaf + 1, n_leaves, col, N_COLS)
    b = _leaf(leaf_ptr, leaf + 2, n_leaves, col, N_COLS) + _leaf(leaf_ptr, leaf + 3, n_leaves, col, N_COLS)
    return a + b


@triton.jit
def _leaf(leaf_ptr, leaf, n_leaves, col, N_COLS: tl.constexpr):
    mask = (leaf < n_leaves)[:, None] & (col < N_COLS)[None, :]
    return tl.load(leaf_ptr + (leaf * N_COLS)[:, None] + col[None, :], mask=mask, other=minus_zero()[None, :])


def leaves_a_program(n_cols: int) -> int:
    """Return how many leaves a program of the fused kernel takes side by side, by the row's length alone."""
    return max(1, 2048 // power_of_two(n_cols))


def fuses(n_rows: int, n_cols: int, device_index: int) -> bool:
    """Return whether rows are so many that reading them once makes up for 32 steps that follow each other.

    H200: [4096, 4096] takes 38 us fused and 46 apart, [2048, 4096] 35 and 22, [8192, 1024] 27 and 24.
    """
    identity = device.for_launch(device_index)
    if n_cols > WIDEST or identity is device.UNKNOWN:
        return False
    programs = -(-n_rows // (LEAF.value * leaves_a_program(n_cols)))
    return n_rows > LEAF.value if is_interpreter(identity.arch) else 4 * programs >= 3 * identity.sm_count


def leaves_in_turn(n_rows: int, n_cols: int, sm_count: int) -> int:
    """Return how many neighbouring leaves, 1 or 2, the fused kernel's programs take one after the other.

    Two leave half the roots to fold, and half the programs (H200: [16384, 4096] takes 106.5 us with two, 108.6 with
    one; rows of 128, 512 and 8192 columns are faster with one).
    """
    many = n_rows >= 3 * LEAF.value * sm_count
    return 2 if power_of_two(n_cols) == _TWO_IN_TURN and many else 1


def launch_fused(
    x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor, casting: int,
    dx: torch.Tensor, dw: torch.Tensor,
) -> None:  # fmt: skip
    """Write dx and dw, contiguous; x and dy are read once. There is at least one row, of at most `WIDEST` columns."""
    n_cols, leaves = x.shape[-1], leaves_a_program(x.shape[-1])
    x_data, *x_rows, x_unit = rows_of(x)
    dy_data, *dy_rows, dy_unit = rows_of(dy)
    span = leaves_in_turn(len(rstd), n_cols, device.for_launch(x.get_device()).sm_count)
    programs = -(-len(rstd) // (LEAF.value * leaves * span))
    roots = torch.empty(programs, n_cols, dtype=torch.float32, device=x.device)
    _rms_norm_bwd_kernel[(programs,)](
        x_data, weight.contiguous(), dy_data, rstd, dx, roots, len(rstd), *x_rows, *dy_rows, 1.0 / n_cols,
        CASTING=casting, X_UNIT=x_unit, DY_UNIT=dy_unit, N_COLS=n_cols, COLS=power_of_two(n_cols), LEAVES=leaves,
        SPAN=span,
    )  # fmt: skip
    _fold(roots, dw)


def launch_dx(
    x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor, casting: int, dx: torch.Tensor
) -> None:
    """Write dx, contiguous. There is at least one row."""
    n_cols, cols = x.shape[-1], power_of_two(x.shape[-1])
    x_data, *x_rows, x_unit = rows_of(x)
    dy_data, *dy_rows, dy_unit = rows_of(dy)
    _rms_norm_dx_kernel[by_rows](
        x_data, weight.contiguous(), dy_data, rstd, dx, len(rstd), *x_rows, *dy_rows, 1.0 / n_cols,
        CASTING=casting, X_UNIT=x_unit, DY_UNIT=dy_unit, N_COLS=n_cols, COLS=cols, TILE=min(cols, WIDEST),
    )  # fmt: skip


def launch_dw(x: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor, casting: int, dw: torch.Tensor) -> None:
    """Write dw, contiguous. There is at least one row."""
    n_cols = x.shape[-1]
    x_data, *x_rows, x_unit = rows_of(x)
    dy_data, *dy_rows, dy_unit = rows_of(dy)
    n_leaves = -(-len(rstd) // LEAF.value)
    leaves = min(power_of_two(n_leaves), _BESIDE)
    programs = -(-n_leaves // leaves)
    roots = dw if programs == 1 else torch.empty(programs, n_cols, dtype=torch.float32, device=x.device)
    _rms_norm_dw_kernel[lambda meta: (programs, -(-n_cols // meta["BLOCK"]))](
        x_data, dy_data, rstd, roots, len(rstd), *x_rows, *dy_rows,
        CASTING=casting, X_UNIT=x_unit, DY_UNIT=dy_unit, N_COLS=n_cols, LEAVES=leaves,
    )  # fmt: skip
    if programs > 1:
        _fold(roots, dw)


def _fold(roots: torch.Tensor, dw: torch.Tensor) -> None:
    """Write the tree above roots of aligned subtrees [n, columns], neighbours first."""
    count, n_cols = roots.shape
    width = max(8, power_of_two(count)) if count <= _ONE_LAUNCH else 64
    programs = -(-count // width)
    above = dw if programs == 1 else torch.empty(programs, n_cols, dtype=torch.float32, device=dw.device)
    _rms_norm_fold_kernel[lambda meta: (programs, -(-n_cols // meta["BLOCK"]))](
        roots, above, count, N_COLS=n_cols, ROOTS=width
    )
    if programs > 1:
        _fold(above, dw)
