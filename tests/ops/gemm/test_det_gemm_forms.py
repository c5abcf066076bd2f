"""det_gemm's forms: zero sizes, batches, groups of rows, gradients, and a weight's gradient continued in fp32."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks.operators.launches import recorded
from tests.support.ops_gemm import KINDS, gemm, gradients, pair
from tests.support.ops_inputs import DEVICE, DTYPES, LAYOUTS, Maker, assert_same_bytes, triton_op


def test_zero_sizes() -> None:
    bias = torch.arange(3.0, device=DEVICE)
    for m, k, n in ((0, 4, 3), (2, 0, 3), (2, 4, 0)):
        a, b = torch.ones(m, k, device=DEVICE), torch.ones(k, n, device=DEVICE)
        found = gemm(a, b, bias[:n])
        assert found.shape == (m, n)
        assert torch.equal(found, a @ b + bias[:n])
        da, db = gradients(a, b, torch.ones_like(found))
        assert torch.equal(da, torch.full_like(a, float(n)))
        assert torch.equal(db, torch.full_like(b, float(m)))


@pytest.mark.parametrize("dtype", KINDS)
def test_a_batch_has_the_bytes_of_its_members(dtype: str) -> None:
    make = Maker(DTYPES[dtype])
    a, b = make.normal(2, 3, 19, 24), make.normal(2, 3, 24, 16)
    dy = make.normal(2, 3, 19, 16)
    found, (da, db) = gemm(a, b), gradients(a, b, dy)
    assert da is not None
    assert db is not None
    for one in itertools.product(range(2), range(3)):
        assert_same_bytes(found[one], gemm(a[one], b[one]), f"member {one}")
        alone = gradients(a[one], b[one], dy[one])
        assert alone[0] is not None
        assert alone[1] is not None
        assert_same_bytes(da[one], alone[0], f"gradient of a, member {one}")
        assert_same_bytes(db[one], alone[1], f"gradient of b, member {one}")


GROUPS = {
    "even": (0, 10, 20, 30, 40), "uneven": (0, 1, 35, 36, 40), "empty": (0, 0, 40, 40, 40),
    "rows of nobody": (5, 9, 9, 20, 33),
}  # fmt: skip


@pytest.mark.parametrize("bounds", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("dtype", KINDS)
def test_a_groups_rows_have_the_bytes_they_have_alone(dtype: str, bounds: tuple[int, ...]) -> None:
    make = Maker(DTYPES[dtype])
    a, b, dy = make.normal(40, 24), make.normal(4, 16, 24).mT, make.normal(40, 16)
    offsets = torch.tensor(bounds, device=DEVICE, dtype=torch.int32)
    found, (da, db) = gemm(a, b, offsets=offsets), gradients(a, b, dy, offsets=offsets)
    assert da is not None
    assert db is not None
    owned = torch.zeros(40, dtype=torch.bool, device=DEVICE)
    for group, (start, end) in enumerate(itertools.pairwise(bounds)):
        owned[start:end] = True
        assert_same_bytes(found[start:end], gemm(a[start:end], b[group]), f"group {group}")
        alone = gradients(a[start:end], b[group], dy[start:end])
        assert alone[0] is not None
        assert alone[1] is not None
        assert_same_bytes(da[start:end], alone[0], f"gradient of a, group {group}")
        assert_same_bytes(db[group], alone[1], f"gradient of b, group {group}")
    assert not found[~owned].any()
    assert not da[~owned].any()


def test_wild_offsets_stay_inside_the_rows() -> None:
    make = Maker(torch.float32)
    memory = torch.full((60, 24), math.nan, device=DEVICE)
    memory[10:50] = make.normal(40, 24)
    a, b = memory[10:50], make.normal(3, 24, 16)
    offsets = torch.tensor([-7, 2**40, 3, 90], device=DEVICE)
    found, (da, db) = gemm(a, b, offsets=offsets), gradients(a, b, make.normal(40, 16), offsets=offsets)
    assert_same_bytes(found, gemm(a, b[0]), "all rows are the first group's")
    assert da is not None
    assert db is not None
    assert torch.isfinite(da).all()
    assert torch.isfinite(db).all()
    assert not db[1:].any()


# Gradients of weights, continued.


@pytest.mark.parametrize("dtype", KINDS)
def test_micro_batches_of_whole_groups_leave_the_bits_of_one_batch(dtype: str) -> None:
    x, w = pair(dtype, 160, 40, 24)
    dy = Maker(DTYPES[dtype], seed=5).normal(160, 24)
    whole = gemm(x.T, dy, out_dtype=torch.float32)
    for cuts in ((0, 160), (0, 16, 160), (0, 48, 64, 128, 160)):
        into = torch.zeros(40, 24, device=DEVICE)
        for start, end in itertools.pairwise(cuts):
            version = into._version
            _da, db = gradients(x[start:end], w, dy[start:end], accumulate_into=into)
            assert db is None
            assert into._version > version
        assert_same_bytes(into, whole, f"cut at {cuts}")


def test_chains_continue_from_what_is_there_in_groups_too() -> None:
    make = Maker(torch.float32)
    a, b, dy = make.normal(40, 24), make.normal(3, 24, 16), make.normal(40, 16)
    offsets = torch.tensor([0, 16, 16, 40], device=DEVICE)
    before = make.normal(3, 24, 16)
    into = before.clone()
    gradients(a, b, dy, offsets=offsets, accumulate_into=into)
    for group, (start, end) in enumerate(((0, 16), (16, 16), (16, 40))):
        alone = before[group].clone()
        gradients(a[start:end], b[group], dy[start:end], accumulate_into=alone)
        assert_same_bytes(into[group], alone, f"group {group}")
    torch.testing.assert_close(into[0], before[0] + a[:16].T @ dy[:16])


def test_a_bias_gradient_is_one_chain_over_the_rows() -> None:
    a, b = pair("float16", 90, 24, 33)
    bias, dy = torch.zeros(33, device=DEVICE, requires_grad=True), Maker(torch.float16, seed=7).normal(90, 33)
    gemm(a, b, bias).backward(dy)
    assert bias.grad is not None
    assert_same_bytes(bias.grad, gemm(torch.ones_like(dy[:, :1]).T, dy, out_dtype=torch.float32)[0], "1^T dy")


def test_a_layers_weight_and_its_gradient_buffer_lie_by_columns() -> None:
    make = Maker(torch.float16)
    x, weight, dy = make.normal(48, 40), make.normal(24, 40), make.normal(48, 24)
    rows = gradients(x, weight.mT.contiguous(), dy)[1]
    parameter = weight.clone().requires_grad_()
    gemm(x, parameter.mT).backward(dy)
    assert parameter.grad is not None
    assert rows is not None
    assert parameter.grad.is_contiguous()  # so autograd takes it as it is
    assert_same_bytes(parameter.grad, rows.mT.contiguous(), "the gradient of [N, K]")
    main_grad = make.normal(24, 40, dtype=torch.float32)
    before, by_rows = main_grad.clone(), main_grad.mT.contiguous()
    gradients(x, weight.mT, dy, accumulate_into=main_grad.mT)
    gradients(x, weight.mT, dy, accumulate_into=by_rows)
    assert_same_bytes(main_grad, by_rows.mT.contiguous(), "accumulated into [N, K]")
    torch.testing.assert_close(main_grad, before + rows.mT.float(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("a_wants", "b_wants"), [(True, False), (False, True)])
def test_backward_keeps_and_computes_what_is_asked_for_alone(a_wants: bool, b_wants: bool) -> None:
    a, b = pair("float16", 20, 24, 16)
    both = gradients(a, b, torch.ones(20, 16, dtype=torch.float16, device=DEVICE))
    x, y = a.clone().requires_grad_(a_wants), b.clone().requires_grad_(b_wants)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        out = gemm(x, y)
    assert [one.shape for one in kept] == [y.shape if a_wants else x.shape]
    with recorded() as launches:
        out.backward(torch.ones_like(out))
    assert len(launches) == 1
    for one, wanted, expected in ((x, a_wants, both[0]), (y, b_wants, both[1])):
        assert (one.grad is not None) == wanted
        if wanted:
            assert_same_bytes(one.grad, expected, "its gradient")


@pytest.mark.parametrize("form", ["frozen weight", "frozen input", "bias", "groups", "batch"])
def test_a_graph_gives_eagers_bytes_in_every_form(form: str) -> None:
    make = Maker(torch.float32)
    a, b, kwargs = make.normal(32, 24), make.normal(16, 24).mT, {}
    if form == "groups":
        b, kwargs = make.normal(3, 24, 16), {"offsets": torch.tensor([0, 10, 10, 32], device=DEVICE)}
    elif form == "batch":
        a, b = make.normal(2, 32, 24), make.normal(2, 24, 16)
    bias = make.normal(16) if form == "bias" else None
    torch._dynamo.reset()
    outcomes = []
    # asked for outside: get_op reads folders, which no graph holds
    for op in (triton_op("det_gemm"), torch.compile(triton_op("det_gemm"), backend="aot_eager", fullgraph=True)):
        x, y = a.clone().requires_grad_(form != "frozen input"), b.detach().requires_grad_(form != "frozen weight")
        z = None if bias is None else bias.clone().requires_grad_()
        out = op(x, y, z, **kwargs)
        out.backward(torch.ones_like(out))
        outcomes.append((out.detach(), x.grad, y.grad, None if z is None else z.grad))
        y.grad = None
    for eager, compiled in zip(*outcomes, strict=True):
        assert (eager is None) == (compiled is None)
        if eager is not None:
            assert eager.stride() == compiled.stride()
            assert_same_bytes(compiled, eager, form)


@pytest.mark.gpu
def test_a_batch_of_more_matrices_than_a_grids_second_axis_holds() -> None:
    make = Maker(torch.bfloat16)
    a, b = make.normal(70_000, 3, 16), make.normal(70_000, 16, 8)
    found = gemm(a, b)
    for member in (0, 65_535, 65_536, 69_999):
        assert_same_bytes(found[member], gemm(a[member], b[member]), f"member {member}")


@pytest.mark.gpu
def test_a_thread_without_a_context_of_its_own_multiplies_through_descriptors() -> None:
    a, b = pair("bfloat16", 256, 512, 512)
    expected = gemm(a, b)  # compiled, and its memory cached: the thread launches before anything else
    del expected
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(gemm, a, b).result()
    assert_same_bytes(found, gemm(a, b), "in a thread")


def test_zero_rows_give_zero_gradients_of_weight_and_bias() -> None:
    a, b = torch.ones(0, 24, device=DEVICE), torch.ones(24, 16, device=DEVICE, requires_grad=True)
    bias = torch.ones(16, device=DEVICE, requires_grad=True)
    gemm(a, b, bias).sum().backward()
    assert b.grad is not None
    assert bias.grad is not None
    assert_same_bytes(b.grad, torch.zeros_like(b), "the weight's")
    assert_same_bytes(bias.grad, torch.zeros_like(bias), "the bias's")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bias_of_any_layout_adds_what_it_shows(layout: str) -> None:
    a, b = pair("float32", 5, 24, 16)
    bias = LAYOUTS[layout](Maker(torch.float32, seed=3).normal(16))
    assert_same_bytes(gemm(a, b, bias), gemm(a, b, bias.clone(memory_format=torch.contiguous_format)), layout)
    torch.testing.assert_close(gemm(a, b, bias), a @ b + bias)
