"""Which multiplications and additions a kernel's machine code has fused, from its SASS or AMDGCN.

The IR does not say: LLVM and ptxas both contract a product and the addition behind it. Counts are no measure across
launches: over a fold the share of additions follows the layout, compilers unroll, slow paths are shared (of this
library's kernels only the streaming ones keep their ratio over all candidates). What unrolling, tiles and warps leave
alone is which kinds of operations there are, and whether an addition reads a product that it could have fused.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_LABEL = re.compile(r"^\s*[.$\w]+:")
_SASS = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_SASS_REGISTER = re.compile(r"\bR(\d+|Z)\b")
_SASS_KIND = re.compile(r"^([FDH])(ADD|MUL|FMA)(2?)$")
_AMD = re.compile(r"^\s+(v_[a-z0-9_]+)\s+(.*)$")
_AMD_REGISTER = re.compile(r"\bv(?:(\d+)|\[(\d+):(\d+)\])")
_AMD_KIND = re.compile(r"^v_(?:pk_)?(add|sub|subrev|mul|fma|fmac|mac|mad)_(f16|bf16|f32|f64)(?:_|$)")
_TYPES = {"F": "f32", "D": "f64", "H": "16 bits"}
_KINDS = {"add": "add", "sub": "add", "subrev": "add", "mul": "mul"}
_DISASSEMBLY_S = 60
_KEPT = 256


@functools.lru_cache(_KEPT)
def of_sass(cubin: bytes, nvdisasm: str) -> tuple[str, ...]:
    """Return the kinds of a cubin; 0.4 s. Raises OSError or subprocess.SubprocessError where it cannot be read."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [nvdisasm, "-c", file.name], capture_output=True, text=True, check=True, timeout=_DISASSEMBLY_S
        )
    return kinds(sass(done.stdout))


def of_amdgcn(text: str) -> tuple[str, ...]:
    """Return the kinds of AMD assembly."""
    return kinds(amdgcn(text))


def kinds(code: Iterator[tuple[str, list[str], list[str]]]) -> tuple[str, ...]:
    """Return what a code computes with: ``f32 add``, ``f32 mul``, ``f32 fma``, ``f32 add of a product``.

    Args:
        code: (kind or '', registers written, registers read) of each instruction; a label is ``("label", [], [])``.
    """
    found = set()
    products: dict[str, str] = {}
    for kind, written, read in code:
        if kind == "label":
            products.clear()
            continue
        if kind:
            found.add(kind)
        if kind.endswith(" add") and kind.replace(" add", " mul") in {products.get(one) for one in read}:
            found.add(f"{kind} of a product")
        for one in written:
            products[one] = kind
    return tuple(sorted(found))


def sass(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the instructions of nvdisasm's text, as `kinds` takes them, up to the slow paths behind the kernel."""
    for line in text.splitlines():
        if _LABEL.match(line):
            yield "label", [], []
            if line.startswith("$"):  # the slow paths of a division or a root follow
                return
            continue
        match = _SASS.match(line)
        if not match:
            continue
        predicate, (name, *modifiers) = match[1], match[2].split(".")
        registers = _SASS_REGISTER.findall(match[3])
        words = next((int(one) // 32 for one in modifiers if one in ("64", "128", "256")), 1)
        wide = name.startswith(("D", "IMAD")) and ("WIDE" in modifiers or name.startswith("D"))
        width = max(words if name.startswith(("LD", "ATOM")) else 1, 2 if wide else 1)
        first, *read = registers or [""]
        written = [str(int(first) + word) for word in range(width)] if first.isdigit() else []
        kind = _SASS_KIND.match(name)
        moves = kind is not None and "Z" in read and kind[2] != "FMA"
        # under a predicate it is part of a lowered function (ex2 of a denormal), and cannot be fused
        if kind is None or predicate or moves or read[:2] == ["Z", "Z"] or "F32" in modifiers:
            yield "", written, read
        else:
            yield f"{_TYPES[kind[1]]} {kind[2].lower()}", written, read


def amdgcn(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the vector instructions of AMD assembly, as `kinds` takes them."""
    for line in text.splitlines():
        if _LABEL.match(line):
            yield "label", [], []
            continue
        match = _AMD.match(line)
        if match:
            first, *others = match[2].split(",")
            kind = _AMD_KIND.match(match[1])
            said = f"{kind[2]} {_KINDS.get(kind[1], 'fma')}" if kind else ""
            yield said, _amd_registers(first), [one for each in others for one in _amd_registers(each)]


def _amd_registers(operand: str) -> list[str]:
    match = _AMD_REGISTER.search(operand)
    if not match:
        return []
    return [match[1]] if match[1] else [str(one) for one in range(int(match[2]), int(match[3]) + 1)]
