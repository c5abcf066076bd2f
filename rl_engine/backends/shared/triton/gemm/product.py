"""One product, by the path and tile that the rule takes; in a tuned backend, that the tuner chose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from rl_engine.backends.shared.triton.asking import Question, answers, ask
from rl_engine.backends.shared.triton.autotuning import may_measure
from rl_engine.backends.shared.triton.descriptors import describable, lies_transposed
from rl_engine.backends.shared.triton.distinct import Failures, Ready
from rl_engine.backends.shared.triton.gemm.launch import identify, multiply_as, ready, turned
from rl_engine.backends.shared.triton.gemm.persistent import persistent
from rl_engine.backends.shared.triton.gemm.rule import Precision, plan
from rl_engine.backends.shared.triton.gemm.space import Choice, Sizes, chosen_by_rule, space
from rl_engine.backends.shared.triton.gemm.tiles import tiles
from rl_engine.backends.shared.triton.qualification import BoundLaunch
from rl_engine.backends.shared.triton.signature import tensor_parts
from rl_engine.platforms.tuning.key import BUCKET, Candidate, Part, bucket
from rl_engine.runtime.policy import PLAIN, launch_policy, pinned

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rl_engine.platforms.device import DeviceIdentity

Axis = Literal["m", "k"]
_MATRIX = 2  # axes
_answers = answers()
_failures = Failures()


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    precision: Precision,
    *,
    bias: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    changing: Axis = "m",
) -> None:
    """Write ``start + a @ b + bias`` to ``out``; any strides, but ``out``'s elements do not overlap.

    Args:
        a: [m, k] or [batch, m, k].
        b: [k, n] or [batch, k, n].
        out: [m, n] or [batch, m, n].
        precision: of fp32 operands.
        bias: [n], contiguous, without a batch, with rows of neighbours in ``out``.
        start: what the chains begin with, of ``out``'s shape and strides; it may be ``out``. None for zeros.
        changing: the length that counts tokens, and so changes from step to step.
    """
    if not out.numel():
        return
    if lies_transposed(out):  # a weight's gradient that lies as the weight does: stored by rows all the same
        a, b, out, start = b.mT, a.mT, out.mT, turned(start)
    policy = launch_policy()
    choice = None
    if policy.backend and policy.mode != "off" and precision == "half" and out.dim() == _MATRIX:
        choice = _choice(a, b, out, bias, start, changing)
    if choice is not None:
        multiply_as(choice.plan, a, b, out, precision, bias=bias, start=start, **choice.options)
        return
    can_describe = precision == "half" and _describable(a, b, out)
    found = plan(*out.shape[-2:], a.shape[-1], precision, identify(a), describable=can_describe)
    multiply_as(found, a, b, out, precision, bias=bias, start=start)


def _describable(*matrices: torch.Tensor) -> bool:
    return all(describable(one) for one in matrices)


def _choice(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, start: torch.Tensor | None,
    changing: Axis,
) -> Choice | None:  # fmt: skip
    """Return what the tuner chose for products of this kind, None for the rule's own."""
    policy, index = launch_policy(), a.get_device()
    tensors = {"a": a, "b": b, "out": out, "bias": bias, "start": start}
    lengths = {"m": out.shape[0], "n": out.shape[1], "k": a.shape[1]}
    lengths[changing] = bucket(lengths[changing])
    kinds = tuple(None if one is None else (one.dtype, one.stride(), one.data_ptr() & 15) for one in tensors.values())
    key = (policy, index, changing, *lengths.values(), _in_place(tensors), *kinds)
    if key in _answers:
        return _answers[key]

    def candidates(identity: DeviceIdentity) -> tuple[Candidate, ...]:
        sizes = Sizes(**lengths, itemsize=out.element_size(), describable=_describable(a, b, out))
        choices = (chosen_by_rule(sizes, identity), *space(sizes, identity))
        return tuple(dict.fromkeys(one.candidate for one in choices))

    question = Question(
        name=policy.backend,
        jitted=(tiles.fn, persistent.fn),
        parts=_parts(tensors, lengths, changing),
        candidates=candidates,
        launches=lambda candidate: (_ready(candidate, tensors).prepared(Choice.of(candidate).options),),
        bound=_bound(tensors),
        failures=_failures,
        index=index,
    )
    answer = ask(question, policy, measures=may_measure(index))
    choice = None if answer.is_fixed else Choice.of(answer.winner)
    if answer.lasts:
        _answers[key] = choice
    return choice


def _ready(candidate: Candidate, tensors: Mapping[str, Any]) -> Ready:
    a, b, out, bias, start = tensors.values()
    return ready(Choice.of(candidate).plan, a, b, out, "half", bias=bias, start=start)


def _bound(tensors: Mapping[str, torch.Tensor | None]) -> BoundLaunch:
    """Return the product as the byte gate takes it; a start that is the result itself is read and written."""

    def run(values: Mapping[str, Any], candidate: Candidate) -> None:
        with pinned(PLAIN):
            _ready(candidate, {name: values[name] for name in tensors}).launch(**Choice.of(candidate).options)

    outputs, inout = ((), ("out",)) if _in_place(tensors) else (("out",), ())
    return BoundLaunch(run, tensors, outputs, inout, ("a", "b", "bias"))


def _in_place(tensors: Mapping[str, torch.Tensor | None]) -> bool:
    start, out = tensors["start"], tensors["out"]
    return start is not None and out is not None and start.data_ptr() == out.data_ptr()


def _parts(tensors: Mapping[str, torch.Tensor | None], lengths: Mapping[str, int], changing: Axis) -> dict[str, Part]:
    """Return the key parts of a product; the length that changes is a bucket."""
    found: dict[str, Part] = {"launch.changing": changing, "launch.in_place": _in_place(tensors)}
    for name, length in lengths.items():
        found[f"{BUCKET if name == changing else 'launch.'}{name}"] = length
    for name, tensor in tensors.items():
        found |= tensor_parts(name, tensor)
        found[f"launch.{name}.strides"] = None if tensor is None else str(tensor.stride())
    return found
