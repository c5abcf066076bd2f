"""Dispatch: from an operator's name, a device and the mode to the one implementation that runs."""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_engine.backends import catalog
from rl_engine.errors import BackendError
from rl_engine.platforms.tuning import events
from rl_engine.runtime.policy import RLKernelMode, rl_kernel_mode

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from rl_engine.backends.spec import Implementation


@dataclass(frozen=True)
class Operator:
    """A callable operator that says what it is.

    Attributes:
        backend_id: the implementation, e.g. ``rlkernel.triton.silu``.
        contract: version of the numerical contract; it changes when the bits may.
        is_deterministic: the same inputs give the same bits on this device and software.
        is_batch_invariant: a row's bits do not depend on the other rows.
    """

    call: Callable[..., Any]
    backend_id: str
    contract: str
    is_deterministic: bool
    is_batch_invariant: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator; its signature is the one of ``call``."""
        return self.call(*args, **kwargs)


class KernelRegistry:
    """Chooses implementations; remembers what it chose, so that every caller holds the same object."""

    def __init__(self) -> None:
        self._operators: dict[str, Operator] = {}
        self._lock = threading.Lock()

    def get_op(self, op_type: str, device: torch.device | str | None = None, *, backend: str | None = None) -> Operator:
        """Return operator ``op_type`` for ``device`` (default: the accelerator if there is one, else the CPU).

        Args:
            op_type: an operator's name, e.g. ``rms_norm``.
            device: where it will run.
            backend: exactly this backend id, or an error; never another one.

        Raises:
            BackendError: the operator or backend is unknown (the message lists those that exist), cannot run on
                ``device`` (it says why), or strict mode asks for promises that no implementation here makes.
        """
        known = catalog.specs()
        if op_type not in known:
            raise BackendError(f"get_op({op_type!r}): no such operator; there are {', '.join(sorted(known))}")
        device_type = _device_type(device)
        mode = rl_kernel_mode()
        chosen = _default(op_type, device_type, mode) if backend is None else _explicit(op_type, device_type, backend)
        if mode is RLKernelMode.AUDIT:
            events.log().emit(events.TuningEvent("dispatch", op_type, reason=f"{chosen.backend_id} on {device_type}"))
        return self._operator(chosen, known[op_type].contract)

    def _operator(self, chosen: Implementation, contract: str) -> Operator:
        with self._lock:
            operator = self._operators.get(chosen.backend_id)
            if operator is None:
                operator = Operator(
                    call=chosen.call,
                    backend_id=chosen.backend_id,
                    contract=contract,
                    is_deterministic=chosen.is_deterministic,
                    is_batch_invariant=chosen.is_batch_invariant,
                )
                self._operators[chosen.backend_id] = operator
        return operator


kernel_registry = KernelRegistry()
get_op = kernel_registry.get_op


def _device_type(device: torch.device | str | None) -> str:
    torch = importlib.import_module("torch")  # after the name was checked: a typo costs no second of import
    if device is None:
        # device_count asks NVML where it can and starts no CUDA, so a later fork still may
        return "cuda" if torch.cuda.device_count() else "cpu"
    return str(torch.device(device).type)


def _of(op_type: str) -> list[Implementation]:
    return [one for one in catalog.implementations().values() if one.op == op_type]


def _default(op_type: str, device_type: str, mode: RLKernelMode) -> Implementation:
    """Return the first implementation that runs here, Triton before PyTorch; the strict modes ask for promises."""
    pytorch, *others = _of(op_type)  # the declaration registers first
    if mode is RLKernelMode.OFF:
        return pytorch
    reasons = {}
    for one in others:
        if one.explicit_only:
            continue
        reason = one.unavailable(device_type)
        if reason is None:
            return one
        reasons[one.backend_id] = reason
    if mode in (RLKernelMode.STRICT, RLKernelMode.AUDIT):
        reasons[pytorch.backend_id] = "claims neither determinism nor batch invariance"
        tried = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise BackendError(
            f"get_op({op_type!r}) on {device_type}: RL_KERNEL_MODE={mode.value} takes only deterministic, "
            f"batch-invariant operators ({tried}); use a supported device or RL_KERNEL_MODE=auto"
        )
    return pytorch


def _explicit(op_type: str, device_type: str, backend: str) -> Implementation:
    candidates = {one.backend_id: one for one in _of(op_type)}
    chosen = candidates.get(backend)
    if chosen is None:
        raise BackendError(
            f"get_op({op_type!r}, backend={backend!r}): no such backend for it; there are {', '.join(candidates)}"
        )
    reason = chosen.unavailable(device_type)
    if reason is not None:
        raise BackendError(f"get_op({op_type!r}, backend={backend!r}) on {device_type}: {reason}")
    return chosen
