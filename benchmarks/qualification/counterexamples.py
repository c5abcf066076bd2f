"""Two kernels that break the library's rules for sums, to see what their bit classes refuse, and whether rightly.

Nothing that the library declares is refused on a card it was written for, so its own kernels cannot show how careful
the classes are. Both sum rows [64, 256] of fp32 and declare their warps neutral, which is wrong.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from benchmarks.operators.launches import Launch
from benchmarks.qualification.families import of_family
from benchmarks.qualification.subjects import Subject
from rl_engine.backends.shared.triton.autotuning import TunableKernel
from rl_engine.backends.shared.triton.primitives.folds import fold_columns
from rl_engine.backends.spec import Inputs

if TYPE_CHECKING:
    from benchmarks.qualification.subjects import Source
    from rl_engine.backends.shared.triton.autotuning import KernelLauncher

_ROWS, _COLS, _SEED = 64, 256, 11


def _fixed(_sizes: Any, _device: Any) -> dict[str, int]:
    return {"num_warps": 4}


_wrongly = TunableKernel(outputs=("y_ptr",), data=("x_ptr",), fixed=_fixed, neutral={"num_warps": (1, 2, 4, 8, 16)})


@_wrongly
@triton.jit
def _tl_sum_kernel(x_ptr, y_ptr, COLS: tl.constexpr):
    """Sum in the order of the layout, which has a place for every warp."""
    row = tl.program_id(0)
    tl.store(y_ptr + row, tl.sum(tl.load(x_ptr + row * COLS + tl.arange(0, COLS)), 0))


@_wrongly
@triton.jit
def _fold_of_products_kernel(x_ptr, y_ptr, COLS: tl.constexpr):
    """Sum in one order, but let the compiler fuse products into those additions that one thread makes."""
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * COLS + tl.arange(0, COLS))
    tl.store(y_ptr + row + tl.arange(0, 1), fold_columns(tl.reshape(x * x, (1, COLS)), 1, COLS))


KERNELS: tuple[KernelLauncher, ...] = (_tl_sum_kernel, _fold_of_products_kernel)
NAMES = frozenset(one.__name__ for one in KERNELS)


def sources(place: str) -> dict[str, list[Source]]:
    """Return the launch of each, by name."""
    return {one.__name__: [functools.partial(_launched, one, place)] for one in KERNELS}


def _launched(kernel: KernelLauncher, place: str, family: str) -> Subject:
    x = torch.randn(_ROWS, _COLS, generator=torch.Generator().manual_seed(_SEED)).to(place)
    (x,) = of_family(Inputs((x,), {}), family).args
    launch = Launch(kernel, (_ROWS,), (x, torch.empty(_ROWS, device=place), _COLS), {})
    return Subject(launch.site(), launch.bound(), launch.candidates())
