"""Matrix products for tests: the operator, operands and gradients."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.ops_inputs import DTYPES, ON_GPU, Maker, triton_op

KINDS = tuple(name for name in DTYPES if ON_GPU or name != "bfloat16")


def gemm(*args: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Return the Triton operator's product."""
    result: torch.Tensor = triton_op("det_gemm")(*args, **kwargs)
    return result


def pair(dtype: str, m: int, k: int, n: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random a [m, k] and b [k, n]."""
    make = Maker(DTYPES[dtype], seed=seed)
    return make.normal(m, k), make.normal(k, n)


def gradients(
    a: torch.Tensor, b: torch.Tensor, dy: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of a and b."""
    x, y = a.detach().requires_grad_(), b.detach().requires_grad_()
    gemm(x, y, **kwargs).backward(dy)
    return x.grad, y.grad
