"""A card that is not there: Triton compiles for it as ever, and what would start a kernel is written down instead.

Kernels are real, compiled for sm_90; only the C functions of Triton's driver are replaced, so everything above them is
Triton's own. A kernel may be given a function that does on host memory what it would have done on the card.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from rl_engine.backends.shared.triton import plan
from rl_engine.backends.shared.triton.autotuning import KernelLauncher

Compute = Callable[[dict[str, Any]], None]  # what a kernel does, of its arguments by name, pointers as integers


class OnCard(torch.Tensor):
    """Host memory that says it lies on device 0, or on ``index``."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    index = 0

    def get_device(self) -> int:
        return self.index


def on_card(tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
    """Return the same memory as of device ``index``."""
    found = tensor.as_subclass(OnCard)
    found.index = index
    return found


@dataclass(frozen=True)
class Start:
    """One start of a kernel, as Triton's driver was asked for it."""

    kernel: str
    grid: tuple[int, int, int]
    stream: int
    function: int
    packed: tuple[int, ...]
    device: int
    args: tuple[Any, ...]
    by_address: bool  # pointers came as integers: a plan's launch


@dataclass
class FakeCard:
    """What Triton calls of a driver, for one card or several.

    Attributes:
        starts: every kernel started.
        stream: the current one.
        device: the current one.
        loaded: names of kernels by their function.
        unloaded: modules that were let go.
        compute: what kernels do, by name.
        kernels: that may be launched here, by name.
        broken: launches by address do nothing.
        encoded: addresses of matrices, as often as a descriptor of them was encoded.
    """

    starts: list[Start] = field(default_factory=list)
    stream: int = 7
    device: int = 0
    loaded: dict[int, str] = field(default_factory=dict)
    unloaded: list[int] = field(default_factory=list)
    compute: dict[str, Compute] = field(default_factory=dict)
    kernels: dict[str, KernelLauncher] = field(default_factory=dict)
    broken: bool = False
    encoded: list[int] = field(default_factory=list)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, _device: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    @contextlib.contextmanager
    def chosen(self, index: int) -> Iterator[None]:
        """Be ``torch.cuda.device``."""
        before, self.device = self.device, index
        try:
            yield
        finally:
            self.device = before

    @property
    def launcher_cls(self) -> type:
        return nvidia.CudaLauncher

    @property
    def utils(self) -> Any:
        return SimpleNamespace(
            launch=self._launch_any,
            load_binary=self._load,
            unload_module=self.unloaded.append,
            build_signature_metadata=lambda signature: bytes(len(signature)),
            get_device_properties=lambda _device: {"max_shared_mem": 227 << 10},
            fill_tma_descriptor=self._encode,
            fill_tma_descriptor_tiled=self._encode,
        )

    def _load(self, name: str, *_binary: Any) -> tuple[int, int, int, int, int]:
        function = 1000 + len(self.loaded)
        self.loaded[function] = name
        return function + 1000, function, 32, 0, 1024

    def _encode(self, address: int, *how: Any) -> Any:
        """Encode a tensor descriptor."""
        self.encoded.append(address)
        return SimpleNamespace(address=address, how=how)

    def _launch_any(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        """Be the one C function of Triton 3.7 and newer."""
        _cooperative, _pdl, packed, metadata, enter, leave, _scratch, _profile, annotations, _signature, args = rest
        assert len(annotations) == len(args), "the driver would read past the arguments"
        self._start((x, y, z), stream, function, packed, metadata, enter, leave, args)

    def _launch_one(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        """Be the C function that Triton 3.6 compiles for a kernel's signature."""
        _cooperative, _pdl, _scratch, _profile, packed, metadata, enter, leave, *args = rest
        self._start((x, y, z), stream, function, packed, metadata, enter, leave, tuple(args))

    def _start(
        self, grid: Any, stream: int, function: int, packed: Any, metadata: Any, enter: Any, leave: Any, args: Any
    ) -> None:
        if enter is not None:
            enter(metadata)
        name = self.loaded[function]
        named, args = self._collected(self.kernels[name], args)
        pointers = [one for key, one in named.items() if key.endswith("_ptr") and one is not None]
        by_address = not any(isinstance(one, torch.Tensor) for one in pointers)
        self.starts.append(Start(name, grid, stream, function, packed, self.device, args, by_address))
        if name in self.compute and not (by_address and self.broken):
            self.compute[name](
                {key: one.data_ptr() if isinstance(one, torch.Tensor) else one for key, one in named.items()}
            )
        if leave is not None:
            leave(metadata)

    @staticmethod
    def _collected(kernel: KernelLauncher, args: tuple[Any, ...]) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Return arguments by name and in order, those of a described matrix (encoding, shape, strides) as one."""
        given = iter(args)
        named = {
            name: tuple(itertools.islice(given, 5)) if name in kernel.declaration.descriptors else next(given)
            for name in kernel.arg_names
        }
        assert not list(given), "more arguments than the kernel has"
        return named, tuple(named.values())


@contextlib.contextmanager
def fake_card(monkeypatch: pytest.MonkeyPatch, *kernels: KernelLauncher) -> Iterator[FakeCard]:
    """Make the block's launches of ``kernels`` go to a card that is not there."""
    card = FakeCard(kernels={one.__name__: one for one in kernels})
    with monkeypatch.context() as patch:
        for name in ("PyKernelArg", "ARG_KERNEL", "ARG_CONSTEXPR", "ARG_TUPLE"):
            patch.setattr(nvidia, name, SimpleNamespace if name == "PyKernelArg" else name, raising=False)
        one_a_signature = SimpleNamespace(launch=card._launch_one)
        patch.setattr(nvidia, "compile_module_from_src", lambda **_source: one_a_signature, raising=False)
        patch.setattr(nvidia, "library_dirs", list)
        patch.setattr(torch.cuda, "current_device", card.get_current_device)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch._C, "_cuda_getDevice", card.get_current_device, raising=False)
        patch.setattr(torch.cuda, "device", card.chosen)
        patch.setattr(triton.runtime.driver, "_active", card)
        try:
            yield card
        finally:
            for one in kernels:
                one.forget()
                made = [compiled for kept, *_others in one.fn.device_caches.values() for compiled in kept.values()]
                for compiled in (*made, *plan._kept.values()):
                    compiled.module = None  # else it would be unloaded later, by a driver that is not there
                one.fn.device_caches.clear()
