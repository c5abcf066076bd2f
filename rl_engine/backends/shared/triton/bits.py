"""The bit class of a compiled kernel: a value that two launches share where their floating-point sums run in one order.

It is computed from what the compiler made, not from what was asked of it, and needs no GPU. It is a filter before the
byte gate, not a proof of equal bytes; what it rests on stands in docs/design/bits.md.
"""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_engine.backends.shared.triton import bits_code, bits_dots, bits_ir, bits_sums, compiler

if TYPE_CHECKING:
    from collections.abc import Iterable

_DIGITS = 16  # of each half of a digest
_LINES = 2  # of a difference that a reason quotes


@dataclass(frozen=True)
class BitClass:
    """What fixes the order and the rounding of a kernel's floating-point operations.

    Attributes:
        structure: lines read from the IR, and the compiler's identity: cheap, compared when a record is loaded.
        code: lines read from the machine code, where a product could be fused with the addition that reads it.
        ordered: False where atomics add in whatever order: such a kernel is in no class, not even its own.
    """

    structure: tuple[str, ...]
    code: tuple[str, ...]
    ordered: bool = True

    @property
    def digest(self) -> str:
        """Digest of `structure`, a dash, digest of `code`."""
        return f"{_digest(self.structure)}-{_digest(self.code)}"

    def agrees_with(self, other: BitClass) -> bool:
        """Return whether two kernels are in one class."""
        return self.ordered and other.ordered and self == other

    def difference(self, other: BitClass) -> str:
        """Return in a line what tells this class from another's; '' where nothing does."""
        if not (self.ordered and other.ordered):
            return "atomics add in any order"
        ours = [one for one in (*self.structure, *self.code) if one not in (*other.structure, *other.code)]
        theirs = [one for one in (*other.structure, *other.code) if one not in (*self.structure, *self.code)]
        if not ours and not theirs:
            return ""
        return " against ".join("; ".join(some[:_LINES]) or "nothing of that kind" for some in (ours, theirs))


def structure_digest(digest: str) -> str:
    """Return the half of a class's digest that is read from the IR alone."""
    return digest.partition("-")[0]


def bit_class(compiled: Any) -> BitClass:
    """Return the bit class of a compiled kernel: Triton's own object, compiled for any target.

    Disassembles the code (0.4 s on NVIDIA) where fusion could make a difference, once per binary.
    """
    structure, ordered, could_fuse = _structure(compiled)
    return BitClass(structure, _fusion(compiled) if could_fuse else (), ordered)


def together(classes: Iterable[BitClass]) -> BitClass:
    """Return the class of kernels that run one after the other: what all of them add, and how."""
    every = tuple(classes)
    return BitClass(
        _merged(one.structure for one in every), _merged(one.code for one in every), all(one.ordered for one in every)
    )


def structure_of(*compiled: Any) -> str:
    """Return the first half of the digest that `bit_class`, or `together`, would give; disassembles nothing."""
    return _digest(_merged(_structure(one)[0] for one in compiled))


def _merged(texts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return all lines without repeats; those of a single kernel as they are."""
    first, *others = texts
    return tuple(sorted({*first}.union(*others))) if others else first


def _structure(compiled: Any) -> tuple[tuple[str, ...], bool, bool]:
    """Return the lines of the IR, whether all sums have an order, and whether fusion could change one."""
    assembly = compiled.asm.get("ptx") or compiled.asm.get("amdgcn") or ""
    return _read(compiled.asm["ttir"], compiled.asm["ttgir"], assembly, compiler.identity_of(compiled))


@functools.lru_cache(64)
def _read(ttir_text: str, ttgir_text: str, assembly: str, identity: str) -> tuple[tuple[str, ...], bool, bool]:
    try:
        return _lines(ttir_text, ttgir_text, assembly, identity)
    except (ValueError, IndexError, KeyError) as error:  # printed in a way that no supported Triton prints it
        reason = f"the IR, not understood ({compiler.first_line(error)})"
        return (identity, reason, _own(assembly)), True, True


def _lines(ttir_text: str, ttgir_text: str, assembly: str, identity: str) -> tuple[tuple[str, ...], bool, bool]:
    ttir, ttgir = bits_ir.parse(ttir_text), bits_ir.parse(ttgir_text)
    unordered = bits_sums.atomics(ttir)
    lines = [
        identity,
        *(f"computes {one}" for one in bits_sums.operations(ttir)),
        *bits_sums.reductions(ttgir),
        *bits_sums.exposed(ttir, ttgir),
        *bits_dots.dots(ttir),
        *bits_dots.instructions(assembly, _architecture(identity)),
        *unordered,
    ]
    if not _understood(ttir, ttgir, lines):
        lines.append(_own(assembly))
    return tuple(lines), not unordered, bits_sums.fusible(ttgir)


def _understood(ttir: bits_ir.Module, ttgir: bits_ir.Module, lines: list[str]) -> bool:
    calls = any(one.name in ("tt.call", "tt.map_elementwise") for one in ttir.operations)
    return (
        bool(ttir.operations and ttgir.operations) and not calls and not any("not understood" in one for one in lines)
    )


def _own(assembly: str) -> str:
    return f"a class of its own: {_digest((assembly,))}"


def _architecture(identity: str) -> str:
    match = re.search(r"\bfor (\w+)", identity)
    return match[1] if match else ""


def _fusion(compiled: Any) -> tuple[str, ...]:
    if "amdgcn" in compiled.asm:
        return bits_code.of_amdgcn(compiled.asm["amdgcn"])
    cubin = compiled.asm["cubin"]
    try:
        return bits_code.of_sass(cubin, compiler.nvdisasm())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return (f"not disassembled ({compiler.first_line(error)}), a class of its own: {_digest((cubin.hex(),))}",)


def _digest(lines: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_DIGITS]
