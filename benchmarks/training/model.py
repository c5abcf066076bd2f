"""A decoder-only transformer over the library's operators, written so that equal inputs give equal bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.training.task import VOCABULARY

if TYPE_CHECKING:
    from benchmarks.training.operators import Operators
    from benchmarks.training.presets import ModelShape


def _matrix(rows: int, cols: int, random: torch.Generator, scale: float = 1.0) -> nn.Parameter:
    # drawn on the CPU, so that every device starts from the same weights
    return nn.Parameter(torch.randn(rows, cols, generator=random) * (scale * cols**-0.5))


def _linear(operators: Operators, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = operators.det_gemm(x, weight.to(x.dtype).mT)
    return product


class Attention(nn.Module):
    """Causal self-attention as products and an fp32 softmax: SDPA's flash backward is not deterministic."""

    def __init__(self, shape: ModelShape, operators: Operators, random: torch.Generator) -> None:
        super().__init__()
        self.operators = operators
        self.heads = shape.heads
        self.query_key_value = _matrix(3 * shape.width, shape.width, random)
        self.output = _matrix(shape.width, shape.width, random, scale=(2 * shape.layers) ** -0.5)

    def forward(self, x: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        """Mix x [batch, length, width] along the length; a position sees those where ``future`` is False."""
        batch, length, width = x.shape
        heads = _linear(self.operators, x, self.query_key_value).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.unbind(2)
        turned = self.operators.rope(query, key)
        query, key, value = (one.transpose(1, 2) for one in (*turned, value))  # each [batch, heads, length, head]
        scores = self.operators.det_gemm(query, key.mT, out_dtype=torch.float32) * (width // self.heads) ** -0.5
        weights = scores.masked_fill(future, float("-inf")).softmax(-1).to(x.dtype)
        mixed = self.operators.det_gemm(weights, value).transpose(1, 2).reshape(x.shape)
        return _linear(self.operators, mixed, self.output)


class Block(nn.Module):
    """Attention, then a SwiGLU MLP, each on a normed copy of the stream and added back to it."""

    def __init__(self, shape: ModelShape, operators: Operators, random: torch.Generator) -> None:
        super().__init__()
        self.operators = operators
        self.attention_norm = nn.Parameter(torch.ones(shape.width))
        self.attention = Attention(shape, operators, random)
        self.mlp_norm = nn.Parameter(torch.ones(shape.width))
        self.gate = _matrix(shape.hidden, shape.width, random)
        self.up = _matrix(shape.hidden, shape.width, random)
        self.down = _matrix(shape.width, shape.hidden, random, scale=(2 * shape.layers) ** -0.5)

    def forward(self, x: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        """Return the stream after this block, x's shape [batch, length, width] and dtype."""
        ops = self.operators
        x = x + self.attention(ops.rms_norm(x, self.attention_norm), future)
        normed = ops.rms_norm(x, self.mlp_norm)
        return x + _linear(ops, ops.swiglu(_linear(ops, normed, self.gate), _linear(ops, normed, self.up)), self.down)


class Transformer(nn.Module):
    """fp32 master weights; the blocks compute in ``compute_dtype``, the head in fp32, as its 13 columns cost nothing.

    Args:
        shape: sizes.
        operators: embedding, norms, rotation, products, activation and log-probabilities.
        compute_dtype: of the residual stream.
        random: a CPU generator that the weights are drawn from.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        operators: Operators,
        compute_dtype: torch.dtype,
        random: torch.Generator,
    ) -> None:
        super().__init__()
        self.operators = operators
        self.compute_dtype = compute_dtype
        self.embedding = _matrix(len(VOCABULARY), shape.width, random)
        self.blocks = nn.ModuleList(Block(shape, operators, random) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.width))
        self.head = _matrix(len(VOCABULARY), shape.width, random)

    def forward(self, tokens: torch.Tensor, *, first: int = 0) -> torch.Tensor:
        """Return the logits at the positions from ``first`` on: [batch, length - first, vocabulary], fp32.

        tokens: [batch, length], int64; the logits at position i are those of token i + 1.
        """
        x = self.operators.embedding(tokens, self.embedding).to(self.compute_dtype)
        length = tokens.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        for block in self.blocks:
            x = block(x, future)
        return _linear(self.operators, self.operators.rms_norm(x[:, first:], self.norm).float(), self.head)

    def answer_logps(self, tokens: torch.Tensor, prompt_length: int) -> torch.Tensor:
        """Return the log-probabilities of the tokens after the prompt: [batch, length - prompt_length], fp32."""
        logits = self(tokens[:, :-1], first=prompt_length - 1)
        logps: torch.Tensor = self.operators.logp(logits, tokens[:, prompt_length:])
        return logps
