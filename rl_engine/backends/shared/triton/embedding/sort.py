"""Tokens by their ids: what a stable sort of the ids gives, in two launches for up to 65,536 tokens.

Blocks of tokens are sorted first, each by one program: an id and the token's number in its block are one integer, all
of which differ, so that a network that is not stable gives the stable order. A token's place among all of them is then
the number of such integers that come before its own, counted by a binary search in every block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.compiler import is_interpreter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_engine.platforms.device import DeviceIdentity

BITS = 10  # of a token's number in its block: 55 exchanges of 1024 integers
FEW_BITS = 6  # where there are no more tokens than that: 21 exchanges
# The searches read T * T / 1024 * 11 integers: 3 million at 16,384 tokens, 46 million at 65,536, which take an H200
# about as long as torch.sort needs for its ten launches; that grows with T alone.
MOST_TOKENS = 1 << 16
MOST_VOCAB = (1 << (31 - BITS)) - 2  # a key of `vocab` is one more, and the integers stay below PADDING
PADDING = tl.constexpr((1 << 31) - 1)


def _fixed_sort(_sizes: Mapping[str, Any], _device: DeviceIdentity) -> dict[str, int]:
    return {"num_warps": 8}


def _fixed_merge(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    tokens = 1 << sizes["BITS"] if is_interpreter(device.arch) else 64
    return {"TOKENS": tokens, "BLOCKS": 8, "num_warps": 4}


def _admits_merge(_sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    """Let through 4 to 32 searches a thread at once."""
    return 4 <= launch["TOKENS"] * launch["BLOCKS"] // (32 * launch["num_warps"]) <= 32


@triton.jit
def _bit(BITS: tl.constexpr, bit: tl.constexpr):
    """Return a bit of the positions in a cube [2] * BITS, broadcastable to it."""
    return tl.reshape(tl.arange(0, 2), [1] * (BITS - 1 - bit) + [2] + [1] * bit)


@triton.jit
def _exchange(cube, BITS: tl.constexpr, stage: tl.constexpr, bit: tl.constexpr):
    """Order every pair of positions that differ in ``bit``, the wrong way round where their bit ``stage`` is set."""
    right = _bit(BITS, bit)
    if stage < BITS:
        right = right ^ _bit(BITS, stage)
    # the pair's sum wraps, and wraps back; tl.sort's own combination of a pair takes an interpreter 15 times as long
    other = tl.sum(cube, BITS - 1 - bit, keep_dims=True) - cube
    return tl.where((cube > other) != (right != 0), other, cube)


@triton.jit
def _sorted(value, BITS: tl.constexpr):
    """Return 2**BITS integers in ascending order, by a bitonic network."""
    cube = tl.reshape(value, [2] * BITS)
    for stage in tl.static_range(1, BITS + 1):
        for step in tl.static_range(stage):
            cube = _exchange(cube, BITS, stage, stage - 1 - step)
    return tl.reshape(cube, [1 << BITS])


@TunableKernel(
    outputs=("key_ptr", "order_ptr"),
    dynamic=("n_tokens",),
    fixed=_fixed_sort,
    neutral={"num_warps": (4, 8, 16)},  # integers
    warm=True,
)
@triton.jit(do_not_specialize=["n_tokens", "padding"])
def _embedding_sort_kernel(
    id_ptr, key_ptr, order_ptr, n_tokens, vocab, padding, id_stride, BITS: tl.constexpr
):  # fmt: skip
    """Write the sorted keys and tokens of one block, or, without ``order_ptr``, every block's sorted integers."""
    lane = tl.arange(0, 1 << BITS)
    token = tl.program_id(0) * (1 << BITS) + lane
    row = tl.load(id_ptr + token.to(tl.int64) * id_stride, mask=token < n_tokens, other=-1).to(tl.int64)
    known = (row >= 0) & (row < vocab) & (row != padding)
    key = tl.where(known, row, vocab).to(tl.int32)
    value = _sorted(tl.where(token < n_tokens, (key << BITS) | lane, PADDING), BITS)
    if order_ptr is None:
        tl.store(key_ptr + token, value)
    else:
        tl.store(key_ptr + token, value >> BITS, mask=token < n_tokens)
        tl.store(order_ptr + token, value & ((1 << BITS) - 1), mask=token < n_tokens)


@triton.jit
def _count_below(value_ptr, block, limit, n_blocks, BITS: tl.constexpr):
    """Return how many of each block's sorted integers are below ``limit`` [blocks, tokens]."""
    there = (block < n_blocks)[:, None]
    count = limit * 0
    block_ptr = value_ptr + (block << BITS)[:, None]
    for step in tl.static_range(BITS):
        found = tl.load(block_ptr + count + ((1 << (BITS - 1 - step)) - 1), mask=there, other=PADDING)
        count += (found < limit).to(tl.int32) << (BITS - 1 - step)
    return count + (tl.load(block_ptr + count, mask=there, other=PADDING) < limit).to(tl.int32)


@TunableKernel(
    outputs=("key_ptr", "order_ptr"),
    dynamic=("n_tokens",),
    fixed=_fixed_merge,
    neutral={"TOKENS": (64, 128, 256), "BLOCKS": (4, 8, 16, 32), "num_warps": (2, 4, 8)},  # integers
    admits=_admits_merge,
    warm=True,
)
@triton.jit(do_not_specialize=["n_tokens"])
def _embedding_merge_kernel(
    value_ptr, key_ptr, order_ptr, n_tokens, BITS: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Write keys and tokens to their places: equal keys of blocks before come first, those of blocks behind do not."""
    n_blocks = tl.cdiv(n_tokens, 1 << BITS)
    # the padding of the last block lies behind its tokens: the first n_tokens integers are those that count
    position = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    own = (tl.program_id(0) * TOKENS) >> BITS
    value = tl.load(value_ptr + position)
    key = value >> BITS
    place = tl.zeros((TOKENS,), tl.int32)
    for first in range(0, n_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        limit = (key[None, :] + (block < own).to(tl.int32)[:, None]) << BITS
        limit = tl.where((block == own)[:, None], value[None, :], limit)
        place += tl.sum(_count_below(value_ptr, block, limit, n_blocks, BITS), 0)
    tl.store(key_ptr + place, key, mask=position < n_tokens)
    tl.store(order_ptr + place, (own << BITS) + (value & ((1 << BITS) - 1)), mask=position < n_tokens)


def _by_blocks(meta: Mapping[str, Any]) -> tuple[int]:
    return (-(-meta["n_tokens"] >> meta["BITS"]),)


def sorted_tokens(ids: torch.Tensor, vocab: int, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys of ``ids`` [tokens], at least one, in ascending order, and the tokens in that order, both int32.

    A key is an id, or ``vocab`` for ids out of range and for ``padding``; tokens of one key ascend.
    """
    n_tokens = len(ids)
    if n_tokens > MOST_TOKENS or vocab > MOST_VOCAB:
        known = (ids >= 0) & (ids < vocab) & (ids != padding)
        # int32 sorts in half the time of int64
        keys, order = torch.sort(torch.where(known, ids, vocab).to(torch.int32), stable=True)
        return keys, order.to(torch.int32)
    keys = torch.empty(n_tokens, dtype=torch.int32, device=ids.device)
    order = torch.empty_like(keys)
    if n_tokens <= 1 << BITS:
        bits = FEW_BITS if n_tokens <= 1 << FEW_BITS else BITS
        _embedding_sort_kernel[(1,)](ids, keys, order, n_tokens, vocab, padding, ids.stride(0), BITS=bits)
    else:
        values = torch.empty(-(-n_tokens >> BITS) << BITS, dtype=torch.int32, device=ids.device)
        _embedding_sort_kernel[_by_blocks](ids, values, None, n_tokens, vocab, padding, ids.stride(0), BITS=BITS)
        _embedding_merge_kernel[operands.blocks("n_tokens", "TOKENS")](values, keys, order, n_tokens, BITS=BITS)
    return keys, order
