"""Correctness before speed: a case's outputs and gradients against float64, and byte for byte against themselves."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.operators.arguments import (
    Outcome,
    changed,
    dtype_of,
    evaluate,
    incoming,
    is_rowwise,
    last_rows,
    tensors_of,
)
from benchmarks.operators.rows import Check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rl_engine.backends.spec import Inputs, OpSpec

CHECKED_ROWS = 64
_WHOLE_ELEMENTS = 1 << 24  # what the float64 reference of an operator without rows is given at once


def check(spec: OpSpec, op: Callable[..., Any], inputs: Inputs) -> Check:
    """Return what was found equal, and what was not, for one case."""
    with _poisoned_memory():
        first = evaluate(op, inputs)
    faults: list[str] = []
    compared = equal_bytes(first.tensors(), evaluate(op, inputs).tensors(), "a second run", faults)
    rows = inputs.args[0].shape[0]
    count = _batch(spec, inputs, rows)
    batch = last_rows(inputs, rows, count)
    gradients = _batch_gradients(first, rows, count)
    ours = evaluate(op, batch, gradients=gradients)
    if spec.rowwise:
        whole = _rows_of(first, inputs, rows, count)
        own = {name: tensor for name, tensor in ours.tensors().items() if name in whole}
        compared += equal_bytes(own, whole, f"{count} rows in a batch of {rows}", faults)
    return Check(_errors(spec, batch, ours, gradients, faults), compared, tuple(faults))


def _batch(spec: OpSpec, inputs: Inputs, rows: int) -> int:
    """Return how many rows the reference gets: a whole small case only where rows are not independent."""
    if spec.rowwise:
        return min(CHECKED_ROWS, max(1, rows // 2))
    small = sum(one.numel() for one in tensors_of(inputs)) <= _WHOLE_ELEMENTS
    return rows if small else max(1, rows // 4)


def _batch_gradients(
    first: Outcome, rows: int, count: int
) -> Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor | None, ...]]:
    """Return the whole batch's incoming gradients, cut to the last rows, in each output's own dtype."""

    def gradients(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
        if any(output.requires_grad and output.dim() for output in outputs):
            asked = [output.requires_grad for output in outputs]
            pairs = zip(first.outputs, asked, strict=True)
            whole = incoming(tuple(one.detach().requires_grad_(wants) for one, wants in pairs))
            cut = [dy[rows - count :] if is_rowwise(dy, rows) else dy for dy in whole]
        else:
            cut = list(incoming(outputs))
        return tuple(None if dy is None else dy.to(output.dtype) for dy, output in zip(cut, outputs, strict=True))

    return gradients


def _rows_of(outcome: Outcome, inputs: Inputs, rows: int, count: int) -> dict[str, torch.Tensor]:
    """Return the last rows of the outputs, and of the gradients of arguments that have one entry a row."""
    outputs = tuple(one[rows - count :] for one in outcome.outputs if is_rowwise(one, rows))
    of_rows = {number for number in inputs.differentiable if is_rowwise(inputs.args[number], rows)}
    by_row = {number: one for number, one in outcome.gradients.items() if number in of_rows}
    return Outcome(outputs, {number: one[rows - count :] for number, one in by_row.items()}).tensors()


def equal_bytes(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], what: str, faults: list[str]) -> int:
    """Return the number of bytes compared; those of a tensor that differs are not counted, but a fault."""
    compared = 0
    for name, tensor in ours.items():
        other = theirs[name]
        if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
            faults.append(f"{name}: another shape or dtype in {what}")
        elif not torch.equal(_bits(tensor), _bits(other)):
            faults.append(f"{name}: other bytes in {what}")
        else:
            compared += tensor.numel() * tensor.element_size()
    return compared


def _errors(
    spec: OpSpec,
    batch: Inputs,
    ours: Outcome,
    gradients: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor | None, ...]],
    faults: list[str],
) -> dict[str, float]:
    """Return the largest error of every tensor over the tolerance, which is relative to its largest magnitude."""
    exact = evaluate(spec.reference, changed(batch, _double), gradients=gradients).tensors()
    errors = {}
    for name, tensor in ours.tensors().items():
        largest = float(exact[name].abs().max()) if exact[name].numel() else 0.0
        worst = float((tensor.double() - exact[name]).abs().max()) if tensor.numel() else 0.0
        epsilon = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
        allowed = spec.tolerance.epsilons[dtype_of(spec)] * epsilon * largest
        if not worst <= allowed:  # NaN is a fault too
            faults.append(f"{name}: {worst} from float64, {allowed} allowed")
        errors[name] = worst / allowed if allowed else 0.0 if worst == 0 else float("inf")
    return errors


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().reshape(-1).view(integers[tensor.element_size()])


@contextlib.contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Let torch.empty return NaN and largest integers: an element that is not written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch operators without a deterministic form: none is judged here
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled
