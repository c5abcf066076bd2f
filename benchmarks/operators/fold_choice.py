"""Time the ways to order a row sum that keep its bits, so that a contract can name one of them.

Two questions, asked once per card: does `rms_norm` fold the whole row or keep fixed lanes and fold them once, and does
the log-sum-exp fold whole chunks, 256-column sub-chunks, or fixed lanes? Every variant is checked against float64 and
across warp counts before it is timed.

    python -m benchmarks.operators.fold_choice --out fold_choice.json
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _fold(x, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr):
    for step in tl.static_range(STEPS):
        x = tl.sum(tl.reshape(x, (ROWS, COLS >> (step + 1), 2)), 2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def _rms_row_kernel(
    x_ptr, w_ptr, y_ptr, n_rows, H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    mask = (row < n_rows)[:, None] & (col < H)[None, :]
    offsets = row[:, None] * H + col[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + col, mask=col < H, other=0.0).to(tl.float32)
    total = _fold(tl.fma(x, x, tl.zeros_like(x)), ROWS, COLS, STEPS)
    rstd = tl.rsqrt(total * (1.0 / H) + 1e-6)
    tl.store(y_ptr + offsets, (x * rstd[:, None] * w[None, :]).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_lanes_kernel(
    x_ptr, w_ptr, y_ptr, n_rows, H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    base = x_ptr + row[:, None] * H
    lane = tl.arange(0, COLS)
    inside = (row < n_rows)[:, None]
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for start in tl.static_range(0, H, COLS):
        col = start + lane
        x = tl.load(base + col[None, :], mask=inside & (col < H)[None, :], other=0.0).to(tl.float32)
        acc = tl.fma(x, x, acc)
    rstd = tl.rsqrt(_fold(acc, ROWS, COLS, STEPS) * (1.0 / H) + 1e-6)
    for start in tl.static_range(0, H, COLS):
        col = start + lane
        mask = inside & (col < H)[None, :]
        x = tl.load(base + col[None, :], mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + col, mask=col < H, other=0.0).to(tl.float32)
        y = (x * rstd[:, None] * w[None, :]).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row[:, None] * H + col[None, :], y, mask=mask)


@triton.jit
def _merge(m, s, m_c, s_c):
    m_new = tl.maximum(m, m_c)
    return m_new, tl.fma(s, tl.exp2((m - m_new) * LOG2E), s_c * tl.exp2((m_c - m_new) * LOG2E))


@triton.jit
def _lse_chunk_kernel(
    z_ptr, m_ptr, s_ptr, V: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, CHUNKS: tl.constexpr,
    STEPS: tl.constexpr, SUB_STEPS: tl.constexpr, N_CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * CHUNKS
    for c in tl.range(first, min(first + CHUNKS, N_CHUNKS), num_stages=STAGES):
        col = c * CHUNK + tl.arange(0, CHUNK)
        z = tl.load(z_ptr + row * V + col, mask=col < V, other=-float("inf")).to(tl.float32)
        if SUB == CHUNK:
            m_c = tl.max(z, 0)
            e = tl.exp2((z - m_c) * LOG2E)
            s_c = tl.sum(_fold(tl.reshape(e, (1, CHUNK)), 1, CHUNK, STEPS), 0)
        else:
            tile = tl.reshape(z, (CHUNK // SUB, SUB))
            m_s = tl.max(tile, 1)
            base = tl.where(m_s == -float("inf"), 0.0, m_s)
            s_s = _fold(tl.exp2((tile - base[:, None]) * LOG2E), CHUNK // SUB, SUB, SUB_STEPS)
            m_c = tl.max(m_s, 0)
            scaled = s_s * tl.exp2((m_s - m_c) * LOG2E)
            scaled = tl.reshape(scaled, (1, CHUNK // SUB))
            s_c = tl.sum(_fold(scaled, 1, CHUNK // SUB, STEPS - SUB_STEPS), 0)
        tl.store(m_ptr + row * N_CHUNKS + c, m_c)
        tl.store(s_ptr + row * N_CHUNKS + c, s_c)


@triton.jit
def _lse_merge_kernel(m_ptr, s_ptr, lse_ptr, N_CHUNKS: tl.constexpr):
    row = tl.program_id(0)
    m = tl.load(m_ptr + row * N_CHUNKS)
    s = tl.load(s_ptr + row * N_CHUNKS)
    for c in range(1, N_CHUNKS):
        m, s = _merge(m, s, tl.load(m_ptr + row * N_CHUNKS + c), tl.load(s_ptr + row * N_CHUNKS + c))
    tl.store(lse_ptr + row, m + tl.log(s))


@triton.jit
def _lse_row_kernel(
    z_ptr, lse_ptr, V: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, STEPS: tl.constexpr,
    SUB_STEPS: tl.constexpr, N_CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    m = -float("inf")
    s = 0.0
    for c in tl.range(0, N_CHUNKS, num_stages=STAGES):
        col = c * CHUNK + tl.arange(0, CHUNK)
        z = tl.load(z_ptr + row * V + col, mask=col < V, other=-float("inf")).to(tl.float32)
        if SUB == CHUNK:
            m_c = tl.max(z, 0)
            e = tl.exp2((z - m_c) * LOG2E)
            s_c = tl.sum(_fold(tl.reshape(e, (1, CHUNK)), 1, CHUNK, STEPS), 0)
        else:
            tile = tl.reshape(z, (CHUNK // SUB, SUB))
            m_s = tl.max(tile, 1)
            base = tl.where(m_s == -float("inf"), 0.0, m_s)
            s_s = _fold(tl.exp2((tile - base[:, None]) * LOG2E), CHUNK // SUB, SUB, SUB_STEPS)
            m_c = tl.max(m_s, 0)
            scaled = tl.reshape(s_s * tl.exp2((m_s - m_c) * LOG2E), (1, CHUNK // SUB))
            s_c = tl.sum(_fold(scaled, 1, CHUNK // SUB, STEPS - SUB_STEPS), 0)
        m, s = _merge(m, s, m_c, s_c)
    tl.store(lse_ptr + row, m + tl.log(s))


@triton.jit
def _lse_lanes_kernel(z_ptr, lse_ptr, V: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    m = -float("inf")
    s = tl.zeros((CHUNK,), tl.float32)
    for c in tl.range(0, tl.cdiv(V, CHUNK), num_stages=STAGES):
        col = c * CHUNK + tl.arange(0, CHUNK)
        z = tl.load(z_ptr + row * V + col, mask=col < V, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(z, 0))
        s = tl.fma(s, tl.exp2((m - m_new) * LOG2E), tl.exp2((z - m_new) * LOG2E))
        m = m_new
    total = tl.sum(_fold(tl.reshape(s, (1, CHUNK)), 1, CHUNK, STEPS), 0)
    tl.store(lse_ptr + row, m + tl.log(total))


def _log2(n: int) -> int:
    return n.bit_length() - 1


def _time_us(launch: Callable[[], None], repeats: int = 15) -> float:
    """Median device time of one launch, by replays of a CUDA graph that holds several."""
    launch()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    launch()
    end.record()
    end.synchronize()
    count = max(1, min(50, int(0.5 / max(start.elapsed_time(end), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            launch()
    samples = []
    for _ in range(repeats):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1000 / count)
    return statistics.median(samples)


def _rms(rows: int, cols: int) -> list[dict]:
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(cols, device="cuda", dtype=torch.bfloat16)
    reference = torch.nn.functional.rms_norm(x[:512].double(), (cols,), w.double(), 1e-6)
    found = []
    whole = triton.next_power_of_2(cols)
    spaces = [("row", _rms_row_kernel, whole)]
    spaces += [("lanes", _rms_lanes_kernel, lanes) for lanes in (1024, 2048) if lanes < whole]
    for name, kernel, width in spaces:
        first = None
        for per, warps in itertools.product((1, 4, 16), (4, 8, 16)):
            if not 4 <= per * width // (warps * 32) <= 64:
                continue
            y = torch.full_like(x, float("nan"))
            grid = (-(-rows // per),)

            def launch(y=y, per=per, warps=warps, kernel=kernel, width=width, grid=grid) -> None:
                kernel[grid](x, w, y, rows, cols, per, width, _log2(width), num_warps=warps, enable_fp_fusion=True)

            launch()
            error = (y[:512].double() - reference).abs().max() / reference.abs().max()
            first = y if first is None else first
            found.append({
                "operator": "rms_norm", "shape": [rows, cols], "order": name, "width": width, "rows": per,
                "warps": warps, "us": _time_us(launch), "error": error.item(), "equal": torch.equal(y, first),
            })  # fmt: skip
    return found


def _lse(rows: int, cols: int) -> list[dict]:
    z = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) * 3
    reference = torch.logsumexp(z[:64].double(), 1)
    found = []

    def measure(order: str, width: int, warps: int, stages: int, launch: Callable[[torch.Tensor], None]) -> None:
        lse = torch.full((rows,), float("nan"), device="cuda")
        launch(lse)
        same = first.setdefault((order, width), lse)
        found.append({
            "operator": "logp", "shape": [rows, cols], "order": order, "width": width, "warps": warps,
            "stages": stages, "us": _time_us(lambda: launch(lse)), "equal": torch.equal(same, lse),
            "error": (lse[:64].double() - reference).abs().max().item(),
        })  # fmt: skip

    first: dict[tuple[str, int], torch.Tensor] = {}
    for width, warps, stages in itertools.product((4096, 16384), (4, 8, 16), (1, 2)):
        if width // (warps * 32) > 64 or width // (warps * 32) < 8:
            continue
        chunks, steps = -(-cols // width), _log2(width)
        for sub in (width, 256):
            order = "chunk" if sub == width else "subchunk"
            measure(order, width, warps, stages, lambda lse, width=width, sub=sub, steps=steps, chunks=chunks,
                    stages=stages, warps=warps: _lse_row_kernel[(rows,)](
                z, lse, cols, width, sub, steps, _log2(sub), chunks, stages, num_warps=warps, enable_fp_fusion=True))  # fmt: skip
            if stages == 1:
                m, s = (torch.empty(rows, chunks, device="cuda") for _ in range(2))

                def split(lse, width=width, sub=sub, steps=steps, chunks=chunks, warps=warps, m=m, s=s) -> None:
                    _lse_chunk_kernel[(rows, chunks)](
                        z, m, s, cols, width, sub, 1, steps, _log2(sub), chunks, 1, num_warps=warps,
                        enable_fp_fusion=True)  # fmt: skip
                    _lse_merge_kernel[(rows,)](m, s, lse, chunks, num_warps=1, enable_fp_fusion=True)

                measure(order + "-split", width, warps, stages, split)
        measure("lanes", width, warps, stages, lambda lse, width=width, steps=steps, stages=stages, warps=warps:
                _lse_lanes_kernel[(rows,)](z, lse, cols, width, steps, stages, num_warps=warps, enable_fp_fusion=True))  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    out = parser.parse_args().out
    torch.manual_seed(0)
    found = []
    for rows, cols in ((16384, 4096), (16384, 5120), (64, 4096), (655360, 128)):
        found += _rms(rows, cols)
    for rows, cols in ((64, 151936), (4096, 32768), (8192, 128256)):
        found += _lse(rows, cols)
    out.write_text(json.dumps({"rows": found}, indent=1))
    best: dict[tuple, dict] = {}
    for row in found:
        key = (row["operator"], *row["shape"], row["order"], row["width"])
        if key not in best or row["us"] < best[key]["us"]:
            best[key] = row
    for key, row in best.items():
        equal = all(r["equal"] for r in found if (r["operator"], *r["shape"], r["order"], r["width"]) == key)
        extras = {k: row[k] for k in ("rows", "warps", "stages") if k in row}
        print(*key, f"{row['us']:.2f} us", extras, f"err {row['error']:.1e}", "equal" if equal else "DIFFERENT")


if __name__ == "__main__":
    main()
