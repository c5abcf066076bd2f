"""The matrix products' benchmark without a card: what is timed, the search, a dry run, the report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gemm import measure, report, run
from benchmarks.gemm.operands import sets_needed, steps
from benchmarks.gemm.rows import NAIVE, TARGETS_US, Product, Results, Row, geometric_mean, products
from rl_engine.backends.shared.triton.gemm import rule
from rl_engine.backends.shared.triton.gemm.space import Choice, Sizes, space
from rl_engine.platforms.device import DeviceIdentity
from rl_engine.platforms.tuning.timer import WallTimer

CARD = DeviceIdentity("cuda", "H200", "sm_90", 132)
SMALL = [Product("small", "both", 16, 512, 320), Product("thr-moe", "fwd", 32, 16, 24, groups=4),
         Product("k512", "fwd", 16, 512, 16)]  # fmt: skip


def _exactly(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(a.double() @ b.double())


def _by_segments(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, _kind: str) -> None:
    for group, matrix in enumerate(b):
        rows = slice(int(offsets[group]), int(offsets[group + 1]))
        out[rows] = (a[rows].double() @ matrix.double()).to(out.dtype)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small wait for threads ten times as long as they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put torch in the kernels' place; returns the ways that products were computed in."""
    ways: list[Any] = []

    def as_told(plan: Any, a: Any, b: Any, out: Any, _kind: str, **options: int) -> None:
        ways.append((plan, options))
        _exactly(a, b, out)

    monkeypatch.setattr(measure.product, "multiply", lambda a, b, out, _kind: _exactly(a, b, out))
    monkeypatch.setattr(measure.launch, "multiply_as", as_told)
    monkeypatch.setattr(measure.launch, "multiply_segments", _by_segments)
    monkeypatch.setattr(measure.device, "identify", lambda _index: CARD)
    monkeypatch.setattr(measure, "_THREADS", 2)
    monkeypatch.setattr(run, "sets_needed", lambda _product: 2)  # there is no cache to keep cold
    monkeypatch.setattr(torch, "compile", lambda call, **_options: call)
    return ways


def _options(out: Path, seconds: float = 60.0) -> run.Options:
    return run.Options(out, (), seconds, time.monotonic(), device="cpu")


def test_every_row_with_a_target_and_every_depth_is_timed_and_limited() -> None:
    found = products()
    assert {(one.preset, one.phase) for one in found if one.kind != "depth"} == TARGETS_US.keys()
    assert [one.inner for one in found if one.kind == "depth"] == [512, 1024, 2048, 4096, 8192, 16384]
    limits = {(one.preset, one.phase): one.limit_us for one in found}
    wanted = {("m1-qkv", "fwd"): 11.71, ("small", "bwd"): 24.63, ("small", "both"): 36.94,
              ("thr-square", "fwd"): 1392, ("thr", "both"): 12526, ("thr-moe", "fwd"): 1044}  # fmt: skip
    for product, limit in wanted.items():
        assert limits[product] == pytest.approx(limit, rel=2e-3)
    assert all(TARGETS_US[name] > limits[name] for name in TARGETS_US)


def test_sets_of_operands_rotate_until_the_cache_is_cold() -> None:
    by_name = {(one.preset, one.phase): one for one in products()}
    assert sets_needed(by_name["m1-qkv", "fwd"]) == 4
    assert sets_needed(by_name["thr", "fwd"]) == 1


def test_the_space_is_admitted_without_repeats_and_holds_what_the_rule_takes_at_large_sizes() -> None:
    for product in products():
        m, n, k = product.rows, product.cols, product.inner
        found = space(Sizes(m, n, k, 2, describable=True), CARD)
        assert len(found) == len(set(found)) >= 15, product
        assert len({str(one) for one in found}) == len(found)
        assert {one.plan.described for one in found} == {True, False}
    plan = rule.plan(8192, 8192, 8192, "half", CARD, describable=True)
    assert plan in {one.plan for one in space(Sizes(8192, 8192, 8192, 2, describable=True), CARD)}


def test_a_dry_run_leaves_rows_of_every_figure(tmp_path: Path, launched: list[Any]) -> None:
    results = run.run(_options(tmp_path), SMALL, WallTimer())
    assert (results.skipped, results.failed) == ({}, {})
    assert Results.read(tmp_path / "rows.json") == results
    both, grouped, depth = results.rows
    assert (both.kind, grouped.kind, depth.kind) == ("decode", "training", "depth")
    assert both.best.count(": ") == 3  # a choice for each of the three products
    assert both.candidates > 45
    assert both.within_best is not None
    assert both.within_best >= 1
    assert all(both.peers[name] is not None for name in both.peers)
    assert both.bytes_checked > 2 * 16 * 320 * both.candidates
    assert 0 < both.error < 2**-8
    assert grouped.peers[NAIVE] is None
    assert depth.candidates == 0
    assert {options["num_stages"] for _plan, options in launched} > {3, 5}


def test_a_choice_of_other_bytes_fails_its_product(
    tmp_path: Path, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_told = measure.launch.multiply_as

    def wrong(plan: Any, a: Any, b: Any, out: Any, kind: str, **options: int) -> None:
        as_told(plan, a, b, out, kind, **options)
        if options["num_stages"] == 5:
            out[0, 0] += 1

    monkeypatch.setattr(measure.launch, "multiply_as", wrong)
    results = run.run(_options(tmp_path), SMALL[:1], WallTimer())
    assert results.rows == []
    assert "5 stages, group 8 differs in" in results.failed["small both"]
    assert launched


def test_a_wrong_product_is_found_before_anything_is_timed(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure.product, "multiply", lambda a, b, out, _kind: _exactly(2 * a, b, out))
    checks = measure.check(steps(SMALL[0], 1, "cpu"))
    assert [fault.partition(":")[0] for fault in checks.faults] == ["fwd", "dX", "dW"]
    assert not launched


def test_a_spent_budget_skips_and_says_so(tmp_path: Path, launched: list[Any]) -> None:
    results = run.run(_options(tmp_path, seconds=1e-9), SMALL[:1], WallTimer())
    assert results.rows == []
    assert "time budget" in results.skipped["small both"]
    assert not launched


def test_unknown_presets_are_refused() -> None:
    with pytest.raises(SystemExit, match="no preset thrr; there are k1024, "):
        run.chosen(run.Options(Path(), ("thrr",), 1.0, 0.0))


def _row(preset: str, kind: Any, fixed: float, mm: float, naive: float, best: float | None = None) -> Row:
    return Row(
        "det_gemm", preset, "fwd", kind, "1x2x3", fixed, fixed, 5.0, 5.0 / fixed, None, (fixed, fixed), 100, 1e-3,
        best_us=best, peers={"torch.mm": mm, NAIVE: naive},
    )  # fmt: skip


def test_the_report_says_which_promises_are_kept_and_names_every_loss(tmp_path: Path) -> None:
    results = Results([
        _row("thr-a", "training", 10.0, 20.0, 30.0, 9.0), _row("thr-b", "training", 10.0, 5.0, 30.0),
        _row("small", "decode", 10.0, 8.0, 30.0, 10.0),
    ])  # fmt: skip
    assert list(results.means().values()) == pytest.approx([1.0, 0.8, 3.0, 10 / 9])
    results.write(tmp_path / "rows.json")
    environment = {
        "device": {"name": "a card", "sm_count": 1},
        "driver": "1",
        "toolkit": "13",
        "python": "3.12",
        "packages": {"torch": "2", "triton": "3"},
    }
    (tmp_path / "environment.json").write_text(json.dumps(environment))
    out = tmp_path / "out"
    out.mkdir()
    (out / "reasons.json").write_text('{"thr-b fwd": "It waits."}')
    report.write(tmp_path, out)
    text = (out / "README.md").read_text()
    assert "| decode rows against torch.mm | 0.800 | 0.85 | **missed** |" in text
    assert "| training rows against torch.mm | 1.000 | 1.00 | kept |" in text
    assert "| fixed rule over the best of the search, at most | 1.111 | 1.10 | **missed** |" in text
    assert "- thr-b fwd (1x2x3): 0.500 times as fast. It waits." in text
    assert "- small fwd (1x2x3): 0.800 times as fast. Reason not known." in text
    found = json.loads((out / "summary.json").read_text())
    assert {"operator", "preset", "phase", "shape", "time_us", "limit_us", "share", "peers", "bytes_checked"} <= found[
        "rows"
    ][0].keys()
    assert (out / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_means_of_nothing_are_nothing() -> None:
    assert geometric_mean([None]) is None
    assert geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)
    assert str(Choice(rule.Plan(64, 16, 128, described=True, swapped=True), 4, 5)) == (
        "64x16x128, descriptors, exchanged, 4 warps, 5 stages, group 8"
    )
