"""Operators inside ``torch.compile``: registered whole, so that tracing neither looks into a launch nor breaks on it.

Eager calls go past this (a custom operator costs 8.5 to 16 us a call); an operator branches here where
``torch.compiler.is_compiling()``. Inside a compiled region the process's policy applies (RL_KERNEL_AUTOTUNE), forward
and backward, whatever `autotune` block is around: AOTAutograd offers no place to pin a forward's policy for a backward
that runs on autograd's thread, where no context variable reaches, and the bits are equal anyway.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

import torch

from rl_engine.runtime.policy import LaunchPolicy, pinned, process_policy

if TYPE_CHECKING:
    from collections.abc import Callable


def graph_operator(
    name: str,
    launch: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    phase: Literal["forward", "backward"] = "forward",
    backend: str = "",
) -> Any:
    """Register ``launch`` as custom operator ``rl_kernel::name`` and return it.

    Args:
        name: of the operator inside a graph.
        launch: annotated with tensors, numbers and None; returns new tensors only.
        fake: the same arguments to empty tensors of the results' shapes, dtypes and strides.
        phase: the pass its launches count to.
        backend: the tuned backend that it belongs to, if any.
    """

    @functools.wraps(launch)
    def run(*args: Any, **kwargs: Any) -> Any:
        with pinned(LaunchPolicy(process_policy().mode, phase, backend)):
            return launch(*args, **kwargs)

    operator = torch.library.custom_op(f"rl_kernel::{name}", run, mutates_args=())
    operator.register_fake(fake)
    return operator


def empty_like(tensor: torch.Tensor, *_others: Any) -> torch.Tensor:
    """Return an empty contiguous tensor of the first argument's shape and dtype: the commonest output, and its fake.

    Naming shape, dtype and device one by one takes the host twice as long.
    """
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def differentiate(operator: Any, backward: Callable[..., Any], save: Callable[..., tuple[Any, ...]]) -> None:
    """Make ``operator`` differentiable.

    Args:
        operator: from `graph_operator`.
        backward: (saved tensors ..., other saved values ..., incoming gradients ...) to a gradient for each input.
        save: (inputs, output) to what backward needs: tensors and other values, in its order.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        saved = save(inputs, output)
        ctx.save_for_backward(*(value for value in saved if isinstance(value, torch.Tensor)))
        ctx.values = tuple(value for value in saved if not isinstance(value, torch.Tensor))

    def run(ctx: Any, *gradients: Any) -> Any:
        return backward(*ctx.saved_tensors, *ctx.values, *gradients)

    operator.register_autograd(run, setup_context=setup_context)
