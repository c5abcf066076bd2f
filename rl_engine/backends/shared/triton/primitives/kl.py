"""Estimates of the KL divergence from log-probabilities of sampled tokens, one piece of code behind every loss.

Formulae: J. Schulman, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html).
"""

import math

import triton
import triton.language as tl

from rl_engine.backends.shared.triton.primitives.folds import rounded_product

KL_CODES = {"k1": 1, "k2": 2, "k3": 3, "abs": 4}  # the estimator's word to what `kl_and_slope` takes; 0 says none


@triton.constexpr_function
def _inverse_factorial(n):
    return 1.0 / math.factorial(n)


@triton.jit
def kl_and_slope(d, KL: tl.constexpr):
    """Return a KL estimate of d = ref_logp - logp, fp32 of any shape, and its derivative by logp."""
    if KL == 1:
        return -d, tl.full(d.shape, 1.0, tl.float32)
    if KL == 2:
        return rounded_product(d * 0.5, d), -d
    if KL == 4:
        return tl.abs(d), tl.where(d > 0, -1.0, tl.where(d < 0, 1.0, 0.0))
    # exp(d) - d - 1 and 1 - exp(d) lose every digit near 0: there the series, in Horner's form (|d| < 1/2: 2e-9)
    tail = tl.full(d.shape, _inverse_factorial(9), tl.float32)
    for n in tl.static_range(8, 1, -1):
        tail = tl.fma(d, tail, _inverse_factorial(n))
    square = rounded_product(d, d)
    near = rounded_product(square, tail)
    growth = tl.exp(d)
    close = tl.abs(d) < 0.5
    return tl.where(close, near, growth - d - 1.0), tl.where(close, -tl.fma(square, tail, d), 1.0 - growth)
