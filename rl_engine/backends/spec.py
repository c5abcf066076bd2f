"""What an operator is: one declaration beside its PyTorch reference, read by registry, tests, benchmarks and docs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

_Call = TypeVar("_Call", bound=Callable[..., Any])


@dataclass(frozen=True)
class Case:
    """One set of sizes to run an operator at. ``tiny`` runs under the interpreter in a second.

    Tags: ``speed`` is for benchmarks alone, ``matrix`` beside it where matrix units are the limit, ``gpu`` for a card.
    """

    name: str
    sizes: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call. Gradients are checked for the floating-point tensors named in ``differentiable``."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    differentiable: tuple[int, ...] = (0,)


class InputMaker(Protocol):
    """Makes a case's tensors, with dtype, device and random numbers chosen by the caller."""

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return normal random values; ``dtype`` only where an operator fixes it."""
        ...

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Return int64 values in ``[low, high)``."""
        ...

    def bernoulli(self, probability: float, *shape: int) -> torch.Tensor:
        """Return a boolean mask."""
        ...


@dataclass(frozen=True)
class Tolerance:
    """Allowed error against the float64 reference, by dtype name, in units of that dtype's epsilon, and why."""

    epsilons: Mapping[str, float]
    reason: str


@dataclass(frozen=True)
class Traffic:
    """What one call must do at the least: bytes of every input read once and every output written once, and products.

    Attributes:
        forward: bytes of the forward pass.
        backward: bytes of the backward pass.
        forward_flops: multiplications and additions on matrix units, forward; 0 where memory alone is the limit.
        backward_flops: the same, backward.
    """

    forward: int
    backward: int = 0
    forward_flops: int = 0
    backward_flops: int = 0


@dataclass(frozen=True)
class OpSpec:
    """Everything the project knows of an operator except how it is computed on a card."""

    name: str
    family: str
    contract: str
    reference: Callable[..., Any]
    inputs: Callable[..., Inputs]
    cases: tuple[Case, ...]
    tolerance: Tolerance
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    differentiable: bool = True
    rowwise: bool = True  # row r of every output depends on row r of the inputs only
    traffic: Callable[..., Traffic] | None = None  # (itemsize, **sizes and options of a case), where a case is timed


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator: what dispatch chooses between."""

    op: str
    backend_id: str
    call: Callable[..., Any]
    is_deterministic: bool
    is_batch_invariant: bool
    unavailable: Callable[[str], str | None] = field(repr=False)
    explicit_only: bool = False


_specs: dict[str, OpSpec] = {}
_implementations: dict[str, Implementation] = {}


def specs() -> Mapping[str, OpSpec]:
    """Return the declared operators by name. Complete after `rl_engine.backends.catalog.load`."""
    return MappingProxyType(_specs)


def implementations() -> Mapping[str, Implementation]:
    """Return the implementations by backend id. Complete after `rl_engine.backends.catalog.load`."""
    return MappingProxyType(_implementations)


def operator(name: str, **declaration: Any) -> Callable[[_Call], _Call]:
    """Declare the decorated PyTorch function as operator ``name`` and its ground truth; fields as in `OpSpec`."""

    def declare(reference: _Call) -> _Call:
        if name in _specs:
            raise ValueError(f"operator {name!r} is declared twice: in {_specs[name].reference.__module__} and here")
        _specs[name] = OpSpec(name=name, reference=reference, **declaration)
        _register(
            Implementation(
                op=name,
                backend_id=f"rlkernel.pytorch.{name}",
                call=reference,
                is_deterministic=False,  # PyTorch promises neither for its own kernels
                is_batch_invariant=False,
                unavailable=lambda _device_type: None,
            )
        )
        return reference

    return declare


def implements(
    name: str,
    *,
    backend_id: str,
    unavailable: Callable[[str], str | None],
    explicit_only: bool = False,
) -> Callable[[_Call], _Call]:
    """Register the decorated function as a deterministic, batch-invariant implementation of operator ``name``.

    ``unavailable(device_type)`` returns None where it runs, else the reason why not.
    """

    def register(call: _Call) -> _Call:
        if name not in _specs:
            raise ValueError(f"{backend_id}: operator {name!r} has no declaration under backends/reference")
        _register(
            Implementation(
                op=name,
                backend_id=backend_id,
                call=call,
                is_deterministic=True,
                is_batch_invariant=True,
                unavailable=unavailable,
                explicit_only=explicit_only,
            )
        )
        return call

    return register


def _register(implementation: Implementation) -> None:
    if implementation.backend_id in _implementations:
        raise ValueError(f"backend id {implementation.backend_id!r} is registered twice")
    _implementations[implementation.backend_id] = implementation
