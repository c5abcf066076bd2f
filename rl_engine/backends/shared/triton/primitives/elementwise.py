"""How elementwise kernels cut their work: rows of columns, a program a block of one row, whole blocks without a mask.

A contiguous tensor is one row of all its elements. Launch rule and candidates are here once, for every such kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from rl_engine.backends.shared.triton.compiler import is_interpreter
from rl_engine.backends.shared.triton.operands import INTERPRETED_TILE, as_rows, power_of_two

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rl_engine.platforms.device import DeviceIdentity

# Which thread computes an element changes no sum: there is none.
NEUTRAL = {"BLOCK": (512, 1024, 2048, 4096), "num_warps": (4, 8)}
# AMD's compiler limits registers so that so many waves fit a SIMD; 0 leaves that to its heuristics
ON = {"hip": {"waves_per_eu": (0, 2, 4)}}


@triton.jit
def block_of_row(n_cols, ONE_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Return (row, first column, columns of this block inside) of the program; row and column int64."""
    if ONE_ROW:  # a division before the first load costs 7% of SiLU's time on an H200
        start = tl.program_id(0).to(tl.int64) * BLOCK
        return start * 0, start, n_cols - start
    n_blocks = tl.cdiv(n_cols, BLOCK)
    row = tl.program_id(0) // n_blocks
    start = (tl.program_id(0) % n_blocks).to(tl.int64) * BLOCK
    return row.to(tl.int64), start, n_cols - start


def fixed(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    """Return blocks of 1024 elements, eight a thread, and of 512 where those would leave multiprocessors idle.

    SiLU of [16384, 12288] bf16 on an H200: 191 us, with 2048 elements and 8 warps 193, with 4096 198.
    """
    columns = sizes["n_cols"]
    if is_interpreter(device.arch):
        return {"BLOCK": min(power_of_two(columns), INTERPRETED_TILE), "num_warps": 4}
    block = 1024 if columns * sizes["n_rows"] >= 2 * 1024 * device.sm_count else 512
    return {"BLOCK": block, "num_warps": 4}


def admits(_sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    """Let through 4 to 16 elements a thread: fewer waste issue slots, more spill."""
    return 4 <= launch["BLOCK"] // (32 * launch["num_warps"]) <= 16


def grid(meta: Mapping[str, Any]) -> tuple[int]:
    """Return one program a block."""
    return (meta["n_rows"] * -(-meta["n_cols"] // meta["BLOCK"]),)


class Rows(NamedTuple):
    """Tensors of one shape as [rows, cols] each: one row where all are contiguous, else by their row strides."""

    tensors: tuple[torch.Tensor, ...]
    shape: tuple[int, int]
    strides: tuple[int, ...]

    @property
    def one(self) -> bool:
        """Whether there is a single row."""
        return self.shape[0] == 1


def rows_of(*tensors: torch.Tensor) -> Rows:
    """Return tensors of one shape as rows; contiguous ones themselves, since a view costs as much as an allocation."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            rows = tuple(as_rows(one) for one in tensors)
            n_rows, n_cols = rows[0].shape
            return Rows(rows, (n_rows, n_cols), tuple(one.stride(0) for one in rows))
    n = tensors[0].numel()
    return Rows(tensors, (1, n), (n,) * len(tensors))
