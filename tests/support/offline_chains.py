"""What a compiled kernel's dots say of a matrix product's bits: one chain over K, by which instruction."""

from __future__ import annotations

import re
from typing import Any

import torch

from tests.support.offline import Offline, Target

_DOT = re.compile(r"\b(tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma(?!_commit))\b[^\n]*")
_MMA = re.compile(
    r"(#mma\d*) = #ttg\.(?:nvidia_mma|amd_mfma)<\{(?:versionMajor|version) = (\d+)[^\n]*?instrShape = \[([\d, ]+)\]"
)
_WIDTH = re.compile(r"kWidth = (\d+)")
_ADDED = re.compile(r"= arith\.addf [^\n]*: tensor<(\d+)x(\d+)xf32")
_NVIDIA_BITS = 256  # of an operand's row in one instruction: 16 of bf16, 8 of tf32
# How many elements of K one instruction of an AMD card adds up, and how many of them a lane holds side by side, by the
# element's bits: another tile may take another instruction, and other groups of K.
_AMD = {("gfx942", 16): (8, 4), ("gfx942", 32): (2, 1), ("gfx950", 16): (16, 8), ("gfx950", 32): (2, 1)}
_AMD_TF32 = (4, 2)  # on gfx942, the one that has it


def broken_chains(launch: Offline, target: Target, compiled: Any) -> list[str]:
    """Return what would make an element more than one chain over K, or a chain of other groups of K than elsewhere."""
    ttgir, found = compiled.asm["ttgir"], []
    dots = [match[0] for match in _DOT.finditer(ttgir)]
    if not dots:
        found.append("no dot")
    # before loops are pipelined, which may repeat what stands behind them
    added = sum(int(match[1]) * int(match[2]) for match in _ADDED.finditer(compiled.asm["ttir"]))
    sums = added / (launch.values["BLOCK_M"] * launch.values["BLOCK_N"])
    wanted = 1 + (launch.values.get("bias_ptr") is not None)  # the closing +0.0, and the bias
    if sums != wanted:
        found.append(f"{sums:g} sums an element beside the dots, not {wanted}")
    if "atomic" in ttgir:
        found.append("an atomic")
    depths = {_depth(dot, ttgir, launch, target) for dot in dots}
    if depths != {_wanted(launch, target)}:
        found.append(f"groups of K {sorted(depths)}, not {_wanted(launch, target)}")
    return found


def _bits(launch: Offline) -> int:
    tensor = launch.values["a_ptr"]
    assert isinstance(tensor, torch.Tensor)
    return 8 * tensor.element_size()


def _wanted(launch: Offline, target: Target) -> tuple[int, int]:
    if target.identity.kind == "hip":
        if launch.values["PRECISION"] == "tf32":
            return _AMD_TF32
        return _AMD[target.identity.arch, _bits(launch)]
    if launch.values["PRECISION"] == "ieee":
        return 1, 1
    return _NVIDIA_BITS // _bits(launch), 32 // _bits(launch)


def _depth(dot: str, ttgir: str, launch: Offline, target: Target) -> tuple[int, int]:
    """Return (elements of K that one instruction adds up, how many of them lie side by side)."""
    layouts = {name: (version, [int(one) for one in shape.split(",")]) for name, version, shape in _MMA.findall(ttgir)}
    used = re.search(r"-> tensor<[^>]*(#\w+)>", dot)
    widths = {int(width) for width in _WIDTH.findall(dot)} or {32 // _bits(launch)}  # from shared memory: packed
    assert len(widths) == 1, dot
    if dot.startswith("ttng.tc_gen5_mma"):
        return _NVIDIA_BITS // _bits(launch), widths.pop()
    assert used is not None, dot
    if used[1] not in layouts:  # no matrix unit: fused multiply-adds, one after the other
        return 1, 1
    version, shape = layouts[used[1]]
    if target.identity.kind == "cuda" and version == "2":
        return _NVIDIA_BITS // _bits(launch), widths.pop()
    return shape[2], widths.pop()
