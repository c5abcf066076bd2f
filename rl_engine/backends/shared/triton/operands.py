"""What every operator checks at its door, and how it sees tensors as rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_engine.backends.shared.triton.compiler import is_interpreter, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_engine.platforms.device import DeviceIdentity

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTERPRETED_TILE = 1 << 18  # elements: an interpreted program costs milliseconds whatever its size
_ROW_AXES = 2
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def require_tensors(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise unless all tensors given are plain and lie on one device that Triton runs on here."""
    first: torch.Tensor | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN:
            raise TypeError(f"{op}: {name} is a {type(tensor).__name__}; pass a plain tensor (DTensor: .to_local())")
        if first is None:
            first = tensor
            reason = unavailable(tensor.device.type)
            if reason is not None:
                raise ValueError(f"{op}: {name} is on {tensor.device}: {reason}")
        elif tensor.device != first.device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, the first tensor on {first.device}; use one device")


def require_floats(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise TypeError unless every tensor given is bf16, fp16 or fp32."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATS:
            raise TypeError(f"{op}: {name} is {tensor.dtype}; pass bfloat16, float16 or float32")


class Door:
    """Checks an operator's tensors in full where their kinds are new; known ones cost one look-up.

    Args:
        op: the operator's name, for messages.
        names: of its tensors, in the order they are passed in.
        any_dtype: those that need not be bf16, fp16 or fp32.
    """

    def __init__(self, op: str, *names: str, any_dtype: tuple[str, ...] = ()) -> None:
        self._op = op
        self._names = names
        self._any_dtype = any_dtype
        self._known: set[tuple[Any, ...]] = set()  # classes, dtypes and devices: a handful in a run

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Raise as `require_tensors` and `require_floats` do."""
        if torch.compiler.is_compiling():
            self._check(tensors)
            return
        kinds = tuple([None if one is None else (one.__class__, one.dtype, one.device) for one in tensors])
        if kinds not in self._known:
            self._check(tensors)
            if all(one is None or one.is_cuda for one in tensors):  # whether Triton runs on a CPU may change
                self._known.add(kinds)

    def _check(self, tensors: tuple[torch.Tensor | None, ...]) -> None:
        named = dict(zip(self._names, tensors, strict=True))
        require_tensors(self._op, **named)
        require_floats(self._op, **{name: one for name, one in named.items() if name not in self._any_dtype})


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., cols] as [rows, cols] with neighbouring columns: a view where its strides allow, else a copy."""
    rows = x if x.dim() == _ROW_AXES else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def rows_a_program(n_rows: int, most: int, sm_count: int) -> int:
    """Return how many rows, a power of two, a program takes: ``most``, or fewer where multiprocessors would idle."""
    return max(1, min(most, power_of_two(-(-n_rows // sm_count))))


def rows_in_tile(n_rows: int, width: int, elements: int, device: DeviceIdentity) -> int:
    """Return how many rows of ``width`` elements, a power of two, a program takes: up to ``elements`` in all.

    Fewer where multiprocessors would idle; under the interpreter as many as `INTERPRETED_TILE` holds.
    """
    if is_interpreter(device.arch):
        return rows_a_program(n_rows, INTERPRETED_TILE // width, 1)
    return rows_a_program(n_rows, elements // width, device.sm_count)


def grad_enabled(*tensors: torch.Tensor | None) -> bool:
    """Return whether autograd has to know of a call on these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def blocks(rows_name: str, rows_per: str) -> Callable[..., tuple[int]]:
    """Return the grid of kernels that take ``rows_per`` rows a program, of as many as argument ``rows_name`` says."""

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (-(-meta[rows_name] // meta[rows_per]),)

    return grid
