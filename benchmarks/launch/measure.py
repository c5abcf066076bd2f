"""Two measurements: single launches, and whole operator calls."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from benchmarks.launch.host_time import Contender, in_turns
from benchmarks.launch.kernels import ARGUMENTS, BLOCK, WARPS, Kernel, grid, kernel
from benchmarks.launch.rows import LaunchPath, LaunchRow, OperatorRow, Phase, Results
from benchmarks.operators import arguments, peers
from benchmarks.operators.timing import brief, release
from rl_engine.backends import catalog
from rl_engine.backends.shared.triton.autotuning import KernelLauncher
from rl_engine.runtime.registry import get_op

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_engine.backends.spec import Inputs

OPERATORS = ("swiglu", "rms_norm", "rope", "logp", "grpo_loss", "det_gemm")
PEERS = ("eager", "compile", "liger")
PHASES: tuple[Phase, ...] = ("fwd", "both")
PRESET = "small"
_LAUNCHES, _CALLS = 500, 20  # a loop: the queue holds about 1,000 launches, an eager loss takes some 40


def launches(results: Results) -> None:
    """Measure every path at every number of arguments, after its bytes were compared with Triton's own.

    All in turns: a host that slows down halfway would otherwise make its later kernels look dear.
    """
    everyone: dict[tuple[LaunchPath, int], Contender] = {}
    for count in ARGUMENTS:
        one = kernel(count)
        args = one.values("cuda")
        args[0].normal_(generator=torch.Generator("cuda").manual_seed(count))
        contenders = _paths(one, args)
        output = args[count // 2 - 1]
        wanted = _written(output, contenders["triton"])
        for name, contender in contenders.items():
            contender.once()
            if not torch.equal(_written(output, contender).view(torch.uint8), wanted.view(torch.uint8)):
                results.faults.append(f"{name}, {count} arguments: other bytes than Triton's launch")
        if launched_through_triton(contenders["plan"]):
            results.faults.append(f"{count} arguments: the hot launch has no plan")
        everyone |= {(name, count): contender for name, contender in contenders.items()}
    found = in_turns(everyone, times=_LAUNCHES)
    results.launches += [LaunchRow(name, count, us) for (name, count), us in found.items()]


def _paths(one: Kernel, args: tuple[Any, ...]) -> dict[LaunchPath, Contender]:
    options = {"BLOCK": BLOCK, "num_warps": WARPS, "enable_fp_fusion": True}
    return {
        "triton": Contender(lambda: one.jitted[grid](*args, **options)),
        "autotune": Contender(lambda: one.autotuned[grid](*args)),
        "adapter_off": Contender(lambda: one.wrapped[grid](*args), "off"),
        "plan": Contender(lambda: one.wrapped[grid](*args), "on"),
    }


def _written(output: torch.Tensor, contender: Contender) -> torch.Tensor:
    output.fill_(float("nan"))
    contender.once()
    return output.clone()


def launched_through_triton(contender: Contender) -> list[str]:
    """Return the kernels of this library that a hot call with tuning on still launches through Triton."""
    seen: list[str] = []
    run = vars(KernelLauncher)["_run"]

    def noted(launcher: KernelLauncher, *args: Any) -> Any:
        seen.append(launcher.__name__)
        return run(launcher, *args)

    contender.once()
    with mock.patch.object(KernelLauncher, "_run", noted):
        contender.once()
    return seen


def operators(results: Results, only: tuple[str, ...] = OPERATORS) -> None:
    """Measure whole operator calls, forward without grad and forward with backward, beside what others offer."""
    for name in only:
        spec = catalog.specs()[name]
        case = next(one for one in spec.cases if one.name == PRESET)
        inputs = arguments.make(spec, case)
        op = get_op(name, "cuda", backend=f"rlkernel.triton.{name}")
        torch.compiler.reset()
        compiled = functools.cache(peers.compiled)
        for phase in PHASES:
            contenders = {
                "adapter_off": Contender(_call(op, inputs, phase), "off"),
                "plan": Contender(_call(op, inputs, phase), "on"),
            }
            left = launched_through_triton(contenders["plan"])
            note = f"without a plan: {', '.join(left)}" if left else ""
            makers = {
                "eager": functools.partial(peers.eager, name),
                "compile": functools.partial(compiled, name),
                "liger": functools.partial(peers.liger, name, "fwd" if phase == "fwd" else "both"),
            }
            for peer, make in makers.items():
                reason = _add(contenders, peer, make, inputs, phase)
                if reason:
                    results.operators.append(OperatorRow(name, phase, peer, None, reason))
            found = in_turns(contenders, times=_CALLS)
            results.operators += [
                OperatorRow(name, phase, provider, us, note if provider == "plan" else "")
                for provider, us in found.items()
            ]
        release()


def _add(
    contenders: dict[str, Contender], name: str, make: Callable[[], peers.Peer | None], inputs: Inputs, phase: Phase
) -> str:
    """Add a peer to the contenders; returns why it cannot be one."""
    try:
        peer = make()
        if peer is None or phase not in peer.phases:
            return "it has none, or is not installed"
        own = arguments.leaves(peer.prepare(inputs))
        own = arguments.changed(own, torch.clone) if peer.writes else own
        contender = Contender(_call(peer.call, own, "fwd" if peer.forward_only else phase, grad=peer.forward_only))
        contender.once()
    except Exception as error:  # noqa: BLE001  # a peer that cannot is reported, whatever it raised
        return brief(error)
    contenders[name] = contender
    return ""


def _call(op: Callable[..., Any], inputs: Inputs, phase: Phase, *, grad: bool = False) -> Callable[[], Any]:
    args, kwargs = inputs.args, inputs.kwargs
    if phase == "fwd" and grad:
        return lambda: op(*args, **kwargs)

    def forward() -> Any:
        with torch.no_grad():
            return op(*args, **kwargs)

    if phase == "fwd":
        return forward
    outputs = arguments.flat(op(*args, **kwargs))
    gradients = arguments.incoming(outputs)

    def both() -> Any:
        return arguments.differentiate(arguments.flat(op(*args, **kwargs)), inputs, gradients)

    return both
