"""The qualification: candidates sorted by binary and class, bytes compared, verdicts, and what its report says."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.operators.timing import Sampled
from benchmarks.qualification import kernels, processes, report, run, speed
from benchmarks.qualification.families import FAMILIES, of_family
from benchmarks.qualification.rows import ROWS_FILE, KernelRow, Results, SpeedRow
from benchmarks.qualification.subjects import Subject
from rl_engine.backends.shared.triton.bits import BitClass
from rl_engine.backends.shared.triton.distinct import Compiled
from rl_engine.backends.shared.triton.qualification import BoundLaunch
from rl_engine.backends.spec import Inputs
from rl_engine.errors import TrialUnavailableError
from rl_engine.platforms.tuning.key import Candidate

FIXED, SAME, TWIN, OTHER, RAW, BROKEN = (Candidate.of(way=number) for number in range(6))
OURS, THEIRS = BitClass(("a fold",), ()), BitClass(("tl.sum",), ())
COMPILED: dict[Candidate, Compiled | Exception] = {
    FIXED: Compiled("one", OURS), SAME: Compiled("two", OURS), TWIN: Compiled("two", OURS),
    OTHER: Compiled("three", THEIRS), RAW: Compiled("four", THEIRS), BROKEN: RuntimeError("does not fit"),
}  # fmt: skip


def _site() -> Any:
    return SimpleNamespace(interpreted=True, compiled=lambda candidates: {one: COMPILED[one] for one in candidates})


def _subject(*, wrong: tuple[Candidate, ...]) -> Subject:
    """Return a launch that doubles x; candidates in ``wrong`` do not, where x is negative."""

    def run(values: Any, candidate: Candidate) -> None:
        x, y = values["x_ptr"], values["y_ptr"]
        y.copy_(x * 2 if candidate not in wrong else x * torch.where(x < 0, 3, 2))

    values = {"x_ptr": torch.linspace(-4, 4, 64), "y_ptr": torch.empty(64)}
    bound = BoundLaunch(run, values, ("y_ptr",), (), ())
    return Subject(_site(), bound, tuple(COMPILED))


def test_candidates_are_sorted_by_binary_and_class() -> None:
    found = kernels.sort(tuple(COMPILED), _site())
    assert found == kernels.Sorted(selectable=(SAME,), refused=(OTHER, RAW), binaries=4, classes=2, failed=1)
    with pytest.raises(TrialUnavailableError, match="the fixed launch failed: does not fit"):
        kernels.sort((BROKEN, FIXED), _site())


def test_a_kernels_row_counts_what_was_compared_and_what_differed() -> None:
    good = kernels.study("doubled", lambda _family: _subject(wrong=(RAW,)), ("normal", "zeros"))
    assert good == KernelRow(
        "doubled", launches=1, declared=6, binaries=4, classes=2, selectable=2, comparisons=2 * kernels.REPEATS,
        mismatches=0, refused=2, refused_that_differed=1, failed=1,
    )  # fmt: skip
    bad = kernels.study("doubled", lambda _family: _subject(wrong=(SAME,)), ("normal",))
    assert (bad.mismatches, bad.refused_that_differed) == (1, 0)


def test_what_processes_find_becomes_rows_reasons_and_failures(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found = [
        ("twice", 0, KernelRow("twice", launches=1, selectable=3)),
        ("_tl_sum_kernel", 0, KernelRow("_tl_sum_kernel", launches=1, refused=4)),
        ("twice", 1, KernelRow("twice", launches=1, selectable=2, mismatches=1)),
        ("alone", 0, "RuntimeError: no"),
        ("twice", 2, processes.NO_TIME),
    ]
    monkeypatch.setattr(processes, "studies", lambda *_args: iter(found))
    monkeypatch.setattr(processes, "sources", lambda _place: {"twice": [], "alone": []})
    monkeypatch.setattr(run, "library_kernels", lambda: {"twice": None, "never": None})
    results = Results()
    run.qualify_kernels(results, "cuda", (), lambda: False)
    assert results.kernels == [KernelRow("twice", launches=2, selectable=5, mismatches=1)]
    assert results.counterexamples == [KernelRow("_tl_sum_kernel", launches=1, refused=4)]
    assert results.skipped == {"twice, launch 2": "no time left"}
    assert results.failed == {
        "never": "no declared case launches it",
        "alone, launch 0": "RuntimeError: no",
        "twice, launch 1": "1 selectable launches gave other bytes",
    }
    assert "alone, launch 0: RuntimeError: no" in capsys.readouterr().out


def test_families_change_floating_point_tensors_alone() -> None:
    x, ids = torch.ones(4, 8), torch.arange(4)
    for family in FAMILIES:
        found = of_family(Inputs((x, ids), {"mask": ids > 1, "y": x}), family)
        assert found.args[1] is ids
        assert found.kwargs["mask"].dtype == torch.bool
        assert found.args[0].shape == x.shape
    assert of_family(Inputs((x,), {}), "nan").args[0].isnan().any()


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (0.9, "10.0% faster"),
        (1.1, "10.0% slower"),
        (1.005, "equal within the noise"),
    ],
)
def test_a_verdict_needs_a_difference_beyond_the_margin_in_nearly_all_rounds(ours: float, expected: str) -> None:
    assert speed.verdict(Sampled([ours] * 15), Sampled([1.0] * 15)) == expected
    mixed = [ours if number % 2 else 1 / ours for number in range(15)]
    assert speed.verdict(Sampled(mixed), Sampled([1.0] * 15)) == "equal within the noise"


def test_what_was_not_timed_has_no_verdict() -> None:
    assert speed.verdict(Sampled([], "failed"), Sampled([])) == "not timed"


def test_every_operator_is_timed_decode_sizes_first() -> None:
    found = [(spec.name, case.name, phase) for spec, case, phase in speed.cases()]
    assert len(found) == len(set(found)) > 60
    assert {name for name, _preset, _phase in found} >= {"silu", "rope", "embedding", "grpo_loss", "det_gemm", "logp"}
    small = ["small" in preset for _name, preset, _phase in found]
    assert small == sorted(small, reverse=True)


ENVIRONMENT = {
    "device": {"name": "a card", "sm_count": 132}, "driver": "1", "toolkit": "13", "python": "3.12",
    "packages": {"torch": "2", "triton": "3"},
}  # fmt: skip
ROW = SpeedRow("silu", "thr", "fwd", "rows=2", 20.0, 10.0, 9.5, 9.4, "5.0% faster", "k: BLOCK=512", "k: BLOCK=2048")


def _results() -> Results:
    every = KernelRow("_silu_fwd_kernel", 4, 40, 30, 1, 410, 9000, 0, 3, 2, 1, 400)
    wrong = KernelRow("_tl_sum_kernel", 1, 5, 5, 5, 1, 0, 0, 4, 3, 0, 0)
    return Results([every], [wrong], [ROW, replace(ROW, phase="bwd", verdict="same launch", tuned="", best="")])


def test_a_report_says_what_held(tmp_path: Any) -> None:
    results = _results()
    assert all(report.promises(results).values())
    runs, out = tmp_path / "runs", tmp_path / "report"
    runs.mkdir()
    results.write(runs / ROWS_FILE)
    (runs / "environment.json").write_text(json.dumps(ENVIRONMENT))
    report.write(runs, out)
    text, numbers = (out / "README.md").read_text(), json.loads((out / "summary.json").read_text())
    assert "| silu | thr | fwd | 20.00 | 10.00 | 9.50 | 9.40 | 5.0% faster | 0.989 |" in text
    assert "| _silu_fwd_kernel | 4 | 40 | 30 | 1 | 410 | 9,000 | 400 | 0 | 3 | 2 | 1 |" in text
    assert "| _tl_sum_kernel | 1 | 5 | 5 | 5 | 1 | 0 | 0 | 0 | 4 | 3 | 0 |" in text
    assert "- silu thr fwd: the tuner took k: BLOCK=512; the search took k: BLOCK=2048." in text
    assert "**no**" not in text
    assert (numbers["selectable"], numbers["kernels"][0]["refused_that_differed"]) == (410, 2)
    assert set(numbers["speed"][0]) >= {"naive_us", "fixed_us", "tuned_us", "best_us", "verdict"}
    assert (out / "speed.png").stat().st_size > 1000


def test_a_report_says_what_did_not_hold() -> None:
    results = _results()
    results.kernels[0].mismatches, results.kernels[0].selectable = 1, 399
    results.speed[0] = replace(ROW, verdict="2.0% slower", best_us=9.0)
    results.skipped["logp thr fwd"] = "no time left"
    assert not any(report.promises(results).values())
    text = report.readme(results, ENVIRONMENT)
    assert text.count("**no**") == 5
    assert "- logp thr fwd: not run, no time left." in text


def test_a_report_of_nothing_promises_nothing() -> None:
    held = report.promises(Results())
    assert [name for name, kept in held.items() if kept] == ["everything ran"]
