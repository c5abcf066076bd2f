"""On a GPU only: more than 2^31 elements, and a hundred runs beside a busy stream, of every operator that has rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from rl_engine.backends.spec import Inputs
from tests.support.ops_inputs import (
    DTYPES,
    ON_GPU,
    Outcome,
    Sample,
    assert_same,
    of_cases,
    run,
    run_sample,
    samples,
    triton_op,
)

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
RUNS = 100
MATRIX = 4096  # of the products that keep the other stream busy: 0.2 ms each on an H200


@pytest.mark.parametrize("sample", samples(of_cases("odd")), ids=str)
def test_a_hundred_runs_beside_a_busy_stream_give_the_same_bytes(sample: Sample) -> None:
    inputs, op = sample.inputs(), triton_op(sample.spec.name)
    first = run_sample(op, sample, inputs)
    other, matrix = torch.cuda.Stream(), torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
    other.wait_stream(torch.cuda.current_stream())
    for number in range(RUNS):
        with torch.cuda.stream(other):
            matrix = matrix @ matrix / MATRIX
        assert_same(run_sample(op, sample, inputs), first, f"run {number}")
    other.synchronize()


@dataclass(frozen=True)
class Large:
    """A call on more than 2^31 elements; ``by_row`` says which of its arguments have one entry a row."""

    name: str
    make: Callable[[], Inputs]
    by_row: tuple[int, ...]


def _half(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float16)


def _logits() -> tuple[torch.Tensor, torch.Tensor]:
    return _half(14200, 152064), torch.randint(0, 152064, (14200,), device="cuda")


def _ratio_kl() -> Inputs:
    logits, ids = _logits()
    return Inputs((logits, None, ids, ids >= 0), {"ref_logps": torch.full((14200,), -12.0, device="cuda")})


LARGE = [
    Large("silu", lambda: Inputs((_half(262200, 8192),)), (0,)),
    Large("swiglu", lambda: Inputs((_half(262200, 8192), _half(262200, 8192)), differentiable=(0, 1)), (0, 1)),
    Large("rms_norm", lambda: Inputs((_half(262200, 8192), _half(8192)), differentiable=(0,)), (0,)),
    Large("logp", lambda: Inputs(_logits()), (0, 1)),
    Large("ratio_kl", _ratio_kl, (0, 2, 3)),
]


def _rows_of(inputs: Inputs, by_row: tuple[int, ...], rows: torch.Tensor) -> Inputs:
    args = tuple(arg[rows] if number in by_row else arg for number, arg in enumerate(inputs.args))
    kwargs = {name: value[rows] for name, value in inputs.kwargs.items()}
    return Inputs(args, kwargs, inputs.differentiable)


@pytest.mark.parametrize("large", LARGE, ids=lambda one: one.name)
def test_b15_rows_behind_two_to_the_31_elements_have_the_bytes_they_have_alone(large: Large) -> None:
    torch.manual_seed(15)
    inputs, op = large.make(), triton_op(large.name)
    count, width = inputs.args[0].shape
    assert count * width > 2**31
    edge = 2**31 // width
    rows = torch.tensor([0, edge - 1, edge, edge + 1, count - 1], device="cuda")

    def gradients(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        # the same for a row whatever its place: by its own output
        return tuple(torch.ones_like(output) if output.dim() == 1 else output.detach().clone() for output in outputs)

    whole = run(op, inputs, gradients=gradients)
    chosen = Outcome(
        tuple(output[rows] for output in whole.outputs), {number: dx[rows] for number, dx in whole.gradients.items()}
    )
    del whole
    torch.cuda.empty_cache()
    assert_same(run(op, _rows_of(inputs, large.by_row, rows), gradients=gradients), chosen, large.name)


def test_b15_ids_near_the_end_of_a_large_embedding_table() -> None:
    weight = _half(300_000, 8192)
    ids = torch.tensor([0, 262143, 262144, 262145, 299_999, 299_999], device="cuda")
    table = weight.requires_grad_()
    found = triton_op("embedding")(ids, table)
    assert torch.equal(found, weight.detach()[ids])
    (gradient,) = torch.autograd.grad(found, table, torch.ones_like(found))
    touched = gradient[ids].float()
    assert torch.equal(touched, torch.tensor([1, 1, 1, 1, 2, 2.0], device="cuda")[:, None].expand_as(touched))
    gradient[ids] = 0
    assert not gradient.any()


def test_every_dtype_is_covered() -> None:
    assert {sample.dtype for sample in samples(of_cases("odd"))} == set(DTYPES)
