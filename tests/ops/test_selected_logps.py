"""Log-probabilities by whole rows and by single chunks: two ways to launch, one set of bits."""

from __future__ import annotations

import pytest
import torch

from benchmarks.operators.launches import recorded
from rl_engine.backends.shared.triton.rows import selected_logps as module
from rl_engine.backends.shared.triton.rows.selected_logps import Selected
from tests.support.ops_inputs import DEVICE, DTYPES, ON_GPU, Maker, assert_same_bytes

VOCABS = [4095, 4096, 4097, 8192, 12289, 151936] if ON_GPU else [4097, 8192, 12289]
HALF = torch.bfloat16 if ON_GPU else torch.float16


def _launched(
    monkeypatch: pytest.MonkeyPatch, least_rows: int, *args: object, **options: object
) -> tuple[Selected, set[str]]:
    """Return the result where programs of rows need so many rows, and the kernels that were launched."""
    with monkeypatch.context() as patch, recorded() as launches:
        patch.setattr(module, "_ROWS_A_MULTIPROCESSOR", least_rows)
        found = module.selected_logps(*args, **options)
    return found, {launch.kernel.__name__ for launch in launches}


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_and_chunks_give_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, vocab: int, dtype: torch.dtype, temperature: float
) -> None:
    make = Maker(dtype)
    logits, other = make.normal(5, vocab, scale=3.0), make.normal(5, vocab, scale=3.0)
    logits[1, : vocab // 2] = -torch.inf
    logits[2, 4096:4097] = torch.nan
    targets, mask = make.integers(0, vocab, 5), torch.tensor([1, 1, 1, 0, 1], device=DEVICE)
    call = {"mask": mask, "other": other, "temperature": temperature}
    rows, by_rows = _launched(monkeypatch, 0, logits, targets, **call)
    chunks, by_chunks = _launched(monkeypatch, 1000, logits, targets, **call)
    assert by_rows == {"_selected_logps_kernel"}
    assert by_chunks == ({"_selected_logps_kernel"} if vocab <= 4096 else {"_chunk_statistics_kernel", "_merge_kernel"})
    for name, ours, theirs in zip(Selected._fields, rows, chunks, strict=True):
        assert_same_bytes(ours, theirs, name)
    assert torch.isnan(rows.logps).tolist() == [False, False, vocab > 4096, False, False]


@pytest.mark.parametrize("name", ["float32", "float16", *(["bfloat16"] if ON_GPU else [])])
def test_masked_rows_are_not_read(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make = Maker(DTYPES[name])
    logits, targets = make.normal(3, 9001), make.integers(0, 9001, 3)
    mask = torch.tensor([1, 0, 1], device=DEVICE)
    wild = torch.where(mask.bool(), targets, 2**40)
    for least_rows in (0, 1000):
        clean, _seen = _launched(monkeypatch, least_rows, logits, targets, mask=mask)
        dirty = logits.clone()
        dirty[1] = torch.nan
        found, _seen = _launched(monkeypatch, least_rows, dirty, wild, mask=mask)
        assert_same_bytes(found.logps, clean.logps, "log-probabilities")
        assert found.logps[1].item() == 0.0


def test_a_padded_vocabulary_is_cut_off_by_a_view() -> None:
    make = Maker(torch.float32)
    padded, targets = make.normal(4, 5120), make.integers(0, 5001, 4)
    view, copy = padded[:, :5001], padded[:, :5001].clone()
    assert_same_bytes(module.selected_logps(view, targets).logps, module.selected_logps(copy, targets).logps, "a view")
