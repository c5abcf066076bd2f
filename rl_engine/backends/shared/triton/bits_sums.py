"""What decides the order of a kernel's floating-point sums: reductions, folds, dots, atomics, products that may fuse.

Everything here returns lines of text, sorted and without repeats, which are equal where the order is. Unrolling,
tiling and the number of warps repeat operations and change extents that nothing is summed along, so neither counts nor
parallel extents are part of a line.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from rl_engine.backends.shared.triton.bits_ir import REDUCTIONS, Module, Operation, Tensor, Value, tensors
from rl_engine.backends.shared.triton.bits_layout import along

if TYPE_CHECKING:
    from collections.abc import Iterator

_PAIR = 2  # the values that one step of a fold adds
_AXIS = re.compile(r"axis = (\d+)")
_FLOAT = re.compile(r"(?:(?<=x)|\b)(f\d+\w*|bf16)\b")
_EXACT_INTEGERS = {"arith.addi", "arith.muli", "arith.andi", "arith.ori", "arith.xori",
                   "arith.maxsi", "arith.maxui", "arith.minsi", "arith.minui"}  # fmt: skip
_EXTREMES = {"arith.maxnumf", "arith.maximumf", "arith.minnumf", "arith.minimumf"}
_ADDITIONS = ("arith.addf", "arith.subf")
# What multiplies last, once lowered: a logarithm is one of base 2 times a constant, a quotient a reciprocal times.
_PRODUCTS = ("arith.mulf", "arith.divf", "math.log", "math.log10", "math.log1p", "tt.extern_elementwise")
_PRODUCT, _SPREAD, _MOVED, _ELSEWHERE, _SELECTED = _WAYS = (
    "a product", "a spread product", "a moved product", "a product of another block", "a selected product",
)  # fmt: skip
_PASSES = {
    **dict.fromkeys(("arith.negf", "arith.extf", "tt.expand_dims"), _PRODUCT),
    **dict.fromkeys(("tt.reshape", "tt.trans", "tt.split", "tt.join", "tt.cat"), _PRODUCT),  # other names, same thread
    **dict.fromkeys(("tt.splat", "tt.broadcast"), _SPREAD),  # how many additions read it is then up to the layout
    **dict.fromkeys(("ttg.convert_layout", "tt.gather"), _MOVED),
    "arith.select": _SELECTED,
}
_RESHAPES = ("ttg.convert_layout", "tt.reshape")


def reductions(ttgir: Module) -> tuple[str, ...]:
    """Return a line for each reduction or scan whose order is its operand's layout, and for each fold of two at a time.

    A reduction of two values by an addition, and any maximum, minimum or integer sum, has no order; the layout counts
    all the same where an operand is a product: adding it may fuse with the multiplication, in some layouts only.
    """
    found = set()
    steps = {}
    for operation in ttgir.operations:
        if operation.name not in REDUCTIONS:
            continue
        axis = _axis(operation)
        operands = tensors(operation.text.partition(" -> ")[0].rpartition("}) : ")[2], ttgir.aliases)
        combine = tuple(one.name for one in operation.body[:-1])
        integers = not _FLOAT.search(" ".join(one.element for one in operands))
        if not operands:
            found.add(f"{operation.name}, not understood: {operation.text}")
        elif (integers and {*combine} <= _EXACT_INTEGERS) or (len(combine) == 1 and combine[0] in _EXTREMES):
            continue
        elif operation.name == "tt.reduce" and combine == ("arith.addf",) and operands[0].shape[axis] == _PAIR:
            steps[operation] = operands[0]
            if _PRODUCT in _reaches(operation.operands[0]):
                found.add(f"{_PRODUCT} added to its neighbour, {along(operands[0], axis)} of {operands[0].element}")
        else:
            text = "; ".join(f"{along(one, axis)} of {one.element}" for one in operands)
            reverse = " from the end" if "reverse = true" in operation.text else ""
            found.add(f"{operation.name} by {_combination(operation)} over {text}{reverse}")
    return tuple(sorted(found | set(_folds(steps))))


def _axis(operation: Operation) -> int:
    match = _AXIS.search(operation.text)
    return int(match[1]) if match else 0


def _combination(operation: Operation) -> str:
    """Return the combine function: its one operation, or all with predicates and what they read, by position."""
    *body, _end = operation.body
    if len(body) == 1:
        return body[0].name
    names: dict[str, str] = {}
    texts = (re.sub(r"%[\w$.-]+", lambda match: names.setdefault(match[0], f"v{len(names)}"), one.text) for one in body)
    return " / ".join(texts)


def _folds(steps: dict[Operation, Tensor]) -> Iterator[str]:
    """Yield a line for each chain of two-value sums: how many steps, and how the distance of partners grows."""
    before = {one: _previous(one.operands[0], steps) for one in steps}
    continued = set(before.values())
    for last in (one for one in steps if one not in continued):
        chain: list[Operation] = []
        step: Operation | None = last
        while step is not None:
            chain.insert(0, step)
            step = before[step]
        strides = [steps[one].right_of(_axis(one)) for one in chain]
        growth = {round(later / earlier, 6) for earlier, later in itertools.pairwise(strides)}
        order = {frozenset(): "", frozenset({1.0}): ", neighbours first", frozenset({0.5}): ", halves first"}
        manner = order.get(frozenset(growth), f", partners {strides} apart")
        yield f"fold of {2 ** len(chain)} values of {steps[last].element}{manner}"


def _previous(value: Value, steps: dict[Operation, Tensor]) -> Operation | None:
    operation = value.operation
    while operation is not None and operation.name in _RESHAPES and operation.operands:
        operation = operation.operands[0].operation
    return operation if operation in steps else None


def fusible(ttgir: Module) -> bool:
    """Return whether an addition reads a product at all: else there is nothing a compiler could fuse."""
    return any(_reaches(value) for one in ttgir.operations for value in _added(one))


def exposed(ttir: Module, ttgir: Module) -> tuple[str, ...]:
    """Return a line for each addition of a product from elsewhere: whether the two are fused is up to the layout.

    A product that its own thread adds at once is fused, or not, for all elements alike (measured for SwiGLU, SiLU and
    RoPE, 18 configurations each). One that was moved between threads or spread over several additions, or that comes
    out of a branch or an earlier round of a loop, is not. Nothing fuses through a select.
    """
    found = set()
    for one in ttgir.operations:
        for way in {way for value in _added(one) for way in _reaches(value)} & {_MOVED, _SPREAD}:
            places = {f"{list(each.shape)} {each.layout}" for each in tensors(one.text, ttgir.aliases)}
            found.add(f"{one.name} of {way} in {' '.join(sorted(places)) or 'a scalar'}")
    for one in ttir.operations:
        if any(_ELSEWHERE in _reaches(value) for value in _added(one)):
            found.add(f"{one.name} of {_ELSEWHERE}, not understood")
    return tuple(sorted(found))


def _added(operation: Operation) -> list[Value]:
    """Return what an operation adds."""
    adds = operation.name in _ADDITIONS
    adds |= operation.name in REDUCTIONS and any(one.name in _ADDITIONS for one in operation.body)
    return operation.operands if adds else []


def _reaches(start: Value) -> set[str]:
    """Return the ways in which ``start`` may be a product; the worst thing on a way names it."""
    found: set[str] = set()
    waiting: list[tuple[Value, str]] = [(start, _PRODUCT)]
    seen: set[tuple[int, str]] = set()
    while waiting:
        value, way = waiting.pop()
        if (id(value), way) in seen:
            continue
        seen.add((id(value), way))
        operation = value.operation
        if value.kind == "unknown":
            found.add(_ELSEWHERE)
        elif value.sources:
            waiting += [(one, max(way, _ELSEWHERE, key=_WAYS.index)) for one in value.sources]
        elif value.kind == "result" and operation is not None:
            if operation.name in _PRODUCTS:
                found.add(way)
            passes = _PASSES.get(operation.name)
            if passes is not None:
                waiting += [(one, max(way, passes, key=_WAYS.index)) for one in operation.operands]
    return found


def atomics(ttir: Module) -> tuple[str, ...]:
    """Return a line for each atomic whose outcome depends on who comes first: of floats, exchanges, used results."""
    found = set()
    for operation in ttir.operations:
        if "atomic" not in operation.name and operation.name != "tt.descriptor_reduce":
            continue
        if _FLOAT.search(operation.text) or "cas" in operation.name or "exch" in operation.text:
            found.add(f"{operation.name}, in any order")
        elif ttir.uses(operation):
            found.add(f"{operation.name} whose result is used, in any order")
    return tuple(sorted(found))


def operations(ttir: Module) -> tuple[str, ...]:
    """Return every kind of floating-point operation that the kernel computes with, by type."""
    found = set()
    for operation in ttir.operations:
        if not operation.name.startswith(("arith.", "math.")) and operation.name not in (
            "tt.fp_to_fp", "tt.precise_sqrt", "tt.precise_divf", "tt.clampf", "tt.extern_elementwise",
            "tt.elementwise_inline_asm", "tt.call", "tt.map_elementwise",
        ):  # fmt: skip
            continue
        if operation.name in ("arith.constant", "arith.select", "arith.cmpf") or not _FLOAT.search(operation.text):
            continue
        types = dict.fromkeys(_FLOAT.findall(operation.text.rpartition(" : ")[2]))
        what = re.findall(r"(?:symbol|asm_string|rounding) = [^,}]*|@\w+", operation.text)
        found.add(" ".join((operation.name, *what, *types)))
    return tuple(sorted(found))
