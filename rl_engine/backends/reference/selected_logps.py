"""Log-probabilities of one token a row from logits, as every reference on logits computes them."""

from __future__ import annotations

import torch

from rl_engine.backends.reference.dtypes import wide


def require_temperature(op: str, temperature: float) -> None:
    """Raise ValueError unless logits can be divided by it."""
    if not temperature > 0:
        raise ValueError(f"{op}: temperature is {temperature}; pass a number above 0")


def selected_logps(logits: torch.Tensor, ids: torch.Tensor, use: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return ``log_softmax(logits / temperature)`` at ``ids``, fp32 (fp64 for fp64).

    Rows where ``use`` does not hold give 0, and their logits are not looked at; an id outside [0, vocab) gives NaN.
    """
    inside = use & (ids >= 0) & (ids < logits.shape[-1])
    z = torch.where(use.unsqueeze(-1), wide(logits), 0.0) / temperature
    chosen = torch.log_softmax(z, -1).gather(-1, torch.where(inside, ids, 0).long().unsqueeze(-1)).squeeze(-1)
    return torch.where(inside, chosen, torch.where(use, float("nan"), 0.0).to(chosen.dtype))
