"""Rotary position embedding: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin, in fp32, rounded once; q and k in one launch.

Angles come from positions inside the kernel, so nothing is launched beside it, or from tables. A program reads several
heads of its tokens, each a tile [TOKENS, lanes], before it turns the first: a thread keeps the same lanes of the same
token in all of them, so no two threads compute one sine. (In one tile with an axis of heads, Triton 3.6 deals threads
out over heads before tokens and each computes four times as many sines; 3.9 does not.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from rl_engine.backends.reference.rope.rope import check_rope
from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import TunableKernel, pin_autotune, pinned_backward
from rl_engine.backends.shared.triton.compiler import is_interpreter, unavailable
from rl_engine.backends.shared.triton.graph import differentiate, empty_like, graph_operator
from rl_engine.backends.shared.triton.operands import INTERPRETED_TILE, power_of_two
from rl_engine.backends.shared.triton.primitives.folds import log2, rounded_product
from rl_engine.backends.spec import implements

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_engine.platforms.device import DeviceIdentity

_TILE = 16384  # elements of a program: 32 kB of bf16, eight 16-byte loads a thread in flight
_VECTOR = 8  # elements of bf16 that one 16-byte access moves

_TWO_OVER_PI = tl.constexpr(0.6366197723675814)
_HALF_PI = tl.constexpr(1.5707963267948966)
# sinf and cosf of Cephes (Moshier, netlib.org/cephes): on [-pi/4, pi/4] within 1 unit of fp32's last place
_S1, _S2, _S3 = tl.constexpr(-1.6666654611e-1), tl.constexpr(8.3321608736e-3), tl.constexpr(-1.9515295891e-4)
_C1, _C2, _C3 = (
    tl.constexpr(4.166664568298827e-2),
    tl.constexpr(-1.388731625493765e-3),
    tl.constexpr(2.443315711809948e-5),
)


def _fixed(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    """Return tiles of 32 kB, of as many tokens as 8 warps cover with wide accesses, and smaller ones for few tokens."""
    row, n_tokens = 2 * sizes["LANES"], sizes["n_tokens"]
    heads = power_of_two(max(sizes["q_heads"], sizes["k_heads"]))
    if is_interpreter(device.arch):
        tokens = min(power_of_two(n_tokens), max(1, INTERPRETED_TILE // row))
        return {"TOKENS": tokens, "HEADS": min(heads, max(1, INTERPRETED_TILE // (row * tokens))), "STEPS": 1,
                "num_warps": 4}  # fmt: skip
    per_thread = _VECTOR if sizes["INTERLEAVED"] else 2 * _VECTOR  # of one head: two halves are two accesses
    most = max(1, 256 * per_thread // row)
    block = max(1, min(heads, _TILE // (row * most)))
    blocks = -(-sizes["q_heads"] // block) + -(-sizes["k_heads"] // block)
    tokens = operands.rows_a_program(n_tokens * blocks, most, device.sm_count)
    return {"TOKENS": tokens, "HEADS": block, "STEPS": 1,
            "num_warps": max(1, min(8, row * tokens * block // (32 * per_thread)))}  # fmt: skip


def _admits(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    """Let through 16 to 64 elements a thread, 32 where tokens are many, and no more heads than there are."""
    heads = max(sizes["q_heads"], sizes["k_heads"])
    per_thread = 2 * sizes["LANES"] * launch["TOKENS"] * launch["HEADS"] // (32 * launch["num_warps"])
    least = 32 if sizes["n_tokens"] > 2048 else 16
    return least <= per_thread <= 64 and launch["HEADS"] * launch["STEPS"] < 2 * heads


@triton.constexpr_function
def _power(theta, bit, half):
    """Return the factor of theta^(-i / half) that bit number ``bit`` of i stands for."""
    return theta ** (-(1 << int(bit)) / half)  # the interpreter counts with tensors


@triton.jit
def _frequencies(frequency_ptr, THETA: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr):
    """Return fp32 angles of one position [LANES]: given, or theta^(-i / HALF) in fp64, a product over the bits of i."""
    lane = tl.arange(0, LANES)
    if frequency_ptr is not None:
        found = tl.load(frequency_ptr + lane, mask=lane < HALF, other=0.0)
    else:  # no early return: Triton 3.6 compiles what stands behind it
        one = tl.full((LANES,), 1.0, tl.float64)
        product = one
        for bit in tl.static_range(log2(LANES) - 1, -1, -1):  # high bits first: neighbouring lanes share their product
            factor = tl.full((LANES,), _power(THETA, bit, HALF), tl.float64)
            product = product * tl.where((lane >> bit) & 1 == 1, factor, one)
        found = product.to(tl.float32)
    return found


@triton.jit
def _cos_and_sin(angle):
    """Return cos and sin of fp32 angles, of any size: Triton's own may become approximations that are not.

    The remainder by quarter turns is taken in fp64, where pi/2 has digits enough for angles up to 2^31.
    """
    exact = angle.to(tl.float64)
    scale = tl.full(angle.shape, _TWO_OVER_PI, tl.float64)
    turns = tl.floor(tl.fma(exact, scale, tl.full(angle.shape, 0.5, tl.float64)))
    r = tl.fma(-turns, tl.full(angle.shape, _HALF_PI, tl.float64), exact).to(tl.float32)
    square = r * r
    sine = tl.fma(tl.fma(tl.fma(square, _S3, _S2), square, _S1), square * r, r)
    cosine = tl.fma(tl.fma(tl.fma(square, _C3, _C2), square, _C1), square * square, tl.fma(square, -0.5, 1.0))
    quarter = turns.to(tl.int64).to(tl.int32)
    swapped = (quarter & 1) == 1
    cos, sin = tl.where(swapped, sine, cosine), tl.where(swapped, cosine, sine)
    return tl.where(((quarter + 1) & 2) == 2, -cos, cos), tl.where((quarter & 2) == 2, -sin, sin)


@triton.jit
def _turn(x1, x2, cos, sin):
    """Return the pair turned, in fp32: one product rounded, the other fused with the sum."""
    return tl.fma(x1, cos, -rounded_product(x2, sin)), tl.fma(x2, cos, rounded_product(x1, sin))


@triton.jit
def _halves(x_at, used, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr):
    """Return x1 and x2 [TOKENS, LANES] of one head; neighbours are read as the one row that they are."""
    if INTERLEAVED:
        pair = tl.arange(0, 2 * LANES)[None, :]
        x = tl.load(x_at + pair, mask=used & (pair < 2 * HALF), other=0.0)
        return tl.split(tl.reshape(x, (TOKENS, LANES, 2)))
    lane = tl.arange(0, LANES)[None, :]
    mask = used & (lane < HALF)
    return tl.load(x_at + lane, mask=mask, other=0.0), tl.load(x_at + (HALF + lane), mask=mask, other=0.0)


@triton.jit
def _store_halves(
    y_at, y1, y2, used, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr
):
    y1, y2 = y1.to(y_at.dtype.element_ty), y2.to(y_at.dtype.element_ty)
    if INTERLEAVED:
        pair = tl.arange(0, 2 * LANES)[None, :]
        tl.store(y_at + pair, tl.reshape(tl.join(y1, y2), (TOKENS, 2 * LANES)), mask=used & (pair < 2 * HALF))
    else:
        lane = tl.arange(0, LANES)[None, :]
        tl.store(y_at + lane, y1, mask=used & (lane < HALF))
        tl.store(y_at + (HALF + lane), y2, mask=used & (lane < HALF))


@triton.jit
def _rotate(
    x_ptr, y_ptr, first, batch, place, inside, cos, sin, seq, heads, x_batch, x_token, x_head,
    DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS_FIRST: tl.constexpr, ALIGN: tl.constexpr,
    LANES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Turn heads from ``first`` on of the program's tokens, HEADS of them in flight; ``y`` is contiguous."""
    x_rows = batch * x_batch + place * x_token
    y_rows = batch * heads * seq + place if HEADS_FIRST else (batch * seq + place) * heads
    x_head, y_head = x_head.to(tl.int64), seq.to(tl.int64) if HEADS_FIRST else 1
    pair, one_each = tl.arange(0, 2 * LANES)[None, :], tl.zeros((TOKENS, 1), tl.int32)
    for tile in range(tl.cdiv(tl.minimum(heads - first, STEPS * HEADS), HEADS)):
        read = ()
        for one in tl.static_range(HEADS):
            head = first + tile * HEADS + one
            rows = x_rows + head * x_head
            if ALIGN > 1:  # strides are not specialised, since they change with the sequence length
                rows = tl.multiple_of(rows, (ALIGN,))
            x_at, used = x_ptr + rows[:, None], inside[:, None] & (one_each + head < heads)
            read = read + _halves(x_at, used, HALF, INTERLEAVED, LANES, TOKENS)
            for column in tl.static_range(2 * HALF, DIM, 2 * LANES):
                kept = used & (column + pair < DIM)
                y_at = y_ptr + ((y_rows + head * y_head) * DIM)[:, None]
                tl.store(y_at + (column + pair), tl.load(x_at + (column + pair), mask=kept), mask=kept)
        for one in tl.static_range(HEADS):
            head = first + tile * HEADS + one
            y_at, used = y_ptr + ((y_rows + head * y_head) * DIM)[:, None], inside[:, None] & (one_each + head < heads)
            y1, y2 = _turn(read[2 * one].to(tl.float32), read[2 * one + 1].to(tl.float32), cos, sin)
            _store_halves(y_at, y1, y2, used, HALF, INTERLEAVED, LANES, TOKENS)


@TunableKernel(
    outputs=("q_out_ptr", "k_out_ptr"),
    data=("q_ptr", "k_ptr", "cos_ptr", "sin_ptr", "frequency_ptr"),
    dynamic=("n_tokens", "seq", "q_batch", "q_head", "k_batch", "k_head", "table_batch"),
    fixed=_fixed,
    # no sum at all: an element comes of its pair, its position and its frequency, whoever computes it
    neutral={"TOKENS": (2, 4, 16, 32), "HEADS": (4, 8), "STEPS": (1, 4), "num_warps": (2, 4, 8)},
    admits=_admits,
)
@triton.jit(
    do_not_specialize=[
        "n_tokens", "seq", "q_heads", "k_heads", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head",
        "table_batch", "table_token",
    ]
)  # fmt: skip
def _rope_kernel(
    q_ptr, k_ptr, position_ptr, cos_ptr, sin_ptr, frequency_ptr, q_out_ptr, k_out_ptr,
    n_tokens, seq, q_heads, k_heads, q_batch, q_token, q_head, k_batch, k_token, k_head, table_batch, table_token,
    INVERSE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS_FIRST: tl.constexpr, THETA: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Turn q and k, whose tokens are counted through all sequences; heads of both share the grid, q's first."""
    q_blocks = tl.cdiv(q_heads, STEPS * HEADS)
    n_blocks = q_blocks + tl.cdiv(k_heads, STEPS * HEADS)
    block = tl.program_id(0) % n_blocks
    # 32 bits wherever they hold the count: a division by seq in 64 costs several times as much
    token = (tl.program_id(0) // n_blocks).to(n_tokens.dtype) * TOKENS + tl.arange(0, TOKENS)
    inside = token < n_tokens
    batch, place = (token // seq).to(tl.int64), (token % seq).to(tl.int64)
    row = batch * table_batch + place * table_token
    if cos_ptr is not None:
        if ALIGN > 1:
            row = tl.multiple_of(row, (ALIGN,))
        lane = tl.arange(0, LANES)
        known = inside[:, None] & (lane < HALF)[None, :]
        at = row[:, None] + lane[None, :]  # kept in the L2 for the other heads: 84.3 us instead of 85.8 on an H200
        cos = tl.load(cos_ptr + at, mask=known, other=0.0, eviction_policy="evict_last").to(tl.float32)
        sin = tl.load(sin_ptr + at, mask=known, other=0.0, eviction_policy="evict_last").to(tl.float32)
    else:
        position = place if position_ptr is None else tl.load(position_ptr + row, mask=inside, other=0)
        angle = position.to(tl.float32)[:, None] * _frequencies(frequency_ptr, THETA, HALF, LANES)[None, :]
        cos, sin = _cos_and_sin(angle)
    if INVERSE:
        sin = -sin
    if block < q_blocks:
        _rotate(
            q_ptr, q_out_ptr, block * STEPS * HEADS, batch, place, inside, cos, sin, seq, q_heads,
            q_batch, q_token, q_head, DIM, HALF, INTERLEAVED, HEADS_FIRST, ALIGN, LANES, TOKENS, HEADS, STEPS,
        )  # fmt: skip
    else:
        _rotate(
            k_ptr, k_out_ptr, (block - q_blocks) * STEPS * HEADS, batch, place, inside, cos, sin, seq, k_heads,
            k_batch, k_token, k_head, DIM, HALF, INTERLEAVED, HEADS_FIRST, ALIGN, LANES, TOKENS, HEADS, STEPS,
        )  # fmt: skip


def _grid(meta: Mapping[str, Any]) -> tuple[int]:
    heads = meta["HEADS"] * meta["STEPS"]
    return (-(-meta["n_tokens"] // meta["TOKENS"]) * (-(-meta["q_heads"] // heads) + -(-meta["k_heads"] // heads)),)


def _as_bshd(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return x as [batch, tokens, heads, dim] with neighbouring columns: a view where strides allow, else a copy."""
    if layout == "bhsd":
        x = x.transpose(-2, -3)
    x = x.unsqueeze(0) if x.dim() == 3 else x.flatten(0, -4)
    return x if x.stride(-1) == 1 else x.contiguous()


def _row_strides(x: torch.Tensor, tokens_axis: int) -> tuple[int, int]:
    """Return the strides by sequence and by token of what has one row a token, or one a token of every sequence."""
    apart = x.dim() + tokens_axis > 0 and x.shape[tokens_axis - 1] > 1
    return x.stride(tokens_axis - 1) if apart else 0, x.stride(tokens_axis)


def _tables(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both [..., tokens, columns] with one set of strides and neighbouring columns, at most three axes."""
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return (cos.flatten(0, -3), sin.flatten(0, -3)) if cos.dim() > 3 else (cos, sin)


def _turned(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    inv_freq: torch.Tensor | None,
    theta: float,
    rotary_dim: int,
    interleaved: bool,
    layout: str,
    inverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k turned, backwards if ``inverse``; an empty tensor stands for no k, as graphs need."""
    q_out = empty_like(q)
    k_out = torch.empty((0,), dtype=q.dtype, device=q.device) if k is None else empty_like(k)
    q_rows = _as_bshd(q, layout)
    k_rows = q_rows if k is None else _as_bshd(k, layout)
    batch, seq, q_heads, dim = q_rows.shape
    k_heads = 0 if k is None else k_rows.shape[2]
    if not batch * seq * (q_heads + k_heads):
        return q_out, k_out
    strides, table_strides = (*q_rows.stride()[:3], *k_rows.stride()[:3]), (0, 0)
    align = math.gcd(16, *strides)
    if cos is not None and sin is not None:
        cos, sin = _tables(cos, sin)
        table_strides = _row_strides(cos, -2)
        align = math.gcd(align, *table_strides)
    elif positions is not None:
        positions = positions.flatten(0, -2) if positions.dim() > 2 else positions
        table_strides = _row_strides(positions, -1)
    _rope_kernel[_grid](
        q_rows, k_rows, positions, cos, sin, None if inv_freq is None else inv_freq.contiguous(),
        q_out, q_out if k is None else k_out,
        batch * seq, seq, q_heads, k_heads, *strides, *table_strides,
        INVERSE=inverse, DIM=dim, HALF=rotary_dim // 2, INTERLEAVED=interleaved, HEADS_FIRST=layout == "bhsd",
        THETA=0.0 if cos is not None or inv_freq is not None else float(theta), ALIGN=align,
        LANES=power_of_two(rotary_dim // 2),
    )  # fmt: skip
    return q_out, k_out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, positions, cos, sin, inv_freq, *options):
        pin_autotune(ctx)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(positions, cos, sin, inv_freq)
        ctx.options = options
        q_out, k_out = _turned(q, k, positions, cos, sin, inv_freq, *options)
        pairs = zip((q_out, k_out), ctx.needs_input_grad, strict=False)
        ctx.mark_non_differentiable(*(out for out, needed in pairs if not needed))
        return q_out, k_out

    @staticmethod
    @once_differentiable
    @pinned_backward
    def backward(ctx, dq, dk):
        wanted = [dy for dy in (dq, dk) if dy is not None]
        turned = iter(())
        if wanted:
            pair, back = (*wanted, None)[:2], (*ctx.options[:-1], True)
            turned = iter(_turned(*pair, *ctx.saved_tensors, *back))
        return tuple(None if dy is None else next(turned) for dy in (dq, dk)) + (None,) * (4 + len(ctx.options))


def _fake(q: torch.Tensor, k: torch.Tensor | None, *_others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_like(q), q.new_empty(0) if k is None else empty_like(k)


def _saved(inputs: tuple[Any, ...], _outputs: Any) -> tuple[Any, ...]:
    """Return the tensors that angles come of, which arguments were given, and the options."""
    given = [one is not None for one in inputs[1:6]]
    return (*(one for one in inputs[2:6] if one is not None), given, inputs[6:])


def _graph_gradients(*saved: Any) -> tuple[Any, ...]:
    *tensors, (has_k, *given), options, dq, dk = saved
    left = iter(tensors)
    rest = (*(next(left) if there else None for there in given), *options[:-1], True)
    dq, dk = _graph_backward(dq, dk if has_k else None, *rest)
    return (dq, dk if has_k else None, *(None for _one in rest))


_graph_forward = graph_operator("rope", _turned, fake=_fake)
_graph_backward = graph_operator("rope_backward", _turned, fake=_fake, phase="backward")
differentiate(_graph_forward, _graph_gradients, _saved)


_door = operands.Door("rope", "q", "k", "positions", "cos", "sin", "inv_freq", any_dtype=("positions", "inv_freq"))


@implements("rope", backend_id="rlkernel.triton.rope", unavailable=unavailable)
def rope(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    theta: float = 10_000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    layout: str = "bshd",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Turn pairs of q's and k's columns by angles that grow with the position (Su et al., arXiv:2104.09864).

    Column i's pair (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin), in fp32, rounded once. A token's bits depend on
    its values and its position alone. The gradient is turned back by the same angles; only q and k have one.

    Args:
        q: [..., tokens, heads, dim], or [..., heads, tokens, dim] with layout "bhsd"; bf16, fp16 or fp32. Rows of
            neighbouring columns are read in place (a part of a packed qkv, a transposed view), others copied.
        k: None, or q's shape, dtype and device with its own number of heads.
        positions: [tokens], [1, tokens] or [..., tokens], int32 or int64, exact below 2**24; None: 0, 1, 2 ...
        cos: instead of positions, [tokens, rotary_dim / 2], with leading axes as positions; bf16, fp16 or fp32. Of
            twice this width (as Hugging Face makes it) the left half is read.
        sin: cos' shape.
        inv_freq: [rotary_dim / 2], fp32, angle of one position, in place of theta (scaled frequencies).
        theta: inv_freq = theta ** (-2 i / rotary_dim); each value compiles a kernel of its own.
        rotary_dim: how many columns are turned, even; the others are copied. None: all.
        interleaved: pair columns 2i and 2i + 1 (GPT-J, DeepSeek) instead of i and i + rotary_dim / 2 (GPT-NeoX, Llama).
        layout: "bshd" or "bhsd".

    Returns:
        q turned, or (q turned, k turned), of their shapes and dtypes, contiguous, never q's or k's memory.

    Raises:
        ValueError: shapes, layout, rotary_dim or theta do not fit, angles are given in two ways, or different devices.
        TypeError: another dtype, k's dtype is not q's, positions are not integers, or a tensor subclass.
    """
    _door(q, k, positions, cos, sin, inv_freq)
    width = check_rope(q, k, positions, cos, sin, inv_freq, theta, rotary_dim, layout)
    options = (float(theta), width, interleaved, layout, False)
    if torch.compiler.is_compiling():
        q_out, k_out = _graph_forward(q, k, positions, cos, sin, inv_freq, *options)
    elif operands.grad_enabled(q, k):
        q_out, k_out = _Rope.apply(q, k, positions, cos, sin, inv_freq, *options)
    else:
        q_out, k_out = _turned(q, k, positions, cos, sin, inv_freq, *options)
    return q_out if k is None else (q_out, k_out)
