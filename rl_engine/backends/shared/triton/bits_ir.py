"""Reading the text of a kernel's IR: operations, what their values come from, the shapes and layouts they have.

The printed form of TTIR and TTGIR is what Triton 3.6 to 3.9 have in common; their Python bindings offer no walk over
regions. What is not understood stays visible: a value of an unknown origin, a layout as its whole text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

_LOCATION = re.compile(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_RESULTS = re.compile(r"^(%[\w$.-]+(?::\d+)?(?:, %[\w$.-]+(?::\d+)?)*) = (.*)$")
_NAME = re.compile(r"%[\w$.-]+(?:#\d+)?")
_PAIR = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+(?:#\d+)?)")
_BOUNDS = re.compile(
    r"scf\.for (?:unsigned )?(%[\w$.-]+) = (%[\w$.-]+(?:#\d+)?) to (%[\w$.-]+(?:#\d+)?) step (%[\w$.#-]+)"
)
_ARGUMENT = re.compile(r"(%[\w$.-]+): ")
_OPERATION = re.compile(r'"?([\w.]+)"?')
_ALIAS = re.compile(r"^(#\w+) = (#.*)$")
_TENSOR = re.compile(r"tensor<((?:\d+x)+)([^,<>]*(?:<[^<>]*>)?)(?:, (.*))?>$")
_LOOPS = ("scf.for", "scf.while")
REDUCTIONS = ("tt.reduce", "tt.scan")

Kind = Literal["argument", "result", "loop", "induction", "unknown"]


@dataclass(eq=False)
class Value:
    """A value: the result of ``operation`` (number ``index``), or an argument of the function or of a region.

    Attributes:
        kind: what it is; ``loop`` is a variable that a loop carries, ``unknown`` an argument of another region.
        operation: what makes it: for arguments of a region, the operation that owns the region.
        sources: what a loop variable, or a result of a loop or a branch, may be: first what it starts as.
    """

    kind: Kind
    operation: Operation | None = None
    sources: list[Value] = field(default_factory=list)


@dataclass(eq=False)
class Operation:
    """One operation.

    Attributes:
        name: e.g. ``arith.addf``.
        text: its line without the result; a reduction's types are added behind its region.
        operands: in the order in which they are printed; of a loop without the initial values of its variables.
        body: operations of the region of a reduction or scan.
    """

    name: str
    text: str
    operands: list[Value]
    body: list[Operation] = field(default_factory=list)


@dataclass(frozen=True)
class Module:
    """A kernel's operations in the order of the text (those of reductions aside), and its named layouts."""

    operations: tuple[Operation, ...]
    aliases: dict[str, str]

    def uses(self, operation: Operation) -> bool:
        """Return whether anything reads a result of ``operation``."""
        return any(value.operation is operation for one in self.operations for value in one.operands)


@dataclass(frozen=True)
class Tensor:
    """A tensor type: its shape, the type of its elements, and its layout with all names resolved ('' in TTIR)."""

    shape: tuple[int, ...]
    element: str
    layout: str

    def right_of(self, axis: int) -> int:
        """Return how far apart neighbours along ``axis`` are, in elements."""
        stride = 1
        for extent in self.shape[axis + 1 :]:
            stride *= extent
        return stride


@dataclass
class _Region:
    operation: Operation | None
    results: list[Value]
    variables: list[Value]


def parse(text: str) -> Module:
    """Return the operations of one module, TTIR or TTGIR."""
    reader = _Reader()
    for line in text.splitlines():
        reader.read(_LOCATION.sub("", line).strip())
    return Module(tuple(reader.operations), reader.aliases)


def tensors(text: str, aliases: dict[str, str]) -> list[Tensor]:
    """Return the tensor types in the text of an operation, in order."""
    found = []
    for start in (match.start() for match in re.finditer(r"tensor<", text)):
        match = _TENSOR.match(_bracketed(text, start))
        if match:
            shape = tuple(int(one) for one in match[1].split("x")[:-1])
            found.append(Tensor(shape, match[2], _resolved(match[3] or "", aliases)))
    return found


def _bracketed(text: str, start: int) -> str:
    """Return ``text`` from ``start`` to the bracket that closes the first one; the one of ``->`` closes nothing."""
    depth = 0
    for end in range(start, len(text)):
        if text[end] == "<":
            depth += 1
        elif text[end] == ">" and text[end - 1] != "-":
            depth -= 1
            if not depth:
                return text[start : end + 1]
    return ""


def _resolved(layout: str, aliases: dict[str, str]) -> str:
    while True:
        found = re.sub(r"#\w+\b(?![.\w])", lambda match: aliases.get(match[0], match[0]), layout)
        if found == layout:
            return found
        layout = found


class _Reader:
    """Reads one line after the other; names hold inside the braces they are written in."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.aliases: dict[str, str] = {}
        self._scopes: list[dict[str, Value]] = [{}]
        self._regions: list[_Region] = []

    def read(self, line: str) -> None:
        alias = _ALIAS.match(line)
        if alias:
            self.aliases[alias[1]] = alias[2]
        elif not line or line.startswith(("#", "module", "{-#", "-}")):
            return
        elif line.startswith("}"):
            self._close(line)
        elif line.startswith("^"):
            self._block(line)
        elif line.startswith("tt.func"):
            self._open(None, [], [])
            self._define_arguments(line, "argument")
        elif line.startswith(("default {", "partition")):  # the regions of a warp-specialised kernel
            self._open(None, [], [])
            self._define_arguments(line, "unknown")
        else:
            self._operation(line)

    def _close(self, line: str) -> None:
        if not self._regions:
            return
        region = self._regions.pop()
        self._scopes.pop()
        if region.operation is not None and region.operation.name in REDUCTIONS:
            region.operation.text += line
        if line.endswith("{"):  # an else, or the body of a while
            self._open(region.operation, region.results, region.variables)

    def _block(self, line: str) -> None:
        region = self._regions[-1]
        if region.operation is not None and region.operation.name == "scf.while":
            for name, result in zip(_ARGUMENT.findall(line), region.results, strict=True):
                self._scopes[-1][name] = Value("loop", region.operation, result.sources)
        else:
            self._define_arguments(line, "unknown")

    def _define_arguments(self, line: str, kind: Kind) -> None:
        self._scopes[-1].update({name: Value(kind) for name in _ARGUMENT.findall(line)})

    def _open(self, operation: Operation | None, results: list[Value], variables: list[Value]) -> None:
        self._regions.append(_Region(operation, results, variables))
        self._scopes.append({})

    def _operation(self, line: str) -> None:
        match = _RESULTS.match(line)
        made, text = (match[1], match[2]) if match else ("", line)
        head = _OPERATION.match(text)
        operation = Operation(head[1] if head else text, text, [])
        within = self._regions[-1].operation if self._regions else None
        body = within.body if within is not None and within.name in REDUCTIONS else self.operations
        body.append(operation)
        bounds = _BOUNDS.match(text)
        pairs = _PAIR.findall(text[bounds.end() :] if bounds else text) if operation.name in _LOOPS else []
        names = bounds.groups()[1:] if bounds else () if operation.name in _LOOPS else _NAME.findall(text)
        operation.operands = [self._value(one) for one in names]
        starts = [self._value(start) for _variable, start in pairs]
        results = self._results(made, operation)
        if operation.name in ("scf.yield", "scf.condition"):
            self._yield(operation)
        if text.endswith("{"):
            variables = [Value("loop", operation, [start]) for start in starts]
            self._open(operation, results, variables)
            self._scopes[-1].update(zip((one for one, _start in pairs), variables, strict=True))
            if bounds:
                self._scopes[-1][bounds[1]] = Value("induction", operation)
                for result, variable in zip(results, variables, strict=True):
                    result.sources = variable.sources

    def _results(self, names: str, operation: Operation) -> list[Value]:
        results: list[Value] = []
        for one in names.split(", ") if names else []:
            name, _, count = one.partition(":")
            made = [Value("result", operation) for _ in range(int(count or 1))]
            self._scopes[-1][name] = made[0]
            self._scopes[-1].update({f"{name}#{number}": value for number, value in enumerate(made)})
            results += made
        return results

    def _yield(self, operation: Operation) -> None:
        """Hand what a region yields to the results of its owner and to the variables of a loop."""
        region = self._regions[-1]
        condition = operation.name == "scf.condition"
        yielded = operation.operands[1:] if condition else operation.operands
        receivers = region.results if condition or not region.variables else region.variables
        for receiver, value in zip(receivers, yielded, strict=False):
            receiver.sources.append(value)

    def _value(self, name: str) -> Value:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return Value("unknown")
