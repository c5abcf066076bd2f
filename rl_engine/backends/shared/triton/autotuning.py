"""TunableKernel: the decorator above ``@triton.jit`` through which every launch of this library goes.

Off, a launch is Triton's own with the kernel's fixed options. On, the first launch of a signature asks the
`PersistentAutotuner`; later ones find their options, and a plan to launch them below Triton, in a table here and never
call it.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rl_engine.backends.shared.triton import compiler
from rl_engine.backends.shared.triton.asking import Question, ask
from rl_engine.backends.shared.triton.candidates import Admits, Axes, FixedRule, NeedsRule, derive
from rl_engine.backends.shared.triton.descriptors import Blocks, described
from rl_engine.backends.shared.triton.distinct import Failures, one_kernel
from rl_engine.backends.shared.triton.plan import LaunchPlan, Plans, Settled, head_length
from rl_engine.backends.shared.triton.qualification import BoundLaunch
from rl_engine.backends.shared.triton.signature import generate
from rl_engine.platforms import device
from rl_engine.platforms.tuning import events
from rl_engine.runtime.policy import LaunchPolicy, innermost_policy, launch_policy, pinned, process_policy

if TYPE_CHECKING:
    from rl_engine.platforms.device import DeviceIdentity
    from rl_engine.platforms.tuning.key import Candidate, Part

__all__ = ["KernelLauncher", "TunableKernel", "kernels", "may_measure", "pin_autotune", "pinned_backward"]

_LAUNCH_OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas", "maxnreg", "waves_per_eu"})
_FIXED_LAUNCHES = 4096  # of a kernel, kept by their exact sizes; a run whose lengths never repeat must not fill memory
_Backward = TypeVar("_Backward", bound=Callable[..., Any])
_kernels: dict[str, KernelLauncher] = {}
# Triton's interpreter patches `triton.language` for the whole process: 34 of 160 launches from four threads failed.
_interpreter_lock = threading.RLock()
_in_child_of_cuda_process = _fork_inherits_cuda = False


def kernels() -> Mapping[str, KernelLauncher]:
    """Return every wrapped kernel by name. Complete after `rl_engine.backends.catalog.load`."""
    return dict(_kernels)


@dataclass(frozen=True, kw_only=True)
class TunableKernel:
    """Declares how a kernel may be launched; used as a decorator above ``@triton.jit``.

    Pointer arguments end in ``_ptr``; parameters named in ``neutral`` come last and are not passed by callers.

    Attributes:
        outputs: pointers the kernel writes and does not read.
        fixed: (scalar arguments, device) -> the launch used without tuning: a value for every axis.
        neutral: axes that cannot change the order of any floating-point sum, and their values.
        inout: pointers the kernel reads and writes.
        data: pointers to floating-point inputs whose values may be anything (no ids, offsets, lengths).
        dynamic: integers that change from step to step; declared ``do_not_specialize`` below.
        admits: (scalar arguments, launch) -> whether the launch makes sense at all.
        needs: (scalar arguments and bytes an element of each pointer, launch) -> registers and shared memory it takes.
        on: axes as they are on a kind of device (cuda, hip) where they differ from ``neutral``, or exist only there.
        warm: the inputs usually lie in the L2, so time them there.
        descriptors: matrices that the kernel takes as tensor descriptors: (all arguments) -> block of each.
    """

    outputs: tuple[str, ...]
    fixed: FixedRule
    neutral: Axes = field(default_factory=dict)
    inout: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    dynamic: tuple[str, ...] = ()
    admits: Admits | None = None
    needs: NeedsRule | None = None
    on: Mapping[str, Axes] = field(default_factory=dict)
    warm: bool = False
    descriptors: Blocks = field(default_factory=dict)

    @property
    def axes(self) -> frozenset[str]:
        """Names of all axes, on any kind of device."""
        return frozenset(self.neutral).union(*self.on.values())

    def __call__(self, jitted: Any) -> KernelLauncher:
        """Wrap a jitted kernel; raises ValueError where the declaration does not fit it."""
        names = inspect.signature(jitted.fn).parameters
        pointers = (*self.outputs, *self.inout, *self.data, *self.descriptors)
        if not self.outputs and not self.inout:
            raise ValueError(f"{jitted.fn.__name__}: name in outputs or inout what the kernel writes")
        unnamed = sorted(name for name in pointers if not name.endswith("_ptr"))
        if unnamed:
            raise ValueError(f"{jitted.fn.__name__}: {', '.join(unnamed)}: pointer arguments end in _ptr")
        declared = {*pointers, *self.dynamic}
        wrong = sorted(name for name in declared if name not in names)
        wrong += sorted(name for name in self.axes if name not in names and name not in _LAUNCH_OPTIONS)
        if wrong:
            raise ValueError(f"{jitted.fn.__name__}: {', '.join(wrong)} declared, but the kernel has no such argument")
        specialised = [one.name for one in getattr(jitted, "params", ()) if not one.do_not_specialize]
        clash = sorted(set(self.dynamic) & set(specialised))
        if clash:
            raise ValueError(f"{jitted.fn.__name__}: add {', '.join(clash)} to do_not_specialize of @triton.jit")
        return KernelLauncher(jitted, self)


class KernelLauncher:
    """A jitted kernel that launches as it always did, ``kernel[grid](...)``, with options chosen for it."""

    def __init__(self, jitted: Any, declaration: TunableKernel) -> None:
        functools.update_wrapper(self, jitted.fn)  # type: ignore[arg-type]  # it takes any object with attributes
        self.fn = jitted
        self._declaration = declaration
        self._tuned = declaration.axes - _LAUNCH_OPTIONS
        self._explicit = declaration.axes | _LAUNCH_OPTIONS
        self._signature = generate(
            jitted.fn,
            tuned=self._tuned,
            dynamic=declaration.dynamic,
            device=(*declaration.outputs, *declaration.inout)[0],
            inout=declaration.inout,
            described=tuple(declaration.descriptors),
            head=head_length(),
        )
        self._settled: dict[tuple[Any, ...], Settled] = {}
        self._fixed: dict[tuple[Any, ...], Mapping[str, int]] = {}
        self._plans = Plans(jitted, self.__name__, self._signature, declaration.descriptors)
        self._interpreted = compiler.interpreted(jitted)
        self._failures = Failures()
        self._launch = self._launcher(self._settled)
        _kernels[self.__name__] = self

    def __getattr__(self, name: str) -> Any:
        """Give everything else of the jitted function, e.g. ``arg_names`` or ``cache_key``."""
        if name == "fn":
            raise AttributeError(name)  # not set yet: a copy or an unpickled object
        return getattr(self.fn, name)

    @property
    def declaration(self) -> TunableKernel:
        """How the kernel may be launched."""
        return self._declaration

    @declaration.setter
    def declaration(self, changed: TunableKernel) -> None:
        """Launch by another fixed rule, or with other neutral axes, from now on; arguments must stay what they are."""
        self._declaration = changed
        self.forget()

    @property
    def src(self) -> str:
        """The kernel's source text."""
        return inspect.getsource(self.fn.fn)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return the launcher for ``grid``: a tuple, or a function of all arguments and chosen parameters by name.

        It takes the kernel's arguments without the tuned ones. A tuned parameter or a launch option passed explicitly
        wins, and that launch is not tuned.
        """
        return functools.partial(self._launch, grid)

    def forget(self) -> None:
        """Ask the autotuner again at the next launch of every signature."""
        self._settled.clear()
        self._fixed.clear()
        self._plans.forget()

    def values(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return all arguments of a launch by name, without the tuned ones."""
        return self._signature.values(*args, **kwargs)

    def parts(self, values: Mapping[str, Any]) -> dict[str, Part]:
        """Return what a tuning key holds of these arguments, tensors and scalars by name."""
        return self._signature.parts(values)

    def candidates(self, values: Mapping[str, Any], identity: DeviceIdentity) -> tuple[Candidate, ...]:
        """Return the launches for these arguments, tensors and scalars by name, the fixed one first."""
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        sizes = {name: value for name, value in values.items() if name not in tensors}
        widths = {name: tensor.element_size() for name, tensor in tensors.items()}
        return derive(self.declaration, sizes, widths, identity)

    def _launcher(self, settled: Any, ordinary: Callable[..., None] | None = None) -> Callable[..., None]:
        """Return the generated launch over a table; ``ordinary`` is called for what has no plan there."""
        return self._signature.launcher(
            innermost=innermost_policy, of_process=process_policy, fixed=self._fixed, settled=settled, jitted=self.fn,
            off=self._launch_fixed, on=ordinary or self._launch_tuned, torch=torch._C, bump=_bump_versions,  # noqa: SLF001
        )  # fmt: skip

    def _launch_fixed(self, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Launch with the fixed options, or with those that the caller gave, on the tensors' own device."""
        given = {name: value for name, value in kwargs.items() if name not in self._explicit}
        exact = self._signature.exact(*args, **given)
        index = exact[0]
        if _elsewhere(index):
            with torch.cuda.device(index):
                return self._launch_fixed(grid, args, kwargs)
        identity = device.for_launch(index)
        options = self.declaration.fixed(self._signature.sizes(*args, **given), identity)
        # what stands in the table is launched as it is: no descriptors are made
        if index >= 0 and identity is not device.UNKNOWN and not self.declaration.descriptors:
            if len(self._fixed) >= _FIXED_LAUNCHES:
                self._fixed.clear()
            self._fixed[exact] = {**options, **compiler.FIXED_OPTIONS}
        self._run(grid, args, {**options, **kwargs})
        return None

    def _launch_tuned(
        self, policy: LaunchPolicy, known: Settled | None, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Launch through Triton: with ``known`` options, the caller's, or those that the autotuner names."""
        explicit = {name: value for name, value in kwargs.items() if name in self._explicit}
        given = {name: value for name, value in kwargs.items() if name not in explicit}
        index = self._signature.index(*args, **given)
        if _elsewhere(index):
            with torch.cuda.device(index):
                return self._launch(grid, *args, **kwargs)
        if known is not None:
            self._run(grid, args, {**given, **known.options})
            return None
        if explicit:
            fixed = self.declaration.fixed(self._signature.sizes(*args, **given), device.for_launch(index))
            # an option that the caller leaves to the rule may differ for the next sizes of the same key
            options, lasting = {**fixed, **explicit}, fixed.keys() <= explicit.keys() and may_measure(index)
        else:
            options, lasting = self._choose(policy, grid, args, given)
        compiled = self._run(grid, args, {**given, **options})
        if lasting:
            plan = self._plan(compiled, options, grid, self._signature.values(*args, **given), index)
            self._settled[self._signature.key(policy.mode, policy.phase, *args, **kwargs)] = Settled(options, plan)
        return None

    def _run(self, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Launch through Triton and return the compiled kernel, None where it was interpreted."""
        if not self._interpreted:
            positional, named = described(self.fn.arg_names, args, kwargs, self.declaration.descriptors)
            compiled = self.fn[grid](*positional, **named, **compiler.FIXED_OPTIONS)
        else:
            compiled = None
            self._interpret(grid, args, kwargs)
        if self.declaration.inout:
            _bump_versions(self._signature.written(*args, **kwargs))
        return compiled

    def _plan(
        self, compiled: Any, options: Mapping[str, int], grid: Any, values: Mapping[str, Any], index: int
    ) -> LaunchPlan | None:
        """Return the plan of a launch that gave ``compiled``, where there can be one."""
        if compiled is None:
            return None
        launch = self.bound(grid, values, options)

        def replay(plan: LaunchPlan, values: Mapping[str, Any]) -> bool:
            declined: list[Any] = []
            frozen = self._launcher(_Always(Settled(options, plan)), lambda *asked: declined.append(asked))
            with pinned(LaunchPolicy("on")):
                frozen(grid, **values)
            return not declined

        try:
            return self._plans.make(compiled, options, launch, replay, index)
        except Exception as error:  # noqa: BLE001  # the launch itself is done, and right
            first = compiler.first_line(error)
            text = f"{self.__name__} launches through Triton: no plan could be made, please report it ({first})"
            events.log().warn_once(self.__name__, text)
            return None

    def _interpret(self, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
                raise TypeError(
                    f"{self.__name__}: Triton's interpreter computes bfloat16 wrongly; pass float32 or float16, or run "
                    "on a GPU"
                )
        # evaluated here: the interpreter hands grid functions its own integers, whose // rounds towards zero
        found = compiler.launch_grid(grid, dict(zip(self.fn.arg_names, args, strict=False)), kwargs)
        positional, named = described(self.fn.arg_names, args, kwargs, self.declaration.descriptors)
        with _interpreter_lock, compiler.quiet_interpreter():
            self.fn[found](*positional, **named)

    def _choose(
        self, policy: LaunchPolicy, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, int], bool]:
        """Return the options that the autotuner names for a signature met first; False where they may still change."""
        values = self._signature.values(*args, **kwargs)
        index = self._signature.index(*args, **kwargs)
        question = Question(
            name=self.__name__,
            jitted=(self.fn,),
            parts=self.parts(values),
            candidates=lambda identity: self.candidates(values, identity),
            launches=one_kernel(self.fn, grid, values, self.declaration.descriptors),
            bound=self.bound(grid, values),
            failures=self._failures,
            index=index,
            warm=self.declaration.warm,
        )
        answer = ask(question, policy, measures=may_measure(index))
        return dict(answer.winner.options), answer.lasts

    def bound(self, grid: Any, values: Mapping[str, Any], options: Mapping[str, int] | None = None) -> BoundLaunch:
        """Return the launch as the byte gate takes it; with ``options`` whatever the candidate is."""

        def run(values: Mapping[str, Any], candidate: Candidate) -> None:
            self._run(grid, (), {**values, **(dict(candidate.options) if options is None else options)})

        declaration = self.declaration
        return BoundLaunch(run, values, declaration.outputs, declaration.inout, declaration.data)


@dataclass(frozen=True)
class _Always:
    """A table that has one answer to every key."""

    settled: Settled

    def get(self, _key: tuple[Any, ...]) -> Settled:
        """Return it."""
        return self.settled


def may_measure(index: int) -> bool:
    """Return whether this is a moment to measure: no capture, and no child of a process that used CUDA."""
    return not _in_child_of_cuda_process and (index < 0 or not torch.cuda.is_current_stream_capturing())


def _elsewhere(index: int) -> bool:
    """Return whether ``index`` is an accelerator other than the current one: Triton would launch on that one."""
    return index >= 0 and not _in_child_of_cuda_process and index != torch.cuda.current_device()


def _bump_versions(tensors: tuple[torch.Tensor | None, ...]) -> None:
    """Tell autograd of tensors written in place: a raw write does not, and would corrupt other nodes silently."""
    written = [tensor for tensor in tensors if tensor is not None and not tensor.is_inference()]
    torch.autograd.graph.increment_version(written)


def pin_autotune(ctx: Any) -> None:
    """Store the launch policy of this forward in an autograd context, for `pinned_backward`."""
    ctx.rl_kernel_policy = launch_policy()


def pinned_backward(backward: _Backward) -> _Backward:
    """Run an autograd Function's backward under the policy that its forward saw, whatever the thread or environment.

    Where the context holds none (an operator that never pinned), the policy in force around the backward holds.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        policy = getattr(ctx, "rl_kernel_policy", None) or launch_policy()
        with pinned(_backward_policy(policy)):
            return backward(ctx, *gradients)

    return run  # type: ignore[return-value]  # the same signature, which wraps() cannot tell


@functools.cache
def _backward_policy(forward: LaunchPolicy) -> LaunchPolicy:
    return replace(forward, phase="backward")


def _before_fork() -> None:
    """Note whether a child inherits a CUDA context: in the child itself, torch says that CUDA was never started."""
    global _fork_inherits_cuda  # noqa: PLW0603  # read by the child; a child's own children inherit it too
    _fork_inherits_cuda = _in_child_of_cuda_process or bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch


def _after_fork_in_child() -> None:
    """Start anew: locks held by the parent's other threads stay held for ever, its CUDA context is not ours to use."""
    global _interpreter_lock, _in_child_of_cuda_process  # noqa: PLW0603  # re-made for a new process
    _interpreter_lock = threading.RLock()
    _in_child_of_cuda_process = _fork_inherits_cuda
    for kernel in _kernels.values():
        kernel.forget()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
