"""Code generated once per kernel from its own arguments: the key of a launch, its scalars, its arguments by name.

A generic loop over the arguments costs 0.7 to 1.6 us more a launch (measured on an H200); ``inspect.Signature.bind``
costs 3.5.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_engine.platforms.tuning.key import BUCKET, Part, bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_WIDE = 2**31 - 1  # Triton passes larger integers as 64 bits: another kernel


@dataclass(frozen=True)
class Signature:
    """What a kernel's launcher passes, in kernel order, without the parameters that are tuned.

    Attributes:
        pointers: names that end in ``_ptr``: tensors or None.
        dynamic: integers that change from step to step; the compiler does not specialise them, the key buckets them.
        static: every other scalar, taken by value; of a float only that it is one.
        key: (mode, phase, *args, **kwargs) -> hashable: equal for launches that share a selection in this process.
        index: (*args, **kwargs) -> index of the device it runs on, -1 for the CPU.
        sizes: (*args, **kwargs) -> scalars by name.
        values: (*args, **kwargs) -> all arguments by name.
    """

    pointers: tuple[str, ...]
    dynamic: tuple[str, ...]
    static: tuple[str, ...]
    key: Callable[..., tuple[Any, ...]]
    index: Callable[..., int]
    sizes: Callable[..., dict[str, Any]]
    values: Callable[..., dict[str, Any]]

    def parts(self, values: Mapping[str, Any]) -> dict[str, Part]:
        """Return the key parts of a launch, named after its arguments."""
        found: dict[str, Part] = {}
        for name in self.pointers:
            tensor = values[name]
            found[f"launch.{name}.dtype"] = None if tensor is None else str(tensor.dtype).removeprefix("torch.")
            found[f"launch.{name}.aligned"] = None if tensor is None else tensor.data_ptr() % 16 == 0
        for name in self.dynamic:
            found[BUCKET + name] = bucket(values[name])
            found[f"launch.{name}.wide"] = values[name] > _WIDE
        for name in self.static:
            value = values[name]
            found[f"launch.{name}.type"] = type(value).__name__
            found[f"launch.{name}"] = _part(value)
        return found


def generate(
    function: Callable[..., Any], *, tuned: frozenset[str], dynamic: tuple[str, ...], device: str
) -> Signature:
    """Return the signature of kernel ``function``; ``device`` names a pointer that is never None."""
    parameters = [one for one in inspect.signature(function).parameters.values() if one.name not in tuned]
    names = [one.name for one in parameters]
    pointers = tuple(name for name in names if name.endswith("_ptr"))
    static = tuple(name for name in names if name not in pointers and name not in dynamic)
    terms = ["_mode", "_phase", f"{device}.get_device()"]
    for name in pointers:
        terms.append(f"None if {name} is None else {name}.dtype")
        terms.append(f"{name} is None or not {name}.data_ptr() & 15")
    for name in dynamic:
        terms.append(f"({name} - 1).bit_length() if {name} > 0 else -1")
        terms.append(f"{name} > {_WIDE}")
    for name in static:
        terms.append(f"{name}.__class__")
        terms.append(f"None if {name}.__class__ is float else {name}")
    defaults = {f"_default_{one.name}": one.default for one in parameters if one.default is not inspect.Parameter.empty}
    accepted = ", ".join(f"{name}=_default_{name}" if f"_default_{name}" in defaults else name for name in names)
    scalars = ", ".join(f"{name!r}: {name}" for name in names if name not in pointers)
    everything = ", ".join(f"{name!r}: {name}" for name in names)
    source = (
        f"def key(_mode, _phase, {accepted}): return ({', '.join(terms)},)\n"
        f"def index({accepted}): return {device}.get_device()\n"
        f"def sizes({accepted}): return {{{scalars}}}\n"
        f"def values({accepted}): return {{{everything}}}\n"
    )
    made: dict[str, Any] = dict(defaults)
    exec(compile(source, f"<signature of {function.__name__}>", "exec"), made)  # noqa: S102  # names from a signature
    return Signature(pointers, dynamic, static, made["key"], made["index"], made["sizes"], made["values"])


def _part(value: Any) -> Part:
    if isinstance(value, float):
        return None  # a run-time float changes neither code nor speed
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)  # a dtype given as a constexpr
