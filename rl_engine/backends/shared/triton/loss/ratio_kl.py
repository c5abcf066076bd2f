"""Policy ratio and KL from logits: the log-probabilities of `logp`, bit for bit, then one small kernel over tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from rl_engine.backends.reference.loss.ratio_kl import RatioKL, check_ratio_kl
from rl_engine.backends.reference.token_ids import validate_ids
from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import TunableKernel, pin_autotune, pinned_backward
from rl_engine.backends.shared.triton.compiler import is_interpreter, unavailable
from rl_engine.backends.shared.triton.graph import differentiate, graph_operator
from rl_engine.backends.shared.triton.primitives.kl import KL_CODES, kl_and_slope
from rl_engine.backends.shared.triton.rows.logits_gradient import logits_gradient
from rl_engine.backends.shared.triton.rows.selected_logps import selected_logps
from rl_engine.backends.spec import implements

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_engine.backends.reference.kl import KLEstimator
    from rl_engine.platforms.device import DeviceIdentity


def _fixed(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    """Return blocks of up to 1024 tokens, fewer where multiprocessors would stay idle."""
    programs = 1 if is_interpreter(device.arch) else device.sm_count
    return {"BLOCK": max(256, operands.rows_a_program(sizes["n_tokens"], 1024, programs)), "num_warps": 4}


@TunableKernel(
    outputs=("ratio_ptr", "kl_ptr", "slope_ptr"),
    data=("logp_ptr", "ref_ptr", "old_ptr"),
    dynamic=("n_tokens",),
    fixed=_fixed,
    neutral={"BLOCK": (256, 512, 1024), "num_warps": (2, 4)},  # no sum at all
    warm=True,
)
@triton.jit(do_not_specialize=["n_tokens"])
def _ratio_kl_kernel(
    logp_ptr, ref_ptr, old_ptr, mask_ptr, ratio_ptr, kl_ptr, slope_ptr, n_tokens, KL: tl.constexpr, BLOCK: tl.constexpr
):
    """Write ratio, KL and the KL's derivative by the log-probability."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = token < n_tokens
    active = inside & (tl.load(mask_ptr + token, mask=inside, other=0) != 0)
    # masked loads, before exp: infinities and NaN under the mask must reach neither results nor gradients
    logp = tl.load(logp_ptr + token, mask=active, other=0.0)
    ref = tl.load(ref_ptr + token, mask=active, other=0.0).to(tl.float32)
    old = logp if old_ptr is None else tl.load(old_ptr + token, mask=active, other=0.0).to(tl.float32)
    kl, slope = kl_and_slope(ref - logp, KL)
    tl.store(ratio_ptr + token, tl.exp(logp - old), mask=inside)
    tl.store(kl_ptr + token, tl.where(active, kl, 0.0), mask=inside)
    tl.store(slope_ptr + token, tl.where(active, slope, 0.0), mask=inside)


_by_tokens = operands.blocks("n_tokens", "BLOCK")


def _forward(
    policy_logits: torch.Tensor,
    ref_logits: torch.Tensor | None,
    action_ids: torch.Tensor,
    mask: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    temperature: float,
    kl: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ratio, KL, the KL's slope [...] and the policy's maxima and base-2 logarithms of sums [2, ...]."""
    found = selected_logps(policy_logits, action_ids, mask=mask, other=ref_logits, temperature=temperature)
    ratio, divergence, slope = (torch.empty_like(found.logps) for _ in range(3))
    if action_ids.numel():
        ref = found.reference if ref_logps is None else ref_logps.contiguous()
        old = None if old_logps is None else old_logps.contiguous()
        _ratio_kl_kernel[_by_tokens](
            found.logps, ref, old, mask.contiguous(), ratio, divergence, slope, ratio.numel(), KL=kl
        )
    return ratio, divergence, slope, found.norm


def _backward(
    policy_logits: torch.Tensor,
    action_ids: torch.Tensor,
    mask: torch.Tensor,
    norm: torch.Tensor,
    ratio: torch.Tensor,
    slope: torch.Tensor,
    temperature: float,
    dratio: torch.Tensor | None,
    dkl: torch.Tensor | None,
) -> torch.Tensor:
    # a missing gradient is left out, not taken as 0: 0 times an infinite ratio would be NaN
    first, *second = [(dy, one) for dy, one in ((dratio, ratio), (dkl, slope)) if dy is not None]
    return logits_gradient(policy_logits, action_ids, norm, first, *second, mask=mask, temperature=temperature)


class _RatioKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, policy_logits, ref_logits, action_ids, mask, old_logps, ref_logps, temperature, kl):
        pin_autotune(ctx)
        ctx.set_materialize_grads(False)
        ratio, divergence, slope, norm = _forward(
            policy_logits, ref_logits, action_ids, mask, old_logps, ref_logps, temperature, kl
        )
        ctx.save_for_backward(policy_logits, action_ids, mask, norm, ratio, slope)
        ctx.temperature = temperature
        return ratio, divergence

    @staticmethod
    @once_differentiable
    @pinned_backward
    def backward(ctx, dratio, dkl):
        if dratio is None and dkl is None:
            return (None,) * 8
        return (_backward(*ctx.saved_tensors, ctx.temperature, dratio, dkl), *[None] * 7)


def _fake_forward(
    _policy_logits: torch.Tensor, _ref_logits: torch.Tensor | None, action_ids: torch.Tensor, *_others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = (*[tuple(action_ids.shape)] * 3, (2, *action_ids.shape))
    ratio, kl, slope, norm = (torch.empty(shape, dtype=torch.float32, device=action_ids.device) for shape in shapes)
    return ratio, kl, slope, norm


_graph_forward = graph_operator("ratio_kl", _forward, fake=_fake_forward)
_graph_backward = graph_operator(
    "ratio_kl_backward",
    _backward,
    fake=lambda policy_logits, *_others: torch.empty(
        policy_logits.shape, dtype=policy_logits.dtype, device=policy_logits.device
    ),
    phase="backward",
)
differentiate(
    _graph_forward,
    lambda logits, ids, mask, norm, ratio, slope, temperature, dratio, dkl, *_others: (
        _graph_backward(logits, ids, mask, norm, ratio, slope, temperature, dratio, dkl),
        *[None] * 7,
    ),
    lambda inputs, outputs: (inputs[0], inputs[2], inputs[3], outputs[3], outputs[0], outputs[2], inputs[6]),
)


_door = operands.Door(
    "ratio_kl", "policy_logits", "ref_logits", "old_logps", "ref_logps", "action_ids", "attention_mask",
    any_dtype=("action_ids", "attention_mask"),
)  # fmt: skip


@implements("ratio_kl", backend_id="rlkernel.triton.ratio_kl", unavailable=unavailable)
def ratio_kl(
    policy_logits: torch.Tensor,
    ref_logits: torch.Tensor | None,
    action_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    old_logps: torch.Tensor | None = None,
    *,
    ref_logps: torch.Tensor | None = None,
    temperature: float = 1.0,
    kl: KLEstimator = "k3",
    validate: bool = False,
) -> RatioKL:
    """Return the ratio to the policy that sampled and the KL estimate to a reference, of every token.

    Formulae and conventions are those of `rl_engine.backends.reference.loss.ratio_kl.ratio_kl`. Log-probabilities are
    those of operator ``logp`` bit for bit, so a policy compared with itself has a ratio of exactly 1 and a KL of 0. A
    token's bits depend on its own logits alone. Rows of masked tokens are not read,
    except in the forward of no more rows than the card has multiprocessors.

    Args:
        policy_logits: [..., vocab], bf16, fp16 or fp32; rows of neighbouring columns are read in place.
        ref_logits: the same shape, of the reference policy; None where ``ref_logps`` are given.
        action_ids: [...], int32 or int64. An id outside [0, vocab) gives NaN and a zero gradient row; nothing is read
            out of bounds.
        attention_mask: [...], bool or number; where it is 0, ratio is 1, KL 0 and the gradient row 0.
        old_logps: [...], of the policy that sampled; None takes the policy itself: a ratio of 1 that has a gradient.
        ref_logps: [...], log-probabilities of the reference policy instead of its logits.
        temperature: positive; 1.0 leaves the logits as they are, bit for bit.
        kl: the estimator: k1, k2, k3 or abs.
        validate: raise for ids out of range, at the price of waiting for the device.

    Returns:
        RatioKL of two fp32 tensors [...]; both carry a gradient to ``policy_logits``, in their dtype.

    Raises:
        ValueError: shapes or devices disagree, not exactly one reference, temperature is not positive, an unknown
            estimator, or ``validate`` found an id out of range.
        TypeError: another dtype, or a tensor subclass.
    """
    _door(policy_logits, ref_logits, old_logps, ref_logps, action_ids, attention_mask)
    check_ratio_kl(
        policy_logits, ref_logits, action_ids, attention_mask, old_logps, ref_logps, temperature=temperature, kl=kl
    )
    if validate:
        validate_ids("ratio_kl", action_ids, policy_logits.shape[-1], attention_mask != 0)
    given = (ref_logits, action_ids, attention_mask, old_logps, ref_logps)
    options: tuple[Any, ...] = (*(None if one is None else one.detach() for one in given), temperature, KL_CODES[kl])
    if torch.compiler.is_compiling():
        return RatioKL(*_graph_forward(policy_logits, *options)[:2])
    if operands.grad_enabled(policy_logits):
        return RatioKL(*_RatioKL.apply(policy_logits, *options))
    return RatioKL(*_forward(policy_logits, *options)[:2])
