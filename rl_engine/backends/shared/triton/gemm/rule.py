"""Which path and tile a product takes, and the fixed launch of a tile: pure functions of sizes, precision and card.

No choice here can change a bit on NVIDIA cards: every tile adds the same groups of K to one accumulator in the same
order. AMD's matrix cores take groups of another length in tiles below 32 rows or columns, so there every product of a
precision takes one tile.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rl_engine.backends.shared.triton.compiler import is_interpreter
from rl_engine.backends.shared.triton.operands import power_of_two
from rl_engine.backends.shared.triton.resources import Needs, shared_bytes
from rl_engine.platforms.device import INTERPRETER, DeviceIdentity

if TYPE_CHECKING:
    from collections.abc import Mapping

Precision = Literal["half", "tf32", "ieee"]
INTERPRETED = DeviceIdentity("cpu", "interpreter", INTERPRETER, sm_count=1)
KIB = 1 << 10
LEAST = 16  # rows, columns and depth of a product on the tensor cores
_FEW = 64  # rows or columns up to which the other operand's stream is the limit (184 on an H200: 790e12 / 4.3e12)
# Tiles of the training path, and an estimate of the share of the largest one's speed that each reaches once it is full:
# the largest reads least of the L2 for a product; the smaller fill the last wave better.
_SHARES = {(128, 256): 1.0, (256, 128): 1.0, (128, 128): 0.86, (64, 256): 0.8, (64, 128): 0.62, (64, 64): 0.4}
_SMALL_TILE = 64 * 128  # up to which a step along K is so short that waiting for it shows
_BARRIERS = 1 * KIB  # of shared memory, beside the tiles: what a pipeline waits on
_MOST_STAGES = 6
_WIDE_PART = 64  # columns from which a tile is stored in parts
_GROUP = 8  # row tiles of a band: together they and the columns of a wave stay in the L2


@dataclass(frozen=True)
class Plan:
    """How one product runs.

    Attributes:
        block_m: rows of an output tile (of C^T, if swapped).
        block_n: its columns.
        block_k: how much of K is read at a time.
        described: operands are read through tensor descriptors by persistent programs, else through pointers.
        swapped: C^T = B^T A^T is computed, so that the longer side fills the rows of the matrix instruction.
    """

    block_m: int
    block_n: int
    block_k: int
    described: bool = False
    swapped: bool = False


@functools.lru_cache(maxsize=4096)
def plan(m: int, n: int, k: int, precision: Precision, device: DeviceIdentity, *, describable: bool) -> Plan:
    """Return how to compute an [m, n] product over k.

    Args:
        m: rows of the product.
        n: columns.
        k: length of the chain.
        precision: "half" for bf16 and fp16; of fp32 operands "tf32" or "ieee".
        device: the card.
        describable: whether both operands and the product can be described: aligned, neighbours in one axis.
    """
    if is_interpreter(device.arch):
        return Plan(128, 64, 1)  # NumPy adds longer chunks in an order that depends on the place
    if device.kind == "hip":
        return Plan(128, 128, 64) if precision == "half" else Plan(64, 64, 32)
    described = describable and reads_descriptors(precision, device)
    if precision == "ieee":
        return Plan(_side(m), _side(n), _depth(k, 32))
    if min(m, n) <= _FEW:
        few = max(LEAST, power_of_two(min(m, n)))
        return Plan(_FEW, few, _depth(k, 128 if precision == "half" else 64), described=described, swapped=m < n)
    block_m, block_n = _tile(m, n, device)
    deep = 128 if block_m * block_n <= _SMALL_TILE else 64  # [128, 4096] over 4096: 13.7 us, 18.1 at 64 (H200)
    return Plan(block_m, block_n, _depth(k, deep if precision == "half" else 32), described=described)


def reads_descriptors(precision: Precision, device: DeviceIdentity) -> bool:
    """Return whether products of a precision read through tensor descriptors where their operands can be described."""
    return precision == "half" and device.arch.startswith(("sm_9", "sm_10"))


def _side(length: int) -> int:
    return min(_FEW, max(LEAST, power_of_two(length)))


def _depth(k: int, most: int) -> int:
    return min(most, max(LEAST, power_of_two(k)))


def _tile(m: int, n: int, device: DeviceIdentity) -> tuple[int, int]:
    """Return the tile that ends first: waves times a tile's work, at the tile's share of the full speed."""
    largest = 128 * 256 if shared_bytes(device.arch) >= 160 * KIB else 128 * 128

    def cost(tile: tuple[int, int]) -> float:
        tiles = -(-m // tile[0]) * -(-n // tile[1])
        return -(-tiles // device.sm_count) * tile[0] * tile[1] / _SHARES[tile]

    return min((tile for tile in _SHARES if tile[0] * tile[1] <= largest), key=cost)


def launch(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    """Return warps, stages and group of a tile: 128 sums a thread at the most, and stages until memory is full."""
    elements = sizes["BLOCK_M"] * sizes["BLOCK_N"]
    if is_interpreter(device.arch):
        return {"num_warps": 4, "num_stages": 1, "GROUP": 1}
    if device.kind == "hip":  # one tile in registers while the other is multiplied
        return {"num_warps": 8 if elements >= 128 * 128 else 4, "num_stages": 2, "GROUP": _GROUP}
    fitting = (shared_bytes(device.arch) - _BARRIERS - _epilogue_bytes(sizes, device.arch)) // _stage_bytes(sizes)
    stages = max(2, min(fitting, _MOST_STAGES if elements < 128 * 128 else 4))
    return {"num_warps": 8 if elements >= 128 * 128 else 4, "num_stages": stages, "GROUP": _GROUP}


def admits(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    """Let through 4 to 128 sums a thread, and what makes a difference.

    More sums spill, fewer idle. Stages wait for tiles that K must have; the order of tiles needs two axes of them.
    """
    sums = sizes["BLOCK_M"] * sizes["BLOCK_N"] // (32 * launch["num_warps"])
    single = min(-(-sizes["m"] // sizes["BLOCK_M"]), -(-sizes["n"] // sizes["BLOCK_N"])) <= 1
    return (
        4 <= sums <= 128
        and launch["num_stages"] <= max(2, -(-sizes["k"] // sizes["BLOCK_K"]))
        and (launch["GROUP"] == _GROUP or not single)
    )


def needs(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> Needs:
    """Return the shared memory of the stages of a tile, and of what it is stored through."""
    return Needs(shared_bytes=launch["num_stages"] * _stage_bytes(sizes) + _epilogue_bytes(sizes))


def parts(found: Plan, itemsize: int) -> int:
    """Return in how many parts a described tile is stored: as many as its elements have bytes, where it is wide."""
    return 1 if found.block_n < _WIDE_PART else itemsize


def persistent_programs(m: int, n: int, found: Plan, device: DeviceIdentity) -> int:
    """Return how many programs take the tiles of a product in turn: one a multiprocessor."""
    return min(-(-m // found.block_m) * -(-n // found.block_n), device.sm_count)


def dot_precision(precision: Precision, device: DeviceIdentity) -> str | None:
    """Return what ``tl.dot`` is told of fp32 operands; AMD cards other than gfx942 have no TF32, and compute ieee."""
    if precision == "tf32" and device.kind == "hip" and device.arch != "gfx942":
        return "ieee"
    return None if precision == "half" else precision


def _stage_bytes(sizes: Mapping[str, Any]) -> int:
    itemsize = 2 if sizes["PRECISION"] is None else 4
    return (sizes["BLOCK_M"] + sizes["BLOCK_N"]) * sizes["BLOCK_K"] * itemsize


def _epilogue_bytes(sizes: Mapping[str, Any], arch: str = "") -> int:
    """Return what a persistent program stores through while the next tile is loaded.

    Others store through what they loaded through. Two parts of bf16 or four of fp32 take a byte an element; sums that
    lie in tensor memory come out through 16 KiB more (Triton 3.9, compiled for sm_100).
    """
    if "PARTS" not in sizes:
        return 0
    through = 16 * KIB if arch.startswith("sm_10") else 0
    return sizes["BLOCK_M"] * sizes["BLOCK_N"] * (1 if sizes["PARTS"] > 1 else 4) + through
