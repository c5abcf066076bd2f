"""Who writes a row of the dense gradient of an embedding: a program of its first token, or one that clears; never both.

Launched with every width and number of rows, over memory that holds a value no result has.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from rl_engine.backends.shared.triton.embedding import gradient as module
from rl_engine.backends.shared.triton.embedding.sort import sorted_tokens
from tests.support.ops_embedding import HALF, by_contract, shuffled, weight_and_gradient
from tests.support.ops_inputs import DEVICE, assert_same_bytes

LENGTHS = (33, 0, 1, 9, 0, 0, 0, 2, 0, 0, 1)  # tokens of each row; no group of 2, 4, 8 or 16 rows divides 11
PADDING = 7
LAUNCHES = [(1, 256), (2, 2048), (4, 1024), (8, 4096), (16, 512)]  # rows to clear, columns
SIZES = [(1000, torch.float32), (5120, HALF)]
UNWRITTEN = -7.0


@dataclass(frozen=True)
class Made:
    """What the dense kernel is given, and the gradient in the order of the contract."""

    keys: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor
    dy: torch.Tensor
    partials: torch.Tensor
    wanted: torch.Tensor

    @classmethod
    def of(cls, lengths: tuple[int, ...], hidden: int, dtype: torch.dtype) -> Made:
        """Return what tokens of such counts give, with ids out of range among them, whose dy is NaN."""
        ids, vocab = shuffled(lengths), len(lengths)
        ids = torch.cat((ids[:9], torch.tensor([-1, vocab, 2**40], device=DEVICE), ids[9:]))
        _weight, dy = weight_and_gradient(vocab, hidden, ids, dtype)
        dy[9:12] = float("nan")
        dy[ids == PADDING] = float("nan")
        dy[ids == vocab - 1, ::2] = -0.0
        keys, order = sorted_tokens(ids, vocab, PADDING)
        starts = torch.empty(vocab + 1, dtype=torch.int32, device=DEVICE)
        partials = module._chunk_sums(keys, order, dy, vocab, starts)
        counted = torch.where(ids == PADDING, -1, ids)
        return cls(keys, order, starts, dy, partials, by_contract(counted, vocab, dy).to(dtype))

    def launched(self, rows: int, block: int, *, keys: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return what the kernel leaves of a gradient never written, by these keys and beginnings of segments."""
        dw = torch.full_like(self.wanted, UNWRITTEN)
        vocab, hidden = dw.shape
        module._embedding_dw_kernel[module._by_tokens_and_rows](
            keys, self.order, starts, self.dy, self.partials, dw, len(keys), vocab, hidden, 1.0,
            SCALED=False, COLS=hidden, ROWS=rows, BLOCK=block, num_warps=4,
        )  # fmt: skip
        return dw

    @property
    def has_token(self) -> torch.Tensor:
        """Whether a row has a token that counts [vocab]."""
        return torch.bincount(self.keys.long(), minlength=len(self.starts))[:-1] > 0


@pytest.mark.parametrize(("rows", "block"), LAUNCHES)
@pytest.mark.parametrize(("hidden", "dtype"), SIZES, ids=str)
def test_every_row_is_written_by_one_kind_of_program_whatever_the_launch(
    hidden: int, dtype: torch.dtype, rows: int, block: int
) -> None:
    made = Made.of(LENGTHS, hidden, dtype)
    unwritten = torch.full_like(made.wanted, UNWRITTEN)
    has_token = made.has_token[:, None]
    assert has_token[:, 0].nonzero()[:, 0].tolist() == [0, 2, 3, 10]
    whole = made.launched(rows, block, keys=made.keys, starts=made.starts)
    assert_same_bytes(whole, made.wanted, "dw")
    full = torch.arange(len(made.starts), dtype=torch.int32, device=DEVICE)  # every row has a token: none is cleared
    sums = made.launched(rows, block, keys=made.keys, starts=full)
    assert_same_bytes(sums, torch.where(has_token, made.wanted, unwritten), "by token")
    none = torch.full_like(made.keys, len(made.wanted))  # no token counts: none is summed
    zeros = made.launched(rows, block, keys=none, starts=made.starts)
    assert_same_bytes(zeros, torch.where(has_token, unwritten, torch.zeros_like(unwritten)), "cleared")


@pytest.mark.parametrize("lengths", [(2100, 1, 0, 40), (0, 3, 2100)], ids=str)
def test_a_row_of_thousands_of_tokens_is_written_beside_others(lengths: tuple[int, ...]) -> None:
    made = Made.of(lengths, 1000, torch.float32)
    assert_same_bytes(made.launched(2, 1024, keys=made.keys, starts=made.starts), made.wanted, "dw")
