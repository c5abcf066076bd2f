"""The precision references compute in: at least fp32 inside, one rounding to the result's dtype."""

from __future__ import annotations

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def require_float(op: str, **tensors: torch.Tensor) -> None:
    """Raise TypeError unless every tensor is bf16, fp16, fp32 or fp64."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{op}: {name} is {tensor.dtype}; pass bfloat16, float16, float32 or float64")


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in fp32, or unchanged where it is fp64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
