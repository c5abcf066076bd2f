"""Time what launching costs above Triton's C functions, on a machine without a card: they are replaced by nothing.

    python -m benchmarks.launch.host_cost

Everything above them is real: Triton's own launch with a kernel compiled for sm_90, the adapter switched off, a plan.
The figures of a card, whose C functions cost several microseconds more, come from `benchmarks.launch.run`.
"""

# ruff: noqa: SLF001  # what no card has settled is put into the adapter's tables by hand
from __future__ import annotations

import json
import sys
import time
import timeit
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.launch.kernels import ARGUMENTS, BLOCK, WARPS, Kernel, grid, kernel
from rl_engine.backends.shared.triton import plan
from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.runtime.policy import autotune

_CALLS, _ROUNDS = 20_000, 7


def _nothing(*_args: Any) -> None:
    """Be a C function."""


class _Launcher:
    """What Triton starts kernels with."""

    launch = staticmethod(_nothing)
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, *_source: Any) -> None:
        pass

    __call__ = staticmethod(_nothing)


class _Driver:
    """What Triton asks of a driver; tensors are on the CPU, whose index is -1."""

    launcher_cls = _Launcher
    utils = SimpleNamespace(
        load_binary=lambda *_binary: (1, 2, 32, 0, 1024),
        unload_module=_nothing,
        get_device_properties=lambda _device: {"max_shared_mem": 227 << 10},
    )

    def get_current_device(self) -> int:
        return -1

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def _us(call: Any) -> float:
    call()  # compiles
    return min(timeit.repeat(call, timer=time.process_time, number=_CALLS, repeat=_ROUNDS)) / _CALLS * 1e6


def measure(one: Kernel) -> dict[str, float]:
    """Return microseconds a call of each path."""
    args = one.values("cpu")
    options = {"BLOCK": BLOCK, "num_warps": WARPS}
    found = {"triton": _us(lambda: one.jitted[grid](*args, **options, enable_fp_fusion=True))}
    with autotune("off"):
        wrapped = one.wrapped
        wrapped._fixed[wrapped._signature.exact(*args)] = {**options, "enable_fp_fusion": True}
        found["adapter_off"] = _us(lambda: wrapped[grid](*args))
        # Triton's own time varies more than what is above it costs: the same without Triton
        above = TunableKernel(outputs=("y_ptr",), dynamic=("n",), fixed=_never, neutral={"BLOCK": ()})(_NoTriton(one))
        above._fixed.update(wrapped._fixed)
        found["adapter_off_above"] = _us(lambda: above[grid](*args)) - _us(lambda: above.fn[grid](*args, **options))
    with autotune("on"):
        compiled = wrapped.fn[grid](*args, **options, enable_fp_fusion=True)
        frozen = plan._freeze(wrapped.fn, compiled, options, -1)
        wrapped._settled[wrapped._signature.key("on", "forward", *args)] = plan.Settled(options, frozen)
        found["plan"] = _us(lambda: wrapped[grid](*args))
        found["plan_key"] = _us(lambda: wrapped._signature.key("on", "forward", *args))
        found["plan_guard"] = _us(frozen.holds)
    return found


def _never(*_asked: Any) -> dict[str, int]:
    raise AssertionError("the fixed rule was asked again")


class _NoTriton:
    """Looks like a jitted function and launches nothing."""

    def __init__(self, one: Kernel) -> None:
        self.fn, self.arg_names = one.jitted.fn, one.jitted.arg_names

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)  # as Triton's does

    def run(self, *_args: Any, **_kwargs: Any) -> None:
        """Launch nothing."""


def main() -> None:
    """Print microseconds a call as JSON."""
    driver = _Driver()
    triton.runtime.driver.set_active(driver)
    torch.cuda.current_device = torch._C._cuda_getDevice = driver.get_current_device
    torch.set_num_threads(1)
    found = {
        arguments: {name: round(us, 2) for name, us in measure(kernel(arguments)).items()} for arguments in ARGUMENTS
    }
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
