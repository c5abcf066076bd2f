"""The operators' benchmark without a card: limits, targets, naive launches, and what its checks catch."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks.operators import arguments, peers, run, timing
from benchmarks.operators.correctness import check
from benchmarks.operators.naive import naive_launch, naive_launches
from benchmarks.operators.rows import Check, Results, Row, Timed, Times, make_row
from benchmarks.operators.targets import PHASES, TARGETS_US, is_throughput, limit_us, phases, target_us
from benchmarks.operators.timing import Contender, Sampled, time_in_turns
from rl_engine.backends import catalog
from rl_engine.backends.spec import Case, Traffic
from rl_engine.platforms.tuning.decision import order_of_round

SPECS = catalog.specs()


def planted(operator: str = "rms_norm", preset: str = "thr", phase: str = "fwd", **changes: object) -> Row:
    row = Row(
        operator=operator,
        preset=preset,
        phase=phase,
        shape="rows=16384 hidden=4096",
        kernels=1,
        time_us=66.0,
        spread_us=(65.5, 67.0),
        limit_us=62.44,
        share=0.946,
        target_us=67.14,
        target_share=0.93,
        peers={"eager": 156.2, "compile": 80.0, "liger": 133.2},
        naive_us=80.9,
        bytes_checked=1000,
        check={"output 0": 0.25},
    )
    return replace(row, **changes)


def test_the_limit_is_bytes_over_the_copys_speed():
    assert limit_us("fwd", 4_300_000, 8_600_000) == 1.0
    assert limit_us("bwd", 4_300_000, 8_600_000) == 2.0
    assert limit_us("both", 4_300_000, 8_600_000) == 3.0


def test_a_training_row_aims_at_its_share_of_the_limit():
    sizes = {"forward_bytes": 268_500_000, "backward_bytes": 406_930_000, "kernels": 3}
    forward = target_us("rms_norm", "thr", "fwd", **sizes)
    backward = target_us("rms_norm", "thr", "bwd", **sizes)
    assert forward == pytest.approx(62.44 / 0.93, abs=0.01)
    assert backward == pytest.approx(94.63 / 0.88, abs=0.01)
    assert target_us("rms_norm", "thr", "both", **sizes) == pytest.approx(forward + backward)


@pytest.mark.parametrize(("kernels", "aimed"), [(1, 5.0), (2, 5.0), (3, 7.5)])
def test_a_small_row_is_not_asked_for_less_than_its_kernels_cost(kernels, aimed):
    sizes = {"forward_bytes": 1_050_000, "backward_bytes": 1_620_000}
    assert target_us("rms_norm", "small", "bwd", **sizes, kernels=kernels) == aimed


def test_presets_without_a_target_have_none_and_all_phases():
    assert target_us("rms_norm", "thr-odd", "fwd", forward_bytes=1, backward_bytes=1, kernels=1) is None
    assert phases("rms_norm", "thr-odd") == PHASES
    assert phases("rope", "thr-mla") == ("fwd",)
    assert phases("grpo_loss", "small") == ("both",)


@pytest.mark.parametrize("operator", sorted({operator for operator, _preset in TARGETS_US} & set(SPECS)))
def test_every_timed_case_of_an_operator_has_a_target(operator):
    timed = {case.name for case in SPECS[operator].cases if "speed" in case.tags}
    assert timed <= {preset for name, preset in TARGETS_US if name == operator}


WITH_TRAFFIC = [
    (name, case.name, phase)
    for name, spec in SPECS.items()
    for case in spec.cases
    if spec.traffic and "speed" in case.tags
    for phase in TARGETS_US.get((name, case.name), {})
]


@pytest.mark.parametrize(("operator", "preset", "phase"), WITH_TRAFFIC)
def test_targets_are_above_the_limit_and_not_far_from_it(operator, preset, phase):
    spec = SPECS[operator]
    case = next(one for one in spec.cases if one.name == preset)
    traffic = spec.traffic(arguments.itemsize_of(spec), **case.sizes, **case.options)
    limit = limit_us(phase, traffic.forward, traffic.backward)
    share = limit / TARGETS_US[operator, preset][phase]
    assert share < 1
    assert share > 0.75 or not is_throughput(preset), f"{share}: traffic and target are of different cases"


def test_a_naive_launch_sets_neutral_axes_only_and_blocks_no_wider_than_declared():
    fixed = {"ROWS": 16, "BLOCK": 256, "num_warps": 8, "TILE": 4096, "SPLIT": 4, "num_stages": 3}
    neutral = {"ROWS": (1, 16), "BLOCK": (128, 256, 512), "num_warps": (4, 8), "SPLIT": (1, 4)}
    assert naive_launch(fixed, neutral) == {**fixed, "ROWS": 1, "BLOCK": 512, "num_warps": 4}
    assert naive_launch({"BLOCK": 64}, {"BLOCK": (64, 4096)}) == {"BLOCK": 1024}
    assert naive_launch({"BLOCK": 64, "num_warps": 8}, {}) == {"BLOCK": 64, "num_warps": 8}


@dataclass(frozen=True)
class Declaration:
    fixed: object
    neutral: dict


class Kernel:
    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration


def test_naive_launches_hold_inside_the_block_only_and_after_an_error_too():
    declaration = Declaration(lambda sizes, _device: {"ROWS": sizes["n"], "num_warps": 8}, {"ROWS": (1, 4)})
    kernel = Kernel(declaration)

    def fail():
        with naive_launches({"one": kernel}):
            assert kernel.declaration.fixed({"n": 4}, None) == {"ROWS": 1, "num_warps": 8}
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert kernel.declaration is declaration


def test_argument_sets_keep_the_l2_cold_at_training_sizes_alone():
    assert arguments.sets_needed("small", 1_000) == 1
    assert arguments.sets_needed("thr", 200_000_000) == 1
    count = arguments.sets_needed("kv_a", 33_550_000)
    assert (count - 1) * 33_550_000 >= arguments.COLD_BYTES
    assert arguments.sets_needed("thr", 8) == 32


def _checked(operator, op, **sizes) -> Check:
    spec = SPECS[operator]
    return check(spec, op, arguments.make(spec, Case("one", sizes), device="cpu"))


def test_a_right_operator_passes_its_check_and_its_bytes_are_counted():
    found = _checked("silu", SPECS["silu"].reference, rows=8, cols=6)
    assert found.faults == ()
    assert set(found.errors) == {"output 0", "gradient of argument 0"}
    assert max(found.errors.values()) <= 1
    # bf16: output and gradient of 8 rows against a second run, of 4 rows against the smaller batch
    assert found.bytes_checked == 2 * 2 * (8 + 4) * 6


def _wrong_in_one(x):
    y = x * x.sigmoid()
    return y + 0.1 * (torch.arange(y.numel()).view(y.shape) == y.numel() - 1)


def _depends_on_its_batch(x):
    return (x.float() * x.float().sigmoid() * (1 + 2.0**-8 * (x.shape[0] > 6))).to(x.dtype)


def _leaves_a_hole(x):
    y = torch.empty_like(x)
    hole = y[0].clone() if y.isnan().all() else torch.zeros_like(y[0])  # as memory may happen to be
    y.copy_(x * x.sigmoid())
    y[0] = hole
    return y


@pytest.mark.parametrize(
    ("op", "fault"),
    [
        (_wrong_in_one, "from float64"),
        (_depends_on_its_batch, "4 rows in a batch of 8"),
        (_leaves_a_hole, "other bytes in a second run"),
    ],
)
def test_a_wrong_operator_is_not_timed(op, fault):
    faults = _checked("silu", op, rows=8, cols=64).faults
    assert any(fault in one for one in faults), faults


def test_a_hole_shows_where_torch_was_told_to_leave_memory_as_it_is(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # as the training job does
    faults = _checked("silu", _leaves_a_hole, rows=8, cols=64).faults
    assert any("other bytes in a second run" in one for one in faults), faults
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_the_weights_gradient_of_all_rows_is_compared_with_a_second_run_alone():
    found = _checked("rms_norm", SPECS["rms_norm"].reference, rows=8, hidden=16)
    assert found.faults == ()
    assert found.bytes_checked == 2 * (8 * 16 + 8 * 16 + 16 + 4 * 16 + 4 * 16)


def test_an_accumulator_is_checked_as_a_gradient_and_left_as_it_was():
    spec = SPECS["embedding"]
    inputs = arguments.make(spec, Case("one", {"rows": 8, "vocab": 5, "hidden": 16, "accumulate": 1}), device="cpu")
    before = inputs.kwargs["accumulate_into"].clone()
    found = check(spec, spec.reference, inputs)
    assert found.faults == ()
    assert set(found.errors) == {"output 0", "gradient of argument accumulate_into"}
    assert torch.equal(inputs.kwargs["accumulate_into"], before)
    assert found.bytes_checked == 2 * (8 * 16 + 5 * 16 + 4 * 16)


TIMED_LIKE = {  # cases as small as tiny whose arguments are those of the timed ones, where tiny's are not
    "rope": Case("one", {"tokens": 6, "batch": 3, "heads": 4, "kv_heads": 2, "dim": 16}),
    "group_advantages": Case("one", {"groups": 9, "samples": 36, "spread": 28}),
}


EAGER = [(name, "tiny") for name in SPECS if peers.eager(name) and name != "rope"]


@pytest.mark.parametrize(("operator", "size"), [*EAGER, *((name, "timed") for name in TIMED_LIKE)])
def test_eager_lines_compute_what_the_operator_does(operator, size):
    spec = SPECS[operator]
    case = TIMED_LIKE[operator] if size == "timed" else next(one for one in spec.cases if one.name == "tiny")
    inputs = arguments.make(spec, case, device="cpu")
    peer = peers.eager(operator)
    assert peer is not None
    made = peer.prepare(inputs)
    ours = arguments.flat(spec.reference(*inputs.args, **inputs.kwargs))[0]
    theirs = arguments.flat(peer.call(*made.args, **made.kwargs))[0]
    torch.testing.assert_close(theirs.reshape(ours.shape).float(), ours.float(), rtol=0.02, atol=0.02)


def test_a_row_is_made_of_its_case_its_times_and_its_check():
    case = Timed("rms_norm", "small", "rows=64 hidden=4096", 1_050_000, 1_620_000)
    times = Times(4.0, (3.9, 4.2), 6.0, {"eager": 8.0, "compile": None}, {"compile": "RuntimeError: no"})
    row = make_row(case, "bwd", 3, times, Check({"output 0": 0.5}, 42))
    assert row.limit_us == pytest.approx(0.3767, abs=1e-4)
    assert row.share == pytest.approx(row.limit_us / 4.0)
    assert (row.target_us, row.reached, row.bytes_checked, row.kernels) == (7.5, True, 42, 3)
    assert row.note == "compile: RuntimeError: no"
    assert row.slower_than() == {}


def test_a_peer_inside_our_range_of_samples_is_not_called_faster():
    assert planted(peers={"eager": 65.9, "liger": 65.0}).slower_than() == {"liger": 65.0}


def test_results_survive_the_disk_and_another_schema_is_refused(tmp_path):
    results = Results([planted()], {"rope thr": "no traffic"}, {"silu thr": "output 0: other bytes"})
    path = tmp_path / "rows.json"
    results.write(path)
    assert Results.read(path) == results
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 0}))
    with pytest.raises(ValueError, match="schema 0"):
        Results.read(path)


class Ticks:
    """A clock without a card: every sample launches once on each set and takes 8 us."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def prepare(self, launch, rotation):
        def sample() -> float:
            for number in range(rotation):
                launch(number)
            return 8.0

        return sample


@pytest.fixture
def ticks(monkeypatch):
    clock = Ticks()
    monkeypatch.setattr(timing, "GraphTimer", lambda: clock)
    monkeypatch.setattr(timing, "release", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return clock


def _noting(order: list[str], name: str):
    def call(x):
        order.append(name)
        return x * x.sigmoid()

    return call


def _silu_sets(count: int = 1):
    case = Case("one", {"rows": 4, "cols": 8})
    return [arguments.make(SPECS["silu"], case, seed, device="cpu") for seed in range(count)]


@pytest.mark.parametrize("phase", PHASES)
def test_contenders_take_turns(ticks, phase):
    calls: list[str] = []
    sets = _silu_sets(2)
    contenders = {name: Contender(_noting(calls, name), sets) for name in ("a", "b")}
    found = time_in_turns(contenders, phase, samples=3)
    assert {name: one.samples_us for name, one in found.items()} == {"a": [8.0] * 3, "b": [8.0] * 3}
    if phase == "bwd":  # the forward ran once a set, before
        assert calls == ["a"] * 2 + ["b"] * 2
    else:
        assert calls[-6 * 2 :] == [
            name for turn in range(3) for name in order_of_round("ab", turn) for _call in range(2)
        ]


def test_a_contender_that_fails_is_reported_and_the_others_are_timed(ticks):
    def fail(_x):
        raise RuntimeError("cannot\nbecause") from None

    found = time_in_turns(
        {"ours": Contender(torch.sigmoid, _silu_sets()), "peer": Contender(fail, _silu_sets())}, "fwd"
    )
    assert found["ours"].median_us == 8.0
    assert (found["peer"].median_us, found["peer"].reason) == (None, "RuntimeError: cannot")


def test_a_contender_that_writes_into_its_arguments_finds_them_as_they_were_at_every_sample(ticks):
    seen: list[float] = []

    def double_in_place(x):
        seen.append(float(x.detach().sum()))
        x.detach().mul_(2)
        return x * 1

    sets = _silu_sets()
    first = float(sets[0].args[0].detach().sum())
    time_in_turns({"peer": Contender(double_in_place, sets, restores=True)}, "fwd", samples=3)
    assert seen[-3:] == [first] * 3


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Run everything of the command but the card: small cases, the references, and a clock that says 2 us."""

    def operators(**calls):
        silu = replace(
            SPECS["silu"],
            cases=tuple(Case(name, {"rows": 8, "cols": 64}, tags=frozenset({"speed"})) for name in ("small", "thr")),
            traffic=lambda itemsize, rows, cols: Traffic(2 * itemsize * rows * cols, 3 * itemsize * rows * cols),
        )
        monkeypatch.setattr(
            run.catalog, "specs", lambda: {"silu": silu, "plain": replace(silu, name="plain", traffic=None)}
        )
        monkeypatch.setattr(run, "get_op", lambda name, _device, backend: calls[name])

    make = arguments.make
    monkeypatch.setattr(arguments, "make", lambda spec, case, seed=1: make(spec, case, seed, "cpu"))
    monkeypatch.setattr(run, "release", lambda: None)
    monkeypatch.setattr(run, "launches_of", lambda _contender, _phase: [None])
    monkeypatch.setattr(run, "time_in_turns", lambda found, _phase: {name: Sampled((2.0, 2.0, 9.0)) for name in found})
    return operators


def _options(out, **changes) -> run.Options:
    chosen = {"only": (), "presets": (), "phases": PHASES, "peers": ("eager", "liger"), "seconds": 1e9, "began_s": 0.0}
    return run.Options(out=out, **{**chosen, **changes})


def test_a_run_times_every_phase_of_a_right_operator_and_says_what_it_passed_over(on_the_cpu, tmp_path, capsys):
    on_the_cpu(silu=SPECS["silu"].reference)
    results = run.run(_options(tmp_path, presets=("small",)))
    assert [(row.operator, row.preset, row.phase) for row in results.rows] == [
        ("silu", "small", phase) for phase in PHASES
    ]
    assert {(row.time_us, row.naive_us, row.peers["eager"]) for row in results.rows} == {(2.0, 2.0, 2.0)}
    assert results.skipped == {"plain small": "its declaration has no traffic"}
    assert Results.read(tmp_path / "rows.json") == results
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_wrong_operator_fails_its_cases_and_is_not_timed(on_the_cpu, tmp_path):
    on_the_cpu(silu=_depends_on_its_batch)
    results = run.run(_options(tmp_path, only=("silu",)))
    assert results.rows == []
    assert set(results.failed) == {"silu small", "silu thr"}
    assert "4 rows in a batch of 8" in results.failed["silu thr"]


def test_no_case_is_begun_when_the_time_is_spent(on_the_cpu, tmp_path):
    on_the_cpu(silu=SPECS["silu"].reference)
    results = run.run(_options(tmp_path, only=("silu",), seconds=1.0))
    assert results.rows == []
    assert set(results.skipped) == {"silu small", "silu thr"}


def test_a_peer_that_computes_something_else_has_no_time(on_the_cpu, tmp_path, monkeypatch):
    on_the_cpu(silu=SPECS["silu"].reference)
    monkeypatch.setattr(peers, "eager", lambda _operator: peers.Peer(torch.relu))
    row = run.run(_options(tmp_path, only=("silu",), presets=("small",))).rows[0]
    assert row.peers == {"eager": None}
    assert "differs from ours" in row.note


def test_an_unknown_operator_is_refused_with_those_that_exist(tmp_path):
    with pytest.raises(SystemExit, match="no operator gelu; there are"):
        run.run(_options(tmp_path, only=("gelu",)))
