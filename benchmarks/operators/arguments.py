"""Arguments of the operators' timed cases on the device, calls with their gradients, and smaller batches of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.operators.targets import is_throughput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_engine.backends.spec import Case, Inputs, OpSpec

SEED = 20_240_607
COLD_BYTES = 2 * 60 * 10**6  # between two uses of a set: twice the L2 of an H200
ACCUMULATOR = "accumulate_into"  # the keyword of a tensor that backward adds to
OVERWRITES = "overwrite_logits"  # the keyword that lets an operator put a gradient in the place of its first argument
_MAX_SETS = 32


class DeviceMaker:
    """Makes a case's tensors on the card: a generator there fills gigabytes in milliseconds."""

    def __init__(self, dtype: torch.dtype, seed: int, device: str) -> None:
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return normal random values."""
        values = torch.randn(shape, generator=self._generator, dtype=dtype or self._dtype, device=self._device)
        return values.mul_(scale)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Return int64 values in ``[low, high)``."""
        return torch.randint(low, high, shape, generator=self._generator, device=self._device)

    def bernoulli(self, probability: float, *shape: int) -> torch.Tensor:
        """Return a boolean mask."""
        return torch.rand(shape, generator=self._generator, device=self._device) < probability


@dataclass(frozen=True)
class Outcome:
    """What one call gave: its outputs, and gradients by the position, or the name, of the argument they belong to."""

    outputs: tuple[torch.Tensor, ...]
    gradients: Mapping[int | str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by a name for messages."""
        named = {f"output {number}": output for number, output in enumerate(self.outputs)}
        return named | {f"gradient of argument {number}": one for number, one in self.gradients.items()}


def dtype_of(spec: OpSpec) -> str:
    """Return the dtype an operator is timed in: bf16 where it takes it."""
    return "bfloat16" if "bfloat16" in spec.dtypes else spec.dtypes[0]


def itemsize_of(spec: OpSpec) -> int:
    """Return the bytes of one element of that dtype."""
    dtype: torch.dtype = getattr(torch, dtype_of(spec))
    return dtype.itemsize


def make(spec: OpSpec, case: Case, seed: int = SEED, device: str = "cuda") -> Inputs:
    """Return fresh inputs of a case, leaves that ask for gradients among them, its options as keyword arguments."""
    made = spec.inputs(DeviceMaker(getattr(torch, dtype_of(spec)), seed, device), **case.sizes)
    return leaves(replace(made, kwargs={**made.kwargs, **case.options}))


def sets_needed(preset: str, set_bytes: int) -> int:
    """Return how many argument sets keep the L2 cold between two uses of one; decode presets stay warm."""
    if not is_throughput(preset):
        return 1
    return min(_MAX_SETS, max(1, -(-COLD_BYTES // max(1, set_bytes)) + 1)) if set_bytes < COLD_BYTES else 1


def leaves(inputs: Inputs) -> Inputs:
    """Return the same memory as autograd leaves."""
    args = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in inputs.args]
    return replace(inputs, args=tuple(_leaf(arg, number in inputs.differentiable) for number, arg in enumerate(args)))


def changed(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    """Return inputs with every tensor changed, as leaves."""
    args = tuple(change(arg.detach()) if isinstance(arg, torch.Tensor) else arg for arg in inputs.args)
    kwargs = {name: change(one) if isinstance(one, torch.Tensor) else one for name, one in inputs.kwargs.items()}
    return leaves(replace(inputs, args=args, kwargs=kwargs))


def tensors_of(inputs: Inputs) -> list[torch.Tensor]:
    """Return the tensors among the arguments."""
    return [one for one in (*inputs.args, *inputs.kwargs.values()) if isinstance(one, torch.Tensor)]


def wanted(inputs: Inputs) -> list[torch.Tensor]:
    """Return the arguments that gradients are asked for."""
    return [inputs.args[number] for number in inputs.differentiable]


def flat(result: Any) -> tuple[torch.Tensor, ...]:
    """Return an operator's result as a tuple of tensors."""
    if isinstance(result, torch.Tensor):
        return (result,)
    return tuple(one for one in result if isinstance(one, torch.Tensor))


def incoming(outputs: tuple[torch.Tensor, ...], seed: int = SEED + 1) -> tuple[torch.Tensor | None, ...]:
    """Return gradients for the outputs that carry one: 1 for a scalar, as of a loss, else random numbers."""
    generator = torch.Generator(outputs[0].device).manual_seed(seed)
    return tuple(_incoming(output, generator) for output in outputs)


def differentiate(
    outputs: tuple[torch.Tensor, ...],
    inputs: Inputs,
    gradients: tuple[torch.Tensor | None, ...],
    *,
    again: bool = False,
) -> dict[int | str, torch.Tensor]:
    """Return gradients by the position of their argument; ``again`` keeps the graph for another backward."""
    pairs = [(output, dy) for output, dy in zip(outputs, gradients, strict=True) if dy is not None]
    found = torch.autograd.grad(
        [output for output, _dy in pairs],
        wanted(inputs),
        [dy for _output, dy in pairs],
        retain_graph=again,
        allow_unused=True,  # a gradient that is added to an accumulator instead
    )
    return {number: dx for number, dx in zip(inputs.differentiable, found, strict=True) if dx is not None}


def evaluate(
    op: Callable[..., Any],
    inputs: Inputs,
    *,
    gradients: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor | None, ...]] = incoming,
) -> Outcome:
    """Call ``op`` and, where it has gradients, differentiate it by every differentiable argument.

    An accumulator that backward adds to is copied first, and counts among the gradients.
    """
    kwargs = dict(inputs.kwargs)
    if ACCUMULATOR in kwargs:
        kwargs[ACCUMULATOR] = kwargs[ACCUMULATOR].clone()
    outputs = flat(op(*inputs.args, **kwargs))
    if not any(output.requires_grad for output in outputs):
        return Outcome(outputs, {})
    found = differentiate(outputs, inputs, gradients(outputs))
    if ACCUMULATOR in kwargs:
        found[ACCUMULATOR] = kwargs[ACCUMULATOR]
    return Outcome(tuple(output.detach() for output in outputs), found)


def fed(op: Callable[..., Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Return ``op`` of a changed first argument: a clone that it may overwrite, or a view, since leaves it may not."""

    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return op(change(first), *args, **kwargs)

    return call


def last_rows(inputs: Inputs, rows: int, count: int) -> Inputs:
    """Return a batch of the last ``count`` rows; a tensor whose first size is not ``rows`` is shared by all rows."""
    return changed(inputs, lambda one: one[rows - count :] if is_rowwise(one, rows) else one)


def is_rowwise(value: Any, rows: int) -> bool:
    """Say whether an argument has one entry a row."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == rows


def describe(case: Case) -> str:
    """Return a case's sizes and options as text."""
    return " ".join(f"{name}={value}" for name, value in {**case.sizes, **case.options}.items())


def _leaf(arg: Any, differentiable: bool) -> Any:
    return arg.requires_grad_() if differentiable else arg


def _incoming(output: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    if not output.requires_grad:
        return None
    if not output.dim():
        return torch.ones_like(output)
    values = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
    return values.detach()
