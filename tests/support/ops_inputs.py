"""Seeded inputs of the operators' declared cases, their layouts, and one way to run forward and gradients of any."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from rl_engine.backends import catalog
from rl_engine.backends.spec import Case, Inputs, OpSpec
from rl_engine.runtime.registry import get_op

INTERPRETING = os.environ.get("TRITON_INTERPRET", "") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu"
ON_GPU = DEVICE == "cuda"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SEED = 20_240_607


class Maker:
    """Makes a case's tensors from a generator of its own; the numbers are the same on every device."""

    def __init__(self, dtype: torch.dtype, *, seed: int = SEED, device: str = DEVICE) -> None:
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return normal random values."""
        values = torch.randn(shape, generator=self._generator, dtype=torch.float32) * scale
        return values.to(dtype or self._dtype).to(self._device)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Return int64 values in ``[low, high)``."""
        return torch.randint(low, high, shape, generator=self._generator).to(self._device)

    def bernoulli(self, probability: float, *shape: int) -> torch.Tensor:
        """Return a boolean mask."""
        return (torch.rand(shape, generator=self._generator) < probability).to(self._device)


@dataclass(frozen=True)
class Sample:
    """One declared case of one operator in one dtype: what a generated test runs at."""

    spec: OpSpec
    case: Case
    dtype: str

    def __str__(self) -> str:
        """Return a test's id."""
        return f"{self.spec.name}-{self.case.name}-{self.dtype}"

    def inputs(self, *, seed: int = SEED, **sizes: int) -> Inputs:
        """Return fresh inputs, with the case's options as keyword arguments; ``sizes`` replace the case's."""
        made = self.spec.inputs(Maker(DTYPES[self.dtype], seed=seed), **{**self.case.sizes, **sizes})
        return replace(made, kwargs={**made.kwargs, **self.case.options})


def samples(keep: Callable[[Sample], bool] = lambda _sample: True) -> list[Sample]:
    """Return every declared case in every dtype that this device computes.

    Those for measuring speed are left out, and from the interpreter those that only a card computes in seconds.
    """
    return [
        sample
        for spec in catalog.specs().values()
        for case in spec.cases
        if "speed" not in case.tags and (ON_GPU or "gpu" not in case.tags)
        for dtype in spec.dtypes
        if (ON_GPU or dtype != "bfloat16") and keep(sample := Sample(spec, case, dtype))
    ]


def of_cases(*names: str) -> Callable[[Sample], bool]:
    """Return a filter for `samples`: cases of these names."""
    return lambda sample: sample.case.name in names


def triton_op(name: str) -> Callable[..., Any]:
    """Return the Triton implementation of an operator, and no other."""
    return get_op(name, DEVICE, backend=f"rlkernel.triton.{name}")


@dataclass(frozen=True)
class Outcome:
    """What one call gave: its outputs, and gradients by the position of the argument they belong to."""

    outputs: tuple[torch.Tensor, ...]
    gradients: Mapping[int, torch.Tensor]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor with a name for messages."""
        yield from ((f"output {number}", output) for number, output in enumerate(self.outputs))
        yield from ((f"gradient of argument {number}", gradient) for number, gradient in self.gradients.items())


def flat(result: Any) -> tuple[torch.Tensor, ...]:
    """Return an operator's result as a tuple of tensors."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def incoming(outputs: tuple[torch.Tensor, ...], *, seed: int = SEED + 1) -> tuple[torch.Tensor | None, ...]:
    """Return random gradients for the outputs that carry one, in their dtype."""
    generator = torch.Generator().manual_seed(seed)
    made: list[torch.Tensor | None] = []
    for output in outputs:
        values = torch.randn(output.shape, generator=generator, dtype=torch.float32)
        made.append(values.to(output.dtype).to(output.device) if output.requires_grad else None)
    return tuple(made)


def run(
    op: Callable[..., Any],
    inputs: Inputs,
    *,
    differentiate: bool = True,
    gradients: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor | None, ...]] = incoming,
    spare: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
) -> Outcome:
    """Call ``op`` and differentiate it by every differentiable argument.

    The arguments' memory is used as it is, but where the call allows to overwrite them, ``spare`` makes what it gets.
    """
    wanted = inputs.differentiable if differentiate else ()
    args = [arg.detach().requires_grad_() if number in wanted else arg for number, arg in enumerate(inputs.args)]
    may_overwrite = wanted if inputs.kwargs.get("overwrite_logits") else ()
    fed = [spare(arg) if number in may_overwrite else arg for number, arg in enumerate(args)]
    outputs = flat(op(*fed, **inputs.kwargs))
    if not wanted:
        return Outcome(outputs, {})
    pairs = [(one, dy) for one, dy in zip(outputs, gradients(outputs), strict=True) if dy is not None]
    found = torch.autograd.grad(
        [output for output, _dy in pairs],
        [args[number] for number in wanted],
        [dy for _output, dy in pairs],
        allow_unused=True,  # a gradient that goes elsewhere, as embedding's accumulate_into
    )
    gradients_of = {number: dx for number, dx in zip(wanted, found, strict=True) if dx is not None}
    return Outcome(tuple(output.detach() for output in outputs), gradients_of)


def run_sample(op: Callable[..., Any], sample: Sample, inputs: Inputs | None = None) -> Outcome:
    """Run ``op`` at a sample's case, with gradients where its operator has them."""
    return run(op, inputs or sample.inputs(), differentiate=sample.spec.differentiable)


def map_tensors(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    """Return inputs with every tensor changed."""
    args = tuple(change(arg) if isinstance(arg, torch.Tensor) else arg for arg in inputs.args)
    kwargs = {
        name: change(value) if isinstance(value, torch.Tensor) else value for name, value in inputs.kwargs.items()
    }
    return replace(inputs, args=args, kwargs=kwargs)


def tensors_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return the tensors among the arguments, by position or keyword."""
    named = {**{str(number): arg for number, arg in enumerate(inputs.args)}, **inputs.kwargs}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def to_double(tensor: torch.Tensor) -> torch.Tensor:
    """Return floating-point tensors in fp64, others as they are."""
    return tensor.double() if tensor.is_floating_point() else tensor


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements, so that NaN payloads and the sign of zero count."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bytes(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    """Fail unless shape, dtype and every byte are equal."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), f"{what}: another shape or dtype"
    if not torch.equal(raw(ours), raw(theirs)):
        different = (raw(ours) != raw(theirs)).reshape(ours.numel(), -1).any(1)
        first = int(different.nonzero()[0])
        seen, wanted = ours.detach().reshape(-1)[first].item(), theirs.detach().reshape(-1)[first].item()
        raise AssertionError(f"{what}: {int(different.sum())} elements differ, element {first} is {seen}, not {wanted}")


def assert_same(ours: Outcome, theirs: Outcome, what: str) -> None:
    """Fail unless two outcomes have the same bytes throughout."""
    found, wanted = dict(ours.tensors()), dict(theirs.tensors())
    assert found.keys() == wanted.keys(), f"{what}: {sorted(found)} instead of {sorted(wanted)}"
    for name, tensor in found.items():
        assert_same_bytes(tensor, wanted[name], f"{what}, {name}")


def _around(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return memory full of what no kernel may read: NaN, or the largest integer."""
    if tensor.is_floating_point():
        return tensor.new_full(shape, float("nan"))
    return torch.full(shape, 1 if tensor.dtype == torch.bool else 2**31 - 1, dtype=tensor.dtype, device=tensor.device)


def sliced(tensor: torch.Tensor) -> torch.Tensor:
    """Return every second element of rows twice as long."""
    if not tensor.dim():
        return tensor
    memory = _around(tensor, *tensor.shape[:-1], 2 * tensor.shape[-1])
    memory[..., ::2] = tensor
    return memory[..., ::2]


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with the last axis outermost in memory."""
    return tensor if tensor.dim() < 2 else tensor.movedim(-1, 0).contiguous().movedim(0, -1)


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the second half of rows that hold two tensors."""
    if not tensor.dim():
        return tensor
    width = tensor.shape[-1]
    memory = _around(tensor, *tensor.shape[:-1], 2 * width)
    memory[..., width:] = tensor
    return memory[..., width:]


def odd_stride(tensor: torch.Tensor) -> torch.Tensor:
    """Return rows that begin an odd number of elements after each other."""
    if not tensor.dim():
        return tensor
    width = tensor.shape[-1]
    memory = _around(tensor, *tensor.shape[:-1], width + 1 + width % 2)
    memory[..., :width] = tensor
    return memory[..., :width]


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor that begins one element after an aligned address."""
    memory = _around(tensor, tensor.numel() + 1)
    memory[1:] = tensor.reshape(-1)
    return memory[1:].view(tensor.shape)


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first row, seen everywhere through a stride of 0: other values than ``tensor``'s."""
    return tensor[:1].clone().expand(tensor.shape) if tensor.dim() and tensor.shape[0] else tensor


LAYOUTS = {layout.__name__: layout for layout in (sliced, transposed, packed, odd_stride, shifted, expanded)}
