"""Copies of a launch's tensors that keep aliases, strides, gaps and alignment, so that a trial may write to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_engine.errors import TrialUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_ALIGNMENT = 256  # bytes; a copy keeps its address modulo this: wide loads and swizzles depend on less
POISON = 0xFF  # every byte: NaN in bf16, fp16 and fp32, -1 in integers


@dataclass(frozen=True)
class Span:
    """The bytes that a group of overlapping tensors covers.

    Attributes:
        tensors: the group's tensors, by argument name.
        low: address of its first byte.
        high: address behind its last byte.
    """

    tensors: Mapping[str, torch.Tensor]
    low: int
    high: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.high - self.low


def spans(tensors: Mapping[str, torch.Tensor]) -> tuple[Span, ...]:
    """Group tensors whose bytes overlap, by address; tensors without elements belong to no group."""
    ranges = sorted((*_range(tensor), name) for name, tensor in tensors.items() if tensor.numel())
    groups: list[tuple[int, int, list[str]]] = []
    for low, high, name in ranges:
        if groups and low < groups[-1][1]:
            first, last, names = groups.pop()
            groups.append((first, max(last, high), [*names, name]))
        else:
            groups.append((low, high, [name]))
    return tuple(Span({name: tensors[name] for name in names}, low, high) for low, high, names in groups)


class Copy:
    """A copy of one span: the same views over other memory, filled or restored at will."""

    def __init__(self, span: Span) -> None:
        self._span = span
        any_tensor = next(iter(span.tensors.values()))
        self._source = _bytes_at(any_tensor, span.low, span.size)
        memory = torch.empty(span.size + 2 * _ALIGNMENT, dtype=torch.uint8, device=any_tensor.device)
        start = (span.low - memory.data_ptr()) % _ALIGNMENT
        self.bytes = memory[start : start + span.size]
        self.tensors = {name: self._view(tensor) for name, tensor in span.tensors.items()}

    def restore(self) -> None:
        """Make the bytes those of the caller's tensors."""
        self.bytes.copy_(self._source)

    def poison(self) -> None:
        """Fill every byte, gaps between rows included, with `POISON`."""
        self.bytes.fill_(POISON)

    def randomise(self, generator: torch.Generator) -> bool:
        """Fill floating-point tensors with random values over a wide range of exponents.

        Returns False, and changes nothing, where the span holds several dtypes or integers.
        """
        dtypes = {tensor.dtype for tensor in self.tensors.values()}
        dtype = next(iter(dtypes))
        if len(dtypes) > 1 or not dtype.is_floating_point or self._span.size % dtype.itemsize:
            return False
        values = self.bytes.view(dtype) if self.bytes.data_ptr() % dtype.itemsize == 0 else None
        if values is None:
            return False
        normal = torch.randn(values.shape, generator=generator, device=values.device, dtype=torch.float32)
        exponent = torch.randint(-6, 7, values.shape, generator=generator, device=values.device)
        values.copy_(torch.ldexp(normal, exponent))
        return True

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        offset = self.bytes.storage_offset() + tensor.data_ptr() - self._span.low
        if offset % tensor.element_size():
            raise TrialUnavailableError("a tensor is not aligned to its own element size")
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        start = offset // tensor.element_size()
        return made.set_(self.bytes.untyped_storage(), start, tensor.size(), tensor.stride())


def require_memory(size: int, device: torch.device) -> None:
    """Raise TrialUnavailableError unless ``size`` bytes of scratch fit, with room to spare.

    Asked beforehand: a failed allocation would flush the allocator's cache.
    """
    if device.type != "cuda":
        return
    free, _total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if size > (free + reserved) // 2:
        raise TrialUnavailableError(f"scratch copies need {size >> 20} MiB, {(free + reserved) >> 20} MiB are free")


def total(found: Iterable[Span]) -> int:
    """Return the bytes that copies of these spans take."""
    return sum(span.size for span in found)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    low = tensor.data_ptr()
    return low, low + (last + 1) * tensor.element_size()


def _bytes_at(tensor: torch.Tensor, low: int, size: int) -> torch.Tensor:
    """Return ``size`` bytes from address ``low`` of the storage under ``tensor``, as uint8."""
    storage = tensor.untyped_storage()
    offset = low - storage.data_ptr()
    if offset < 0 or offset + size > storage.nbytes():
        raise TrialUnavailableError("overlapping tensors lie in different storages")
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, offset, (size,), (1,))
