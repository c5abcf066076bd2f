"""The GRPO job: what it scores, what it claims, and that its bits survive a restart. Runs are real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.training import figures, grpo, presets
from benchmarks.training.compare import ModeSummary, table
from benchmarks.training.history import Launches, RunRecord, StepRecord, final_reward, timed_ms
from benchmarks.training.model import Transformer
from benchmarks.training.operators import Operators
from benchmarks.training.task import SumTask, decode, encode, mislead, score
from benchmarks.training.verdict import faults

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("--preset", "cpu", "--warm-steps", "3", "--steps", "30")
STEPS = 30


def job(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.training.grpo", *SHORT, "--out", str(out), *arguments]


def finished(out: Path, *arguments: str) -> RunRecord:
    subprocess.run(job(out, *arguments), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return RunRecord.read(out / "run.json")


def losses(record: RunRecord) -> list[tuple[str, ...]]:
    return [step.losses for step in record.history]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run."""
    out = tmp_path_factory.mktemp("uninterrupted")
    finished(out, "--checkpoint-every", str(STEPS))
    return out


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> RunRecord:
    return RunRecord.read(folder / "run.json")


class TestTask:
    @pytest.mark.parametrize(
        ("largest", "left", "right", "prompt", "answer"),
        [
            (99, 47, 38, "47+38=", "085."),
            (99, 99, 99, "99+99=", "198."),
            (9, 0, 7, "0+7=", "07."),
            (9, 8, 4, "8+4=", "12."),
        ],
    )
    def test_sums_are_written_with_leading_zeros(self, largest, left, right, prompt, answer):
        problems = SumTask(largest).problems(torch.tensor([left]), torch.tensor([right]))
        assert (decode(problems.prompts[0]), decode(problems.answers[0])) == (prompt, answer)

    @pytest.mark.parametrize(
        ("said", "reward"), [("085.", 1.0), ("084.", 0.0), ("850.", 0.0), ("85..", 0.0), ("0850", 0.0), ("085=", 0.0)]
    )
    def test_only_the_whole_answer_scores(self, said, reward):
        assert score(encode(said)[None], encode("085.")[None]).tolist() == [reward]

    def test_lengths_are_those_of_the_texts(self):
        problems = SumTask(99).sample(5, torch.Generator().manual_seed(0))
        assert problems.prompts.shape == (5, SumTask(99).prompt_length)
        assert problems.answers.shape == (5, SumTask(99).answer_length)

    def test_sampled_answers_are_the_sums_python_finds(self):
        problems = SumTask(99).sample(200, torch.Generator().manual_seed(1))
        for prompt, answer in zip(problems.prompts, problems.answers, strict=True):
            left, right = decode(prompt)[:-1].split("+")
            assert decode(answer) == f"{int(left) + int(right):03d}."

    def test_a_misleading_teacher_is_wrong_about_as_often_as_asked(self):
        random = torch.Generator().manual_seed(2)
        answers = SumTask(99).sample(4000, random).answers
        right = score(mislead(answers, 0.5, random), answers).mean().item()
        assert right == pytest.approx(0.5, abs=0.04)  # 4 standard deviations, and 1% of neighbours share a sum

    def test_an_unknown_character_is_named(self):
        with pytest.raises(ValueError, match="no id for '-'"):
            encode("4-2=")


def small_model(layers: int) -> Transformer:
    return Transformer(
        presets.ModelShape(width=16, layers=layers, heads=2, hidden=24),
        operators=Operators.load("pytorch", "cpu"),
        compute_dtype=torch.float32,
        random=torch.Generator().manual_seed(0),
    )


def test_log_probabilities_do_not_see_the_future():
    model = small_model(layers=2)
    tokens, changed = encode("47+38=085.")[None], encode("47+38=091.")[None]
    with torch.no_grad():
        logps, other = model.answer_logps(tokens, 6)[0], model.answer_logps(changed, 6)[0]
        earlier = model.answer_logps(encode("46+38=085.")[None], 6)[0]
    assert logps[0] == other[0], "the first character is predicted before the change"
    assert (logps[1:] != other[1:]).all(), "the changed character and those after it see it"
    assert (logps != earlier).all(), "every character sees the prompt"


def test_the_order_of_earlier_characters_counts():
    model = small_model(layers=1)  # more layers would tell orders apart by what each position can see
    with torch.no_grad():
        logps, other = (model.answer_logps(encode(text)[None], 6)[0, 0] for text in ("47+38=085.", "74+38=085."))
    assert (logps - other).abs() > 1e-3


class TestDeterminism:
    def test_the_same_seed_gives_the_same_bytes(self, uninterrupted, tmp_path):
        again = finished(tmp_path, "--quiet")
        assert losses(again) == losses(uninterrupted)
        assert again.digest == uninterrupted.digest

    def test_another_seed_does_not(self, uninterrupted, tmp_path):
        other = finished(tmp_path, "--seed", "1", "--quiet")
        assert other.history[0].losses != uninterrupted.history[0].losses
        assert other.digest != uninterrupted.digest

    def test_a_killed_run_resumes_to_the_same_bytes(self, uninterrupted, tmp_path):
        checkpoint = tmp_path / "checkpoint.pt"
        process = subprocess.Popen(job(tmp_path, "--checkpoint-every", "1", "--quiet"), cwd=ROOT)
        try:
            deadline_s = time.monotonic() + 60
            while not checkpoint.exists():
                assert process.poll() is None, "the run ended before its first checkpoint"
                assert time.monotonic() < deadline_s, "no checkpoint within 60 s"
                time.sleep(0.002)
        finally:
            process.kill()
            code = process.wait()
        assert code == -signal.SIGKILL
        assert 0 < torch.load(checkpoint, weights_only=True)["steps_done"] < STEPS, "killed in the middle"
        resumed = finished(tmp_path, "--resume", "--quiet")
        assert losses(resumed) == losses(uninterrupted)
        assert resumed.digest == uninterrupted.digest

    def test_a_checkpoint_of_another_run_is_refused(self, folder):
        other = subprocess.run(
            job(folder, "--resume", "--seed", "5"), cwd=ROOT, check=False, capture_output=True, text=True
        )
        assert other.returncode == 2
        assert "seed=0 there and 5 here" in other.stderr


class TestWhatARunLeaves:
    def test_the_json_says_what_was_run_and_what_came_of_it(self, folder):
        record = json.loads((folder / "run.json").read_text())
        assert set(record) == {
            "schema", "settings", "autotune", "environment", "parameters", "total_s", "final_reward", "digest",
            "launches", "history",
        }  # fmt: skip
        assert record["settings"]["seed"] == 0
        assert record["autotune"] == "off"
        assert record["launches"] == {"counts": {}, "seconds": 0.0, "selections": []}
        assert [step["phase"] for step in record["history"]] == ["warm"] * 3 + ["grpo"] * STEPS

    def test_the_exact_losses_are_those_of_the_plain_numbers(self, uninterrupted):
        for step in uninterrupted.history:
            assert float.fromhex(step.losses[-1]) == step.loss
            assert step.step_s > 0
        improving = [step for step in uninterrupted.history if step.phase == "grpo"]
        assert all(len(step.losses) == 2 for step in improving)
        assert all(0 <= step.reward <= 1 for step in improving)

    @pytest.mark.skipif(not figures.is_available(), reason="matplotlib is not installed")
    def test_the_reward_is_drawn(self, folder):
        assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")

    def test_a_missed_target_is_exit_code_1(self, tmp_path):
        missed = subprocess.run(
            job(tmp_path, "--steps", "1", "--warm-steps", "1", "--target-reward", "1.0", "--quiet"),
            cwd=ROOT, check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert missed.returncode == 1
        assert "the target is 1.0" in missed.stderr


def step(number: int, loss: str = "0x1.8p+0", reward: float = 0.5) -> StepRecord:
    return StepRecord("grpo", number, float.fromhex(loss), (loss,), step_s=0.01, reward=reward, kl=0.0)


def test_the_first_third_of_grpo_steps_and_the_warm_start_are_not_timed():
    times_s = {"warm": (7.0, 7.0, 7.0), "grpo": (9.0, 8.0, 0.5, 0.25, 0.125, 1.0, 2.0)}
    history = [
        StepRecord(phase, number, 1.0, ("0x1.0p+0",), step_s=step_s)
        for phase, steps_s in times_s.items()
        for number, step_s in enumerate(steps_s)
    ]
    assert timed_ms(history) == [500.0, 250.0, 125.0, 1000.0, 2000.0]
    assert timed_ms(history[:3]) == []


def record(source: str = "", **changes: object) -> RunRecord:
    """Return a run of four steps whose one launch came from ``source``."""
    selection = {"kernel": "_silu_fwd_kernel", "key": "ab12", "winner": "BLOCK=512", "source": source, "reason": ""}
    launches = Launches({"tuned": int(source == "tuned")}, 1.0, (selection,) if source else ())
    plain = RunRecord(
        settings={},
        autotune="off",
        environment={},
        parameters=1,
        total_s=1.0,
        final_reward=0.5,
        digest="d1",
        launches=launches,
        history=tuple(step(number) for number in range(4)),
    )
    return replace(plain, **changes)


def runs(**changes: RunRecord) -> dict[str, RunRecord]:
    good = {"off": record(), "on": record("tuned"), "replay": record("disk"), "off_again": record()}
    return {label.replace("_", " "): run for label, run in {**good, **changes}.items()}


ODD_LOSS = (step(0), step(1), step(2, loss="0x1.8000000000001p+0"), step(3))
ODD_REWARD = (step(0), step(1), step(2), step(3, reward=0.25))


class TestVerdict:
    def test_equal_runs_pass(self, capsys):
        assert faults(runs()) == ()
        assert grpo.conclude(faults(runs())) == 0
        assert "byte for byte" in capsys.readouterr().out

    @pytest.mark.parametrize("label", ["on", "replay"])
    def test_the_last_bit_of_one_loss_fails_and_names_its_step(self, label, capsys):
        source = {"on": "tuned", "replay": "disk"}[label]
        found = faults(runs(**{label: record(source, history=ODD_LOSS)}))
        assert grpo.conclude(found) == 1
        assert capsys.readouterr().err == (
            f"FAILED: off and {label} differ first at grpo step 2: losses 0x1.8p+0 and 0x1.8000000000001p+0\n"
        )

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"off_again": record(history=ODD_LOSS)}, "PyTorch itself is not deterministic"),
            ({"on": record("tuned", history=ODD_REWARD)}, "first at grpo step 3: equal losses, rewards 0.5 and 0.25"),
            ({"on": record("tuned", digest="d2")}, "differ in their final weights after equal losses: d1 and d2"),
            ({"replay": record("disk", history=ODD_LOSS[:2])}, "differ in length: 4 and 2 steps"),
            ({"on": record()}, "on tuned no launch"),
            ({"replay": record("tuned")}, "replay measured 1 launches"),
            ({"replay": record("fixed")}, "replay took 0 of 1 tuned launches from disk, not _silu_fwd_kernel ab12"),
            ({"replay": replace(record("disk"), launches=replace(record("disk").launches, counts={"quarantined": 2}))},
             "replay quarantined 2 records"),
        ],
    )  # fmt: skip
    def test_every_fault_is_said(self, changes, said):
        assert said in "\n".join(faults(runs(**changes)))

    def test_without_repeatable_torch_nothing_is_said_of_tuning(self):
        found = faults(runs(off_again=record(history=ODD_LOSS), on=record("tuned", history=ODD_REWARD)))
        assert len(found) == 1

    def test_the_table_has_a_row_a_mode(self):
        rows = table([ModeSummary.of(label, run) for label, run in runs().items()]).splitlines()
        assert [row.split("  ")[0] for row in rows] == ["tuning", "off", "on", "replay", "off again"]
        assert "10.0 to 10.0" in rows[1]
        assert "disk 1" in rows[3]

    def test_the_final_reward_is_the_mean_of_the_last_ten_steps(self):
        history = [step(number, reward=0.0) for number in range(5)] + [step(number, reward=1.0) for number in range(9)]
        assert final_reward(history) == pytest.approx(0.9)


class TestUsage:
    def test_comparing_operators_that_do_not_tune_is_refused(self, capsys, tmp_path):
        assert grpo.main(["--compare", "--operators", "pytorch", "--preset", "cpu", "--out", str(tmp_path)]) == 2
        assert "use --operators triton" in capsys.readouterr().err

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_the_gpu_preset_asks_for_a_gpu(self, capsys, tmp_path):
        assert grpo.main(["--preset", "gpu", "--out", str(tmp_path)]) == 2
        assert "use --preset cpu or interpreter" in capsys.readouterr().err

    def test_the_gpu_preset_has_at_least_50_million_weights(self):
        settings = presets.training("gpu")
        model = Transformer(
            settings.shape,
            operators=Operators.load("pytorch", "cpu"),
            compute_dtype=torch.bfloat16,
            random=torch.Generator(),
        )
        assert sum(weight.numel() for weight in model.parameters()) >= 50_000_000
