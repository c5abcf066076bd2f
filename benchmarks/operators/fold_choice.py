"""Time the ways to order a row sum that keep its bits, so that a contract can name one of them.

Two questions, asked once per card: does `rms_norm` fold the whole row, or keep fixed lanes and fold those once; and
does the log-sum-exp fold whole chunks, or keep fixed lanes. Every variant is compared with float64, and over its
launches byte for byte, before it is timed.

    python -m benchmarks.operators.fold_choice --out fold_choice.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from rl_engine.backends.shared.triton.operands import power_of_two
from rl_engine.backends.shared.triton.primitives.folds import fold_columns, rounded_product
from rl_engine.backends.shared.triton.primitives.logsumexp import LOG2E, merge_chunk
from rl_engine.platforms.tuning.timer import GraphTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EPS = 1e-6
SAMPLES = 15
CHECKED_ROWS = 64  # compared with float64


@dataclass(frozen=True)
class Timing:
    """One launch of one variant: ``order`` of the sum and its ``width``, how it was launched, and what came of it."""

    operator: str
    rows: int
    cols: int
    order: str
    width: int
    launch: str
    time_us: float
    error: float
    equal: bool  # to the bytes of the variant's first launch


@triton.jit
def _rms_row_kernel(x_ptr, w_ptr, y_ptr, n_rows, n_cols, COLS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    mask = (row < n_rows)[:, None] & (col < n_cols)[None, :]
    offsets = (row * n_cols)[:, None] + col[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(fold_columns(rounded_product(x, x), ROWS, COLS) / n_cols + 1e-6)
    tl.store(y_ptr + offsets, (x * rstd[:, None] * w[None, :]).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_lanes_kernel(x_ptr, w_ptr, y_ptr, n_rows, n_cols, COLS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, COLS)
    sums = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, n_cols, COLS):
        mask = (row < n_rows)[:, None] & (start + lane < n_cols)[None, :]
        x = tl.load(x_ptr + (row * n_cols)[:, None] + (start + lane)[None, :], mask=mask, other=0.0).to(tl.float32)
        sums = tl.fma(x, x, sums)
    rstd = tl.rsqrt(fold_columns(sums, ROWS, COLS) / n_cols + 1e-6)
    for start in range(0, n_cols, COLS):
        mask = (row < n_rows)[:, None] & (start + lane < n_cols)[None, :]
        offsets = (row * n_cols)[:, None] + (start + lane)[None, :]
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + start + lane, mask=start + lane < n_cols, other=0.0).to(tl.float32)
        tl.store(y_ptr + offsets, (x * rstd[:, None] * w[None, :]).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _lse_chunk_kernel(z_ptr, lse_ptr, n_cols, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, COLS)
    m = tl.full((1,), -float("inf"), tl.float32)
    s = tl.zeros((1,), tl.float32)
    for start in range(0, n_cols, COLS):
        z = tl.load(z_ptr + row * n_cols + start + lane, mask=start + lane < n_cols, other=-float("inf"))
        m, s = merge_chunk(m, s, tl.reshape(z.to(tl.float32), (1, COLS)), 1, COLS)
    tl.store(lse_ptr + row + tl.arange(0, 1), m + tl.log(s))


@triton.jit
def _lse_lanes_kernel(z_ptr, lse_ptr, n_cols, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, COLS)
    m = -float("inf")
    s = tl.zeros((COLS,), tl.float32)
    for start in range(0, n_cols, COLS):
        z = tl.load(z_ptr + row * n_cols + start + lane, mask=start + lane < n_cols, other=-float("inf"))
        z = z.to(tl.float32)
        m_new = tl.maximum(m, tl.max(z, 0))
        s = tl.fma(s, tl.exp2((m - m_new) * LOG2E), tl.exp2((z - m_new) * LOG2E))
        m = m_new
    total = fold_columns(tl.reshape(s, (1, COLS)), 1, COLS)
    tl.store(lse_ptr + row + tl.arange(0, 1), m + tl.log(total))


def time_rms_norm(rows: int, cols: int) -> Iterator[Timing]:
    """Yield the launches of both orders on random bf16 rows."""
    x, w = _normal(rows, cols), _normal(cols)
    expected = torch.nn.functional.rms_norm(x[:CHECKED_ROWS].double(), (cols,), w.double(), EPS)
    whole = power_of_two(cols)
    variants = [("row", _rms_row_kernel, whole)]
    variants += [("lanes", _rms_lanes_kernel, width) for width in (1024, 2048) if width < whole]
    for order, kernel, width in variants:
        first: torch.Tensor | None = None
        for per_program, warps in itertools.product((1, 4, 16), (4, 8, 16)):
            if not 4 <= per_program * width // (warps * 32) <= 64:  # elements a thread
                continue
            y = torch.full_like(x, float("nan"))

            def launch(_set: int = 0, kernel=kernel, y=y, width=width, per_program=per_program, warps=warps) -> None:
                grid = (-(-rows // per_program),)
                kernel[grid](x, w, y, rows, cols, width, per_program, num_warps=warps, enable_fp_fusion=True)

            launch()
            first = y if first is None else first
            error = _error(y[:CHECKED_ROWS], expected)
            name = f"ROWS={per_program} num_warps={warps}"
            yield Timing("rms_norm", rows, cols, order, width, name, _time_us(launch), error, torch.equal(y, first))


def time_log_sum_exp(rows: int, cols: int) -> Iterator[Timing]:
    """Yield the launches of both orders on random bf16 logits, one program a row."""
    z = _normal(rows, cols) * 3
    expected = torch.logsumexp(z[:CHECKED_ROWS].double(), 1)
    variants = (("chunk", _lse_chunk_kernel), ("lanes", _lse_lanes_kernel))
    for (order, kernel), width in itertools.product(variants, (4096, 16384)):
        first: torch.Tensor | None = None
        for warps in (4, 8, 16):
            if width // (warps * 32) > 64:  # elements a thread
                continue
            lse = torch.full((rows,), float("nan"), device="cuda")

            def launch(_set: int = 0, kernel=kernel, lse=lse, width=width, warps=warps) -> None:
                kernel[(rows,)](z, lse, cols, width, num_warps=warps, enable_fp_fusion=True)

            launch()
            first = lse if first is None else first
            error = _error(lse[:CHECKED_ROWS], expected)
            name = f"num_warps={warps}"
            yield Timing("logp", rows, cols, order, width, name, _time_us(launch), error, torch.equal(lse, first))


def best(timings: list[Timing]) -> list[Timing]:
    """Return the fastest launch of every variant; raises RuntimeError where a variant's launches differ in bytes."""
    found: dict[tuple[Any, ...], Timing] = {}
    for one in timings:
        variant = (one.operator, one.rows, one.cols, one.order, one.width)
        if not one.equal:
            raise RuntimeError(f"{variant}: {one.launch} gives other bytes; its time says nothing")
        if variant not in found or one.time_us < found[variant].time_us:
            found[variant] = one
    return list(found.values())


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected).abs().max() / expected.abs().max()).item()


def _time_us(launch: Callable[[int], None]) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sample = GraphTimer().prepare(launch, rotation=1)
        times = [sample() for _ in range(SAMPLES)]
    torch.cuda.current_stream().wait_stream(stream)
    return statistics.median(times)


def main() -> None:
    """Time all variants, write them as JSON and print the best of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    out = parser.parse_args().out
    torch.manual_seed(0)
    timings = []
    for rows, cols in ((16384, 4096), (16384, 5120), (64, 4096), (655360, 128)):
        timings += time_rms_norm(rows, cols)
    for rows, cols in ((64, 151936), (4096, 32768), (8192, 128256)):
        timings += time_log_sum_exp(rows, cols)
    out.write_text(json.dumps({"rows": [asdict(one) for one in timings]}, indent=1) + "\n")
    print("| operator | shape | order | width | best launch | us | error |\n|---|---|---|---|---|---|---|")
    for one in best(timings):
        shape = f"[{one.rows}, {one.cols}]"
        row = (one.operator, shape, one.order, one.width, one.launch, f"{one.time_us:.2f}", f"{one.error:.1e}")
        print("|", " | ".join(map(str, row)), "|")


if __name__ == "__main__":
    main()
