"""GEMM of one ascending chain over K an element: C = A B + bias, plain, batched or by segments; kernels beside."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from rl_engine.backends.reference.gemm.det_gemm import InputPrecision, check_det_gemm
from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import pin_autotune, pinned_backward
from rl_engine.backends.shared.triton.compiler import unavailable
from rl_engine.backends.shared.triton.descriptors import lies_transposed
from rl_engine.backends.shared.triton.gemm.launch import multiply_depths, multiply_segments
from rl_engine.backends.shared.triton.gemm.product import multiply
from rl_engine.backends.shared.triton.graph import differentiate, graph_operator
from rl_engine.backends.spec import implements

if TYPE_CHECKING:
    from rl_engine.backends.shared.triton.gemm.rule import Precision

_MATRIX = 2  # axes


def _precision(dtype: torch.dtype, input_precision: str) -> Precision:
    if dtype != torch.float32:
        return "half"
    return "tf32" if input_precision == "tf32" else "ieee"


def _is_batched(b: torch.Tensor, offsets: torch.Tensor | None) -> bool:
    return offsets is None and b.dim() > _MATRIX


def _merged(tensor: torch.Tensor, kept: int) -> torch.Tensor:
    """Return a tensor with the axes before the last ``kept`` merged into one: a view where its strides allow."""
    shape = tensor.shape
    return tensor if tensor.dim() == kept + 1 else tensor.reshape(math.prod(shape[:-kept]), *shape[-kept:])


def _rows(tensor: torch.Tensor, *, batched: bool) -> torch.Tensor:
    """Return a or dy as [rows, .], or [batch, rows, .]."""
    return _merged(tensor, _MATRIX if batched else 1)


def _weights(b: torch.Tensor) -> torch.Tensor:
    """Return b, or its gradient, as [K, N], or [batch or groups, K, N]."""
    return b if b.dim() == _MATRIX else _merged(b, _MATRIX)


def _product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor | None,
    out: torch.Tensor, precision: Precision,
) -> None:  # fmt: skip
    """Write the product to ``out``, which is contiguous."""
    batched = _is_batched(b, offsets)
    x, y, out = _rows(a, batched=batched), _weights(b), _rows(out, batched=batched)
    if offsets is None:
        multiply(x, y, out, precision, bias=None if bias is None else bias.contiguous())
    else:
        multiply_segments(x, y, offsets, out, precision)


def _forward(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor | None,
    out_dtype: torch.dtype, input_precision: str,
) -> torch.Tensor:  # fmt: skip
    out = _fake_forward(a, b, bias, offsets, out_dtype, input_precision)
    _product(a, b, bias, offsets, out, _precision(a.dtype, input_precision))
    return out


def _fake_forward(
    a: torch.Tensor, b: torch.Tensor, _bias: torch.Tensor | None, _offsets: torch.Tensor | None,
    out_dtype: torch.dtype, _input_precision: str,
) -> torch.Tensor:  # fmt: skip
    return torch.empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype, device=a.device)


class _How(NamedTuple):
    """What backward has to know beside tensors.

    Attributes:
        dtype: of a, b and their gradients.
        bias_dtype: of bias; None where its gradient is not wanted.
        input_precision: of fp32 operands.
        batched: b has batch axes.
        turned: b lies in memory as [N, K], as a layer's weight does: so will its gradient.
    """

    dtype: torch.dtype
    bias_dtype: torch.dtype | None
    input_precision: str
    batched: bool
    turned: bool

    @classmethod
    def of(
        cls, b: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor | None, input_precision: str,
        *, wants_dbias: bool,
    ) -> _How:  # fmt: skip
        bias_dtype = bias.dtype if bias is not None and wants_dbias else None
        return cls(b.dtype, bias_dtype, input_precision, _is_batched(b, offsets), bool(lies_transposed(b)))


def _backward(
    a: torch.Tensor | None, b: torch.Tensor | None, offsets: torch.Tensor | None, dy: torch.Tensor,
    dtype: torch.dtype, bias_dtype: torch.dtype | None, input_precision: str, batched: bool, turned: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of a (b is given), b (a is given) and bias (it has a dtype); an empty tensor for others."""
    da, db, dbias = _fake_backward(a, b, offsets, dy, dtype, bias_dtype, input_precision, batched, turned)
    precision, dy = _precision(dtype, input_precision), dy.to(dtype)  # tensor cores multiply one dtype
    if b is not None:
        _product(dy, b.mT, None, offsets, da, precision)
    if a is not None:
        _gradient_of_b(a, dy, offsets, db, precision, None, batched=batched)
    if bias_dtype is not None:
        rows = _rows(dy, batched=False)
        multiply(dy.new_ones((1, 1)).expand(1, len(rows)), rows, dbias.view(1, -1), precision, changing="k")
    return da, db, dbias


def _fake_backward(
    a: torch.Tensor | None, b: torch.Tensor | None, offsets: torch.Tensor | None, dy: torch.Tensor,
    dtype: torch.dtype, bias_dtype: torch.dtype | None, _input_precision: str, batched: bool, turned: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    da = torch.empty((0,) if b is None else (*dy.shape[:-1], b.shape[-2]), dtype=dtype, device=dy.device)
    if a is None:
        db = torch.empty((0,), dtype=dtype, device=dy.device)
    else:
        lead = dy.shape[:-2] if batched else () if offsets is None else (offsets.shape[0] - 1,)
        sides = (dy.shape[-1], a.shape[-1]) if turned else (a.shape[-1], dy.shape[-1])
        db = torch.empty((*lead, *sides), dtype=dtype, device=dy.device)
        db = db.mT if turned else db
    n_biases = (0,) if bias_dtype is None else dy.shape[-1:]
    return da, db, torch.empty(n_biases, dtype=bias_dtype or dtype, device=dy.device)


def _gradient_of_b(
    a: torch.Tensor, dy: torch.Tensor, offsets: torch.Tensor | None, out: torch.Tensor,
    precision: Precision, start: torch.Tensor | None, *, batched: bool,
) -> None:  # fmt: skip
    x, dy, out = _rows(a, batched=batched), _rows(dy, batched=batched), _weights(out)
    start = None if start is None else _weights(start)
    if offsets is None:
        multiply(x.mT, dy, out, precision, start=start, changing="k")
    else:
        multiply_depths(x.mT, dy, offsets, out, precision, start=start)


def _continue(a: torch.Tensor, offsets: torch.Tensor | None, dy: torch.Tensor, how: _How, into: torch.Tensor) -> None:
    """Let the chains of b's gradient go on from ``into``, in place."""
    precision = _precision(how.dtype, how.input_precision)
    _gradient_of_b(a, dy.to(how.dtype), offsets, into, precision, into, batched=how.batched)
    torch.autograd.graph.increment_version(into)


class _DetGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, bias, offsets, out_dtype, input_precision, into):
        pin_autotune(ctx)
        wants_da, wants_db, wants_dbias = ctx.needs_input_grad[:3]
        # a frozen weight's input is let go, and so is a weight whose input needs no gradient
        ctx.save_for_backward(a if wants_db else None, b if wants_da else None, offsets)
        ctx.how = _How.of(b, bias, offsets, input_precision, wants_dbias=wants_dbias)
        ctx.into = into  # not saved: a saved tensor must not change, and every backward changes this one
        return _forward(a, b, bias, offsets, out_dtype, input_precision)

    @staticmethod
    @once_differentiable
    @pinned_backward
    def backward(ctx, dy):
        a, b, offsets = ctx.saved_tensors
        found = _backward(a if ctx.into is None else None, b, offsets, dy, *ctx.how)
        if a is not None and ctx.into is not None:
            _continue(a, offsets, dy, ctx.how, ctx.into)
        wanted = (b is not None, a is not None and ctx.into is None, ctx.how.bias_dtype is not None)
        return *_kept(found, wanted), None, None, None, None


def _kept(found: tuple[torch.Tensor, ...], wanted: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(one if keep else None for one, keep in zip(found, wanted, strict=True))


def graph_gemm(name: str, backend: str = "") -> Any:
    """Register GEMM for ``torch.compile`` under a name, for a tuned backend or the default one, and return it."""
    forward = graph_operator(name, _forward, fake=_fake_forward, backend=backend)
    backward = graph_operator(f"{name}_backward", _backward, fake=_fake_backward, phase="backward", backend=backend)

    def gradients(*saved_and_dy: Any) -> tuple[Any, ...]:
        *tensors, has_a, has_b, has_offsets, how, dy = saved_and_dy
        given = iter(tensors)
        a, b, offsets = (next(given) if here else None for here in (has_a, has_b, has_offsets))
        found = backward(a, b, offsets, dy, *how)
        return *_kept(found, (has_b, has_a, how.bias_dtype is not None)), None, None, None

    differentiate(forward, gradients, _graph_save)
    return forward


def _graph_save(inputs: tuple[Any, ...], _out: torch.Tensor) -> tuple[Any, ...]:
    a, b, bias, offsets, _out_dtype, input_precision = inputs
    kept = (a if b.requires_grad else None, b if a.requires_grad else None, offsets)
    how = _How.of(b, bias, offsets, input_precision, wants_dbias=bias is not None and bias.requires_grad)
    return *(one for one in kept if one is not None), *(one is not None for one in kept), how


_graph_forward = graph_gemm("det_gemm")


def _eager(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor | None,
    out_dtype: torch.dtype, input_precision: str, into: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    if operands.grad_enabled(a, b, bias):
        return _DetGemm.apply(a, b, bias, offsets, out_dtype, input_precision, into)
    return _forward(a, b, bias, offsets, out_dtype, input_precision)


_door = operands.Door(
    "det_gemm", "a", "b", "bias", "offsets", "accumulate_into", any_dtype=("offsets", "accumulate_into")
)


@implements("det_gemm", backend_id="rlkernel.triton.det_gemm", unavailable=unavailable)
def det_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    offsets: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    input_precision: InputPrecision = "ieee",
    accumulate_into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``a @ b + bias``: each element one chain over K in ascending order in fp32, rounded once.

    An element's bits depend on K, its row of a and its column of b alone: not on M, N, strides, alignment or launch.

    Args:
        a: [..., M, K], or [..., K] with b [K, N]: bf16, fp16 or fp32. Any strides; leading axes that do not merge into
            one are copied.
        b: [K, N], [..., K, N] with a's leading axes, or [groups, K, N] with offsets; a's dtype, any strides, so a
            weight [N, K] is passed as ``weight.mT``.
        bias: [N], added in fp32 before rounding; with b [K, N] only. Its gradient is one chain over the rows.
        offsets: [groups + 1], int32 or int64, rising from 0 to rows: row r of a [rows, K] is multiplied by b[g] where
            offsets[g] <= r < offsets[g + 1]; rows of no group give zeros. Read on the device alone.
        out_dtype: a's dtype (None) or float32, which leaves the sums as they are.
        input_precision: of fp32 operands. "ieee": fused multiply-adds; "tf32": tensor cores, which read 10 bits of each
            fraction (AMD cards from gfx950 on have none and compute "ieee"). Whatever torch's own settings say.
        accumulate_into: b's shape, fp32, contiguous as it is or as [..., N, K] (a weight's gradient buffer is passed as
            ``main_grad.mT``): backward continues the chains of b's gradient from it, in place, and b itself gets none.
            Micro-batches of a multiple of 16 rows leave the bits of one batch of all rows. It breaks a graph of
            torch.compile.

    Returns:
        [..., M, N], contiguous. A gradient wider than a is rounded to a's dtype before it is multiplied; b's own lies
        in memory as b does, by rows or by columns.

    Raises:
        ValueError: shapes that do not fit, another input_precision, different devices, or one that Triton does not run
            on.
        TypeError: other or different dtypes, or a tensor subclass.
    """
    return checked_gemm(
        a, b, bias, offsets=offsets, out_dtype=out_dtype, input_precision=input_precision,
        accumulate_into=accumulate_into, in_graph=_graph_forward,
    )  # fmt: skip


def checked_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    offsets: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    input_precision: InputPrecision = "ieee",
    accumulate_into: torch.Tensor | None = None,
    in_graph: Any,
) -> torch.Tensor:
    """Return `det_gemm` of the same arguments; ``in_graph`` is what stands for it inside ``torch.compile``."""
    _door(a, b, bias, offsets, accumulate_into)
    check_det_gemm(a, b, bias, offsets, out_dtype, input_precision, accumulate_into)
    out_dtype = out_dtype or a.dtype
    if not torch.compiler.is_compiling():
        return _eager(a, b, bias, offsets, out_dtype, input_precision, accumulate_into)
    if accumulate_into is not None:  # backward writes to it, which no graph may hold: the graph breaks here
        return torch.compiler.disable(_eager)(a, b, bias, offsets, out_dtype, input_precision, accumulate_into)
    return in_graph(a, b, bias, offsets, out_dtype, input_precision)
