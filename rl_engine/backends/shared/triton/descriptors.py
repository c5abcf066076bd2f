"""Tensor descriptors made on the host, where a kernel asks for them: arguments stay tensors up to the launch itself.

So keys, scratch copies and checks see tensors, and the block of a descriptor follows the launch that is tried. A launch
plan passes what Triton makes of a descriptor, encoded once for every place that a matrix is found in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

Blocks: TypeAlias = Mapping[str, Callable[[Mapping[str, Any]], list[int]]]  # by pointer argument
_BYTES = 16  # addresses and row strides are multiples of it, and a row stride has 40 bits (cuTensorMapEncodeTiled)
_ROW_BYTES = 1 << 40
_MATRIX = 2  # axes
_MOST_PLACES = 1024  # of one argument of one plan; 0.3 kB each
_thread = threading.local()


def describe(values: Mapping[str, Any], blocks: Blocks) -> dict[str, Any]:
    """Return arguments by name with every tensor named in ``blocks`` as a descriptor, as it lies in memory."""
    made = dict(values)
    for name, block in blocks.items():
        if isinstance(values[name], torch.Tensor):
            made[name] = descriptor(values[name], block(values))
    return made


def descriptor(matrix: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Return the descriptor of a matrix as it lies in memory."""
    shape, strides = list(matrix.shape), list(matrix.stride())
    if lies_transposed(matrix):
        shape.reverse()
        strides.reverse()
    return TensorDescriptor(matrix, shape, strides, block)


class Places:
    """What a plan passes for one described argument: (matrix, its address) -> arguments of the C function.

    They follow from address, shape and strides, the dtype being the plan's, so they are kept by these: to encode a
    descriptor takes longer than to start a kernel, and a training step finds its matrices where the last one did.
    No tensor is kept.
    """

    def __init__(self, block: list[int], encode: Callable[[TensorDescriptor], Sequence[Any]]) -> None:
        self._block = block
        self._encode = encode
        self._made: dict[tuple[Any, ...], Sequence[Any]] = {}

    def __call__(self, matrix: torch.Tensor, address: int) -> Sequence[Any]:
        """Return the arguments for a matrix."""
        place = (address, matrix.shape, matrix.stride())
        found = self._made.get(place)
        if found is None:
            if matrix.is_cuda:
                _enter_context()
            found = self._encode(descriptor(matrix, self._block))
            if len(self._made) >= _MOST_PLACES:
                self._made.clear()
            self._made[place] = found
        return found


def described(
    names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any], blocks: Blocks
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return a launch's arguments as its kernel takes them; unchanged where it wants no descriptors.

    Args:
        names: of the kernel's arguments, in order.
        args: the first of them.
        kwargs: the others, and options.
        blocks: as in `describe`.
    """
    if not blocks:
        return args, kwargs
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    if any(isinstance(values[name], torch.Tensor) and values[name].is_cuda for name in blocks):
        _enter_context()
    return (), describe(values, blocks)


def _enter_context() -> None:
    """Make CUDA's context current in this thread: to encode a descriptor takes one, and unlike a launch makes none.

    A thread that has only used memory cached by torch has none. An event may be recorded under a capture too.
    """
    if not getattr(_thread, "entered", False):
        torch.cuda.Event().record()  # type: ignore[no-untyped-call]  # torch
        _thread.entered = True


def describable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a matrix that can be described: aligned, its rows or columns dense and apart."""
    if tensor.dim() != _MATRIX or not tensor.numel():
        return False
    (n_rows, n_cols), (row_stride, col_stride) = tensor.shape, tensor.stride()
    stride, width, neighbour = (row_stride, n_cols, 1) if col_stride == 1 else (col_stride, n_rows, row_stride)
    row_bytes = stride * tensor.element_size()
    return (
        neighbour == 1
        and width <= stride
        and row_bytes % _BYTES == 0
        and row_bytes < _ROW_BYTES
        and tensor.data_ptr() % _BYTES == 0
    )


def lies_transposed(matrix: torch.Tensor) -> bool:
    """Return whether a matrix's neighbours in memory lie along its first axis, so that it is described transposed."""
    return matrix.stride(-1) != 1
