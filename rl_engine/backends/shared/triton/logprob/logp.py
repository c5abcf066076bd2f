"""Log-probability of selected tokens: logp = (z[target] - max z) - ln(sum), z = logits / temperature, in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from rl_engine.backends.reference.logprob.logp import check_logp, validate_ids
from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.autotuning import TunableKernel, pin_autotune, pinned_backward
from rl_engine.backends.shared.triton.compiler import is_interpreter, unavailable
from rl_engine.backends.shared.triton.graph import differentiate, empty_like, graph_operator
from rl_engine.backends.shared.triton.operands import power_of_two
from rl_engine.backends.shared.triton.primitives.logsumexp import (
    CHUNK,
    log_probability,
    merge_chunk,
    probability,
    scaled,
)
from rl_engine.backends.spec import implements

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_engine.platforms.device import DeviceIdentity

_INTERPRETED_TILE = 1 << 18  # an interpreted program costs milliseconds whatever its size


def _fixed_rows(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    """Return one chunk of one row at a time with 4 warps, or as many short rows as make up a chunk."""
    if is_interpreter(device.arch):
        return {"ROWS": operands.rows_a_program(sizes["n_rows"], _INTERPRETED_TILE // sizes["COLS"], 1), "num_warps": 4}
    most = CHUNK.value // sizes["COLS"]
    return {"ROWS": operands.rows_a_program(sizes["n_rows"], most, device.sm_count), "num_warps": 4}


def _admits_rows(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    """Let through 2 to 64 elements a thread."""
    return 2 <= launch["ROWS"] * sizes["COLS"] // (32 * launch["num_warps"]) <= 64


def _fixed_blocks(sizes: Mapping[str, Any], device: DeviceIdentity) -> dict[str, int]:
    block = min(power_of_two(sizes["n_cols"]), 2048)
    most, programs = (_INTERPRETED_TILE, 1) if is_interpreter(device.arch) else (2048, device.sm_count)
    return {"ROWS": operands.rows_a_program(sizes["n_rows"], most // block, programs), "BLOCK": block, "num_warps": 4}


def _admits_blocks(sizes: Mapping[str, Any], launch: Mapping[str, int]) -> bool:
    """Let through 4 to 32 elements a thread, in blocks as wide as a short row or of at least 1024 columns."""
    per_thread = launch["ROWS"] * launch["BLOCK"] // (32 * launch["num_warps"])
    width = power_of_two(sizes["n_cols"])
    return min(width, 1024) <= launch["BLOCK"] <= width and 4 <= per_thread <= 32


@TunableKernel(
    outputs=("logp_ptr", "norm_ptr"),
    data=("z_ptr",),
    dynamic=("n_rows",),
    fixed=_fixed_rows,
    # chunk width is contract; which rows share a program and how many warps work on them changes no sum
    neutral={"ROWS": (1, 2, 4, 16, 64, 256), "num_warps": (2, 4, 8, 16)},
    admits=_admits_rows,
)
@triton.jit(do_not_specialize=["n_rows"])
def _logp_fwd_kernel(
    z_ptr, target_ptr, logp_ptr, norm_ptr, n_rows, n_cols, z_stride, ignore_index, inverse_temperature,
    SCALED: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the log-probabilities, and to norm_ptr [2, rows] each row's maximum and base-2 logarithm of its sum."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    used = row < n_rows
    z_rows = z_ptr + row * z_stride
    lane = tl.arange(0, COLS)
    m = tl.full((ROWS,), -float("inf"), tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    for start in range(0, n_cols, COLS):
        col = start + lane
        mask = used[:, None] & (col < n_cols)[None, :]
        z = tl.load(z_rows[:, None] + col[None, :], mask=mask, other=-float("inf")).to(tl.float32)
        m, s = merge_chunk(m, s, scaled(z, inverse_temperature, SCALED), ROWS, COLS)
    log2_sum = tl.log2(s)
    target = tl.load(target_ptr + row, mask=used, other=0).to(tl.int64)
    valid = used & (target >= 0) & (target < n_cols)
    chosen = tl.load(z_rows + tl.where(valid, target, 0), mask=valid, other=float("nan")).to(tl.float32)
    logp = log_probability(scaled(chosen, inverse_temperature, SCALED), m, log2_sum)
    tl.store(logp_ptr + row, tl.where(target == ignore_index, 0.0, logp), mask=used)
    tl.store(norm_ptr + row, m, mask=used)
    tl.store(norm_ptr + n_rows + row, log2_sum, mask=used)


@TunableKernel(
    outputs=("dz_ptr",),
    data=("z_ptr", "dlogp_ptr"),
    dynamic=("n_rows",),
    fixed=_fixed_blocks,
    # no sum at all
    neutral={"ROWS": (1, 4, 16, 64), "BLOCK": (16, 64, 256, 1024, 2048, 4096), "num_warps": (4, 8)},
    admits=_admits_blocks,
)
@triton.jit(do_not_specialize=["n_rows"])
def _logp_bwd_kernel(
    z_ptr, target_ptr, norm_ptr, dlogp_ptr, dz_ptr, n_rows, n_cols, z_stride, ignore_index, inverse_temperature,
    SCALED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n_blocks = tl.cdiv(n_cols, BLOCK)
    row = (tl.program_id(0) // n_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) % n_blocks) * BLOCK + tl.arange(0, BLOCK)
    used = row < n_rows
    mask = used[:, None] & (col < n_cols)[None, :]
    target = tl.load(target_ptr + row, mask=used, other=-1).to(tl.int64)
    counted = (target >= 0) & (target < n_cols) & (target != ignore_index)
    z = tl.load(z_ptr + (row * z_stride)[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
    m = tl.load(norm_ptr + row, mask=used, other=0.0)
    log2_sum = tl.load(norm_ptr + n_rows + row, mask=used, other=0.0)
    p = probability(scaled(z, inverse_temperature, SCALED), m[:, None], log2_sum[:, None])
    dlogp = tl.load(dlogp_ptr + row, mask=used, other=0.0)
    coefficient = dlogp * inverse_temperature if SCALED else dlogp
    dz = coefficient[:, None] * (tl.where(col[None, :] == target[:, None], 1.0, 0.0) - p)
    dz = tl.where(counted[:, None], dz, 0.0)
    tl.store(dz_ptr + (row * n_cols)[:, None] + col[None, :], dz.to(dz_ptr.dtype.element_ty), mask=mask)


def _by_blocks(meta: Mapping[str, Any]) -> tuple[int]:
    return (-(-meta["n_rows"] // meta["ROWS"]) * -(-meta["n_cols"] // meta["BLOCK"]),)


_by_rows = operands.blocks("n_rows", "ROWS")


def _forward(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logp [...] and the rows' maxima and base-2 logarithms of their sums [2, ...]."""
    logp = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    norm = torch.empty((2, *targets.shape), dtype=torch.float32, device=logits.device)
    if targets.numel():
        z = operands.as_rows(logits)
        _logp_fwd_kernel[_by_rows](
            z, targets.contiguous(), logp, norm, *z.shape, z.stride(0), ignore_index, 1.0 / temperature,
            SCALED=temperature != 1.0, COLS=min(power_of_two(z.shape[1]), CHUNK.value),
        )  # fmt: skip
    return logp, norm


def _backward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    norm: torch.Tensor,
    dlogp: torch.Tensor,
    ignore_index: int,
    temperature: float,
) -> torch.Tensor:
    dz = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if targets.numel():
        z = operands.as_rows(logits)
        _logp_bwd_kernel[_by_blocks](
            z, targets.contiguous(), norm, dlogp.contiguous(), dz, *z.shape, z.stride(0), ignore_index,
            1.0 / temperature, SCALED=temperature != 1.0,
        )  # fmt: skip
    return dz


class _LogP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, ignore_index, temperature):
        pin_autotune(ctx)
        logp, norm = _forward(logits, targets, ignore_index, temperature)
        ctx.save_for_backward(logits, targets, norm)
        ctx.options = (ignore_index, temperature)
        return logp

    @staticmethod
    @once_differentiable
    @pinned_backward
    def backward(ctx, dlogp):
        return _backward(*ctx.saved_tensors, dlogp, *ctx.options), None, None, None


def _fake_forward(
    logits: torch.Tensor, targets: torch.Tensor, _ignore_index: int, _temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = (targets.shape, (2, *targets.shape))
    logp, norm = (torch.empty(shape, dtype=torch.float32, device=logits.device) for shape in shapes)
    return logp, norm


_graph_forward = graph_operator("logp", _forward, fake=_fake_forward)
_graph_backward = graph_operator("logp_backward", _backward, fake=empty_like, phase="backward")
differentiate(
    _graph_forward,
    lambda logits, targets, norm, ignore_index, temperature, dlogp, _dnorm: (
        _graph_backward(logits, targets, norm, dlogp, ignore_index, temperature),
        None,
        None,
        None,
    ),
    lambda inputs, outputs: (*inputs[:2], outputs[1], *inputs[2:]),
)


@implements("logp", backend_id="rlkernel.triton.logp", unavailable=unavailable)
def logp(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    validate: bool = False,
) -> torch.Tensor:
    """Return ``log_softmax(logits / temperature)`` at ``targets``, in fp32. A row's bits depend on that row alone.

    Args:
        logits: [..., vocab], bf16, fp16 or fp32; rows of neighbouring columns are read in place, others copied.
        targets: [...], int32 or int64. ``ignore_index`` gives 0 and a zero gradient row. Another id outside
            [0, vocab) gives NaN and a zero gradient row; nothing is read out of bounds.
        ignore_index: the id that marks padding.
        temperature: positive; 1.0 leaves the logits as they are, bit for bit.
        validate: raise for ids out of range, at the price of waiting for the device.

    Returns:
        [...], fp32.

    Raises:
        ValueError: shapes or devices disagree, temperature is not positive, or ``validate`` found an id out of range.
        TypeError: a tensor subclass, logits of another dtype, or targets that are not int32 or int64.
    """
    operands.require_tensors("logp", logits=logits, targets=targets)
    operands.require_floats("logp", logits=logits)
    check_logp(logits, targets, temperature)
    if validate:
        validate_ids(targets, logits.shape[-1], ignore_index)
    if torch.compiler.is_compiling():
        return _graph_forward(logits, targets, ignore_index, temperature)[0]
    if operands.grad_enabled(logits):
        return _LogP.apply(logits, targets, ignore_index, temperature)
    return _forward(logits, targets, ignore_index, temperature)[0]
