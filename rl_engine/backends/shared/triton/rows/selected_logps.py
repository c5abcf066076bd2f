"""Log-probabilities of one token a row, from one tensor of logits or two: the launches that several operators share.

A program reads whole rows, or, where there are too few rows for the card, single chunks of them, which a second kernel
merges in the same order: the bits are the same.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rl_engine.backends.shared.triton import operands
from rl_engine.backends.shared.triton.asking import Question, answers, ask
from rl_engine.backends.shared.triton.autotuning import may_measure
from rl_engine.backends.shared.triton.distinct import Failures, Ready
from rl_engine.backends.shared.triton.operands import power_of_two
from rl_engine.backends.shared.triton.primitives.logsumexp import CHUNK
from rl_engine.backends.shared.triton.qualification import BoundLaunch
from rl_engine.backends.shared.triton.rows import logp_kernels as kernels
from rl_engine.backends.shared.triton.signature import tensor_parts
from rl_engine.platforms import device
from rl_engine.platforms.tuning.key import BUCKET, Candidate, Part, bucket
from rl_engine.runtime.policy import PLAIN, launch_policy, pinned

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rl_engine.platforms.device import DeviceIdentity

# Fewer rows than this a multiprocessor, and programs of single chunks are faster than programs of rows.
_ROWS_A_MULTIPROCESSOR = 8
_answers = answers()
_failures = Failures()


class Selected(NamedTuple):
    """Log-probabilities [...], maxima and base-2 logarithms of sums [2, ...], log-probabilities of other logits."""

    logps: torch.Tensor
    norm: torch.Tensor
    reference: torch.Tensor | None


def _rows_grid(meta: Mapping[str, Any]) -> tuple[int, int]:
    return -(-meta["n_rows"] // meta["ROWS"]), 1 if meta["other_ptr"] is None else 2


def _chunks_grid(meta: Mapping[str, Any]) -> tuple[int, int]:
    return meta["n_rows"] * -(-meta["n_chunks"] // meta["CHUNKS"]), 1 if meta["other_ptr"] is None else 2


def selected_logps(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    other: torch.Tensor | None = None,
    ignore_index: int | None = None,
    temperature: float = 1.0,
) -> Selected:
    """Return the log-probabilities of ``targets`` under ``logits`` and, if given, under ``other`` logits.

    Args:
        logits: [..., vocab].
        targets: [...], int32 or int64. An id outside [0, vocab) gives NaN; nothing is read there.
        mask: [...]; rows where it is 0 give 0, whatever stands in them. None counts every row.
        other: logits' shape and device.
        ignore_index: rows with this id give 0; None for no such id.
        temperature: divides the logits.
    """
    if other is not None and other.dtype != logits.dtype:  # one launch takes one dtype
        call = {"mask": mask, "ignore_index": ignore_index, "temperature": temperature}
        found, others = (selected_logps(one, targets, **call) for one in (logits, other))  # type: ignore[arg-type]
        return Selected(found.logps, found.norm, others.logps)
    shape = targets.shape if other is None else (2, *targets.shape)  # taking the first of one costs the host 2 us
    logps = torch.empty(shape, dtype=torch.float32, device=logits.device)
    norm = torch.empty((2, *targets.shape), dtype=torch.float32, device=logits.device)
    if targets.numel():
        _launch(logits, targets, mask, other, logps, norm, ignore_index, temperature)
    return Selected(logps, norm, None) if other is None else Selected(logps[0], norm, logps[1])


def _launch(
    logits: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    other: torch.Tensor | None,
    logps: torch.Tensor,
    norm: torch.Tensor,
    ignore_index: int | None,
    temperature: float,
) -> None:
    call = _Call(
        operands.as_rows(logits), None if other is None else operands.as_rows(other), targets.contiguous(),
        None if mask is None else mask.contiguous(), logps, norm, ignore_index, temperature,
    )  # fmt: skip
    policy = launch_policy()
    way = _way(call) if policy.backend and policy.mode != "off" else None
    if way is None:
        for launch in call.by_rows() if call.takes_rows() else call.by_chunks():
            launch.launch()
    else:
        _run(call, way)


@dataclass(frozen=True)
class _Call:
    """Tensors as the kernels take them: logits as rows, everything else contiguous."""

    z: torch.Tensor
    other: torch.Tensor | None
    targets: torch.Tensor
    mask: torch.Tensor | None
    logps: torch.Tensor
    norm: torch.Tensor
    ignore_index: int | None
    temperature: float

    @property
    def cols(self) -> int:
        """Columns of a chunk."""
        return min(power_of_two(self.z.shape[1]), CHUNK.value)

    def takes_rows(self) -> bool:
        """Return whether the rule takes programs of rows."""
        n_rows, n_cols = self.z.shape
        sm_count = device.for_launch(self.z.get_device()).sm_count
        return n_cols <= self.cols or n_rows >= _ROWS_A_MULTIPROCESSOR * sm_count

    def by_rows(self) -> tuple[Ready, ...]:
        """Return the launch of programs of rows."""
        even = self.z.shape[1] % 16 == 0  # what Triton knows of an integer: then masks along the row keep loads wide
        args = (self.z, self.other, self.targets, self.mask, self.logps, self.norm, *self.z.shape, *self.options())
        kwargs = {"SCALED": self.temperature != 1.0, "EVEN": even, "COLS": self.cols}
        return (Ready(kernels.by_rows, _rows_grid, args, kwargs),)

    def by_chunks(self) -> tuple[Ready, ...]:
        """Return the launches of programs of chunks, and of their merge."""
        (n_rows, n_cols), scale = self.z.shape, self.temperature != 1.0
        n_chunks = -(-n_cols // self.cols)
        count = 1 if self.other is None else 2
        parts = torch.empty((count, 2, n_chunks, n_rows), dtype=torch.float32, device=self.z.device)
        # waiting for ids to know which rows count takes longer than reading a few rows in vain
        few = n_rows <= device.for_launch(self.z.get_device()).sm_count
        tensors = (self.z, self.other, self.targets, self.mask)
        judged = (self.z, self.other, None, None) if few else tensors
        sizes = (n_rows, n_cols, n_chunks, *self.options())
        chunks = Ready(kernels.by_chunks, _chunks_grid, (*judged, parts, *sizes), {"SCALED": scale, "COLS": self.cols})
        merge = Ready(kernels.merged, _rows_grid, (parts, *tensors, self.logps, self.norm, *sizes), {"SCALED": scale})
        return chunks, merge

    def options(self) -> tuple[int, int, int | None, float]:
        """Return strides, ignored id and inverse temperature."""
        other = 0 if self.other is None else self.other.stride(0)
        return self.z.stride(0), other, self.ignore_index, 1.0 / self.temperature


# --- a tuned backend opens the path too: rows, or chunks and a merge ---


def _way(call: _Call) -> Candidate | None:
    """Return the way that the tuner chose for calls of this kind, None for the rule's own."""
    policy, index = launch_policy(), call.z.get_device()
    tensors = {"z": call.z, "other": call.other, "targets": call.targets, "mask": call.mask}
    kinds = tuple(None if one is None else (one.dtype, one.data_ptr() & 15) for one in tensors.values())
    stride, other_stride, ignored, _inverse = call.options()
    facts: dict[str, Part] = {
        f"{BUCKET}rows": bucket(len(call.z)), "launch.cols": call.z.shape[1], "launch.stride": stride,
        "launch.other_stride": other_stride, "launch.ignores": ignored is not None,
        "launch.scaled": call.temperature != 1.0,
    }  # fmt: skip
    key = (policy, index, *facts.values(), *kinds)
    if key in _answers:
        return _answers[key]
    parts = dict(facts)
    for name, tensor in tensors.items():
        parts |= tensor_parts(name, tensor)
    question = Question(
        name=policy.backend,
        jitted=tuple(one.fn for one in (kernels.by_rows, kernels.by_chunks, kernels.merged)),
        parts=parts,
        candidates=lambda identity: _ways(call, identity),
        launches=lambda way: tuple(one.prepared(options) for one, options in _launches(call, way)),
        bound=_bound(call),
        failures=_failures,
        index=index,
    )
    answer = ask(question, policy, measures=may_measure(index))
    way = None if answer.is_fixed else answer.winner
    if answer.lasts:
        _answers[key] = way
    return way


def _ways(call: _Call, identity: DeviceIdentity) -> tuple[Candidate, ...]:
    """Return every way, the rule's first: rows (CHUNKS=0) or chunks (ROWS=0) a program, and warps."""
    sizes = {"n_rows": bucket(len(call.z)), "n_cols": call.z.shape[1], "COLS": call.cols}
    rows, chunks = kernels.by_rows.declaration, kernels.by_chunks.declaration
    found = [{"CHUNKS": 0, **rows.fixed(sizes, identity)}, {"ROWS": 0, **chunks.fixed(sizes, identity)}]
    if not call.takes_rows():
        found.reverse()
    elif sizes["n_cols"] <= call.cols:
        del found[1]  # a single chunk
    ways = [Candidate.of(**one) for one in found]
    for first in found:
        axes = chunks.neutral if first.get("CHUNKS") else rows.neutral
        for values in itertools.product(*axes.values()):
            launch = {**first, **dict(zip(axes, values, strict=True))}
            if launch["CHUNKS"] or kernels.admits_rows(sizes, launch):
                ways.append(Candidate.of(**launch))
    return tuple(dict.fromkeys(ways))


def _launches(call: _Call, way: Candidate) -> Iterator[tuple[Ready, dict[str, int]]]:
    """Yield the launches of a way and their options."""
    options = dict(way.options)
    rows, chunks = options.pop("ROWS"), options.pop("CHUNKS")
    if rows:
        (launch,) = call.by_rows()
        yield launch, {**options, "ROWS": rows}
    else:
        first, merge = call.by_chunks()
        yield first, {**options, "CHUNKS": chunks}
        yield merge, dict(kernels.merged.declaration.fixed({}, device.UNKNOWN))


def _run(call: _Call, way: Candidate) -> None:
    for launch, options in _launches(call, way):
        launch.launch(**options)


def _bound(call: _Call) -> BoundLaunch:
    names = ("z", "other", "targets", "mask", "logps", "norm")

    def run(values: Mapping[str, Any], way: Candidate) -> None:
        with pinned(PLAIN):
            _run(replace(call, **{name: values[name] for name in names}), way)

    return BoundLaunch(run, {name: getattr(call, name) for name in names}, ("logps", "norm"), (), ("z", "other"))
