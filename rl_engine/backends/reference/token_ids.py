"""Checks of token ids that operators share."""

from __future__ import annotations

import torch


def require_ids(op: str, **ids: torch.Tensor) -> None:
    """Raise TypeError unless every tensor is int32 or int64."""
    for name, tensor in ids.items():
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op}: {name} are {tensor.dtype}; pass int32 or int64 ids")


def validate_ids(op: str, ids: torch.Tensor, vocab: int, counted: torch.Tensor | None = None) -> None:
    """Raise ValueError if an id, of those where ``counted`` holds, is outside [0, vocab). Waits for the device."""
    wrong = (ids < 0) | (ids >= vocab)
    bad = ids[wrong if counted is None else wrong & counted]
    if bad.numel():
        raise ValueError(
            f"{op}: {bad.numel()} ids outside [0, {vocab}), the first is {bad[0].item()}; mask or fix them"
        )
