"""The tuned backends: other paths and tiles, the default operators' bytes; whatever chance chooses, for every batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_engine.backends.shared.triton.launch_trial import LaunchTrial
from rl_engine.errors import BackendError
from rl_engine.platforms.tuning.key import Candidate
from rl_engine.platforms.tuning.store import FileStore, MemoryStore
from rl_engine.runtime.policy import autotune
from rl_engine.runtime.registry import Operator, get_op
from tests.support.ops_inputs import DEVICE, ON_GPU, assert_same_bytes
from tests.support.ops_launches import new_process, process_mode

HALF = torch.bfloat16 if ON_GPU else torch.float16
BACKENDS = {"tuned_gemm": "det_gemm", "tuned_logp": "logp"}
SEEDS = 50 if ON_GPU else 3  # of each of the two; the interpreter takes seconds a launch
BOTH = pytest.mark.parametrize("backend", BACKENDS)


def _tuned(backend: str) -> Operator:
    return get_op(BACKENDS[backend], DEVICE, backend=f"rlkernel.triton.{backend}")


def _default(backend: str) -> Operator:
    return get_op(BACKENDS[backend], DEVICE)


def _arguments(backend: str, rows: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return the argument with rows, and the others; both lengths are odd, and a row has more than one chunk."""
    generator = torch.Generator().manual_seed(seed)
    if backend == "tuned_gemm":
        inner, cols = (4104, 257) if ON_GPU else (24, 37)
        return tuple(torch.randn(*one, generator=generator).to(DEVICE, HALF) for one in ((rows, inner), (inner, cols)))
    logits = torch.randn(rows, 4099, generator=generator).to(DEVICE, HALF)
    return logits, torch.randint(0, 4099, (rows,), generator=generator).to(DEVICE)


def _run(op: Callable[..., torch.Tensor], first: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the result and every gradient."""
    leaves = [one.detach().requires_grad_(one.is_floating_point()) for one in (first, *others)]
    out = op(*leaves)
    wanted = [one for one in leaves if one.requires_grad]
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).reshape(out.shape).to(out.dtype)
    return (out.detach(), *torch.autograd.grad(out, wanted, weights))


def _assert_same(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...], what: str) -> None:
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_same_bytes(one, other, f"{what}, tensor {number}")


@pytest.fixture
def chance(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that lets a seed decide what is fastest."""

    def seeded(seed: int) -> None:
        def lie(_trial: LaunchTrial, candidate: Candidate) -> float:
            return random.Random(f"{seed} {candidate}").uniform(1.0, 10.0)

        monkeypatch.setattr(LaunchTrial, "sample", lie)

    return seeded


@BOTH
def test_b37_it_is_given_for_its_id_alone_and_promises_what_the_default_promises(backend: str) -> None:
    tuned, default = _tuned(backend), _default(backend)
    assert tuned.backend_id == f"rlkernel.triton.{backend}"
    assert default.backend_id == f"rlkernel.triton.{BACKENDS[backend]}"
    assert (tuned.contract, tuned.is_deterministic, tuned.is_batch_invariant) == (default.contract, True, True)
    assert _tuned(backend) is tuned
    with pytest.raises(BackendError, match=rf"there are .*rlkernel\.triton\.{BACKENDS[backend]}"):
        get_op(BACKENDS[backend], DEVICE, backend="rlkernel.triton.tuned_nothing")
    with pytest.raises(BackendError, match=r"rlkernel\.pytorch\.silu"):
        get_op("silu", DEVICE, backend=f"rlkernel.triton.{backend}")


@BOTH
def test_whatever_chance_chooses_the_bytes_are_the_default_operators(
    backend: str, chance: Callable[[int], None]
) -> None:
    arguments = _arguments(backend, 70 if backend == "tuned_gemm" else 2)
    with autotune("off"):
        expected = _run(_default(backend), *arguments)
    winners = set()
    for seed in range(SEEDS):
        chance(seed)
        store = MemoryStore()
        for _process in ("measures", "replays"):
            with new_process(store) as tuner, autotune("on"):
                _assert_same(_run(_tuned(backend), *arguments), expected, f"seed {seed}")
                winners |= {one.winner for one in tuner.report().selections if one.kernel == _tuned(backend).backend_id}
    assert len(winners) > 1


@BOTH
def test_b16_a_rows_bytes_do_not_know_its_batch_while_chance_chooses(
    backend: str, chance: Callable[[int], None]
) -> None:
    most = 4096 if ON_GPU else 9
    first, *others = _arguments(backend, most)
    batched = others[:1] if backend == "tuned_logp" else []
    shared = others[len(batched) :]
    with autotune("off"):
        whole = _default(backend)(first, *batched, *shared)
    seed = 0
    for rows in (1, 2, 7, 16, 33, 64, 128, 129, 1000, most) if ON_GPU else (1, 4, most):
        for start in {0, most - rows}:
            seed += 1
            chance(seed)
            cut = slice(start, start + rows)
            with new_process(MemoryStore()), autotune("on"), torch.no_grad():
                found = _tuned(backend)(first[cut], *(one[cut] for one in batched), *shared)
            assert_same_bytes(found, whole[cut], f"{rows} rows from {start}")


@BOTH
def test_off_it_is_the_default_operator_and_asks_nothing(backend: str) -> None:
    arguments = _arguments(backend, 3)
    with new_process(MemoryStore()) as tuner, autotune("off"):
        _assert_same(_run(_tuned(backend), *arguments), _run(_default(backend), *arguments), "off")
        assert tuner.report().selections == ()


@BOTH
def test_its_records_are_its_own_and_serve_the_next_process(
    backend: str, tmp_path: Path, chance: Callable[[int], None]
) -> None:
    arguments, store = _arguments(backend, 2), FileStore(tmp_path / "cache")
    chance(3)
    with torch.no_grad():
        with new_process(store) as tuner, autotune("on"):
            expected = _tuned(backend)(*arguments)
            first = {one.kernel: one.source for one in tuner.report().selections}
            _default(backend)(*arguments)
            assert not {one.kernel for one in tuner.report().selections} <= {_tuned(backend).backend_id}
        assert first[_tuned(backend).backend_id] == "tuned"
        with new_process(store) as tuner, autotune("replay"):
            assert_same_bytes(_tuned(backend)(*arguments), expected, "replayed")
            assert {one.source for one in tuner.report().selections} == {"disk"}


@BOTH
def test_lengths_of_a_bucket_share_an_answer(backend: str, chance: Callable[[int], None]) -> None:
    chance(1)
    with new_process(MemoryStore()) as tuner, autotune("on"), torch.no_grad():
        for rows in (5, 7, 8, 7):
            _tuned(backend)(*_arguments(backend, rows))
        own = [one for one in tuner.report().selections if one.kernel == _tuned(backend).backend_id]
        assert len({one.key for one in own}) == 1
        _tuned(backend)(*_arguments(backend, 9))
        own = [one for one in tuner.report().selections if one.kernel == _tuned(backend).backend_id]
        assert len({one.key for one in own}) == 2


@BOTH
@pytest.mark.parametrize("mode", ["off", "on"])
def test_b50_a_whole_graph_holds_it_and_gives_eagers_bytes(
    backend: str, mode: str, chance: Callable[[int], None]
) -> None:
    arguments = _arguments(backend, 2)
    chance(2)
    with autotune("off"):
        expected = _run(_default(backend), *arguments)
    tuned: Any = _tuned(backend).call
    torch.compiler.reset()
    compiled = torch.compile(tuned, fullgraph=True, backend="aot_eager")
    with new_process(MemoryStore()) as tuner, process_mode(mode):
        _assert_same(_run(compiled, *arguments), expected, f"compiled, {mode}")
        asked = {one.kernel for one in tuner.report().selections}
    assert (_tuned(backend).backend_id in asked) == (mode == "on")


def test_a_weights_gradient_goes_on_in_its_accumulator_while_chance_chooses(chance: Callable[[int], None]) -> None:
    (x, weight), rows = _arguments("tuned_gemm", 48), 16
    into, chosen = torch.zeros_like(weight, dtype=torch.float32), torch.zeros_like(weight, dtype=torch.float32)
    dy = torch.randn(48, weight.shape[1], device=DEVICE).to(HALF)
    with autotune("off"):
        _default("tuned_gemm")(x, weight.requires_grad_(), accumulate_into=into).backward(dy)
    for start in range(0, 48, rows):
        chance(start)
        cut = slice(start, start + rows)
        with new_process(MemoryStore()), autotune("on"):
            _tuned("tuned_gemm")(x[cut], weight, accumulate_into=chosen).backward(dy[cut])
    assert_same_bytes(chosen, into, "gradient of 3 micro-batches")
