"""Broken on purpose (cases B84): what operators, launcher and byte gate are tested by fails when it must."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.operators.launches import library_kernels, recorded
from rl_engine.backends.shared.triton import qualification
from rl_engine.backends.shared.triton.autotuning import KernelLauncher
from rl_engine.platforms.tuning.store import FileStore
from rl_engine.runtime.policy import autotune
from tests.ops import test_adapter_launch, test_autotuning_candidates, test_operators
from tests.support.ops_inputs import DEVICE, Sample, samples, triton_op


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "cache")


def _sample(name: str, case: str) -> Sample:
    (found,) = samples(lambda one: (one.spec.name, one.case.name, one.dtype) == (name, case, "float32"))
    return found


def _zero_dx(patch: pytest.MonkeyPatch) -> None:
    from rl_engine.backends.shared.triton.norm import rms_norm

    backward = rms_norm._backward
    patch.setattr(rms_norm, "_backward", lambda x, *others: (torch.zeros_like(x), backward(x, *others)[1]))


def _grpo(patch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    from rl_engine.backends.shared.triton.loss import grpo_loss

    patch.setattr(grpo_loss, "loss_and_gradient", functools.partial(change, grpo_loss.loss_and_gradient))


def _without_kl(forward: Callable[..., Any], *args: Any) -> Any:
    return forward(*args[:8], 0.0, *args[9:])  # beta


def _scaled_normaliser(forward: Callable[..., Any], *args: Any) -> Any:
    *others, weight = forward(*args)
    return *others, weight * 99


@pytest.mark.parametrize(
    ("mutate", "sample"),
    [
        (_zero_dx, _sample("rms_norm", "odd")),
        (lambda patch: _grpo(patch, _without_kl), _sample("grpo_loss", "odd")),
        (lambda patch: _grpo(patch, _scaled_normaliser), _sample("grpo_loss", "odd")),
    ],
    ids=["dx is zero", "no KL", "normaliser times 99"],
)
def test_b84_the_comparison_with_the_reference_fails_for_broken_operators(
    mutate: Callable[[pytest.MonkeyPatch], None], sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = test_operators.test_outputs_and_gradients_are_the_float64_references_within_the_declared_tolerance
    check(sample)
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=r"gradient of argument 0|output 0"):
        check(sample)


def test_b84_a_launcher_that_always_takes_the_first_candidate_is_noticed(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = test_adapter_launch.test_b22_every_launch_after_the_choice_carries_exactly_the_winners_options
    monkeypatch.setattr(KernelLauncher, "_choose", lambda *_args: ({"BLOCK": 1024, "num_warps": 4}, True))
    with pytest.raises(AssertionError, match=r"launch 1\b"):
        check(store, monkeypatch)


def test_b84_a_gate_that_compares_nothing_is_noticed(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    check = test_adapter_launch.test_b26_candidates_that_write_only_a_part_are_rejected_however_fast
    monkeypatch.setattr(qualification, "_equal", lambda _ours, _theirs: True)
    with pytest.raises((AssertionError, KeyError)):
        check(store, monkeypatch)


def test_b84_a_comparison_of_no_pair_is_noticed() -> None:
    with recorded() as launches, autotune("off"):
        triton_op("silu")(torch.ones(1000, device=DEVICE))
    assert library_kernels()["_silu_fwd_kernel"].declaration.neutral.keys() != {"num_warps"}
    comparisons, _fallen = test_autotuning_candidates.compared("_silu_fwd_kernel", launches)
    assert comparisons > 0
    with pytest.raises(AssertionError):
        test_autotuning_candidates.compared("_silu_fwd_kernel", [])
