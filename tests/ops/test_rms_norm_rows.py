"""RMSNorm's two backwards, of few and of many rows, and the rows that it reads where they lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.operators.launches import recorded
from rl_engine.backends.shared.triton.norm import rms_norm as module
from rl_engine.backends.shared.triton.norm import rms_norm_backward
from rl_engine.backends.shared.triton.norm.strided_rows import Rows, rows_of
from rl_engine.platforms import device
from rl_engine.platforms.device import DeviceIdentity
from tests.support.ops_inputs import DEVICE, DTYPES, ON_GPU, Maker, assert_same, assert_same_bytes, triton_op
from tests.support.ops_inputs import Outcome as Gradients

FUSED, APART = {"_rms_norm_bwd_kernel"}, {"_rms_norm_dx_kernel", "_rms_norm_dw_kernel"}
DTYPE = "bfloat16" if ON_GPU else "float16"
SHAPES = [(33, 20), (65, 300), (1, 8), (300, 1), *([(2100, 8), (70, 2048), (20_000, 4096)] if ON_GPU else [])]
# one leaf after the other, two beside each other, and 32; all with programs that lack some at their end
SPANS = [(150, 1000, "none"), (70, 40, "llama"), (70, 40, "gemma")]
if ON_GPU:
    SPANS += [(32 * 531 + 5, 4096, "none"), (4000, 8192, "llama"), (70_000, 128, "gemma")]
# what a caller slices, and whether its rows can be read there
VIEWS: dict[str, tuple[Callable[[Maker], torch.Tensor], bool]] = {
    "kv_a": (lambda make: make.normal(40, 24)[:, :16], True),
    "heads": (lambda make: make.normal(40, 6, 16)[:, 1:4], True),
    "unaligned heads": (lambda make: make.normal(40, 6 * 7)[:, 3 : 3 + 28].view(40, 4, 7), True),
    "shifted positions": (lambda make: make.normal(3, 12, 16)[:, :-1], True),
    "every second row": (lambda make: make.normal(40, 16)[::2], True),
    "one row for all": (lambda make: make.normal(16).expand(5, 7, 16), True),
    "swapped axes": (lambda make: make.normal(5, 9, 16).transpose(0, 1), True),
    "one token": (lambda make: make.normal(1, 6, 16)[:, 1:4], True),
    "blocks of blocks": (lambda make: make.normal(3, 12, 6, 16)[:, :-1, 1:4], False),
    "every second column": (lambda make: make.normal(40, 32)[:, ::2], False),
}


def _backward(
    x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, casting_mode: str = "none"
) -> tuple[Gradients, set[str]]:
    """Return outputs and gradients, and the kernels that computed the gradients."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = triton_op("rms_norm")(x, weight, casting_mode=casting_mode)
    with recorded() as launches:
        found = torch.autograd.grad(y, (x, weight), dy)
    return Gradients((y.detach(),), dict(enumerate(found))), {one.kernel.__name__ for one in launches}


@pytest.mark.parametrize("dtype", [DTYPE, "float32"])
@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
def test_the_fused_backward_has_the_bytes_of_the_kernels_apart(
    rows: int, hidden: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Maker(DTYPES[dtype])
    inputs = make.normal(rows, hidden), make.normal(hidden), make.normal(rows, hidden)
    monkeypatch.setattr(module, "fuses", lambda *_sizes: False)
    apart, kernels = _backward(*inputs)
    assert kernels - {"_rms_norm_fold_kernel"} == APART
    monkeypatch.setattr(module, "fuses", lambda *_sizes: True)
    fused, kernels = _backward(*inputs)
    assert kernels - {"_rms_norm_fold_kernel"} == FUSED
    assert_same(fused, apart, "fused")


@pytest.mark.parametrize(("rows", "hidden", "casting_mode"), SPANS)
def test_leaves_in_turn_give_the_bytes_of_the_kernels_apart(
    rows: int, hidden: int, casting_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Maker(DTYPES[DTYPE])
    inputs = make.normal(rows, hidden), make.normal(hidden, dtype=torch.float32), make.normal(rows, hidden)
    monkeypatch.setattr(module, "fuses", lambda *_sizes: False)
    apart, _kernels = _backward(*inputs, casting_mode)
    monkeypatch.setattr(module, "fuses", lambda *_sizes: True)
    monkeypatch.setattr(rms_norm_backward, "leaves_in_turn", lambda *_sizes: 2)
    fused, kernels = _backward(*inputs, casting_mode)
    assert kernels - {"_rms_norm_fold_kernel"} == FUSED
    assert_same(fused, apart, "two leaves in turn")


@pytest.mark.skipif(not ON_GPU, reason="the interpreter's fused multiply-add rounds its product, and so loses the sign")
def test_missing_leaves_leave_a_negative_zero_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker(torch.float32)
    x, weight, dy = make.normal(32, 2048), make.normal(2048), make.normal(32, 2048)
    x[:, 0], dy[:, 0] = 1e-30, -1e-30  # their products underflow to -0.0
    monkeypatch.setattr(module, "fuses", lambda *_sizes: True)
    monkeypatch.setattr(rms_norm_backward, "leaves_in_turn", lambda *_sizes: 2)
    gradients, _kernels = _backward(x, weight, dy)
    assert_same_bytes(gradients.gradients[1][:1], torch.tensor([-0.0], device=DEVICE), "dw")


@pytest.mark.parametrize(
    ("rows", "hidden", "multiprocessors", "span"),
    [
        (16384, 4096, 132, 2),
        (16384, 3000, 132, 2),
        (8192, 4096, 132, 1),
        (16384, 8192, 132, 1),
        (655360, 128, 132, 1),
    ],
)
def test_two_leaves_follow_each_other_where_that_was_measured_to_be_faster(
    rows: int, hidden: int, multiprocessors: int, span: int
) -> None:
    assert rms_norm_backward.leaves_in_turn(rows, hidden, multiprocessors) == span


@pytest.mark.parametrize("wanted", [0, 1])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_of_one_gradient_only_its_kernel_runs(wanted: int, compiled: bool) -> None:
    torch._dynamo.reset()
    make = Maker(torch.float32)
    inputs, dy = [make.normal(70, 24), make.normal(24)], make.normal(70, 24)
    both, _kernels = _backward(*inputs, dy)
    inputs[wanted].requires_grad_()
    op = triton_op("rms_norm")
    y = (torch.compile(op, backend="aot_eager", fullgraph=True) if compiled else op)(*inputs)
    with recorded() as launches:
        (found,) = torch.autograd.grad(y, inputs[wanted], dy)
    assert {one.kernel.__name__ for one in launches} == {["_rms_norm_dx_kernel", "_rms_norm_dw_kernel"][wanted]}
    assert_same_bytes(found, both.gradients[wanted], "the only one")


@pytest.mark.parametrize(
    ("rows", "hidden", "multiprocessors", "fused"),
    [
        (16384, 4096, 132, True),
        (4096, 4096, 132, True),  # 128 programs
        (2048, 4096, 132, False),
        (16384, 8192, 132, True),
        (16384, 8193, 132, False),  # wider than a tile
        (655360, 128, 132, True),
        (16384, 128, 132, False),  # 32 programs of 16 leaves
    ],
)
def test_many_rows_go_through_the_fused_kernel(
    rows: int, hidden: int, multiprocessors: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = DeviceIdentity("cuda", "a card", "sm_90", multiprocessors)
    monkeypatch.setattr(device, "identify", lambda _index: card)
    assert module.fuses(rows, hidden, 0) is fused


def test_a_card_that_does_not_say_what_it_is_computes_gradients_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_index: int) -> DeviceIdentity:
        raise RuntimeError("no such device")

    monkeypatch.setattr(device, "identify", unknown)
    assert not module.fuses(1 << 20, 4096, 0)


def _where(rows: Rows, n_rows: int) -> list[int]:
    """Return where rows begin, by the definition of `Rows`."""
    if not rows.unit:
        return [row * rows.stride for row in range(n_rows)]
    block_stride = rows.block_stride * rows.unit
    return [row // rows.block * block_stride + row % rows.block * rows.stride for row in range(n_rows)]


@pytest.mark.parametrize("view", VIEWS)
def test_rows_are_read_where_they_lie(view: str) -> None:
    make, in_place = VIEWS[view]
    x = make(Maker(torch.float32))
    rows = rows_of(x)
    assert (rows.data.data_ptr() == x.data_ptr()) is in_place
    flat = x.reshape(-1, x.shape[-1])
    for row, begin in enumerate(_where(rows, len(flat))):
        seen = torch.as_strided(rows.data, (x.shape[-1],), (1,), rows.data.storage_offset() + begin)
        assert_same_bytes(seen, flat[row], f"row {row}")


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_give_the_bytes_of_contiguous_copies(view: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fuses", lambda *_sizes: fused)
    make = VIEWS[view][0]
    x, dy = make(Maker(torch.float32, seed=1)), make(Maker(torch.float32, seed=2))
    weight = Maker(torch.float32).normal(x.shape[-1])
    plain, _kernels = _backward(x.contiguous(), weight, dy.contiguous())
    assert_same(_backward(x, weight, dy)[0], plain, "both sliced")
    assert_same(_backward(x, weight, dy.contiguous())[0], plain, "x sliced")
    assert_same(_backward(x.contiguous(), weight, dy)[0], plain, "dy sliced")


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_a_nan_row_reaches_its_own_gradient_and_the_weights_alone(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fuses", lambda *_sizes: fused)
    make = Maker(torch.float32)
    x, weight, dy = make.normal(70, 24), make.normal(24), make.normal(70, 24)
    plain, _kernels = _backward(x, weight, dy)
    x[40] = float("nan")
    planted, _kernels = _backward(x, weight, dy)
    others = torch.arange(70, device=DEVICE) != 40
    assert_same_bytes(planted.gradients[0][others], plain.gradients[0][others], "dx of the other rows")
    assert planted.gradients[0][40].isnan().all()
    assert planted.gradients[1].isnan().all()
