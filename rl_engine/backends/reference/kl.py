"""Estimates of the KL divergence of one token, which losses share (Schulman, "Approximating KL divergence")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

KLEstimator = Literal["k1", "k2", "k3", "abs"]


def estimate_kl(d: torch.Tensor, kl: KLEstimator) -> torch.Tensor:
    """Return the estimate from d = ref_logp - logp: -d (k1), d**2 / 2 (k2), exp(d) - d - 1 (k3) or |d| (abs)."""
    if kl == "k1":
        return -d
    if kl == "k2":
        return d.square() / 2
    return d.abs() if kl == "abs" else d.expm1() - d
