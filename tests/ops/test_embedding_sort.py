"""The sort of embedding's tokens: its own launches and torch.sort, byte for byte, and which of them runs when."""

from __future__ import annotations

import pytest
import torch

from benchmarks.operators.launches import recorded
from rl_engine.backends.shared.triton.embedding import sort as module
from rl_engine.backends.shared.triton.embedding.embedding import embedding
from rl_engine.backends.shared.triton.embedding.sort import BITS, FEW_BITS, MOST_TOKENS, MOST_VOCAB, sorted_tokens
from rl_engine.platforms import device
from rl_engine.platforms.device import DeviceIdentity
from tests.support.ops_inputs import DEVICE, ON_GPU, Maker, assert_same_bytes

BLOCK = 1 << BITS
FEW = 1 << FEW_BITS
VOCAB = 151_936
LENGTHS = (1, 31, FEW, FEW + 1, BLOCK - 1, BLOCK, BLOCK + 1, 5000, *((16_384, MOST_TOKENS) if ON_GPU else ()))
KINDS = ("random", "few ids", "skewed", "equal", "invalid", "falling")


def _ids(kind: str, n_tokens: int, vocab: int) -> torch.Tensor:
    make = torch.Generator().manual_seed(n_tokens)
    skewed = torch.rand(n_tokens, generator=make, dtype=torch.float64) ** 8 * vocab
    ids = {
        "random": torch.randint(-vocab // 9, vocab + vocab // 9, (n_tokens,), generator=make),
        "few ids": torch.randint(0, 3, (n_tokens,), generator=make),
        "skewed": skewed.long(),
        "equal": torch.full((n_tokens,), vocab - 1),
        "invalid": torch.tensor([-1, vocab, 2**40, -(2**40)]).repeat(n_tokens // 4 + 1)[:n_tokens],
        "falling": (n_tokens - torch.arange(n_tokens)) % vocab,
    }
    return ids[kind].to(DEVICE)


def _by_torch(ids: torch.Tensor, vocab: int, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.where((ids >= 0) & (ids < vocab) & (ids != padding), ids, vocab).int()
    keys, order = torch.sort(keys, stable=True)
    return keys, order.int()


def _agree(ids: torch.Tensor, vocab: int, padding: int = 2) -> None:
    ours, theirs = sorted_tokens(ids, vocab, padding), _by_torch(ids, vocab, padding)
    assert_same_bytes(ours[0], theirs[0], "keys")
    assert_same_bytes(ours[1], theirs[1], "order")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_keys_and_order_are_those_of_a_stable_sort(n_tokens: int, kind: str) -> None:
    _agree(_ids(kind, n_tokens, VOCAB), VOCAB)


@pytest.mark.parametrize("n_tokens", [FEW, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("vocab", [1, 7, MOST_VOCAB, MOST_VOCAB + 1, 2**31 - 1])
def test_vocabularies_of_any_size_sort(vocab: int, n_tokens: int) -> None:
    ids = _ids("random", n_tokens, vocab)
    ids[::3] = vocab - 1
    ids[1::7] = vocab
    _agree(ids, vocab)


def test_int32_and_strided_ids_sort_as_copies_do() -> None:
    ids = _ids("random", 2 * BLOCK + 40, VOCAB)
    _agree(ids.int(), VOCAB)
    _agree(ids[::2], VOCAB)
    _agree(ids[:70].expand(2, -1)[1], VOCAB)


@pytest.mark.parametrize(
    ("n_tokens", "vocab", "wanted"),
    [
        (BLOCK, MOST_VOCAB, ["_embedding_sort_kernel"]),
        (BLOCK + 1, MOST_VOCAB, ["_embedding_sort_kernel", "_embedding_merge_kernel"]),
        (BLOCK + 1, MOST_VOCAB + 1, []),
        (MOST_TOKENS + 1, 7, []),
    ],
)
def test_many_tokens_and_large_vocabularies_are_sorted_by_torch(n_tokens: int, vocab: int, wanted: list[str]) -> None:
    ids = _ids("skewed", n_tokens, vocab)
    with recorded() as made:
        sorted_tokens(ids, vocab, -1)
    assert [one.kernel.__name__ for one in made] == wanted


def test_the_integers_of_the_network_fit_int32_and_stay_below_its_padding() -> None:
    most = module.PADDING.value
    largest, compared = (MOST_VOCAB << BITS) + BLOCK - 1, (MOST_VOCAB + 1) << BITS  # by the merge, with `vocab`
    assert largest < compared < most < compared + BLOCK


@pytest.mark.parametrize("sm_count", [1, 132])
def test_a_cards_launch_places_every_token_too(sm_count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arch = device.identify(0).arch if ON_GPU else "sm_90"  # the interpreter then runs a card's launch
    monkeypatch.setattr(device, "identify", lambda _index: DeviceIdentity("cuda", "a card", arch, sm_count))
    _agree(_ids("few ids", BLOCK + 300, VOCAB), VOCAB)
    _agree(_ids("random", BLOCK + 300, VOCAB), VOCAB)


def test_the_gradient_is_one_whoever_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker(torch.float32, seed=2)
    weight, ids = make.normal(40, 8), _ids("skewed", BLOCK + 70, 40)
    dy = make.normal(len(ids), 8)

    def gradient() -> torch.Tensor:
        leaf = weight.detach().requires_grad_()
        return torch.autograd.grad(embedding(ids, leaf), leaf, dy)[0]

    ours = gradient()
    monkeypatch.setattr(module, "MOST_TOKENS", 0)
    assert_same_bytes(gradient(), ours, "dw")
