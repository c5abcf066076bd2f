"""Log-probability of selected tokens: logp = (z[target] - max z) - ln(sum), z = logits / temperature, in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rl_engine.backends.reference.logprob.logp import check_logp
from rl_engine.backends.reference.token_ids import validate_ids
from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import pin_autotune, pinned_backward
from rl_engine.backends.shared.triton.compiler import unavailable
from rl_engine.backends.shared.triton.graph import differentiate, empty_like, graph_operator
from rl_engine.backends.shared.triton.rows.logits_gradient import logits_gradient
from rl_engine.backends.shared.triton.rows.selected_logps import selected_logps
from rl_engine.backends.spec import implements


def _forward(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logp [...] and the rows' maxima and base-2 logarithms of their sums [2, ...]."""
    found = selected_logps(logits, targets, ignore_index=ignore_index, temperature=temperature)
    return found.logps, found.norm


def _backward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    norm: torch.Tensor,
    dlogp: torch.Tensor,
    ignore_index: int,
    temperature: float,
) -> torch.Tensor:
    return logits_gradient(logits, targets, norm, (dlogp, None), ignore_index=ignore_index, temperature=temperature)


class _LogP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, ignore_index, temperature):
        pin_autotune(ctx)
        logp, norm = _forward(logits, targets, ignore_index, temperature)
        ctx.save_for_backward(logits, targets, norm)
        ctx.options = (ignore_index, temperature)
        return logp

    @staticmethod
    @once_differentiable
    @pinned_backward
    def backward(ctx, dlogp):
        return _backward(*ctx.saved_tensors, dlogp, *ctx.options), None, None, None


def _fake_forward(
    logits: torch.Tensor, targets: torch.Tensor, _ignore_index: int, _temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = (targets.shape, (2, *targets.shape))
    logp, norm = (torch.empty(shape, dtype=torch.float32, device=logits.device) for shape in shapes)
    return logp, norm


def graph_logp(name: str, backend: str = "") -> Any:
    """Register the operator for ``torch.compile`` under a name, for a tuned backend or the default one; return it."""
    forward = graph_operator(name, _forward, fake=_fake_forward, backend=backend)
    backward = graph_operator(f"{name}_backward", _backward, fake=empty_like, phase="backward", backend=backend)
    differentiate(
        forward,
        lambda logits, targets, norm, ignore_index, temperature, dlogp, _dnorm: (
            backward(logits, targets, norm, dlogp, ignore_index, temperature),
            None,
            None,
            None,
        ),
        lambda inputs, outputs: (*inputs[:2], outputs[1], *inputs[2:]),
    )
    return forward


_graph_forward = graph_logp("logp")


_door = operands.Door("logp", "logits", "targets", any_dtype=("targets",))


@implements("logp", backend_id="rlkernel.triton.logp", unavailable=unavailable)
def logp(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    validate: bool = False,
) -> torch.Tensor:
    """Return ``log_softmax(logits / temperature)`` at ``targets``, in fp32. A row's bits depend on that row alone.

    Args:
        logits: [..., vocab], bf16, fp16 or fp32; rows of neighbouring columns are read in place, others copied.
        targets: [...], int32 or int64. ``ignore_index`` gives 0 and a zero gradient row. Another id outside
            [0, vocab) gives NaN and a zero gradient row; nothing is read out of bounds.
        ignore_index: the id that marks padding.
        temperature: positive; 1.0 leaves the logits as they are, bit for bit.
        validate: raise for ids out of range, at the price of waiting for the device.

    Returns:
        [...], fp32.

    Raises:
        ValueError: shapes or devices disagree, temperature is not positive, or ``validate`` found an id out of range.
        TypeError: a tensor subclass, logits of another dtype, or targets that are not int32 or int64.
    """
    return checked_logp(
        logits, targets, ignore_index=ignore_index, temperature=temperature, validate=validate, in_graph=_graph_forward
    )


def checked_logp(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    validate: bool = False,
    in_graph: Any,
) -> torch.Tensor:
    """Return `logp` of the same arguments; ``in_graph`` is what stands for it inside ``torch.compile``."""
    _door(logits, targets)
    check_logp(logits, targets, temperature)
    if validate:
        validate_ids("logp", targets, logits.shape[-1], targets != ignore_index)
    if torch.compiler.is_compiling():
        return in_graph(logits, targets, ignore_index, temperature)[0]
    if operands.grad_enabled(logits):
        return _LogP.apply(logits, targets, ignore_index, temperature)
    return _forward(logits, targets, ignore_index, temperature)[0]
