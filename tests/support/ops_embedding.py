"""What tests of the embedding share: ids, gradients by PyTorch and by hand, in the order of the contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rl_engine.backends.reference.embedding.embedding import embedding as reference_embedding
from rl_engine.backends.shared.triton.embedding.embedding import embedding as triton_embedding
from tests.support.ops_inputs import DEVICE, ON_GPU, Maker

Embedding = Callable[..., torch.Tensor]
EMBEDDINGS = pytest.mark.parametrize("embedding", [reference_embedding, triton_embedding], ids=["pytorch", "triton"])
HALF = torch.bfloat16 if ON_GPU else torch.float16
CHUNK = 32  # contract
CHAINS = 2e-6  # fp32 chains of 32 and of a few dozen chunk sums: 16 roundings of 1.2e-7, of normal numbers


def ids_of(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return these ids on the tests' device."""
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def shuffled(lengths: tuple[int, ...], *, seed: int = 0) -> torch.Tensor:
    """Return ids 0, 1, ... as often as ``lengths`` say, in random order."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))].to(DEVICE)


def gradient(
    embedding: Embedding, ids: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, **options: object
) -> torch.Tensor:
    """Return the gradient by weight."""
    leaf = weight.detach().requires_grad_()
    (dw,) = torch.autograd.grad(embedding(ids, leaf, **options), leaf, dy)
    return dw


def exact(ids: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, *, padding: int = -1) -> torch.Tensor:
    """Return the fp64 gradient, summed by hand."""
    dw = torch.zeros(weight.shape, dtype=torch.float64, device=weight.device)
    flat, rows = ids.reshape(-1).long(), dy.reshape(-1, dy.shape[-1]).double()
    counted = (flat >= 0) & (flat < len(weight)) & (flat != padding)
    return dw.index_add_(0, flat[counted], rows[counted])


def by_contract(ids: torch.Tensor, vocab: int, dy: torch.Tensor) -> torch.Tensor:
    """Return the fp32 gradient in the order of the contract, one addition after the other."""
    dw = torch.zeros(vocab, dy.shape[1], device=dy.device)
    for row in range(vocab):
        tokens = (ids == row).nonzero()[:, 0].tolist()
        for start in range(0, len(tokens), CHUNK):
            chain = torch.zeros(dy.shape[1], device=dy.device)
            for token in tokens[start : start + CHUNK]:
                chain = chain + dy[token].float()
            dw[row] = dw[row] + chain
    return dw


def weight_and_gradient(
    vocab: int, hidden: int, ids: torch.Tensor, dtype: torch.dtype = torch.float32, *, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random table, and a random gradient of its rows at ``ids``."""
    make = Maker(dtype, seed=seed)
    return make.normal(vocab, hidden), make.normal(*ids.shape, hidden)


def close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """Fail unless sums of chains are the fp64 ones, within `CHAINS` and the last rounding."""
    eps = 0.0 if ours.dtype == torch.float32 else torch.finfo(ours.dtype).eps
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    torch.testing.assert_close(ours.double(), exact, rtol=eps, atol=CHAINS * max(largest, 1.0))


def accumulated(
    embedding: Embedding, ids: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, into: torch.Tensor, **options
) -> None:
    """Add the gradient by weight to ``into``; weight gets none."""
    leaf = weight.detach().requires_grad_()
    embedding(ids, leaf, accumulate_into=into, **options).backward(dy)
    assert leaf.grad is None
