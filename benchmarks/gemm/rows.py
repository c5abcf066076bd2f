"""Which products are timed, what limits and targets they have, and what a run of them leaves behind."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from benchmarks.operators.targets import BYTES_PER_US, PHASES, Phase
from benchmarks.report_files import read_rows, write_rows
from rl_engine.backends import catalog

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

Kind = Literal["training", "decode", "depth"]
SCHEMA = 1
ROWS_FILE = "rows.json"
ITEMSIZE = 2  # bf16
FLOPS_PER_US = 790e6  # of bf16 on an H200 whose clock gives way to random data; zeros reach 894
PEERS = ("torch.mm", "compile", "tile 128x128x64", "tile 128x256x64")
NAIVE = PEERS[2]  # the one tile of batch-invariant GEMMs in use: 8 warps, 3 stages
DEPTHS = tuple(1 << power for power in range(9, 15))  # K from 512 to 16,384
_SIDE = 4096  # rows and columns at every depth

# limit / efficiency aimed at, in microseconds
TARGETS_US: dict[tuple[str, Phase], float] = {
    ("m1-qkv", "fwd"): 14.64,
    ("m16-gate-up", "fwd"): 55.33,
    ("m64-down", "fwd"): 29.14,
    ("m128-o", "fwd"): 13.82,
    ("small", "fwd"): 18.95,
    ("small", "bwd"): 37.89,
    ("small", "both"): 56.84,
    ("thr-qkv", "fwd"): 600.0,
    ("thr", "fwd"): 4691.0,
    ("thr", "bwd"): 9710.0,
    ("thr", "both"): 14402.0,
    ("thr-down", "fwd"): 2346.0,
    ("thr-square", "fwd"): 1564.0,
    ("thr-70b", "fwd"): 10947.0,
    ("thr-q-b", "fwd"): 955.0,
    ("thr-32b", "fwd"): 3089.0,
    ("thr-moe", "fwd"): 1392.0,
}


@dataclass(frozen=True)
class Product:
    """One case in one phase: x [rows, inner] times a weight [cols, inner], its gradients, or all three.

    Attributes:
        preset: name of the declared case, or ``k`` and the depth.
        phase: forward, both gradients, or forward and both.
        rows: of x.
        inner: length of the forward's chains.
        cols: of the product.
        groups: experts, each with a weight and as many rows; 0 for a plain product.
    """

    preset: str
    phase: Phase
    rows: int
    inner: int
    cols: int
    groups: int = 0

    @property
    def kind(self) -> Kind:
        """What a row counts to."""
        if self.preset.startswith("k"):
            return "depth"
        return "training" if self.preset.startswith("thr") else "decode"

    @property
    def shape(self) -> str:
        """Sizes as text."""
        return f"{self.rows}x{self.cols}x{self.inner}" + (f", {self.groups} groups" if self.groups else "")

    @property
    def limit_us(self) -> float:
        """The time of its multiplications, or of its bytes where that is longer; of every pass."""
        traffic = catalog.specs()["det_gemm"].traffic
        assert traffic is not None
        found = traffic(ITEMSIZE, self.rows, self.inner, self.cols, groups=self.groups)
        forward = max(found.forward_flops / FLOPS_PER_US, found.forward / BYTES_PER_US)
        backward = max(found.backward_flops / FLOPS_PER_US, found.backward / BYTES_PER_US)
        return {"fwd": forward, "bwd": backward, "both": forward + backward}[self.phase]


def products() -> list[Product]:
    """Return everything that is timed: the declared cases in the phases that have a target, then every depth."""
    found = []
    for case in catalog.specs()["det_gemm"].cases:
        if "matrix" in case.tags:
            sizes = {name: size for name, size in case.sizes.items() if name != "weight"}
            phases = [phase for phase in PHASES if (case.name, phase) in TARGETS_US]
            found += [Product(case.name, phase, **sizes) for phase in phases]
    return found + [Product(f"k{depth}", "fwd", _SIDE, depth, _SIDE) for depth in DEPTHS]


@dataclass
class Row:
    """What was measured of one product; times are medians in microseconds, None where there is none.

    Attributes:
        operator: det_gemm.
        preset: of the product.
        phase: of the product.
        kind: training, decode or depth.
        shape: rows x columns x K.
        time_us: the faster of the fixed rule and the tuner; where the tuner kept the rule's launch, the mean of both.
        fixed_us: by the fixed rule.
        tuned_us: by what the tuner chose.
        best_us: by the best of an exhaustive search over paths, tiles and launches.
        best: which that is.
        candidates: how many were compared.
        limit_us: what the card's arithmetic and memory allow.
        share: limit over time.
        target_us: what it aims at.
        spread_us: fastest and slowest sample of the fixed rule.
        peers: by name.
        bytes_checked: bytes compared equal, to a second run, a smaller batch and every candidate.
        error: largest error against float64, of the largest value.
        note: what there is to say.
        tuned: what the tuner took instead of the rule's launches; the empty text where it kept them.
    """

    operator: str
    preset: str
    phase: Phase
    kind: Kind
    shape: str
    time_us: float
    fixed_us: float
    limit_us: float
    share: float
    target_us: float | None
    spread_us: tuple[float, float]
    bytes_checked: int
    error: float
    tuned_us: float | None = None
    best_us: float | None = None
    best: str = ""
    candidates: int = 0
    peers: dict[str, float | None] = field(default_factory=dict)
    note: str = ""
    tuned: str = ""

    def faster_than(self, peer: str) -> float | None:
        """Return how many times as fast as a peer this is."""
        other = self.peers.get(peer)
        return None if other is None else other / self.time_us

    @property
    def within_best(self) -> float | None:
        """The fixed rule's time over the best of the search's."""
        return None if self.best_us is None else self.fixed_us / min(self.best_us, self.fixed_us)


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    """Return the geometric mean of what is there; None of nothing."""
    known = [math.log(ratio) for ratio in ratios if ratio is not None]
    return math.exp(sum(known) / len(known)) if known else None


@dataclass
class Results:
    """All rows of a run so far; ``skipped`` and ``failed`` say why by ``preset phase``."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write everything as JSON, in place of what stood at ``path``."""
        write_rows(path, self, SCHEMA)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read results; raises ValueError for those of another schema."""
        fields = read_rows(path, SCHEMA)
        fields["rows"] = [Row(**{**row, "spread_us": tuple(row["spread_us"])}) for row in fields["rows"]]
        return cls(**fields)

    def means(self) -> Mapping[str, float | None]:
        """Return the figures that the library promises, by name."""

        def of(kind: Kind, peer: str) -> float | None:
            return geometric_mean(row.faster_than(peer) for row in self.rows if row.kind == kind)

        within = [row.within_best for row in self.rows if row.within_best is not None]
        return {
            "training rows against torch.mm": of("training", "torch.mm"),
            "decode rows against torch.mm": of("decode", "torch.mm"),
            f"decode rows against {NAIVE}": of("decode", NAIVE),
            "fixed rule over the best of the search, at most": max(within, default=None),
        }
