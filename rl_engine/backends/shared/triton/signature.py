"""Code generated once per kernel from its own arguments: the key of a launch, its arguments by name, the launch itself.

A generic loop over the arguments costs 0.7 to 1.6 us more a launch (measured on an H200); ``inspect.Signature.bind``
costs 3.5. Handing ``*args`` and ``**kwargs`` from one function to the next is not free either, so the launch is one
function with the kernel's own parameters.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_engine.platforms.tuning.key import BUCKET, Part, bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_LOW, _WIDE = -(2**31), 2**31 - 1  # Triton passes integers outside as 64 bits: another kernel
_WIDEST = 2**63 - 1  # and larger ones unsigned: yet another


def tensor_parts(name: str, tensor: Any) -> dict[str, Part]:
    """Return the key parts of an argument that is a tensor or None: what a compiler may know of it."""
    return {
        f"launch.{name}.dtype": None if tensor is None else str(tensor.dtype).removeprefix("torch."),
        f"launch.{name}.aligned": None if tensor is None else tensor.data_ptr() % 16 == 0,
    }


@dataclass(frozen=True)
class Signature:
    """What a kernel's launcher passes, in kernel order, without the parameters that are tuned.

    Attributes:
        pointers: names that end in ``_ptr``: tensors or None.
        dynamic: integers that change from step to step; the compiler does not specialise them, the key buckets them.
        static: every other scalar, taken by value; of a run-time float only that it is one.
        constants: the ``tl.constexpr`` among them, which are compiled in.
        described: those of the pointers that the kernel takes as tensor descriptors.
        key: (mode, phase, *args, **kwargs with options) -> hashable: equal for launches that share a selection in this
            process, and then whatever Triton specialises a kernel on is equal too.
        index: (*args, **kwargs) -> index of the device it runs on, -1 for the CPU.
        sizes: (*args, **kwargs) -> scalars by name.
        values: (*args, **kwargs) -> all arguments by name.
        exact: (*args, **kwargs) -> hashable: index and scalars; all that a fixed rule depends on.
        written: (*args, **kwargs with options) -> the tensors that are read and written.
    """

    pointers: tuple[str, ...]
    dynamic: tuple[str, ...]
    static: tuple[str, ...]
    constants: frozenset[str]
    described: tuple[str, ...]
    key: Callable[..., tuple[Any, ...]]
    index: Callable[..., int]
    sizes: Callable[..., dict[str, Any]]
    values: Callable[..., dict[str, Any]]
    exact: Callable[..., tuple[Any, ...]]
    written: Callable[..., tuple[Any, ...]]
    _launch_source: str = field(repr=False)
    _defaults: Mapping[str, Any] = field(repr=False)

    def parts(self, values: Mapping[str, Any]) -> dict[str, Part]:
        """Return the key parts of a launch, named after its arguments."""
        found: dict[str, Part] = {}
        for name in self.pointers:
            found |= tensor_parts(name, values[name])
        for name in self.dynamic:
            found[BUCKET + name] = bucket(values[name])
            found[f"launch.{name}.wide"] = values[name] > _WIDE
        for name in self.static:
            value = values[name]
            found[f"launch.{name}.type"] = type(value).__name__
            found[f"launch.{name}"] = _part(value, constant=name in self.constants)
        return found

    def launcher(self, **parts: Any) -> Callable[..., None]:
        """Return the launch: (grid, *args, **kwargs) -> None; ``kwargs`` may hold tuned parameters and options.

        Args:
            parts: what it is made of. ``innermost``: () -> LaunchPolicy or None, and ``of_process``: () ->
                LaunchPolicy, where there is none; ``fixed``: exact -> options; ``settled``: key -> something with
                ``plan``; ``jitted``: Triton's function; ``off``: (grid, args, kwargs) and ``on``: (policy, settled,
                grid, args, kwargs), for what the tables do not hold; ``torch``: ``torch._C``, whose
                ``_cuda_getDevice()`` is ``torch.cuda.current_device()`` without its check that CUDA was started;
                ``bump``: called with the tensors written in place.
        """
        named = {f"_{name}": one for name, one in parts.items()}
        launch: Callable[..., None] = _made(self._launch_source, {**self._defaults, **named})["launch"]
        return launch


def generate(
    function: Callable[..., Any],
    *,
    tuned: frozenset[str],
    dynamic: tuple[str, ...],
    device: str,
    inout: tuple[str, ...] = (),
    described: tuple[str, ...] = (),
    head: int = 0,
) -> Signature:
    """Return the signature of kernel ``function``.

    Args:
        function: its Python text.
        tuned: names of its tuned parameters.
        dynamic: names of integers that change from step to step.
        device: name of a pointer that is never None.
        inout: names of pointers that it reads and writes.
        described: names of pointers that it takes as tensor descriptors.
        head: how many arguments of a plan's stand before the kernel's own.
    """
    every = inspect.signature(function).parameters
    parameters = [one for one in every.values() if one.name not in tuned]
    names = [one.name for one in parameters]
    pointers = tuple(name for name in names if name.endswith("_ptr"))
    static = tuple(name for name in names if name not in pointers and name not in dynamic)
    constants = frozenset(one.name for one in parameters if "constexpr" in str(one.annotation))
    described = tuple(name for name in names if name in described)  # in the kernel's order
    defaults = {f"_default_{one.name}": one.default for one in parameters if one.default is not inspect.Parameter.empty}
    accepted = ", ".join(f"{name}=_default_{name}" if f"_default_{name}" in defaults else name for name in names)
    text = _Text(
        accepted,
        _tensors(pointers, device),
        ", ".join(name for name in names if name not in pointers),
        ", ".join(_terms(pointers, dynamic, static, constants)),
        device,
        described,
        head,
    )
    source = (
        f"def key(_mode, _phase, {accepted}, **_more):\n    _index = {device}.get_device()\n{text.tensors}\n"
        f"    return (_mode, _phase, _index, {text.terms})\n"
        f"def index({accepted}): return {device}.get_device()\n"
        f"def sizes({accepted}): return {_mapping(name for name in names if name not in pointers)}\n"
        f"def values({accepted}): return {_mapping(names)}\n"
        f"def exact({accepted}): return ({device}.get_device(), {text.exact})\n"
        f"def written({accepted}, **_options): return ({_listed(inout)})\n"
    )
    made = _made(source, defaults)
    tuned_names = tuple(name for name in every if name in tuned)
    launch = text.launch(tuple(every), tuned_names, _leading(every, tuned, constants), inout)
    return Signature(
        pointers, dynamic, static, constants, described, made["key"], made["index"], made["sizes"], made["values"],
        made["exact"], made["written"], launch, defaults,
    )  # fmt: skip


@dataclass(frozen=True)
class _Text:
    """Pieces of generated code that several functions share."""

    accepted: str
    tensors: str
    exact: str
    terms: str
    device: str
    described: tuple[str, ...]
    head: int

    def launch(
        self, names: tuple[str, ...], tuned: tuple[str, ...], positional: tuple[str, ...], inout: tuple[str, ...]
    ) -> str:
        """Return the text of a kernel's launch; `Signature.launcher` says what the names in it stand for."""
        args = f"({_listed(positional)})"
        keywords = "".join(f"{name!r}: {name}, " for name in names if name not in positional and name not in tuned)
        constants = "".join(f"{name}={name}, " for name in names if name not in positional and name not in tuned)
        head = tuple(f"_head_{number}" for number in range(self.head))
        passed = _listed((*head, *(self._passed(name) for name in names)))
        return f"""
def launch(_grid, {self.accepted}, **_more):
    _policy = _innermost() or _of_process()
    _index = {self.device}.get_device()
    if _policy.mode == "off":
        _options = None if _more else _fixed.get((_index, {self.exact}))
        if _options is None or _index != _torch._cuda_getDevice():
            return _off(_grid, {args}, {{{keywords}**_more}})
        _jitted.run({_listed(positional)}{constants}grid=_grid, warmup=False, **_options)
{f"        _bump(({_listed(inout)}))" if inout else ""}
        return
{self.tensors}
    _found = _settled.get((_policy.mode, _policy.phase, _index, {self.terms}))
    _plan = None if _found is None else _found.plan
    if _plan is None or not _plan.holds():
        return _on(_policy, _found, _grid, {args}, {{{keywords}**_more}})
{f"    ({_listed(tuned)}) = _plan.tuned" if tuned else ""}
{f"    ({_listed(head)}) = _plan.head" if head else ""}
    _size = _grid({_mapping(names)}) if callable(_grid) else _grid
    _x, _y, _z = (_size[0], 1, 1) if len(_size) == 1 else (*_size, 1)[:3]
    _plan.call(_x, _y, _z, _plan.stream(_index), {passed})
{f"    _bump(({_listed(inout)}))" if inout else ""}
"""

    def _passed(self, name: str) -> str:
        if name in self.described:
            return f"*_plan.descriptors[{self.described.index(name)}]({name}, {_address(name)})"
        return _address(name) if name.endswith("_ptr") else name


def _tensors(pointers: tuple[str, ...], device: str) -> str:
    """Return the text that asks tensors what a key needs to know: address, 0 for None, dtype, and whether all lie here.

    Where none is None, as usual, each is asked that once.
    """
    others = [name for name in pointers if name != device]
    plain = [f"{_address(one)} = {one}.data_ptr(); {_kind(one)} = {one}.dtype" for one in pointers]
    plain.append("_here = " + (" == ".join(("_index", *(f"{one}.get_device()" for one in others)))))
    if not others:
        return "\n".join(f"    {line}" for line in plain)
    careful = [
        f"{_address(one)}, {_kind(one)} = (0, None) if {one} is None else ({one}.data_ptr(), {one}.dtype)"
        for one in pointers
    ]
    here = [f"({one} is None or {one}.get_device() == _index)" for one in others]
    careful.append(f"_here = {' and '.join(here)}")
    present = " and ".join(f"{one} is not None" for one in others)
    branches = [f"    if {present}:", *(f"        {one}" for one in plain)]
    branches += ["    else:", *(f"        {one}" for one in careful)]
    return "\n".join(branches)


def _terms(
    pointers: tuple[str, ...], dynamic: tuple[str, ...], static: tuple[str, ...], constants: frozenset[str]
) -> list[str]:
    """Return what a key holds of the arguments: everything that Triton specialises on, and the values it is tuned for.

    Few terms, for each is hashed at every launch: the commonest case of an argument is one number, any other a tuple.
    All pointers have to lie on one device: a plan hands on addresses, which nobody below it checks.
    Classes stand beside values, since 1, 1.0 and True are equal; a constant float is taken by its digits, since 0.0 and
    -0.0 are equal and NaN is not equal to itself.
    """
    addresses = [_address(name) for name in pointers]
    terms = ["tuple(_more.items()) if _more else None", *(_kind(name) for name in pointers), "_here"]
    terms.append(f"0 if not ({' | '.join(addresses)}) & 15 else ({', '.join(f'{one} & 15 > 0' for one in addresses)},)")
    for name in dynamic:
        plain = f"{name}.__class__ is int and 0 < {name} <= {_WIDE}"
        terms.append(f"({name} - 1).bit_length() if {plain} else _unusual({name})")
    for name in static:
        digits = f"{name}.hex()" if name in constants else "None"
        value = f"({name}.__class__, {digits} if {name}.__class__ is float else {name})"
        terms.append(f"{name} if {name}.__class__ is int else {value}")
    return terms


def _unusual(length: Any) -> tuple[Any, ...]:
    """Return what a key holds of a length that is none of 32 bits: its class, its bucket, and how wide it is."""
    bits = -1 if length <= 0 else (length - 1).bit_length()
    return type(length), bits, length < _LOW, length > _WIDE, length > _WIDEST


def _leading(
    every: Mapping[str, inspect.Parameter], tuned: frozenset[str], constants: frozenset[str]
) -> tuple[str, ...]:
    """Return the parameters that are passed by position: those before the first tuned or constant one."""
    names = list(every)
    behind = [number for number, name in enumerate(names) if name in tuned or name in constants]
    return tuple(names[: behind[0]] if behind else names)


def _address(name: str) -> str:
    return f"_{name}_at"


def _kind(name: str) -> str:
    return f"_{name}_is"


def _listed(names: tuple[str, ...]) -> str:
    return "".join(f"{name}, " for name in names)


def _mapping(names: Any) -> str:
    return f"{{{', '.join(f'{name!r}: {name}' for name in names)}}}"


def _made(source: str, names: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {**names, "_unusual": _unusual}
    exec(compile(source, "<launch of a kernel>", "exec"), made)  # noqa: S102  # names from a signature
    return made


def _part(value: Any, *, constant: bool) -> Part:
    if isinstance(value, float):
        return value.hex() if constant else None  # a run-time float changes neither code nor speed
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)  # a dtype given as a constexpr
