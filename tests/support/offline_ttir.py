"""What a kernel's TTIR says about its writes, read from the text that every Triton version prints."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

_ARGUMENT = re.compile(r"%([\w$.-]+): ([^{,]*?)(?: \{[^}]*\})? loc\(")
_RESULT = re.compile(r"^(%[\w$.-]+)(?::\d+)? = (.*)$")
_VALUE = re.compile(r"%[\w$.-]+")
_NAME = re.compile(r"%[\w$.-]+(?:#\d+)?")
# results that are a pointer into what these operands point into
_FIRST_OPERAND = ("tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "tt.bitcast")
_LOOP_VARIABLE = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+(?:#\d+)?)")


@dataclass
class Access:
    """Names of the pointer arguments that a kernel stores to (atomics included), and loads from."""

    written: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)


def access(ttir: str, parameters: list[str]) -> Access:
    """Follow every pointer back to an argument; ``parameters`` are the names of those that are not constants."""
    header = next(line for line in ttir.splitlines() if "tt.func public" in line)
    arguments = list(_own(_ARGUMENT.findall(header)))
    assert len(arguments) == len(parameters), f"{len(arguments)} arguments in the TTIR, {len(parameters)} in the kernel"
    origins: dict[str, set[str]] = defaultdict(set)
    for (argument, kind), parameter in zip(arguments, parameters, strict=True):
        if "!tt.ptr" in kind or "!tt.tensordesc" in kind:
            origins[f"%{argument}"].add(parameter)
    lines = _told_apart([line.split(" loc(")[0].strip() for line in ttir.splitlines()])
    size = -1
    while size != sum(map(len, origins.values())):  # loops feed pointers back
        size = sum(map(len, origins.values()))
        _propagate(lines, origins)
    found = Access()
    for line in lines:
        for operation, names in (
            ("tt.store", found.written), ("tt.atomic", found.written), ("tt.descriptor_store", found.written),
            ("tt.load", found.read), ("tt.descriptor_load", found.read),
        ):  # fmt: skip
            match = re.search(rf"{re.escape(operation)}\w* [^%]*(%[\w$.-]+(?:#\d+)?)", line)
            if match:
                assert origins[match[1]], f"this pointer comes from nowhere: {line}"
                names.update(origins[match[1]])
            else:
                assert not re.search(rf"(^|= ){re.escape(operation)}", line), f"not understood: {line}"
    return found


def _own(arguments: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the kernel's own arguments: a descriptor's sizes and strides, which follow it, are none."""
    passed = 0
    for name, kind in arguments:
        if passed:
            passed -= 1
            continue
        if "!tt.tensordesc" in kind:
            passed = 2 * len(re.findall(r"\d+x", kind))
        yield name, kind


def _told_apart(lines: list[str]) -> list[str]:
    """Name values after the line that defines them: the two branches of an ``if`` use one name for two values."""
    scopes: list[dict[str, str]] = [{}]
    told = []
    for number, line in enumerate(lines):
        if line.startswith("}"):
            scopes.pop()
        known = {name: new for scope in scopes for name, new in scope.items()}
        result = _RESULT.match(line)
        results = {result[1].partition(":")[0]} if result else set()
        variables = {variable for variable, _start in _LOOP_VARIABLE.findall(line.partition("iter_args")[2])}
        own = {name: f"{name}.{number}" for name in results | variables}
        told.append(_VALUE.sub(lambda match, names={**known, **own}: names.get(match[0], match[0]), line))
        scopes[-1].update((name, own[name]) for name in results)
        if line.endswith("{") or line.startswith("tt.func"):  # whose own brace stands behind a loc()
            scopes.append({name: own[name] for name in variables})
    return told


def _propagate(lines: list[str], origins: dict[str, set[str]]) -> None:
    """Hand origins on from operands to results, once through the text."""
    regions: list[tuple[str, list[str]]] = []  # result name and loop variables of every region that is open
    for line in lines:
        match = _RESULT.match(line)
        result, operation = (match[1], match[2]) if match else ("", line)
        names = _NAME.findall(operation)
        if operation.startswith(_FIRST_OPERAND) and names:
            origins[result] |= origins[names[0]]
        elif operation.startswith("arith.select"):
            origins[result] |= origins[names[1]] | origins[names[2]]
        elif operation.startswith(("scf.yield", "scf.condition")) and regions:
            owner, variables = regions[-1]
            _hand_on(names, owner, variables, origins)
        if operation.endswith("{") and "tt.func" not in operation and not operation.startswith("} else"):
            pairs = _LOOP_VARIABLE.findall(operation.partition("iter_args")[2])
            variables = [variable for variable, _start in pairs]
            _hand_on([start for _variable, start in pairs], result, variables, origins)
            regions.append((result, variables))
        elif operation.startswith("}") and regions and not operation.startswith(("})", "} else")):
            regions.pop()


def _hand_on(names: list[str], owner: str, variables: list[str], origins: dict[str, set[str]]) -> None:
    """Hand origins on to a region's results and loop variables, by position."""
    for number, name in enumerate(names):
        origins[owner if len(names) == 1 else f"{owner}#{number}"] |= origins[name]
        for variable in variables[number : number + 1]:
            origins[variable] |= origins[name]
