"""Gradients that are added to a tensor of the caller's instead of being handed on."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


class AddInto(torch.autograd.Function):
    """The identity, whose gradient is added to a tensor and goes no further."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Return a view of ``tensor``."""
        ctx.into = into  # not saved: a saved tensor must not change, and every backward changes this one
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        """Add ``gradient`` to the tensor."""
        ctx.into.add_(gradient)
        return None, None
