"""Scratch copies are the same views over other memory: aliases, gaps, strides and alignment kept."""

from __future__ import annotations

import itertools

import pytest
import torch

from rl_engine.backends.shared.triton.qualification import BoundLaunch, Sandbox
from rl_engine.backends.shared.triton.scratch import POISON, Copy, Span, require_memory, spans, total
from rl_engine.errors import TrialUnavailableError
from tests.support.ops_inputs import DEVICE, DTYPES, assert_same_bytes, raw


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    size = int(torch.Size(shape).numel())
    return torch.arange(size, device=DEVICE, dtype=torch.float32).to(dtype).view(shape)


def _copied(**tensors: torch.Tensor) -> tuple[Copy, Span]:
    (span,) = spans(tensors)
    copy = Copy(span)
    copy.restore()
    return copy, span


def test_tensors_that_share_bytes_are_one_span_and_neighbours_are_not() -> None:
    memory = _numbers(100)
    found = spans({"a": memory[:10], "b": memory[5:20], "c": memory[20:30], "d": memory[40:50], "e": memory[:0]})
    assert [sorted(span.tensors) for span in found] == [["a", "b"], ["c"], ["d"]]
    assert [span.size for span in found] == [80, 40, 40]
    assert total(found) == 160


def test_a_chain_of_overlaps_is_one_span_in_any_order() -> None:
    memory = _numbers(30)
    tensors = {"a": memory[:10], "b": memory[8:18], "c": memory[16:26]}
    for order in itertools.permutations(tensors):
        (span,) = spans({name: tensors[name] for name in order})
        assert span.size == 26 * 4


def test_interleaved_columns_are_one_span() -> None:
    memory = _numbers(6, 10)
    (span,) = spans({"even": memory[:, ::2], "odd": memory[:, 1::2]})
    assert sorted(span.tensors) == ["even", "odd"]
    assert span.size == 6 * 10 * 4


def test_views_of_one_span_stay_views_of_one_memory() -> None:
    memory = _numbers(100)
    copy, _span = _copied(whole=memory, part=memory[10:20], strided=memory[::7])
    copy.tensors["part"].fill_(-1.0)
    assert (copy.tensors["whole"][10:20] == -1).all()
    assert copy.tensors["strided"][2].item() == -1.0
    assert memory[10].item() == 10.0


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_a_copy_keeps_values_strides_and_address_modulo_256(dtype: torch.dtype, offset: int) -> None:
    memory = _numbers(40, 20, dtype=dtype)
    tensor = memory.view(-1)[offset:].as_strided((5, 6), (21, 2))
    copy, _span = _copied(x_ptr=tensor)
    made = copy.tensors["x_ptr"]
    assert (made.stride(), made.dtype, made.device) == (tensor.stride(), dtype, tensor.device)
    assert made.data_ptr() % 256 == tensor.data_ptr() % 256
    assert made.data_ptr() != tensor.data_ptr()
    assert_same_bytes(made, tensor, "values")


def test_gaps_between_rows_are_copied_poisoned_and_restored() -> None:
    memory = _numbers(4, 8)
    copy, span = _copied(x_ptr=memory[:, :3])
    assert torch.equal(copy.bytes, raw(memory)[: span.size])
    copy.poison()
    assert (copy.bytes == POISON).all()
    assert torch.isnan(copy.tensors["x_ptr"]).all()
    copy.restore()
    assert torch.equal(copy.bytes, raw(memory)[: span.size])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64], ids=str)
def test_poison_is_a_value_no_result_holds(dtype: torch.dtype) -> None:
    copy, _span = _copied(x_ptr=torch.zeros(9, dtype=dtype, device=DEVICE))
    copy.poison()
    poisoned = copy.tensors["x_ptr"]
    assert (torch.isnan(poisoned) if dtype.is_floating_point else poisoned == -1).all()


def test_an_expanded_tensor_takes_the_memory_of_one_row() -> None:
    tensor = _numbers(1, 5).expand(1000, 5)
    copy, span = _copied(x_ptr=tensor)
    assert span.size == 5 * 4
    assert copy.tensors["x_ptr"].stride() == (0, 1)
    assert_same_bytes(copy.tensors["x_ptr"], tensor, "values")


def test_random_values_are_seeded_finite_and_of_many_magnitudes() -> None:
    tensor = torch.zeros(4000, device=DEVICE)
    made = []
    for _time in range(2):
        copy, _span = _copied(x_ptr=tensor)
        assert copy.randomise(torch.Generator(DEVICE).manual_seed(1))
        made.append(copy.tensors["x_ptr"].clone())
    assert_same_bytes(made[0], made[1], "the same seed")
    sizes = made[0].abs()
    assert torch.isfinite(made[0]).all()
    assert sizes.max().item() / sizes.median().item() > 16
    assert (tensor == 0).all()


def test_integers_and_mixed_spans_are_not_randomised() -> None:
    integers, _span = _copied(x_ptr=torch.arange(8, device=DEVICE))
    assert not integers.randomise(torch.Generator(DEVICE))
    memory = _numbers(8)
    mixed, _span = _copied(x_ptr=memory, ids_ptr=memory.view(torch.int32))
    assert not mixed.randomise(torch.Generator(DEVICE))
    assert_same_bytes(mixed.tensors["x_ptr"], memory, "values")


def _sandbox(values: dict[str, torch.Tensor], *, outputs: tuple[str, ...], inout: tuple[str, ...] = ()) -> Sandbox:
    launch = BoundLaunch(lambda _values, _candidate: None, values, outputs, inout, ())
    return Sandbox(launch)


def test_an_output_alone_is_poisoned_and_one_that_overlaps_an_input_is_restored() -> None:
    memory = _numbers(30)
    alone = _sandbox({"x_ptr": memory[:10], "y_ptr": memory[20:]}, outputs=("y_ptr",))
    alone.reset()
    assert torch.isnan(alone.values["y_ptr"]).all()
    assert alone.values["x_ptr"].data_ptr() == memory.data_ptr()  # only read: the caller's own
    shared = _sandbox({"x_ptr": memory[:20], "y_ptr": memory[10:]}, outputs=("y_ptr",))
    shared.reset()
    assert_same_bytes(shared.values["y_ptr"], memory[10:], "an output over an input")
    shared.values["y_ptr"].zero_()
    assert (shared.values["x_ptr"][10:] == 0).all()
    assert memory[15].item() == 15.0


def test_inout_arguments_are_restored_before_every_run() -> None:
    x = _numbers(10)
    sandbox = _sandbox({"x_ptr": x}, outputs=(), inout=("x_ptr",))
    for _run in range(3):
        sandbox.reset()
        assert_same_bytes(sandbox.values["x_ptr"], x, "before the run")
        sandbox.values["x_ptr"].add_(1)
    assert torch.equal(x, _numbers(10))


def test_a_span_that_begins_between_elements_keeps_their_alignment() -> None:
    memory = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    odd = memory[4:36].view(torch.float32)
    (span,) = spans({"a": odd, "b": memory[1:40]})
    copy = Copy(span)
    copy.restore()
    assert_same_bytes(copy.tensors["a"], odd, "values")
    assert copy.tensors["a"].data_ptr() % 4 == 0


@pytest.mark.gpu
def test_scratch_that_does_not_fit_is_refused_before_it_is_asked_for() -> None:
    reserved = torch.cuda.memory_reserved()
    with pytest.raises(TrialUnavailableError, match=r"scratch copies need .* MiB, .* MiB are free"):
        require_memory(1 << 50, torch.device("cuda"))
    assert torch.cuda.memory_reserved() == reserved
