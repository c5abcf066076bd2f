"""Dots: what decides the order in which a matrix product adds along K."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rl_engine.backends.shared.triton.bits_ir import Module, Operation, Value, tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

_DOTS = ("tt.dot", "tt.dot_scaled")
_OPTIONS = re.compile(r"(inputPrecision|maxNumImpreciseAcc) = (\w+)")
_NVIDIA = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\.\S+")
_AMD = re.compile(r"\bv_(?:s?mfmac?|wmma|dot\d+)_\w+")
_SHAPE = re.compile(r"\.m\d+n\d+k(\d+)")
_OPERANDS = re.compile(r"\.(f16|bf16|tf32|f32|e4m3|e5m2|s8|u8)\b")
# One multiply-accumulate of these types is the same arithmetic in a warp's and in a warp group's instruction; measured
# on an H200 in fp32, bit for bit, over tiles of 16 to 128 rows. Of other types and cards it is not known.
_ALIKE_ON_SM_90 = ("f16", "bf16", "tf32")
_CHAINED_BY_TYPE = ("f16", "bf16")  # BLOCK_K cuts the chain of such a dot only between instructions
_CHAINED_BY_PRECISION = ("tf32",)
_DEEPEST = 8  # bounds of a loop are short expressions


def dots(ttir: Module) -> tuple[str, ...]:
    """Return a line for each dot: types, precision, what it accumulates onto, and the steps it takes along K.

    The width of a step counts where the instruction's own chain does not run on over it: for float32 in several
    passes, 8-bit types and plain fused multiply-adds.
    """
    found = set()
    for operation in ttir.operations:
        if operation.name not in _DOTS:
            continue
        types = tensors(operation.text, ttir.aliases)
        if operation.name != "tt.dot" or len(types) != 3:  # noqa: PLR2004  # a, b and the result
            found.add(f"{operation.name}, not understood: {re.sub(r'%[^ ,)]+', '%', operation.text)}")
            continue
        left, right, result = types
        options = dict(_OPTIONS.findall(operation.text))
        precision = options.get("inputPrecision", "default")
        depth = left.shape[-1]
        chained = left.element in _CHAINED_BY_TYPE or (left.element == "f32" and precision in _CHAINED_BY_PRECISION)
        line = [f"dot of {left.element} and {right.element} into {result.element}"]
        if left.element == "f32":
            line.append(precision)
        if "maxNumImpreciseAcc" in options and not chained:
            line.append(f"flushed every {options['maxNumImpreciseAcc']}")
        if not chained:
            line.append(f"{depth} at a time")
        line.append(_accumulator(operation, ttir, depth))
        found.add(", ".join(line))
    return tuple(sorted(found))


def instructions(assembly: str, target: str) -> tuple[str, ...]:
    """Return the matrix instructions of PTX or AMDGCN text: how deep along K, of which types.

    Args:
        assembly: the text.
        target: architecture, e.g. ``sm_90``.
    """
    found = set(_AMD.findall(assembly))
    for name in _NVIDIA.findall(assembly):
        depth = _SHAPE.search(name)
        types = _OPERANDS.findall(name)
        plain = _SHAPE.sub("", name).rstrip(";")
        if depth and target == "sm_90" and types[1:2] and types[1] in _ALIKE_ON_SM_90:
            plain = f"multiply-accumulate of {types[1]} into {types[0]}"
        found.add(f"{plain} {depth[1]} deep" if depth else plain)
    return tuple(sorted(found))


def _accumulator(dot: Operation, ttir: Module, depth: int) -> str:
    start = dot.operands[2]
    if start.kind == "loop" and start.operation is not None:
        between = sorted(_between(start, ttir))
        steps = _bounds(start.operation, depth * max(1, between.count("tt.dot")))
        return f"onto what {' '.join(dict.fromkeys(between))} left of the last step, K {steps}"
    if start.operation is not None and start.operation.name == "arith.constant":
        return f"onto {start.operation.text.partition(' : ')[0]}"
    return f"onto {start.operation.name if start.operation is not None else start.kind}"


def _between(variable: Value, ttir: Module) -> Iterator[str]:
    """Yield the operations between a loop variable and what becomes of it in one round."""
    reached: set[int] = {id(variable)}
    makes: list[Operation] = []
    for operation in ttir.operations:
        if any(id(one) in reached or one.operation in makes for one in operation.operands):
            makes.append(operation)
    needed = [one.operation for one in variable.sources[1:]]
    seen: set[int] = set()
    while needed:
        source = needed.pop()
        if source is None or id(source) in seen or source not in makes:
            continue
        seen.add(id(source))
        yield source.name
        needed += [one.operation for one in source.operands]


def _bounds(loop: Operation, step: int) -> str:
    """Return where a loop starts, ends and how far it goes at a time, in steps of ``step`` along K."""
    if loop.name != "scf.for":
        return "in a loop that is not understood"
    numbers = [_number(one) for one in loop.operands]
    lower, upper, by = numbers
    if lower is not None and upper is not None and by:
        scale = 1 if by % step == 0 else step  # the loop counts columns, or steps
        return f"from {lower * scale} to {upper * scale} by {by * scale // step} step"
    texts = [_expression(one, step) for one in loop.operands]
    return f"from {texts[0]} to {texts[1]} by {texts[2]}"


def _number(value: Value) -> int | None:
    """Return the integer that a value is, or None where that shows only at run time."""
    operation = value.operation
    if value.kind != "result" or operation is None:
        return None
    match = re.match(r"arith\.constant (-?\d+)", operation.text)
    return int(match[1]) if match else None


def _expression(value: Value, step: int, deep: int = 0) -> str:
    """Return how an integer is computed, numbers in steps of the loop where they are whole ones: tiles cancel out."""
    operation = value.operation
    if value.kind != "result" or operation is None or deep > _DEEPEST:
        return value.kind
    number = _number(value)
    if number is not None:
        if number and number % step == 0:
            return f"{number // step} step"
        return f"{(number + 1) // step} step - 1" if number and (number + 1) % step == 0 else str(number)
    axis = re.findall(r"^tt\.get_\w+ (\w)", operation.text)
    inner = [_expression(one, step, deep + 1) for one in operation.operands]
    return f"{operation.name.partition('.')[2]}({', '.join([*axis, *inner])})"
