"""RMSNorm: y = x * rstd * w, rstd = rsqrt(mean(x^2) + eps), computed in fp32; kernels in the files beside."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from rl_engine.backends.reference.norm.rms_norm import CastingMode, check_rms_norm
from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import pin_autotune, pinned_backward
from rl_engine.backends.shared.triton.compiler import unavailable
from rl_engine.backends.shared.triton.graph import differentiate, empty_like, graph_operator
from rl_engine.backends.shared.triton.norm.rms_norm_backward import fuses, launch_dw, launch_dx, launch_fused
from rl_engine.backends.shared.triton.norm.rms_norm_forward import GEMMA, LLAMA, NONE, launch_forward
from rl_engine.backends.spec import implements

_CASTING = {"none": NONE.value, "llama": LLAMA.value, "gemma": GEMMA.value}


def _forward(x: torch.Tensor, weight: torch.Tensor, eps: float, casting: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and rstd [rows]."""
    y, rstd = _fake_forward(x, weight, eps, casting)
    if rstd.shape[0]:
        launch_forward(x, weight, eps, casting, y, rstd)
    return y, rstd


def _fake_forward(
    x: torch.Tensor, _weight: torch.Tensor, _eps: float, _casting: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.numel() // x.shape[-1]
    return empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)


def _backward(
    x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor,
    casting: int, wants_dx: bool, wants_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return dx and dw; of one that is not wanted, an empty tensor."""
    dx, dw = _fake_backward(x, weight, rstd, dy, casting, wants_dx, wants_dw)
    if not len(rstd):
        return dx, dw.zero_()
    if wants_dx and wants_dw and fuses(len(rstd), len(weight), x.get_device()):
        launch_fused(x, weight, rstd, dy, casting, dx, dw)
        return dx, dw
    if wants_dx:
        launch_dx(x, weight, rstd, dy, casting, dx)
    if wants_dw:
        launch_dw(x, rstd, dy, casting, dw)
    return dx, dw


def _fake_backward(
    x: torch.Tensor, weight: torch.Tensor, _rstd: torch.Tensor, _dy: torch.Tensor,
    _casting: int, wants_dx: bool, wants_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    dx_shape, dw_shape = x.shape if wants_dx else (0,), weight.shape if wants_dw else (0,)
    dx = torch.empty(dx_shape, dtype=x.dtype, device=x.device)
    return dx, torch.empty(dw_shape, dtype=weight.dtype, device=x.device)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, casting):
        pin_autotune(ctx)
        ctx.casting = casting
        y, rstd = _forward(x, weight, eps, casting)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    @pinned_backward
    def backward(ctx, dy):
        wants_dx, wants_dw, _wants_eps, _wants_casting = ctx.needs_input_grad
        dx, dw = _backward(*ctx.saved_tensors, dy, ctx.casting, wants_dx, wants_dw)
        return dx if wants_dx else None, dw if wants_dw else None, None, None


_graph_forward = graph_operator("rms_norm", _forward, fake=_fake_forward)
_graph_backward = graph_operator("rms_norm_backward", _backward, fake=_fake_backward, phase="backward")


def _graph_gradients(x, weight, rstd, casting, wants_dx, wants_dw, dy, _drstd):
    dx, dw = _graph_backward(x, weight, rstd, dy, casting, wants_dx, wants_dw)
    return dx if wants_dx else None, dw if wants_dw else None, None, None


differentiate(
    _graph_forward,
    _graph_gradients,
    lambda inputs, outputs: (*inputs[:2], outputs[1], inputs[3], inputs[0].requires_grad, inputs[1].requires_grad),
)


_door = operands.Door("rms_norm", "x", "weight")


@implements("rms_norm", backend_id="rlkernel.triton.rms_norm", unavailable=unavailable)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, casting_mode: CastingMode = "none"
) -> torch.Tensor:
    """Return ``x / sqrt(mean(x**2, -1) + eps) * weight``, computed in fp32 and rounded once.

    A row's bits depend on that row alone; the weight's gradient on the rows and their order, not on grid or card.

    Args:
        x: [..., hidden], bf16, fp16 or fp32. Rows of neighbouring columns are read in place where their leading axes
            merge into one or two (a slice of a packed qkv, ``x[:, :-1]``), others copied.
        weight: [hidden], bf16, fp16 or fp32; it may be wider than x.
        eps: added to the mean square (Zhang and Sennrich, arXiv:1910.07467).
        casting_mode: what is rounded, and what the weight is. "none": as above. "llama": the normalised x is rounded to
            x's dtype before weight multiplies it, as in Hugging Face's LlamaRMSNorm and Qwen's (which return the wider
            dtype of the two; this returns x's). "gemma": 1 + weight multiplies, as in GemmaRMSNorm.

    Returns:
        [..., hidden], x's dtype, contiguous.

    Raises:
        ValueError: weight's shape is not [hidden], hidden is 0, an unknown casting_mode, different devices, or one
            Triton does not run on.
        TypeError: another dtype, or a tensor subclass.
    """
    _door(x, weight)
    check_rms_norm(x, weight, casting_mode)
    casting = _CASTING[casting_mode]
    if torch.compiler.is_compiling():
        return _graph_forward(x, weight, eps, casting)[0]
    if operands.grad_enabled(x, weight):
        return _RMSNorm.apply(x, weight, eps, casting)
    return _forward(x, weight, eps, casting)[0]
