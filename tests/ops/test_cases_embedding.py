"""Trials from public bug reports (cases): embedding lookup and its gradient, by the PyTorch and the Triton operator."""

from __future__ import annotations

import random

import pytest
import torch

from rl_engine.backends import catalog
from rl_engine.backends.shared.triton.embedding.embedding import embedding as triton_embedding
from rl_engine.backends.spec import Traffic
from rl_engine.platforms import device
from rl_engine.platforms.device import DeviceIdentity
from rl_engine.runtime.registry import get_op
from tests.support.ops_embedding import (
    CHUNK,
    EMBEDDINGS,
    HALF,
    Embedding,
    accumulated,
    by_contract,
    close,
    exact,
    gradient,
    ids_of,
    shuffled,
    weight_and_gradient,
)
from tests.support.ops_inputs import DEVICE, LAYOUTS, ON_GPU, assert_same_bytes

RUNS = 20 if ON_GPU else 4
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 96, 97, 200)


@EMBEDDINGS
@pytest.mark.parametrize("bad", [-1, 7, 2**40, -(2**40), -100, 2**31, 2**63 - 1])
def test_b57_b13_a_bad_id_gives_a_row_of_nan_no_gradient_and_an_error_where_asked(
    embedding: Embedding, bad: int
) -> None:
    ids = ids_of(0, bad, 6, 0)
    weight, dy = weight_and_gradient(7, 5, ids)
    dy[1] = float("nan")
    out = embedding(ids, weight)
    assert out[1].isnan().all()
    assert_same_bytes(out[[0, 2, 3]], weight[[0, 6, 0]], "the other rows")
    kept = torch.tensor([0, 2, 3], device=DEVICE)
    others = gradient(embedding, ids[kept], weight, dy[kept])
    assert_same_bytes(gradient(embedding, ids, weight, dy), others, "dw")
    with pytest.raises(ValueError, match=rf"^embedding: 1 ids outside \[0, 7\), the first is {bad}; mask or fix"):
        embedding(ids, weight, validate=True)
    embedding(ids[kept], weight, validate=True)


@EMBEDDINGS
def test_b57_ids_of_which_all_are_bad_give_zeros(embedding: Embedding) -> None:
    ids = torch.full((100,), -100, device=DEVICE)
    weight, dy = weight_and_gradient(4, 6, ids)
    assert embedding(ids, weight).isnan().all()
    assert_same_bytes(gradient(embedding, ids, weight, dy / 0), torch.zeros_like(weight), "dw")


@pytest.mark.parametrize("backend", ["rlkernel.pytorch.embedding", "rlkernel.triton.embedding"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int16, torch.uint8], ids=str)
def test_b57_ids_of_other_types_are_refused_by_every_backend(backend: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"^embedding: token_ids are {dtype}; pass int32 or int64 ids"):
        get_op("embedding", DEVICE, backend=backend)(ids_of(0, 1).to(dtype), torch.zeros(7, 5, device=DEVICE))


@EMBEDDINGS
def test_b57_int32_and_int64_ids_give_the_same_bytes(embedding: Embedding) -> None:
    ids = shuffled((3, 40, 0, 70, 1))
    ids[::9] = -1
    weight, dy = weight_and_gradient(5, 33, ids)
    assert_same_bytes(embedding(ids.int(), weight), embedding(ids, weight), "y")
    assert_same_bytes(gradient(embedding, ids.int(), weight, dy), gradient(embedding, ids, weight, dy), "dw")


@EMBEDDINGS
@pytest.mark.parametrize("copies", [1000, 4000])
def test_b59_the_gradient_of_a_repeated_token_does_not_saturate(embedding: Embedding, copies: int) -> None:
    ids = torch.zeros(copies, dtype=torch.int64, device=DEVICE)
    dw = gradient(embedding, ids, torch.ones(10, 4, dtype=HALF, device=DEVICE), torch.ones(copies, 4, dtype=HALF,
                   device=DEVICE))  # fmt: skip
    wanted = torch.zeros_like(dw)
    wanted[0] = copies  # both dtypes hold it
    assert_same_bytes(dw, wanted, "dw")


def test_b59_shuffled_ids_of_a_constant_gradient_give_the_same_bytes() -> None:
    ids = torch.arange(10).repeat_interleave(torch.arange(0, 100, 10)).to(DEVICE)
    weight = torch.zeros(10, 4, device=DEVICE)
    dy = torch.full((len(ids), 4), 0.1, device=DEVICE)
    first = gradient(triton_embedding, ids, weight, dy)
    for seed in range(RUNS):
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        assert_same_bytes(gradient(triton_embedding, ids[order], weight, dy), first, f"shuffle {seed}")


@EMBEDDINGS
@pytest.mark.parametrize("hidden", [8191, 8192, 8193, 12288, 65537])
def test_b67_a_hidden_size_above_one_block_is_the_fp64_result(embedding: Embedding, hidden: int) -> None:
    ids = shuffled((1, 0, 2, 34))
    weight, dy = weight_and_gradient(4, hidden, ids)
    assert_same_bytes(embedding(ids, weight), weight[ids], "y")
    close(gradient(embedding, ids, weight, dy), exact(ids, weight, dy))


@EMBEDDINGS
@pytest.mark.parametrize("vocab", [65537, 151_936, 1_048_577] if ON_GPU else [65537])
def test_b67_a_vocabulary_of_any_size_has_its_first_and_last_row(embedding: Embedding, vocab: int) -> None:
    ids = ids_of(vocab - 1, 0, vocab, 0, 65536)
    weight, dy = weight_and_gradient(vocab, 1, ids)
    assert_same_bytes(embedding(ids, weight)[[0, 1, 3, 4]], weight[ids[[0, 1, 3, 4]]], "y")
    close(gradient(embedding, ids, weight, dy), exact(ids, weight, dy))


@EMBEDDINGS
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [*((length,) for length in LENGTHS), *((length, 3, length + 1) for length in LENGTHS), (33, 33, 33, 33, 33),
     (31, 34, 32, 33, 64, 65, 1), (0, 5, 0, 300, 301)],
    ids=str,
)  # fmt: skip
def test_segments_of_any_length_beside_each_other_have_fp64_sums(
    embedding: Embedding, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    ids = shuffled(lengths)
    weight, dy = weight_and_gradient(len(lengths) + 1, 24, ids, dtype)
    close(gradient(embedding, ids, weight, dy), exact(ids, weight, dy))


@pytest.mark.parametrize("lengths", [(31, 34, 32, 33, 64, 65, 1), (0, 5, 0, 100, 201), (130,)], ids=str)
def test_sums_are_those_of_the_contract_bit_by_bit(lengths: tuple[int, ...]) -> None:
    ids = shuffled(lengths)
    weight, dy = weight_and_gradient(len(lengths), 7, ids)
    assert_same_bytes(gradient(triton_embedding, ids, weight, dy), by_contract(ids, len(weight), dy), "dw")


def test_the_contract_shows_a_sum_in_another_order() -> None:
    ids = shuffled((130,))
    _weight, dy = weight_and_gradient(1, 7, ids)
    assert not torch.equal(by_contract(ids, 1, dy), by_contract(ids, 1, dy.flip(0)))


def _slots(keys: list[int]) -> dict[int, list[tuple[int, int]]]:
    """Return for each scratch slot the chunks of sorted ``keys`` that go there, as (begin, end)."""
    found: dict[int, list[tuple[int, int]]] = {}
    begin = 0
    while begin < len(keys):
        end = begin
        while end < len(keys) and keys[end] == keys[begin]:
            end += 1
        if end - begin > CHUNK:
            for position in range(begin, end, CHUNK):
                slot = 2 * (position // CHUNK) + (position == begin)
                found.setdefault(slot, []).append((position, min(position + CHUNK, end)))
        begin = end
    return found


def test_two_chunks_never_share_a_slot_of_scratch_whatever_the_ids() -> None:
    draw = random.Random(5)
    for trial in range(2000):
        lengths = [draw.choice((1, 2, 31, 32, 33, 34, 63, 64, 65, draw.randrange(1, 200))) for _ in range(9)]
        keys = [number for number, length in enumerate(lengths) for _ in range(length)]
        found = _slots(keys)
        assert all(len(chunks) == 1 for chunks in found.values()), f"trial {trial}: {lengths}"
        assert max(found, default=0) < 2 * -(-len(keys) // CHUNK)


def test_the_dense_gradient_of_many_random_lists_is_the_contracts() -> None:
    draw = random.Random(6)
    for trial in range(8):
        lengths = tuple(draw.choice((0, 1, 31, 32, 33, 34, 64, 65)) for _ in range(6))
        ids = shuffled(lengths, seed=trial)
        weight, dy = weight_and_gradient(6, 3, ids, seed=trial)
        dw = gradient(triton_embedding, ids, weight, dy)
        assert_same_bytes(dw, by_contract(ids, 6, dy), f"trial {trial}: {lengths}")


@EMBEDDINGS
def test_the_padding_row_is_looked_up_and_gets_no_gradient(embedding: Embedding) -> None:
    ids = shuffled((40, 50, 3))
    weight, dy = weight_and_gradient(3, 8, ids)
    for padding_idx in (1, -2):
        assert_same_bytes(embedding(ids, weight, padding_idx=padding_idx), weight[ids], "y")
        dw = gradient(embedding, ids, weight, dy, padding_idx=padding_idx)
        assert_same_bytes(dw[1], torch.zeros_like(dw[1]), "the padding row")
        close(dw, exact(ids, weight, dy, padding=1))


@EMBEDDINGS
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("scale", [0.5, 45.25, 0.0, -1.0])
def test_a_scale_multiplies_once_in_fp32(embedding: Embedding, scale: float, dtype: torch.dtype) -> None:
    ids = shuffled((40, 2, 3))
    weight, dy = weight_and_gradient(3, 8, ids, dtype)
    assert_same_bytes(embedding(ids, weight, scale=scale), (weight.float() * scale).to(dtype)[ids], "y")
    close(gradient(embedding, ids, weight, dy, scale=scale), scale * exact(ids, weight, dy))


@EMBEDDINGS
@pytest.mark.parametrize("scale", [-1.0, float("inf")])
def test_a_row_without_a_token_is_plus_zero_whatever_the_scale_and_the_rows_beside_it(
    embedding: Embedding, scale: float
) -> None:
    ids = ids_of(0, 5, 0)
    weight, dy = weight_and_gradient(9, 8, ids)
    dw = gradient(embedding, ids, weight, dy.abs() + 1, scale=scale)
    empty = [row for row in range(9) if row not in (0, 5)]
    assert_same_bytes(dw[empty], torch.zeros_like(dw[empty]), "rows without a token")


def test_the_scaled_sum_is_rounded_after_the_sum() -> None:
    ids = shuffled((40, 2, 70))
    weight, dy = weight_and_gradient(3, 8, ids)
    dw = gradient(triton_embedding, ids, weight, dy, scale=1.1)
    assert_same_bytes(dw, by_contract(ids, 3, dy) * 1.1, "dw")


@EMBEDDINGS
def test_rows_are_copied_bit_for_bit(embedding: Embedding) -> None:
    weight = torch.tensor([[-0.0, 1e-45, float("inf"), float("nan"), 3.4e38, -1e-40]], device=DEVICE)
    assert_same_bytes(embedding(ids_of(0, 0), weight), weight.expand(2, -1).contiguous(), "y")


def _moved(one: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the tests' device, with its strides: a move alone makes an expanded one whole."""
    return one.detach().to(DEVICE).as_strided(one.shape, one.stride()).requires_grad_(one.requires_grad)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"padding_idx": 3}, ValueError, r"padding_idx is 3; pass a row of weight, in \[-3, 3\)"),
        ({"padding_idx": -4}, ValueError, r"padding_idx is -4; pass"),
        ({"accumulate_into": torch.zeros(3, 7)}, ValueError, r"accumulate_into is \[3, 7\], weight is \[3, 8\]; pass"),
        ({"accumulate_into": torch.zeros(3, 8).half()}, TypeError, "accumulate_into is torch.float16; pass float32"),
        ({"accumulate_into": torch.zeros(8, 3).t()}, ValueError, r"strides \(1, 3\); pass rows of neighbouring col"),
        ({"accumulate_into": torch.zeros(8).expand(3, 8)}, ValueError, r"strides \(0, 1\); pass rows of neighbour"),
        ({"accumulate_into": torch.zeros(3, 8, requires_grad=True)}, ValueError, r"requires a gradient; pass its \.de"),
    ],
)
@EMBEDDINGS
def test_options_that_do_not_fit_are_refused(
    embedding: Embedding, options: dict, error: type[Exception], message: str
) -> None:
    moved = {name: _moved(one) if isinstance(one, torch.Tensor) else one for name, one in options.items()}
    with pytest.raises(error, match=f"^embedding: .*{message}"):
        embedding(ids_of(0, 1), torch.zeros(3, 8, device=DEVICE), **moved)


@EMBEDDINGS
@pytest.mark.parametrize("shape", [(3,), (0, 8), (3, 0), (2, 3, 4)], ids=str)
def test_a_weight_that_is_no_table_is_refused(embedding: Embedding, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^embedding: weight is \[.*\]; pass \[vocab, hidden\], both at least 1"):
        embedding(ids_of(0), torch.zeros(shape, device=DEVICE))


def test_other_tokens_between_move_no_bit_of_a_row() -> None:
    ids = shuffled((40, 0, 70, 3))
    weight, dy = weight_and_gradient(4, 8, ids)
    plain = gradient(triton_embedding, ids, weight, dy)
    alone = ids == 2
    assert_same_bytes(gradient(triton_embedding, ids[alone], weight, dy[alone])[2], plain[2], "without the others")
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    for row in range(4):  # the places of a row's tokens may change, their order among themselves does not
        order[ids[order] == row] = order[ids[order] == row].sort().values
    assert not torch.equal(order, torch.arange(len(ids), device=DEVICE))
    assert_same_bytes(gradient(triton_embedding, ids[order], weight, dy[order]), plain, "other places")
    junk = torch.cat((ids, torch.full((100,), -1, device=DEVICE)))
    padded = torch.cat((dy, torch.full((100, 8), float("nan"), device=DEVICE)))
    assert_same_bytes(gradient(triton_embedding, junk, weight, padded), plain, "padding behind")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_ids_weight_and_gradient_give_the_bytes_of_copies(layout: str) -> None:
    change = LAYOUTS[layout]
    ids = change(shuffled((40, 20, 36)).view(8, 12))
    weight, dy = (change(one) for one in weight_and_gradient(3, 24, ids))
    plain = [one.contiguous().clone() for one in (ids, weight, dy)]
    assert_same_bytes(triton_embedding(ids, weight), triton_embedding(*plain[:2]), "y")
    assert_same_bytes(gradient(triton_embedding, ids, weight, dy), gradient(triton_embedding, *plain), "dw")
    into, other = torch.zeros(3, 24, device=DEVICE), torch.zeros(3, 24, device=DEVICE)
    accumulated(triton_embedding, ids, weight, dy, into)
    accumulated(triton_embedding, *plain, other)
    assert_same_bytes(into, other, "accumulated")


@EMBEDDINGS
def test_one_id_without_an_axis_is_one_row(embedding: Embedding) -> None:
    weight, dy = weight_and_gradient(3, 8, torch.zeros(()))
    assert_same_bytes(embedding(ids_of(2)[0], weight), weight[2], "y")
    close(gradient(embedding, ids_of(2)[0], weight, dy), exact(ids_of(2), weight, dy))


@EMBEDDINGS
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)], ids=str)
def test_no_tokens_give_zeros_and_leave_an_accumulator(embedding: Embedding, shape: tuple[int, ...]) -> None:
    ids = torch.zeros(shape, dtype=torch.int64, device=DEVICE)
    weight, dy = weight_and_gradient(3, 8, ids)
    assert embedding(ids, weight).shape == (*shape, 8)
    assert_same_bytes(gradient(embedding, ids, weight, dy), torch.zeros_like(weight), "dw")
    into = torch.full((3, 8), 5.0, device=DEVICE)
    accumulated(embedding, ids, weight, dy, into)
    assert (into == 5.0).all()


@pytest.mark.parametrize("sm_count", [1, 108, 132])
def test_the_gradient_does_not_know_the_number_of_multiprocessors(
    sm_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = shuffled((40, 0, 70, 3))
    weight, dy = weight_and_gradient(4, 300, ids)
    plain = gradient(triton_embedding, ids, weight, dy)
    arch = device.identify(0).arch if ON_GPU else "sm_90"  # the interpreter then runs a card's launch
    monkeypatch.setattr(device, "identify", lambda _index: DeviceIdentity("cuda", "a card", arch, sm_count))
    assert_same_bytes(gradient(triton_embedding, ids, weight, dy), plain, "dw")
    into = torch.zeros_like(plain)
    accumulated(triton_embedding, ids, weight, dy, into)
    assert_same_bytes(into, plain, "accumulated")


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_every_run_gives_the_same_bytes(dtype: torch.dtype) -> None:
    ids = shuffled((400, 0, 70, 3, 1000) if ON_GPU else (40, 0, 70, 3))
    weight, dy = weight_and_gradient(5, 512 if ON_GPU else 8, ids, dtype)
    first = gradient(triton_embedding, ids, weight, dy)
    for run in range(RUNS):
        assert_same_bytes(gradient(triton_embedding, ids, weight, dy), first, f"run {run}")


def test_traffic_is_what_a_call_reads_and_writes_once() -> None:
    spec = catalog.specs()["embedding"]
    found = {case.name: spec.traffic(2, **case.sizes, **case.options) for case in spec.cases}
    rows, table, ids = 2 * 16384 * 4096, 2 * 151936 * 4096, 8 * 16384
    assert found["thr"] == Traffic(2 * rows + ids, rows + ids + table)
    assert found["thr-accum"].backward == 3 * rows == 402_653_184
    assert found["small"] == Traffic(1_049_088, 1_245_184_512)
    assert found["scaled"].forward == 2 * 2 * 60 * 24 + 8 * 60
