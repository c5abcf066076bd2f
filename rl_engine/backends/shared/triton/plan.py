"""LaunchPlan: a launch frozen below Triton's JIT, which works out on every call again what a signature has settled.

The generated launch (`signature.py`) finds a plan by a key that covers whatever Triton specialises a kernel on; the
plan's own guard covers the rest: hooks, captured globals, debugging, the current device. A plan is made from the
compiled kernel that an ordinary launch returned, never from a copy of Triton's keys, and is used only after both ways
of launching wrote the same bytes. Whatever is in doubt takes the ordinary path.

Supported: Triton 3.6 to 3.9 on NVIDIA cards. What is used below `compiler.py`'s list: ``CompiledKernel.run``,
``function``, ``packed_metadata``, ``metadata``, ``src``; the launch hooks of ``triton.knobs``; the C function under
``run`` where `_VERSIONS` says so. AMD's compiler specialises on the size of buffers as well: no plans there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from rl_engine.backends.shared.triton.descriptors import Places, descriptor
from rl_engine.backends.shared.triton.qualification import BoundLaunch, gate
from rl_engine.backends.shared.triton.scratch import spans, total
from rl_engine.errors import TrialUnavailableError
from rl_engine.platforms.tuning import events
from rl_engine.platforms.tuning.key import Candidate

if TYPE_CHECKING:
    from rl_engine.backends.shared.triton.descriptors import Blocks
    from rl_engine.backends.shared.triton.signature import Signature

_PROOF_BYTES = 1 << 26  # written by a launch that proves a plan: three times as much is allocated
_INTEGERS = ("i32", "i64", "u64")
_SCALARS: Mapping[type, tuple[str, ...]] = {int: _INTEGERS, bool: ("u1", "i1"), float: ("fp32",)}
_DIVISIBLE = ("tt.divisibility", 16)

_Entry = tuple["Callable[..., Any]", tuple[Any, ...]]
_Passes = Callable[[torch.Tensor, int], Sequence[Any]]

# Kernels that a plan has launched, by identity: from Triton 3.8 on a kernel that nobody refers to unloads its module,
# at any time, also under a graph that will launch it again, and in a forked child that does not own it.
_kept: dict[int, Any] = {}


def _safe_entry(compiled: Any) -> _Entry:
    """Return ``CompiledKernel.run``, whose arguments are the same in every version, and those before the kernel's."""
    return compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)


def _safe_descriptor(block: list[int], _meta: Any) -> _Passes:
    """Pass the descriptor itself, as the JIT does. It refers to its tensor, so each is made anew."""
    return lambda matrix, _address: (descriptor(matrix, block),)


def _c_entry(compiled: Any) -> _Entry:
    """Return the C function below ``run`` of Triton 3.6, compiled for one signature: it parses what it is given.

    0.7 to 1.1 us faster than ``run`` (H200). From 3.7 on one function serves all kernels, and reads as many arguments
    as the kernel has whatever it is given: not worth it before it has run on a card.
    """
    run, launch = compiled.run, compiled.run.launch
    if getattr(compiled.metadata, "tensordesc_meta", None):
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]  # below the wrapper that encodes descriptors
    scratch, hooks = (None, None), (None, None, None)
    flags = (run.launch_cooperative_grid, run.launch_pdl)
    return launch, (compiled.function, *flags, *scratch, compiled.packed_metadata, *hooks)


def _c_descriptor(block: list[int], meta: Any) -> _Passes:
    """Pass what Triton 3.6 makes of a descriptor: its encoding, shape and strides."""
    driver = importlib.import_module("triton.backends.nvidia.driver")
    return Places(block, lambda described: tuple(driver.make_tensordesc_arg(described, meta)))


@dataclass(frozen=True)
class _Version:
    """How a Triton starts a kernel.

    Attributes:
        entry: compiled kernel -> what is called, and its arguments between the stream and the kernel's own.
        head_length: how many those are.
        descriptor: (block, Triton's metadata of it) -> what is passed for a matrix that the kernel takes described.
    """

    entry: Callable[[Any], _Entry]
    head_length: int
    descriptor: Callable[[list[int], Any], _Passes]


_SAFE = _Version(_safe_entry, 5, _safe_descriptor)
_VERSIONS: Mapping[str, _Version] = {
    "3.6": _Version(_c_entry, 9, _c_descriptor),
    "3.7": _SAFE,
    "3.8": _SAFE,
    "3.9": _SAFE,
}


@dataclass(frozen=True)
class LaunchPlan:
    """One compiled kernel, ready to be started with other arguments of the same key.

    Attributes:
        call: (grid x, y, z, stream, *head, *arguments in kernel order), pointers as integers.
        descriptors: what is passed for a matrix that the kernel takes described, in kernel order.
        head: what stands between stream and arguments.
        tuned: values of the tuned parameters, in kernel order.
        stream: device index -> the stream that is current now.
        index: of the device.
        holds: whether nothing outside the arguments asks for Triton's own launch.
    """

    call: Callable[..., Any]
    head: tuple[Any, ...]
    descriptors: tuple[_Passes, ...]
    tuned: tuple[Any, ...]
    stream: Callable[[int], int]
    index: int
    holds: Callable[[], bool]


@dataclass(frozen=True)
class Settled:
    """What a key stands for: options that were chosen, and the plan, if there can be one."""

    options: Mapping[str, int]
    plan: LaunchPlan | None = None


class Plans:
    """Makes the plans of one kernel, and proves them once for each device and kinds of arguments."""

    def __init__(self, jitted: Any, name: str, signature: Signature, blocks: Blocks) -> None:
        self._jitted = jitted
        self._name = name
        self._signature = signature
        self._blocks = [blocks[name] for name in signature.described]
        self._proofs: dict[tuple[Any, ...], bool] = {}
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Prove again; for a forked child, where another thread of the parent's may have held the lock."""
        self._proofs.clear()
        self._lock = threading.Lock()

    def make(
        self, compiled: Any, options: Mapping[str, int], launch: BoundLaunch, replay: Callable[..., bool], index: int
    ) -> LaunchPlan | None:
        """Return the plan of the launch that gave ``compiled``, or None where the ordinary path must do.

        Args:
            compiled: what ``kernel[grid](...)`` returned.
            options: tuned parameters and launch options.
            launch: the same launch, ordinary, on other memory.
            replay: (plan, arguments by name) -> whether the plan launched them.
            index: of the device.
        """
        if _unsupported() is not None:
            return None
        reason = obstacle(self._jitted, self._signature, compiled, launch.values, index)
        if reason is not None:
            events.logger.debug("%s launches through Triton: %s", self._name, reason)
            return None
        blocks = [block({**launch.values, **options}) for block in self._blocks]
        plan = _freeze(self._jitted, compiled, options, index, blocks)
        with self._lock:
            kinds = (index, *compiled.src.signature.values())
            if kinds not in self._proofs:
                proof = prove(launch, lambda values: replay(plan, values))
                if proof is None:
                    return None
                self._proofs[kinds] = proof == ""
                if proof:
                    text = f"{self._name} launches through Triton: its launch plan {proof}; please report it"
                    events.log().warn_once(self._name, text)
            return plan if self._proofs[kinds] else None


@functools.cache
def _unsupported() -> str | None:
    """Return why this Triton, or this backend of it, has no plans, and log it once; None where it has."""
    reason: str | None = None
    backend = triton.runtime.driver.active.get_current_target().backend
    if _version() not in _VERSIONS:
        reason = f"Triton {triton.__version__} is none of {', '.join(_VERSIONS)}"
    elif backend != "cuda":
        reason = f"the compiler's backend is {backend}"
    if reason is not None:
        events.logger.debug("no launch plans, every launch goes through Triton: %s", reason)
    return reason


def head_length() -> int:
    """Return how many arguments a plan's `LaunchPlan.head` has; 0 where this Triton has no plans."""
    return _VERSIONS[_version()].head_length if _version() in _VERSIONS else 0


def _version() -> str:
    return ".".join(triton.__version__.split(".")[:2])


def obstacle(jitted: Any, signature: Signature, compiled: Any, values: Mapping[str, Any], index: int) -> str | None:
    """Return what keeps a compiled kernel from being launched by a plan, None where nothing does."""
    if not isinstance(compiled, triton.compiler.CompiledKernel):
        return f"it was compiled to a {type(compiled).__name__}"
    metadata, kinds = compiled.metadata, compiled.src.signature
    compiled.run  # noqa: B018  # loads the module: `function` is None before
    if not compiled.function:
        return "its module did not load"
    if list(kinds) != list(jitted.arg_names):
        return f"it takes {len(kinds)} arguments, the kernel has {len(jitted.arg_names)}"
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        return "it needs scratch memory"
    described = getattr(metadata, "tensordesc_meta", None) or ()
    if len(described) != len(signature.described) or None in described:
        return "it takes other tensor descriptors than were made on the host"
    if metadata.launch_cooperative_grid or metadata.launch_pdl or getattr(metadata, "instrumentation_mode", ""):
        return "it is launched in a way of its own"
    if jitted.debug or triton.knobs.runtime.debug:
        return "it is being debugged"
    others = [name for name in signature.pointers if _elsewhere(values[name], index)]
    if others:
        return f"{', '.join(others)} is none of device {index}"
    strange = [name for name in values if not _expected(name, jitted, signature, compiled, values[name])]
    return f"Triton specialised {', '.join(strange)} in a way not known here" if strange else None


def prove(launch: BoundLaunch, replay: Callable[[Mapping[str, Any]], bool]) -> str | None:
    """Launch both ways into poisoned copies of a bounded size.

    Returns "" where the bytes are equal and a launch that does nothing would have shown, a reason where they are not,
    and None where that cannot be told now.
    """
    if total(launch.written) > _PROOF_BYTES:
        return None
    ordinary, planned, nothing = (Candidate.of(way=way) for way in range(3))
    declined = False

    def run(values: Mapping[str, Any], way: Candidate) -> None:
        nonlocal declined
        if way == ordinary:
            launch.run(values, ordinary)
        elif way == planned:
            declined |= not replay(values)  # a hook is installed: nothing was launched

    data = launch.data if total(spans(launch.tensors)) <= _PROOF_BYTES else ()
    both = BoundLaunch(run, launch.values, launch.outputs, launch.inout, data)
    try:
        found = gate(both, (ordinary, planned, nothing), repeats=1)
    except (TrialUnavailableError, torch.OutOfMemoryError) as error:
        events.logger.debug("a launch plan is not proved now: %s", error)
        return None
    except Exception as error:  # noqa: BLE001  # a plan that cannot launch must not stop a training run
        return f"failed ({type(error).__name__}: {error})"
    if declined or nothing in found.survivors:
        return None
    return "" if planned in found.survivors else "gave other bytes than Triton's launch"


def _freeze(
    jitted: Any, compiled: Any, options: Mapping[str, int], index: int, blocks: Sequence[list[int]] = ()
) -> LaunchPlan:
    version = _VERSIONS[_version()]
    call, head = version.entry(compiled)
    described = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    _kept[id(compiled)] = compiled
    return LaunchPlan(
        call=call,
        head=head,
        descriptors=tuple(version.descriptor(block, meta) for block, meta in zip(blocks, described, strict=True)),
        tuned=tuple(options[name] for name in jitted.arg_names if name in options),
        stream=triton.runtime.driver.active.get_current_stream,
        index=index,
        holds=_guard(jitted, index),
    )


def _guard(jitted: Any, index: int) -> Callable[[], bool]:
    """Return a function that says whether Triton's own launch would do nothing but start the kernel.

    Of environment variables that Triton reads at every launch (TRITON_DEBUG) a change made while the process runs is
    not seen: reading one costs as much as the rest. What is set through ``triton.knobs`` is.
    """
    runtime, compilation = triton.knobs.runtime, triton.knobs.compilation
    set_by_hand = vars(runtime)
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    before = jitted.pre_run_hooks
    alone = torch.cuda.device_count() == 1
    current_device = triton.runtime.driver.active.get_current_device
    unchanged = _unchanged(jitted.used_global_vals)

    def holds() -> bool:
        return (
            not enter.calls
            and not leave.calls
            and runtime.launch_enter_hook is enter
            and runtime.launch_exit_hook is leave
            and not before
            and not set_by_hand.get("debug")
            and runtime.add_stages_inspection_hook is None
            and not compilation.instrumentation_mode
            and (alone or current_device() == index)
            and (unchanged is None or unchanged())
        )

    return holds


def _unchanged(used: Mapping[tuple[str, int], tuple[Any, dict[str, Any]]]) -> Callable[[], bool] | None:
    """Return a function that says whether the globals a kernel was compiled with are what they were; None for none.

    Triton keeps copies, and to compare one ``tl.constexpr`` with another takes its Python 0.5 us, up to seven times a
    launch. Here the globals themselves are kept, which are soon compared while they are the same objects, and what
    they hold.
    """
    scopes: dict[int, dict[str, Any]] = {}
    captured: dict[int, dict[str, Any]] = {}
    constants: list[Any] = []
    for (name, _scope), (value, scope) in used.items():
        seen = scope.get(name)
        same = isinstance(seen, triton.language.constexpr) and bool(seen == value)
        if same:
            constants.append(seen)
        scopes[id(scope)] = scope
        captured.setdefault(id(scope), {})[name] = seen if same else value
    if not captured:
        return None
    # of a single name itemgetter would give the value itself, which is compared otherwise than in a tuple
    checks = [
        (operator.itemgetter(*names, next(iter(names))), scopes[key], (*names.values(), next(iter(names.values()))))
        for key, names in captured.items()
    ]
    held = [one.value for one in constants]

    def unchanged() -> bool:
        try:
            for get, scope, values in checks:
                if get(scope) != values:
                    return False
        except KeyError:  # deleted
            return False
        return [one.value for one in constants] == held

    return unchanged


def _elsewhere(value: Any, index: int) -> bool:
    return value is not None and value.get_device() != index


def _expected(name: str, jitted: Any, signature: Signature, compiled: Any, value: Any) -> bool:
    """Return whether Triton specialised an argument by the rules that the key follows, and no others.

    Integers: 1 is a constant, multiples of 16 are marked, width by value; those not specialised by width alone.
    Pointers: dtype, and a mark where 16 divides the address. None is a constant; of run-time floats nothing is known.
    """
    source, at = compiled.src, jitted.arg_names.index(name)
    parameter, kind = jitted.params[at], source.signature[name]
    marks = [tuple(one) for one in source.attrs.get((at,), ())]
    if name in signature.described:
        return isinstance(value, torch.Tensor) and kind.startswith("tensordesc<") and not marks
    if parameter.is_constexpr or value is None:
        return bool(kind == "constexpr") and not marks
    if name in signature.pointers:
        aligned = [_DIVISIBLE] if value.data_ptr() % 16 == 0 else []
        return isinstance(value, torch.Tensor) and kind[0] == "*" and marks in (aligned, [])
    if type(value) is int and value == 1 and not parameter.do_not_specialize:
        return bool(kind == "constexpr")
    if name in signature.dynamic and (marks or not parameter.do_not_specialize):
        return False
    return kind in _SCALARS.get(type(value), ()) and marks in ([_DIVISIBLE], [])
