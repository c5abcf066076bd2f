"""A row's bits depend on that row alone, whatever stands beside it and wherever it stands."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rl_engine.backends.spec import Inputs
from tests.support.ops_inputs import (
    ON_GPU,
    Outcome,
    Sample,
    assert_same,
    assert_same_bytes,
    incoming,
    run,
    samples,
    triton_op,
)

ROWS = 4096 if ON_GPU else 257  # blocks of 1, 2, 4, 16, 64 and 256 rows all have a last one that is not full
ALONE = (0, 1, 31, 32, 100, ROWS - 1)
PREFIXES = (1, 2, 3, 5, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 255, 256) if ON_GPU else (1, 2, 5, 17, 32, 129, 256)
CHUNKS = (1 + ROWS // 2, 1 + ROWS // 9)


def _rowwise() -> list[Sample]:
    return samples(lambda sample: sample.spec.rowwise and sample.case.name == ("odd" if ON_GPU else "tiny"))


class Batch:
    """A batch of many rows with its outcome, and what the same operator gives for any choice of its rows."""

    def __init__(self, sample: Sample) -> None:
        self._op = triton_op(sample.spec.name)
        self.inputs = sample.inputs(rows=ROWS)
        others = [size for name, size in sample.case.sizes.items() if name != "rows"]
        assert ROWS not in others, "a tensor is told to have rows by its first size"
        self._by_row = [number for number, arg in enumerate(self.inputs.args) if arg.shape[0] == ROWS]
        self._dy: tuple[torch.Tensor | None, ...] = ()
        self.whole = self._run(self.inputs, self._keep)

    def _keep(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
        self._dy = incoming(outputs)
        return self._dy

    def _run(self, inputs: Inputs, gradients: Callable[..., tuple[torch.Tensor | None, ...]]) -> Outcome:
        made = run(self._op, inputs, gradients=gradients)
        return Outcome(made.outputs, {number: dx for number, dx in made.gradients.items() if number in self._by_row})

    def chosen(self, rows: torch.Tensor, *, junk: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Outcome:
        """Return the outcome of these rows in this order; ``junk`` makes rows that are put behind every tensor."""

        def take(tensor: torch.Tensor) -> torch.Tensor:
            own = tensor[rows]
            return own if junk is None else torch.cat((own, junk(tensor)))

        args = tuple(take(arg) if number in self._by_row else arg for number, arg in enumerate(self.inputs.args))
        return self._run(
            replace(self.inputs, args=args),
            lambda _outputs: tuple(None if dy is None else take(dy) for dy in self._dy),
        )

    def expected(self, rows: torch.Tensor) -> Outcome:
        """Return these rows of the whole batch's outcome."""
        return Outcome(
            tuple(output[rows] for output in self.whole.outputs),
            {number: dx[rows] for number, dx in self.whole.gradients.items()},
        )


@pytest.fixture(scope="module", params=_rowwise(), ids=str)
def batch(request: pytest.FixtureRequest) -> Batch:
    return Batch(request.param)


def _rows(numbers: range | list[int], batch: Batch) -> torch.Tensor:
    return torch.tensor(list(numbers), device=batch.inputs.args[0].device)


def test_a_row_alone_has_the_bytes_it_has_in_the_batch(batch: Batch) -> None:
    for number in ALONE:
        rows = _rows([number], batch)
        assert_same(batch.chosen(rows), batch.expected(rows), f"row {number} alone")


def test_a_prefix_has_the_bytes_it_has_in_the_batch(batch: Batch) -> None:
    for length in PREFIXES:
        rows = _rows(range(length), batch)
        assert_same(batch.chosen(rows), batch.expected(rows), f"the first {length} rows")


def test_rows_in_another_order_have_their_own_bytes(batch: Batch) -> None:
    for seed in range(3):
        rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed)).to(batch.inputs.args[0].device)
        assert_same(batch.chosen(rows), batch.expected(rows), f"permutation {seed}")


def test_a_batch_cut_into_chunks_has_its_bytes(batch: Batch) -> None:
    for length in CHUNKS:
        for start in range(0, ROWS, length):
            rows = _rows(range(start, min(start + length, ROWS)), batch)
            assert_same(batch.chosen(rows), batch.expected(rows), f"rows from {start} in chunks of {length}")


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_padding_rows_behind_change_nothing(batch: Batch, value: float) -> None:
    def junk(tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor[:7], value if tensor.is_floating_point() else -100)

    rows = _rows(range(33), batch)
    padded = batch.chosen(rows, junk=junk)
    kept = Outcome(
        tuple(output[:33] for output in padded.outputs), {number: dx[:33] for number, dx in padded.gradients.items()}
    )
    assert_same(kept, batch.expected(rows), f"rows of {value} behind")


@pytest.mark.parametrize("sample", samples(lambda one: one.spec.rowwise and one.case.name == "odd"), ids=str)
def test_leading_axes_are_rows(sample: Sample) -> None:
    rows = 12
    flat = sample.inputs(rows=rows)

    def folded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(3, 2, 2, *tensor.shape[1:]) if tensor.shape[0] == rows else tensor

    def unfolded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(rows, *tensor.shape[3:]) if tensor.shape[:3] == (3, 2, 2) else tensor

    op = triton_op(sample.spec.name)
    deep = run(
        op,
        replace(flat, args=tuple(folded(arg) for arg in flat.args)),
        gradients=lambda outputs: tuple(folded(dy) for dy in incoming(tuple(unfolded(one) for one in outputs))),
    )
    plain = run(op, flat)
    for (name, ours), (_name, wanted) in zip(deep.tensors(), plain.tensors(), strict=True):
        assert_same_bytes(unfolded(ours), wanted, name)
