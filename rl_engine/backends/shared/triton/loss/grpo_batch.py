"""How the GRPO kernels see a batch, and what they must know of it before its tokens: counts, and sequences' ratios.

A program of the kernels over tokens takes one tile of tokens of a few sequences and leaves its sums in a scratch
[tiles, sequences]; who needs a sequence's sum adds its tiles in ascending order (`merge_tiles`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.operands import as_rows, power_of_two
from rl_engine.backends.shared.triton.primitives.folds import fold_columns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_engine.platforms.device import DeviceIdentity

TILE = 1024  # tokens of one fold, and sequences of one fold: contract
_PARTS = tl.constexpr(512)  # programs at most that count, so totals at most that a token program adds
_COUNTED = 1 << 14  # tokens a counting program looks at in one go: 64 bytes of a bool mask a thread
_UNROLLED = tl.constexpr(8)  # tiles whose loads are in flight together when a sequence's are added


@dataclass(frozen=True)
class Batch:
    """Tensors as rows [sequences, tokens], which kernels read by their strides; advantages may be [sequences].

    Attributes:
        logps: of the policy.
        old: of the policy that sampled, or None.
        ref: of the reference, or None.
        advantages: one a sequence, contiguous, or one a token.
        mask: what counts.
        aligned: every row begins, and ends, a multiple of 16 elements from the first. Strides and lengths change from
            step to step, so kernels are not specialised on them; this one bit is what 16-byte accesses need of them, at
            two binaries instead of one a length (`as_sixteens`).
        tile: tokens of a program.
    """

    logps: torch.Tensor
    old: torch.Tensor | None
    ref: torch.Tensor | None
    advantages: torch.Tensor
    mask: torch.Tensor
    aligned: bool
    tile: int

    @classmethod
    def of(
        cls,
        logps: torch.Tensor,
        old: torch.Tensor | None,
        ref: torch.Tensor | None,
        advantages: torch.Tensor,
        mask: torch.Tensor,
    ) -> Batch:
        """Return the batch of these tensors, which have elements."""
        advantages = as_rows(advantages) if advantages.dim() == 2 else advantages.contiguous()
        logps, mask = as_rows(logps), as_rows(mask)
        old, ref = (None if one is None else as_rows(one) for one in (old, ref))
        rows = [one for one in (logps, old, ref, mask, advantages) if one is not None and one.dim() == 2]
        n_tokens = logps.shape[1]
        aligned = n_tokens % 16 == 0 and all(one.stride(0) % 16 == 0 for one in rows)
        return cls(logps, old, ref, advantages, mask, aligned, min(power_of_two(n_tokens), TILE))

    @property
    def n_tiles(self) -> int:
        """Tiles of a sequence."""
        return -(-self.logps.shape[1] // self.tile)

    def scratch(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return room for one sum a tile, [tiles, sequences]."""
        return torch.empty(self.n_tiles, len(self.logps), dtype=dtype, device=self.logps.device)


class Counts(NamedTuple):
    """Unmasked tokens: of each sequence, int32 [1, sequences], and int64 ``parts``, the first ``n_parts`` of them."""

    sequences: torch.Tensor | None = None
    parts: torch.Tensor | None = None
    n_parts: int = 0


@triton.jit
def as_sixteens(n, ALIGNED: tl.constexpr):
    """Return n; where ALIGNED, in a form that the compiler sees to be a multiple of 16."""
    return n // 16 * 16 if ALIGNED else n


@triton.jit
def load_tokens(row_ptr, stride, seq, inside, col, ALIGNED: tl.constexpr):
    """Return the values at columns ``col`` of the sequences' rows, 0 where not ``inside`` [sequences, tile]."""
    rows = (seq * as_sixteens(stride, ALIGNED))[:, None]
    return tl.load(row_ptr + rows + col[None, :], mask=inside, other=0)


@triton.jit
def merge_tiles(part_ptr, seq, used, n_seqs, n_tiles, SEQS: tl.constexpr):
    """Return the sums of sequences ``seq`` [SEQS] over their tiles, ascending."""
    total = tl.zeros((SEQS,), part_ptr.dtype.element_ty)
    tiles = tl.where(used, n_tiles, 0)
    for start in range(0, n_tiles, _UNROLLED):
        for step in tl.static_range(_UNROLLED):
            tile = start + step
            total += tl.load(part_ptr + n_seqs.to(tl.int64) * tile + seq, mask=tile < tiles, other=0)
    return total


@triton.jit
def token_count(total_ptr, n_parts):
    """Return the number of unmasked tokens, at least 1."""
    part = tl.arange(0, _PARTS)
    total = tl.sum(tl.load(total_ptr + part, mask=part < n_parts, other=0), 0)  # integers: any order
    return tl.maximum(total, 1).to(tl.float32)


def _fixed_count(sizes: Mapping[str, Any], _device: DeviceIdentity) -> dict[str, int]:
    return {"num_warps": 16 if sizes["SEQS"] * sizes["BLOCK"] >= 8192 else 4}


@TunableKernel(
    outputs=("count_ptr", "total_ptr"),
    dynamic=("n_seqs", "n_tokens", "n_parts", "mask_stride"),
    fixed=_fixed_count,
    neutral={"num_warps": (4, 8, 16)},  # integers
)
@triton.jit(do_not_specialize=["n_seqs", "n_tokens", "n_parts", "mask_stride"])
def _grpo_count_kernel(
    mask_ptr, count_ptr, total_ptr, n_seqs, n_tokens, n_parts, mask_stride,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """Write how many tokens each sequence has unmasked, [n_seqs], and each of n_parts programs met, [n_parts]."""
    n_tokens = as_sixteens(n_tokens, ALIGNED)
    total = tl.zeros((1,), tl.int64)
    for first in range(tl.program_id(0) * SEQS, n_seqs, n_parts * SEQS):
        seq = first + tl.arange(0, SEQS).to(tl.int64)
        used = seq < n_seqs
        count = tl.zeros((SEQS,), tl.int32)
        for start in range(0, n_tokens, BLOCK):
            col = start + tl.arange(0, BLOCK)
            inside = used[:, None] & (col < n_tokens)[None, :]
            active = load_tokens(mask_ptr, mask_stride, seq, inside, col, ALIGNED) != 0
            count += tl.sum(active.to(tl.int32), 1)
        tl.store(count_ptr + seq, count, mask=used)
        total += tl.sum(count.to(tl.int64), 0)
    tl.store(total_ptr + tl.program_id(0) + tl.arange(0, 1), total)


def count(batch: Batch) -> Counts:
    """Return the numbers of unmasked tokens."""
    n_seqs, n_tokens = batch.mask.shape
    sequences = torch.empty(1, n_seqs, dtype=torch.int32, device=batch.mask.device)
    parts = torch.empty(_PARTS.value, dtype=torch.int64, device=batch.mask.device)
    block = min(power_of_two(n_tokens), _COUNTED)
    seqs = min(power_of_two(n_seqs), _COUNTED // block)
    n_parts = min(-(-n_seqs // seqs), _PARTS.value)
    _grpo_count_kernel[(n_parts,)](
        batch.mask, sequences, parts, n_seqs, n_tokens, n_parts, batch.mask.stride(0),
        ALIGNED=batch.aligned, BLOCK=block, SEQS=seqs,
    )  # fmt: skip
    return Counts(sequences, parts, n_parts)


def fixed_tiles(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    """Return about 1024 tokens a program, and fewer where multiprocessors would stay idle."""
    return {"SEQS": operands.rows_in_tile(sizes["n_seqs"], sizes["TILE"], 1024, device), "num_warps": 4}


def admits_tiles(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    """Let through 1 to 16 tokens a thread."""
    return 1 <= launch["SEQS"] * sizes["TILE"] // (32 * launch["num_warps"]) <= 16


def by_tiles(meta: Mapping[str, Any]) -> tuple[int]:
    """Return one program a tile of SEQS sequences."""
    return (-(-meta["n_seqs"] // meta["SEQS"]) * -(-meta["n_tokens"] // meta["TILE"]),)


@triton.jit
def log_ratio_sums(logp, old, active, SEQS: tl.constexpr, TILE: tl.constexpr):
    """Return the sums of logp - old over the active tokens of a tile, [SEQS]."""
    return fold_columns(tl.where(active, logp - old, 0.0), SEQS, TILE)


@triton.jit
def place(n_seqs, n_tokens, TILE: tl.constexpr, SEQS: tl.constexpr):
    """Return the program's tile, its sequences [SEQS], which of them exist, and its columns [TILE]."""
    n_tiles = tl.cdiv(n_tokens, TILE)
    tile = tl.program_id(0) % n_tiles
    seq = (tl.program_id(0) // n_tiles).to(tl.int64) * SEQS + tl.arange(0, SEQS)
    return tile, seq, seq < n_seqs, tile * TILE + tl.arange(0, TILE)


@TunableKernel(
    outputs=("log_ratio_ptr",),
    data=("logp_ptr", "old_ptr"),
    dynamic=("n_seqs", "n_tokens", "logp_stride", "old_stride", "mask_stride"),
    fixed=fixed_tiles,
    neutral={"SEQS": (1, 2, 4, 16, 64), "num_warps": (4, 8)},  # a tile's sums are folds of two values at a time
    admits=admits_tiles,
)
@triton.jit(do_not_specialize=["n_seqs", "n_tokens", "logp_stride", "old_stride", "mask_stride"])
def _grpo_log_ratio_kernel(
    logp_ptr, old_ptr, mask_ptr, log_ratio_ptr, n_seqs, n_tokens, logp_stride, old_stride, mask_stride,
    ALIGNED: tl.constexpr, TILE: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """Write the sums of logp - old over unmasked tokens of each tile, [tiles, n_seqs]."""
    n_tokens = as_sixteens(n_tokens, ALIGNED)
    tile, seq, used, col = place(n_seqs, n_tokens, TILE, SEQS)
    inside = used[:, None] & (col < n_tokens)[None, :]
    active = load_tokens(mask_ptr, mask_stride, seq, inside, col, ALIGNED) != 0
    logp = load_tokens(logp_ptr, logp_stride, seq, inside, col, ALIGNED).to(tl.float32)
    old = logp if old_ptr is None else load_tokens(old_ptr, old_stride, seq, inside, col, ALIGNED).to(tl.float32)
    total = log_ratio_sums(logp, old, active, SEQS, TILE)
    tl.store(log_ratio_ptr + tile.to(tl.int64) * n_seqs + seq, total, mask=used)


def log_ratios(batch: Batch) -> torch.Tensor:
    """Return the sums of logp - old over the unmasked tokens of each tile, [tiles, sequences]."""
    found = batch.scratch()
    _grpo_log_ratio_kernel[by_tiles](
        batch.logps, batch.old, batch.mask, found, *batch.logps.shape, batch.logps.stride(0),
        0 if batch.old is None else batch.old.stride(0), batch.mask.stride(0),
        ALIGNED=batch.aligned, TILE=batch.tile,
    )  # fmt: skip
    return found
