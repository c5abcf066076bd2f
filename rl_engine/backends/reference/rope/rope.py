"""Rotary position embedding: the declaration and the PyTorch operator."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rl_engine.backends.reference.dtypes import require_float, wide
from rl_engine.backends.spec import Case, InputMaker, Inputs, Tolerance, Traffic, operator

if TYPE_CHECKING:
    from collections.abc import Sequence

_THETA = 10_000.0  # of the tables that cases are timed with
LAYOUTS = ("bshd", "bhsd")


def _inputs(
    make: InputMaker,
    heads: int,
    kv_heads: int,
    dim: int,
    rows: int | None = None,
    tokens: int = 1,
    batch: int = 1,
    width: int = 0,
) -> Inputs:
    """Return [rows, heads, dim] with a position each, or [batch, tokens, heads, dim] with tables.

    ``width`` above dim makes q the end of heads that wide, as DeepSeek's q_pe is.
    """
    if rows is not None:
        positions = make.integers(0, 131_072, rows)
        return Inputs((make.normal(rows, heads, dim), make.normal(rows, kv_heads, dim), positions), {}, (0, 1))
    q = make.normal(batch, tokens, heads, width or dim)[..., -dim:]
    cos, sin = _tables(batch, tokens, dim, q.device)
    if not kv_heads:
        return Inputs((q,), {"cos": cos, "sin": sin})
    return Inputs((q, make.normal(batch, tokens, kv_heads, dim)), {"cos": cos, "sin": sin}, (0, 1))


def _tables(batch: int, tokens: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [tokens, dim / 2], or [batch, 1, dim / 2] where every sequence is at another position."""
    positions = torch.arange(_table_rows(batch, tokens), device=device)
    angle = positions[:, None].float() * frequencies(_THETA, dim, device)
    angle = angle.view(batch, 1, -1) if tokens == 1 else angle
    return angle.cos(), angle.sin()


def _table_rows(batch: int, tokens: int) -> int:
    return batch if tokens == 1 else tokens


def _traffic(
    itemsize: int,
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    tokens: int,
    batch: int = 1,
    **_others: object,
) -> Traffic:
    moved = 2 * itemsize * batch * tokens * (heads + kv_heads) * dim + 2 * 4 * _table_rows(batch, tokens) * (dim // 2)
    return Traffic(forward=moved, backward=moved)


def frequencies(theta: float, rotary_dim: int, device: torch.device) -> torch.Tensor:
    """Return ``theta ** (-2 i / rotary_dim)`` [rotary_dim / 2], computed in fp64 and rounded once to fp32."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / -rotary_dim
    return torch.pow(theta, exponent).float()


def check_rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    inv_freq: torch.Tensor | None,
    theta: float,
    rotary_dim: int | None,
    layout: str,
) -> int:
    """Raise unless the arguments fit together; returns the width that is rotated."""
    if layout not in LAYOUTS:
        raise ValueError(f"rope: layout is {layout!r}; pass one of {', '.join(LAYOUTS)}")
    axes = "tokens, heads" if layout == "bshd" else "heads, tokens"
    if q.dim() < 3 or q.shape[-1] < 2:
        raise ValueError(f"rope: q is {list(q.shape)}; pass [..., {axes}, dim] with dim of at least 2")
    leading = leading_of(q, layout)
    if k is not None:
        _check_k(k, q, axes, layout)
    width = q.shape[-1] if rotary_dim is None else rotary_dim
    if not 2 <= width <= q.shape[-1] or width % 2:
        raise ValueError(f"rope: rotary_dim is {width}, dim is {q.shape[-1]}; pass an even number from 2 to dim")
    if cos is None and sin is None:
        _check_frequencies(positions, inv_freq, theta, width, leading)
    elif cos is None or sin is None:
        raise ValueError("rope: one of cos and sin is missing; pass both, or positions")
    elif positions is not None or inv_freq is not None:
        raise ValueError("rope: tables came with positions or inv_freq; pass cos and sin alone, or none of the two")
    else:
        _check_tables(cos, sin, width, leading)
    return width


def _check_k(k: torch.Tensor, q: torch.Tensor, axes: str, layout: str) -> None:
    if k.dim() != q.dim() or leading_of(k, layout) != leading_of(q, layout) or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"rope: k is {list(k.shape)}, q is {list(q.shape)}; only their heads may differ, of [..., {axes}, dim]"
        )
    if k.dtype != q.dtype:
        raise TypeError(f"rope: k is {k.dtype}, q is {q.dtype}; pass equal dtypes")


def _check_tables(cos: torch.Tensor, sin: torch.Tensor, width: int, leading: Sequence[int]) -> None:
    if cos.shape != sin.shape:
        raise ValueError(f"rope: cos is {list(cos.shape)}, sin is {list(sin.shape)}; pass equal shapes")
    if cos.dim() == 0 or cos.shape[-1] not in (width // 2, width):
        raise ValueError(f"rope: cos is {list(cos.shape)}; pass [..., {width // 2}] or, doubled, [..., {width}]")
    _check_per_token("cos", cos, cos.shape[:-1], leading)


def _check_frequencies(
    positions: torch.Tensor | None,
    inv_freq: torch.Tensor | None,
    theta: float,
    width: int,
    leading: Sequence[int],
) -> None:
    if positions is not None:
        if positions.dtype not in (torch.int32, torch.int64):
            # bf16 holds integers up to 256, fp16 up to 2048: no way to tell a rounded position from a right one
            raise TypeError(f"rope: positions are {positions.dtype}; pass int32 or int64")
        _check_per_token("positions", positions, positions.shape, leading)
    if inv_freq is None and not 0 < theta < math.inf:
        raise ValueError(f"rope: theta is {theta}; pass a positive number")
    if inv_freq is not None and inv_freq.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"rope: inv_freq is {inv_freq.dtype}; pass float32 (a model cast to bfloat16 casts its buffer)")
    if inv_freq is not None and inv_freq.shape != (width // 2,):
        raise ValueError(f"rope: inv_freq is {list(inv_freq.shape)}; pass [{width // 2}], half of rotary_dim")


def _check_per_token(name: str, tensor: torch.Tensor, rows: Sequence[int], leading: Sequence[int]) -> None:
    tokens = leading[-1]
    if rows != leading and rows != (tokens,) and rows != (1, tokens):
        raise ValueError(
            f"rope: {name} is {list(tensor.shape)}, q has {list(leading)} tokens; "
            f"pass one row a token, [{tokens}, ...], or one a token of every sequence"
        )


def leading_of(x: torch.Tensor, layout: str) -> Sequence[int]:
    """Return [..., tokens], the shape of ``x`` without heads and dim."""
    return x.shape[:-2] if layout == "bshd" else (*x.shape[:-3], x.shape[-2])


@operator(
    "rope",
    family="rope",
    contract=(
        "rope.v1: inv_freq = theta^(-2i/d) rounded once to fp32 unless given; angle = fp32(position) * inv_freq in"
        " fp32; quarter turns n = floor(fma(angle, 2/pi, 1/2)), r = fma(-n, pi/2, angle) in fp64, rounded to fp32;"
        " sin and cos of r by Cephes' polynomials in fp32 fmas; or both from tables;"
        " y1 = fma(x1, c, -(x2 * s)), y2 = fma(x2, c, x1 * s) with the inner product rounded, rounded once"
    ),
    inputs=_inputs,
    cases=(
        Case("tiny", {"rows": 3, "heads": 3, "kv_heads": 1, "dim": 8}),
        Case("odd", {"rows": 19, "heads": 5, "kv_heads": 2, "dim": 20}),
        Case("partial", {"rows": 7, "heads": 3, "kv_heads": 2, "dim": 40}, {"rotary_dim": 12, "interleaved": True}),
        Case("tables", {"tokens": 6, "batch": 3, "heads": 4, "kv_heads": 2, "dim": 16}),
        Case("decode", {"tokens": 1, "batch": 5, "heads": 3, "kv_heads": 1, "dim": 16}),
        Case("empty", {"rows": 0, "heads": 2, "kv_heads": 1, "dim": 8}),
        Case("small", {"tokens": 1, "batch": 32, "heads": 32, "kv_heads": 8, "dim": 128}, tags=frozenset({"speed"})),
        Case("thr", {"tokens": 4096, "batch": 4, "heads": 32, "kv_heads": 8, "dim": 128}, tags=frozenset({"speed"})),
        Case(
            "thr-mla",
            {"tokens": 8192, "heads": 128, "kv_heads": 0, "dim": 64, "width": 192},
            {"interleaved": True},
            tags=frozenset({"speed"}),
        ),
    ),
    tolerance=Tolerance({"float32": 8, "float16": 1, "bfloat16": 1}, "sin and cos in fp32, two products, one addition"),
    traffic=_traffic,
)
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

    Column i's pair (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin), in fp32 (fp64 for fp64), rounded once.

    Args:
        q: [..., tokens, heads, dim], or [..., heads, tokens, dim] with layout "bhsd"; bf16, fp16, fp32 or fp64.
        k: None, or q's shape and dtype with its own number of heads.
        positions: [tokens], [1, tokens] or [..., tokens], int32 or int64, exact below 2**24; None: 0, 1, 2 ...
        cos: instead of positions, [tokens, rotary_dim / 2], with leading axes as positions; of twice this width (as
            Hugging Face makes it) the left half is read.
        sin: cos' shape.
        inv_freq: [rotary_dim / 2], fp32, angle of one position, in place of theta (scaled frequencies).
        theta: inv_freq = theta ** (-2 i / rotary_dim).
        rotary_dim: how many columns are turned, even; the others are copied. None: all.
        interleaved: pair columns 2i and 2i + 1 (GPT-J, DeepSeek) instead of i and i + rotary_dim / 2 (GPT-NeoX, Llama).
        layout: "bshd" or "bhsd".

    Returns:
        q turned, or (q turned, k turned), of their shapes and dtypes.

    Raises:
        ValueError: shapes, layout, rotary_dim or theta do not fit, or angles are given in two ways.
        TypeError: q, k or a table is not floating point, k's dtype is not q's, or positions are not integers.
    """
    given = {"q": q, "k": k, "cos": cos, "sin": sin, "inv_freq": inv_freq}
    require_float("rope", **{name: one for name, one in given.items() if one is not None})
    width = check_rope(q, k, positions, cos, sin, inv_freq, theta, rotary_dim, layout)
    if cos is None or sin is None:
        tokens = leading_of(q, layout)[-1]
        places = torch.arange(tokens, device=q.device) if positions is None else positions
        step = frequencies(theta, width, q.device) if inv_freq is None else inv_freq
        angle = places.unsqueeze(-1).float() * step.float()
        angle = angle.to(wide(q).dtype)
        cos, sin = angle.cos(), angle.sin()
    heads_axis = -2 if layout == "bshd" else -3
    tables = [wide(table[..., : width // 2]).unsqueeze(heads_axis) for table in (cos, sin)]
    turned = [_turned(x, *tables, width=width, interleaved=interleaved) for x in (q, k) if x is not None]
    return (turned[0], turned[1]) if k is not None else turned[0]


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, width: int, interleaved: bool) -> torch.Tensor:
    value = wide(x)
    pairs = value[..., :width].reshape(*x.shape[:-1], *((width // 2, 2) if interleaved else (2, width // 2)))
    x1, x2 = pairs.unbind(-1 if interleaved else -2)
    y = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1 if interleaved else -2).flatten(-2)
    return torch.cat((y, value[..., width:]), -1).to(x.dtype)
