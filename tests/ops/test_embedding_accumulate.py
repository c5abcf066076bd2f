"""Embedding's accumulator: gradients that backward adds to a tensor in place."""

from __future__ import annotations

import pytest
import torch

from rl_engine.backends.shared.triton.embedding.embedding import embedding as triton_embedding
from rl_engine.platforms import device
from rl_engine.platforms.device import DeviceIdentity
from tests.support.ops_embedding import (
    EMBEDDINGS,
    HALF,
    Embedding,
    accumulated,
    by_contract,
    close,
    exact,
    ids_of,
    shuffled,
    weight_and_gradient,
)
from tests.support.ops_inputs import DEVICE, ON_GPU, Maker, assert_same_bytes


@EMBEDDINGS
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("into_dtype", ["fp32", "weight's"])
def test_a_gradient_is_added_in_place_again_and_again(
    embedding: Embedding, dtype: torch.dtype, into_dtype: str
) -> None:
    ids = shuffled((40, 0, 3, 70, 1))
    weight, dy = weight_and_gradient(6, 24, ids, dtype)
    into = Maker(torch.float32 if into_dtype == "fp32" else dtype, seed=9).normal(6, 24)
    before, version = into.clone(), into._version
    added = exact(ids, weight, dy)
    accumulated(embedding, ids, weight, dy, into)
    assert into._version > version
    close(into, before.double() + added)
    once, version = into.clone(), into._version
    accumulated(embedding, ids, weight, dy, into)
    assert into._version > version
    close(into, once.double() + added)
    assert_same_bytes(into[[1, 5]], before[[1, 5]], "rows without a token")


@pytest.mark.parametrize("hidden", [8, 520, 2048, 2100])
def test_long_segments_beside_short_ones_are_added_whole(hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arch = device.identify(0).arch if ON_GPU else "sm_90"  # a card's blocks: eight programs share a long segment
    monkeypatch.setattr(device, "identify", lambda _index: DeviceIdentity("cuda", "a card", arch, 132))
    ids = shuffled((33, 1, 32, 0, 70, 2, 31))
    weight, dy = weight_and_gradient(7, hidden, ids)
    into = torch.zeros(7, hidden, device=DEVICE)
    accumulated(triton_embedding, ids, weight, dy, into)
    assert_same_bytes(into, by_contract(ids, 7, dy), "accumulated")


def test_the_old_value_comes_last_and_a_scale_with_it_in_one_fused_step() -> None:
    ids = shuffled((40, 2, 70))
    weight, dy = weight_and_gradient(3, 8, ids)
    total, old = by_contract(ids, 3, dy), Maker(torch.float32, seed=3).normal(3, 8)
    into = old.clone()
    accumulated(triton_embedding, ids, weight, dy, into)
    assert_same_bytes(into, old + total, "old + sum")
    into = old.clone()
    accumulated(triton_embedding, ids, weight, dy, into, scale=1.25)
    fused = (total.double() * 1.25 + old.double()).float()  # 1.25 times 24 bits fits 53, and so does the sum
    assert_same_bytes(into, fused, "fma(sum, scale, old)")


def test_padding_and_bad_ids_move_nothing_in_the_accumulator() -> None:
    ids = ids_of(2, -1, 2, 9, 1)
    weight, dy = weight_and_gradient(3, 8, ids)
    into = torch.full((3, 8), float("nan"), device=DEVICE)
    into[1] = 5.0
    before = into.clone()
    dy[:4] = float("inf")
    accumulated(triton_embedding, ids, weight, dy, into, padding_idx=2)
    assert_same_bytes(into[[0, 2]], before[[0, 2]], "rows without a counted token")
    assert_same_bytes(into[1], 5.0 + dy[4], "the row with one")


@EMBEDDINGS
def test_rows_of_a_wider_buffer_are_added_to_and_its_gaps_stay(embedding: Embedding) -> None:
    ids = shuffled((40, 2, 70))
    weight, dy = weight_and_gradient(3, 8, ids)
    memory = torch.full((3, 20), 7.0, device=DEVICE)
    accumulated(embedding, ids, weight, dy, memory[:, 4:12])
    close(memory[:, 4:12], 7.0 + exact(ids, weight, dy))
    assert (memory[:, :4] == 7.0).all()
    assert (memory[:, 12:] == 7.0).all()


def test_no_gradient_wanted_leaves_the_accumulator_alone() -> None:
    into = torch.zeros(3, 8, device=DEVICE)
    triton_embedding(ids_of(0, 1), torch.ones(3, 8, device=DEVICE), accumulate_into=into)
    assert (into == 0).all()
    assert into._version == torch.zeros(3, 8)._version


def test_an_accumulator_is_left_out_of_compiled_graphs_and_added_to_all_the_same() -> None:
    def lookup(ids: torch.Tensor, weight: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        return triton_embedding(ids, weight, accumulate_into=into)

    ids, weight, into = (
        ids_of(0, 1, 0),
        torch.zeros(3, 8, device=DEVICE, requires_grad=True),
        torch.zeros(3, 8).to(DEVICE),
    )
    torch.compile(lookup, backend="aot_eager")(ids, weight, into).sum().backward()
    assert weight.grad is None
    assert into[:, 0].tolist() == [2.0, 1.0, 0.0]
    torch._dynamo.reset()
