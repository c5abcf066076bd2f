"""Trials from public bug reports (cases) and of every form of RoPE, by the PyTorch and by the Triton operator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.operators.launches import recorded
from rl_engine.backends import catalog
from rl_engine.backends.reference.rope.rope import rope as reference_rope
from rl_engine.backends.shared.triton.rope.rope import rope as triton_rope
from tests.support.ops_inputs import DEVICE, LAYOUTS, ON_GPU, Maker, assert_same_bytes

ROPES = pytest.mark.parametrize("rope", [reference_rope, triton_rope], ids=["pytorch", "triton"])
Rope = Callable[..., Any]
EPSILON = 1.2e-7  # of fp32
LONG = 131_071  # the last position of a context of 128k
# dim, rotary_dim: whole and partial, powers of two and not
WIDTHS = [(8, None), (64, None), (6, None), (10, None), (96, None), (100, None), (128, 96), (40, 6), (192, 64), (10, 2)]


def _ids(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def _exact(
    x: torch.Tensor,
    positions: torch.Tensor,
    *,
    theta: float = 10_000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """Turn x [..., tokens, heads, dim] pair by pair with Python's own cosine of fp32 angles, in fp64."""
    width = rotary_dim or x.shape[-1]
    y = x.double().clone()
    for i in range(width // 2):
        frequency = torch.tensor(theta ** (-2 * i / width), dtype=torch.float64).float()
        angles = (positions.cpu().float() * frequency).double().to(x.device).unsqueeze(-1)
        one, other = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
        x1, x2 = x[..., one].double(), x[..., other].double()
        y[..., one] = x1 * angles.cos() - x2 * angles.sin()
        y[..., other] = x2 * angles.cos() + x1 * angles.sin()
    return y


def _pair(*, tokens: int = 5, dim: int = 16, batch: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    make = Maker(dtype)
    return [make.normal(batch, tokens, heads, dim) for heads in (3, 2)]


def _close(ours: torch.Tensor, exact: torch.Tensor, *, units: float = 8) -> None:
    epsilon = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=units * epsilon * float(exact.abs().max()))


# B30: nothing is written into what came in


@ROPES
def test_b30_inputs_stay_as_they_were_also_as_parts_of_a_packed_qkv(rope: Rope) -> None:
    packed = Maker(torch.float32).normal(2, 5, 3 + 2 + 2, 16)
    q, k, before = packed[:, :, :3], packed[:, :, 3:5], packed.clone()
    q_out, k_out = rope(q, k)
    assert_same_bytes(packed, before, "the packed q, k and v")
    wanted = rope(q.clone(), k.clone())
    assert_same_bytes(q_out, wanted[0], "q")
    assert_same_bytes(k_out, wanted[1], "k")


@ROPES
@pytest.mark.parametrize("layout", ["contiguous", *LAYOUTS])
def test_b30_turning_twice_turns_by_twice_the_angle_whatever_the_memory(rope: Rope, layout: str) -> None:
    (q, _k), positions = _pair(), torch.arange(5, device=DEVICE) * 7
    q = q if layout == "contiguous" else LAYOUTS[layout](q)
    before = q.clone()
    _close(rope(rope(q, None, positions), None, positions), _exact(q, 2 * positions), units=16)
    assert_same_bytes(q.clone(), before, "q")


@ROPES
@pytest.mark.parametrize("interleaved", [False, True])
def test_b30_the_gradient_is_turned_back(rope: Rope, interleaved: bool) -> None:
    (q, k), positions = _pair(), _ids(0, 1, 1000, 77_777, LONG)
    leaves = [one.requires_grad_() for one in (q, k)]
    outputs = rope(q, k, positions, interleaved=interleaved)
    back = torch.autograd.grad(outputs, leaves, [out.detach() for out in outputs])
    for ours, x in zip(back, leaves, strict=True):
        torch.testing.assert_close(ours, x.detach(), rtol=0, atol=2e-6)  # the case says 1e-6 of values of size 1


@ROPES
def test_b30_an_input_used_elsewhere_too_and_recomputed_has_autograds_gradient(rope: Rope) -> None:
    q, k = _pair()

    def block(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        q_out, k_out = rope(q, k)
        return (q_out * q).sum() + (k_out * k_out * k).sum()

    def gradients(call: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = [one.detach().clone().requires_grad_() for one in (q, k)]
        call(*leaves).backward()  # autograd.grad does not go through reentrant checkpoints
        return tuple(leaf.grad for leaf in leaves)

    plain = gradients(block)
    for reentrant in (False, True):
        again = gradients(lambda *leaves, kind=reentrant: checkpoint(block, *leaves, use_reentrant=kind))
        for ours, wanted in zip(again, plain, strict=True):
            assert_same_bytes(ours, wanted, f"recomputed, reentrant={reentrant}")
    places = torch.arange(5, device=DEVICE)
    leaves = [one.double().requires_grad_() for one in (q, k)]
    q_out, k_out = (_exact_leaf(leaf, places) for leaf in leaves)
    exact = torch.autograd.grad((q_out * leaves[0]).sum() + (k_out * k_out * leaves[1]).sum(), leaves)
    for ours, wanted in zip(plain, exact, strict=True):
        _close(ours, wanted, units=32)


def _exact_leaf(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return `_exact` for NeoX pairs, differentiable."""
    half = x.shape[-1] // 2
    frequency = torch.tensor([10_000.0 ** (-i / half) for i in range(half)], dtype=torch.float64).float().to(x.device)
    angle = (positions.float()[:, None] * frequency).double()[:, None, :]
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat((x1 * angle.cos() - x2 * angle.sin(), x2 * angle.cos() + x1 * angle.sin()), -1)


# B71: angles keep their digits


@ROPES
@pytest.mark.parametrize("ids", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16], ids=str)
def test_b71_positions_above_what_half_precision_holds_are_exact(
    rope: Rope, dtype: torch.dtype, ids: torch.dtype
) -> None:
    positions = _ids(257, 1857, 2049, LONG, dtype=ids)
    (q, _k) = _pair(tokens=4, dim=32, dtype=dtype)
    _close(rope(q, None, positions), _exact(q, positions), units=0.51)  # the last rounding, and nothing else


@ROPES
def test_b71_the_cases_angle(rope: Rope) -> None:
    q = torch.zeros(1, 1, 32, device=DEVICE)
    q[..., 1] = 1.0
    out = rope(q, None, _ids(1857))[0, 0].cpu().double()
    frequency = torch.tensor(10_000.0 ** (-1 / 16), dtype=torch.float64).float()
    angle = float(torch.tensor(1857.0) * frequency)
    assert math.isclose(angle, 1044.2678, abs_tol=1e-3)
    assert math.isclose(float(out[1]), math.cos(angle), abs_tol=2 * EPSILON)
    assert math.isclose(float(out[17]), math.sin(angle), abs_tol=2 * EPSILON)


@ROPES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool], ids=str)
def test_b71_positions_that_are_no_integers_are_refused(rope: Rope, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"^rope: positions are torch\.\w+; pass int32 or int64"):
        rope(_pair()[0], None, torch.zeros(5, dtype=dtype, device=DEVICE))


@ROPES
def test_b71_frequencies_that_a_cast_model_has_rounded_are_refused(rope: Rope) -> None:
    with pytest.raises(TypeError, match=r"^rope: inv_freq is torch\.bfloat16; pass float32"):
        rope(_pair()[0], inv_freq=torch.ones(8, dtype=torch.bfloat16, device=DEVICE))


def test_sine_and_cosine_are_right_over_all_quarters_and_far_out() -> None:
    positions = torch.cat(
        [torch.arange(0, 4096, 3), torch.arange(LONG - 300, LONG + 1), torch.arange(2**24 - 50, 2**24)]
    )
    x = torch.zeros(len(positions), 1, 2, device=DEVICE)
    x[..., 0] = 1.0
    for positions_ in (positions, -positions):
        out = triton_rope(x, None, positions_.to(DEVICE))[:, 0].cpu().double()
        for ours, exact in ((out[:, 0], positions_.double().cos()), (out[:, 1], positions_.double().sin())):
            assert float((ours - exact).abs().max()) <= 1.5 * EPSILON / 2  # units of the last place just under 1


# Every form, against fp64


@ROPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), WIDTHS, ids=str)
def test_every_width_is_the_fp64_result_and_the_rest_is_copied(
    rope: Rope, dim: int, rotary_dim: int | None, interleaved: bool
) -> None:
    (q, k), positions = _pair(dim=dim), _ids(3, 0, 500, 12, LONG)
    outputs = rope(q, k, positions, rotary_dim=rotary_dim, interleaved=interleaved)
    for ours, x in zip(outputs, (q, k), strict=True):
        _close(ours, _exact(x, positions, rotary_dim=rotary_dim, interleaved=interleaved))
        kept = rotary_dim or dim
        assert_same_bytes(ours[..., kept:], x[..., kept:], "columns that are not turned")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("memory", ["contiguous", "transposed view"])
def test_both_layouts_give_the_same_bytes(memory: str, interleaved: bool) -> None:
    (q, k), positions = _pair(), _ids(3, 0, 500, 12, LONG)
    wanted = triton_rope(q, k, positions, interleaved=interleaved)
    turned = [
        one.transpose(1, 2) if memory == "transposed view" else one.transpose(1, 2).contiguous() for one in (q, k)
    ]
    ours = triton_rope(*turned, positions, interleaved=interleaved, layout="bhsd")
    for one, other in zip(ours, wanted, strict=True):
        assert one.is_contiguous()
        assert_same_bytes(one.transpose(1, 2), other, memory)


@pytest.mark.parametrize("ndim", [3, 4, 5, 6])
def test_leading_axes_are_sequences(ndim: int) -> None:
    make = Maker(torch.float32)
    leading = (2, 3, 2)[: ndim - 3]
    q, positions = make.normal(*leading, 4, 3, 16), make.integers(0, 5000, *leading, 4)
    out = triton_rope(q, None, positions)
    wanted = triton_rope(q.reshape(-1, 3, 16), None, positions.reshape(-1))
    assert_same_bytes(out.reshape(-1, 3, 16), wanted, "sequences")


def test_without_positions_every_sequence_counts_from_zero() -> None:
    q, k = _pair()
    counted = torch.arange(5, device=DEVICE)
    for given in (counted, counted[None], counted.expand(2, 5), counted.int()):
        for ours, wanted in zip(triton_rope(q, k), triton_rope(q, k, given), strict=True):
            assert_same_bytes(ours, wanted, f"positions {list(given.shape)} {given.dtype}")


def test_a_part_of_wider_heads_is_read_in_place() -> None:
    make = Maker(torch.float32)
    wide = torch.full((7, 4, 192), math.nan, device=DEVICE)  # q_pe of DeepSeek's MLA, whose neighbours are not read
    wide[..., 128:] = make.normal(7, 4, 64)
    with recorded() as launches:
        out = triton_rope(wide[..., 128:], interleaved=True)
    assert len(launches) == 1
    assert launches[0].values["q_ptr"].data_ptr() == wide[..., 128:].data_ptr()
    assert_same_bytes(out, triton_rope(wide[..., 128:].clone(), interleaved=True), "q_pe")


@pytest.mark.parametrize("with_grad", [False, True])
def test_q_and_k_are_one_launch_and_so_is_the_gradient_even_of_one(with_grad: bool) -> None:
    q, k = _pair()
    wanted = torch.autograd.grad(triton_rope(*(one.requires_grad_() for one in (q, k)))[1].sum(), k)[0]
    q, k = q.detach(), k.detach().requires_grad_(with_grad)
    with recorded() as launches:
        outputs = triton_rope(q, k)
        assert [out.requires_grad for out in outputs] == [False, with_grad]
        if with_grad:
            assert_same_bytes(torch.autograd.grad(outputs[1].sum(), k)[0], wanted, "k's gradient")
    assert len(launches) == 1 + with_grad


# Tables


def _hugging_face(theta: float, positions: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables of transformers' LlamaRotaryEmbedding: fp32 frequencies, fp32 product, doubled."""
    inverse = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64, device=DEVICE).float() / dim))
    angle = positions[..., None].float() * inverse
    doubled = torch.cat((angle, angle), -1)
    return doubled.cos(), doubled.sin()


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


@ROPES
@pytest.mark.parametrize("rank", [2, 3])
def test_hugging_faces_formula_with_its_tables(rope: Rope, rank: int) -> None:
    q, k = (one.transpose(1, 2) for one in _pair(dim=32))
    positions = _ids(3, 0, 500, 12, LONG)
    cos, sin = _hugging_face(1e6, positions if rank == 2 else torch.stack((positions, positions + 1)), 32)
    outputs = rope(q, k, cos=cos, sin=sin, layout="bhsd")
    for ours, x in zip(outputs, (q, k), strict=True):
        c, s = (table.double() if rank == 2 else table.double().unsqueeze(1) for table in (cos, sin))
        _close(ours, x.double() * c + _rotate_half(x.double()) * s, units=2)


def test_hugging_faces_frequencies_give_what_its_tables_give() -> None:
    (q, k), positions = _pair(dim=32), _ids(3, 0, 500, 12, LONG)
    inverse = 1.0 / (1e6 ** (torch.arange(0, 32, 2, device=DEVICE).float() / 32)) / 8.0  # as linear scaling does
    angle = (positions[:, None].float() * inverse).double()
    tables = triton_rope(q, k, cos=angle.cos().float(), sin=angle.sin().float())
    for ours, wanted in zip(triton_rope(q, k, positions, inv_freq=inverse), tables, strict=True):
        _close(ours, wanted.double(), units=2)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32] if ON_GPU else [torch.float16], ids=str
)
@pytest.mark.parametrize("form", ["half", "doubled", "one batch", "every batch", "columns apart", "rows apart"])
def test_tables_of_every_form_give_the_same_bytes(form: str, dtype: torch.dtype) -> None:
    q, k = _pair(dtype=dtype)
    tables = [table[:, :8].to(dtype) for table in _hugging_face(1e4, _ids(3, 0, 500, 12, LONG), 16)]
    wanted = triton_rope(q, k, cos=tables[0], sin=tables[1])
    made = {
        "half": lambda table: table.clone(),
        "doubled": lambda table: torch.cat((table, torch.full_like(table, math.nan)), -1),
        "one batch": lambda table: table[None],
        "every batch": lambda table: table.repeat(2, 1, 1),
        "columns apart": LAYOUTS["sliced"],
        "rows apart": LAYOUTS["odd_stride"],
    }[form]
    cos, sin = made(tables[0]), made(tables[1])
    for ours, other in zip(triton_rope(q, k, cos=cos, sin=sin), wanted, strict=True):
        assert_same_bytes(ours, other, form)
    for ours, other in zip(triton_rope(q, k, cos=cos, sin=sin.clone()), wanted, strict=True):
        assert_same_bytes(ours, other, f"{form}, sin in other memory")


# A token's bits depend on its values and its position alone


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_prompt_in_chunks_or_token_by_token_has_the_bytes_it_has_whole(interleaved: bool) -> None:
    tokens = 4096 if ON_GPU else 70
    q, k = _pair(tokens=tokens, batch=1)
    whole = triton_rope(q, k, interleaved=interleaved)
    for length in (1, 7, 16, 33) if not ON_GPU else (1000, 1, 17):
        for start in range(0, tokens if length > 1 else 5, length):
            part = slice(start, min(start + length, tokens))
            positions = torch.arange(tokens, device=DEVICE)[part]
            ours = triton_rope(q[:, part], k[:, part], positions, interleaved=interleaved)
            for one, other in zip(ours, whole, strict=True):
                assert_same_bytes(one, other[:, part], f"tokens {part}")


@pytest.mark.parametrize("batch", [1, 2, 3, 17, 64, 4096] if ON_GPU else [1, 2, 3, 17])
def test_a_sequence_has_the_same_bytes_in_every_batch_and_beside_any_heads(batch: int) -> None:
    q, k = (one.repeat(batch, 1, 1, 1)[:batch] for one in _pair(batch=1))
    q_out, k_out = triton_rope(q, k)
    alone = triton_rope(q[:1, :, 1:2].clone(), None)
    for row in (0, batch - 1):
        assert_same_bytes(q_out[row : row + 1, :, 1:2], alone, f"sequence {row} of {batch}")
        assert_same_bytes(k_out[row : row + 1], triton_rope(k[:1]), "k alone")


def test_junk_positions_of_padding_reach_nothing_else() -> None:
    (q, k), positions = _pair(), _ids(3, 0, 500, 12, 7)
    junk = _ids(3, 0, 500, -(2**62), 2**62)
    for ours, wanted in zip(triton_rope(q, k, junk), triton_rope(q, k, positions), strict=True):
        assert_same_bytes(ours[:, :3], wanted[:, :3], "tokens that count")


@pytest.mark.parametrize("shape", [(0, 5, 3, 8), (2, 0, 3, 8), (2, 5, 0, 8)], ids=str)
def test_empty_tensors_are_turned_without_a_launch(shape: tuple[int, ...]) -> None:
    q = torch.zeros(shape, device=DEVICE, requires_grad=True)
    with recorded() as launches:
        (gradient,) = torch.autograd.grad(triton_rope(q).sum(), q)
    assert gradient.shape == shape
    assert not launches


@pytest.mark.parametrize(("case", "forward"), [("small", 671_744), ("thr", 337_641_472), ("thr-mla", 270_532_608)])
def test_the_bytes_of_a_timed_case_are_its_tensors_read_and_written_once(case: str, forward: int) -> None:
    spec = catalog.specs()["rope"]
    (found,) = [one for one in spec.cases if one.name == case]
    assert spec.traffic is not None
    assert spec.traffic(2, **{**found.sizes, **found.options}).forward == forward


Q = torch.zeros(2, 5, 3, 8, device=DEVICE)
TABLE = torch.zeros(5, 4, device=DEVICE)
REFUSED = [
    ((Q,), {"layout": "sbhd"}, ValueError, r"layout is 'sbhd'; pass one of bshd, bhsd"),
    ((Q[0, 0],), {}, ValueError, r"q is \[3, 8\]; pass \[\.\.\., tokens, heads, dim\] with dim of at least 2"),
    ((Q[..., :1],), {"layout": "bhsd"}, ValueError, r"q is .*; pass \[\.\.\., heads, tokens, dim\] with dim of"),
    ((Q, Q[:, :4]), {}, ValueError, r"k is \[2, 4, 3, 8\], q is \[2, 5, 3, 8\]; only their heads may differ"),
    ((Q, Q[..., :6]), {}, ValueError, r"k is \[2, 5, 3, 6\], q is \[2, 5, 3, 8\]; only their heads may differ"),
    ((Q, Q[0]), {}, ValueError, r"k is \[5, 3, 8\], q is \[2, 5, 3, 8\]; only their heads may differ"),
    ((Q, Q.half()), {}, TypeError, r"k is torch.float16, q is torch.float32; pass equal dtypes"),
    ((Q[..., :7],), {}, ValueError, r"rotary_dim is 7, dim is 7; pass an even number from 2 to dim"),
    ((Q,), {"rotary_dim": 0}, ValueError, r"rotary_dim is 0, dim is 8; pass an even number from 2 to dim"),
    ((Q,), {"rotary_dim": 10}, ValueError, r"rotary_dim is 10, dim is 8; pass an even number from 2 to dim"),
    ((Q,), {"theta": 0.0}, ValueError, r"theta is 0.0; pass a positive number"),
    ((Q,), {"theta": math.nan}, ValueError, r"theta is nan; pass a positive number"),
    ((Q,), {"inv_freq": TABLE[0, :3]}, ValueError, r"inv_freq is \[3\]; pass \[4\], half of rotary_dim"),
    ((Q, None, _ids(1, 2)), {}, ValueError, r"positions is \[2\], q has \[2, 5\] tokens; pass one row a token, \[5, "),
    ((Q,), {"cos": TABLE}, ValueError, r"one of cos and sin is missing; pass both, or positions"),
    ((Q,), {"sin": TABLE}, ValueError, r"one of cos and sin is missing; pass both, or positions"),
    ((Q, None, _ids(0, 1, 2, 3, 4)), {"cos": TABLE, "sin": TABLE}, ValueError, r"tables came with positions or"),
    ((Q,), {"cos": TABLE, "sin": TABLE, "inv_freq": TABLE[0]}, ValueError, r"tables came with positions or"),
    ((Q,), {"cos": TABLE, "sin": TABLE[:4]}, ValueError, r"cos is \[5, 4\], sin is \[4, 4\]; pass equal shapes"),
    ((Q,), {"cos": TABLE[:, :3], "sin": TABLE[:, :3]}, ValueError, r"cos is \[5, 3\]; pass \[\.\.\., 4\] or, doubled"),
    ((Q,), {"cos": TABLE[:4], "sin": TABLE[:4]}, ValueError, r"cos is \[4, 4\], q has \[2, 5\] tokens; pass one row"),
]  # fmt: skip


@ROPES
@pytest.mark.parametrize(("args", "kwargs", "error", "message"), REFUSED, ids=range(len(REFUSED)))
def test_arguments_that_do_not_fit_are_refused(
    rope: Rope, args: tuple[Any, ...], kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=rf"^rope: {message}"):
        rope(*args, **kwargs)
