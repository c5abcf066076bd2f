"""Matrices of one product, and the single multiplications that its phase consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.gemm.rows import ITEMSIZE

if TYPE_CHECKING:
    from benchmarks.gemm.rows import Product

COLD_BYTES = 120_000_000  # twice the L2 of an H200
_MOST_SETS = 16


@dataclass(frozen=True)
class Step:
    """One multiplication: a @ b into out; b has a matrix a group where ``offsets`` say which rows are whose."""

    name: str
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    offsets: torch.Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows and columns of the product, and the length of its chains."""
        return self.out.shape[-2], self.out.shape[-1], self.a.shape[-1]


def sets_needed(product: Product) -> int:
    """Return how many sets keep the L2 cold between two uses of one."""
    weights = max(product.groups, 1) * product.inner * product.cols
    size = ITEMSIZE * (product.rows * (product.inner + product.cols) + weights)
    return min(_MOST_SETS, 1 if size >= COLD_BYTES else -(-COLD_BYTES // size) + 1)


def steps(product: Product, seed: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> list[Step]:
    """Return the multiplications of a phase over fresh random matrices, which they share as an operator's do.

    The weight lies as [cols, inner], its gradient too.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    rows, inner, cols, groups = product.rows, product.inner, product.cols, product.groups
    x = normal(rows, inner)
    if groups:
        offsets = torch.arange(groups + 1, device=device, dtype=torch.int32) * (rows // groups)
        return [Step("fwd", x, normal(groups, cols, inner).mT, empty(rows, cols), offsets)]
    weight, found = normal(cols, inner), []
    if product.phase in ("fwd", "both"):
        found.append(Step("fwd", x, weight.mT, empty(rows, cols)))
    if product.phase in ("bwd", "both"):
        dy = normal(rows, cols)
        found.append(Step("dX", dy, weight, empty(rows, inner)))
        found.append(Step("dW", dy.mT, x, empty(cols, inner)))
    return found
