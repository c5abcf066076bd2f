"""What a record is valid for: this code, on this card (cases B32, B75)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_engine.platforms import device
from rl_engine.platforms.tuning import identity
from rl_engine.platforms.tuning.store import FileStore
from tests.support.processes import environment, run

EDITED = """
import torch, triton
import triton.language as tl
from rl_engine.backends.shared.triton.autotuning import TunableKernel

STEP = tl.constexpr(1.0)

@triton.jit
def shifted(x):
    return x + STEP

@TunableKernel(outputs=("y_ptr",), dynamic=("n",), neutral={"BLOCK": (256, 512)}, fixed=lambda s, d: {"BLOCK": 1024})
@triton.jit(do_not_specialize=["n"])
def edited_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + lane, shifted(tl.load(x_ptr + lane, mask=lane < n)), mask=lane < n)

def launch(x):
    y = torch.empty_like(x)
    edited_kernel[lambda meta: (-(-meta["n"] // meta["BLOCK"]),)](x, y, x.numel())
    return y
"""
EDITS = {  # name: (text, what stands there instead); each is another key
    "nothing": ("STEP =", "STEP ="),
    "kernel body": ("mask=lane < n)), mask", "mask=lane < n) * 1.0), mask"),
    "helper body": ("return x + STEP", "return x + STEP + 0.0"),
    "global constant": ("constexpr(1.0)", "constexpr(3.0)"),
    "launcher": ("y = torch.empty_like(x)", "y = torch.zeros_like(x)"),
    "comment": ("STEP =", "# one\nSTEP ="),  # documented: the module's whole text counts
    "order of candidates": ("(256, 512)", "(512, 256)"),  # in the same text
}
TUNE_IN_CHILDREN = """
import os, sys
import torch, triton
from rl_engine.platforms import autotuner
sys.dont_write_bytecode = True
for folder in sys.argv[1:]:
    if not os.fork():
        sys.path.insert(0, folder)
        try:
            import edited
            x = torch.zeros(1000, device="cuda" if torch.cuda.is_available() else "cpu")
            print(folder, edited.launch(x).unique().tolist(), autotuner.report().counts, sep="|", flush=True)
        except Exception as error:
            print(folder, error, sep="|", flush=True)
        os._exit(0)
    os.wait()
"""


def test_b32_every_edit_of_what_a_launch_is_made_from_is_another_key(tmp_path: Path) -> None:
    folders = []
    for name, (text, instead) in EDITS.items():
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        assert text in EDITED, name
        (folders[-1] / "edited.py").write_text(EDITED.replace(text, instead), encoding="utf-8")
    env = environment(RL_KERNEL_AUTOTUNE="1", RL_KERNEL_AUTOTUNE_CACHE_DIR=str(tmp_path / "cache"))
    names = [*EDITS, *list(EDITS)[:2]]  # some met again
    printed = run(TUNE_IN_CHILDREN, *(str(tmp_path / name) for name in names), env=env).splitlines()
    seen: set[str] = set()
    for line, name in zip(printed, names, strict=True):
        folder, values, counts = line.split("|")
        assert folder == str(tmp_path / name)
        assert values == ("[3.0]" if name == "global constant" else "[1.0]"), name
        measured = name not in seen
        assert ("tuned" in counts, "replayed" in counts) == (measured, not measured), f"{name}: {counts}"
        seen.add(name)
    assert len(FileStore(tmp_path / "cache").digests()) == len(EDITS)


class Cards:
    """torch's view of cards, as a test wants it; a card is told by its index alone, as torch does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *cards: dict[str, Any]) -> None:
        usual = {
            "name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 150 << 30,
            "L2_cache_size": 60 << 20, "uuid": "GPU-1", "pci_domain_id": 0, "pci_bus_id": 26, "pci_device_id": 0,
        }  # fmt: skip
        made = []
        for card in cards:
            facts = {**usual, **card}
            made.append(SimpleNamespace(**{name: value for name, value in facts.items() if value is not None}))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: made[index])
        monkeypatch.setattr(torch.version, "hip", None)
        device.identify.cache_clear()
        self.parts = [identity.machine_parts(index, "device") for index in range(len(cards))]
        self.model_parts = [identity.machine_parts(index, "model") for index in range(len(cards))]
        self.provenance = [identity.physical_parts(index) for index in range(len(cards))]
        device.identify.cache_clear()


@pytest.mark.parametrize(
    ("other", "differing"),
    [
        ({"uuid": "GPU-2"}, ("device.uuid",)),
        ({"multi_processor_count": 60, "total_memory": 70 << 30}, ("device.memory_bytes", "device.sm_count")),
        ({"uuid": "MIG-1", "multi_processor_count": 16}, ("device.sm_count", "device.uuid")),
        ({"pci_bus_id": 27}, ("device.pci",)),
        ({"name": "NVIDIA H100"}, ("device.name",)),
        ({"uuid": None}, ("device.uuid",)),
        ({}, ()),
    ],
    ids=str,
)
def test_b75_another_card_or_slice_is_another_key(
    other: dict[str, Any], differing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = Cards(monkeypatch, {}, other)
    ours, theirs = cards.parts
    assert {name for name in ours | theirs if ours[name] != theirs[name]} == set(differing)


def test_b75_without_a_uuid_a_card_is_told_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = Cards(monkeypatch, {"uuid": None}, {"uuid": None, "pci_bus_id": 27}, {"uuid": None})
    assert cards.parts[0] != cards.parts[1]
    assert cards.parts[0] == cards.parts[2]
    assert cards.provenance[0] == (("device.pci", "0000:1a:00"), ("device.uuid", None))


def test_b75_under_scope_model_identical_cards_share_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = Cards(monkeypatch, {}, {"uuid": "GPU-2", "pci_bus_id": 27}, {"uuid": "MIG-1", "multi_processor_count": 16})
    assert cards.model_parts[0] == cards.model_parts[1]
    assert cards.model_parts[0] != cards.model_parts[2]
    assert cards.provenance[0] != cards.provenance[1]  # which card it was stays in the record


@pytest.mark.parametrize("visible", ["1", "GPU-1", "MIG-1", "", "1,0", "nonsense"])
def test_b75_the_key_follows_the_card_and_no_variable_is_parsed(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Cards(monkeypatch, {"uuid": "GPU-1"}, {"uuid": "GPU-2"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    alone = Cards(monkeypatch, {"uuid": "GPU-2"})  # the second card, seen as index 0
    assert alone.parts[0] == both.parts[1]
