"""What operators refuse, and that the message says what was asked, what was seen and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.ops_inputs import (
    DEVICE,
    ON_GPU,
    Sample,
    map_tensors,
    samples,
    tensors_of,
    triton_op,
)

TINY = samples(lambda sample: sample.case.name == "tiny" and sample.dtype == "float32")


class Labelled(torch.Tensor):
    """Stands for DTensor and its like: a subclass whose bytes are not what its shape says."""


def _replaced(sample: Sample, name: str, change: Callable[[torch.Tensor], Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return a call's arguments with one tensor changed."""
    inputs = sample.inputs()
    args, kwargs = list(inputs.args), dict(inputs.kwargs)
    if name.isdigit():
        args[int(name)] = change(args[int(name)])
    else:
        kwargs[name] = change(kwargs[name])
    return args, kwargs


def _each_tensor(*, floating: bool = False) -> list[Any]:
    return [
        pytest.param(sample, name, id=f"{sample.spec.name}-{name}")
        for sample in TINY
        for name, tensor in tensors_of(sample.inputs()).items()
        if tensor.is_floating_point() or not floating
    ]


@pytest.mark.parametrize(("sample", "name"), _each_tensor(floating=True))
def test_fp64_is_refused_and_the_message_lists_what_is_taken(sample: Sample, name: str) -> None:
    args, kwargs = _replaced(sample, name, torch.Tensor.double)
    with pytest.raises(TypeError, match=rf"^{sample.spec.name}: \w+ is torch.float64; pass bfloat16, float16 or fl"):
        triton_op(sample.spec.name)(*args, **kwargs)


@pytest.mark.parametrize(("sample", "name"), _each_tensor(floating=True))
def test_integers_are_refused_where_numbers_belong(sample: Sample, name: str) -> None:
    args, kwargs = _replaced(sample, name, torch.Tensor.int)
    with pytest.raises(TypeError, match=rf"^{sample.spec.name}: \w+ is torch.int32; pass bfloat16"):
        triton_op(sample.spec.name)(*args, **kwargs)


@pytest.mark.parametrize(("sample", "name"), _each_tensor())
def test_a_tensor_subclass_is_refused_and_the_message_names_to_local(sample: Sample, name: str) -> None:
    args, kwargs = _replaced(sample, name, lambda tensor: tensor.as_subclass(Labelled))
    with pytest.raises(TypeError, match=rf"^{sample.spec.name}: \w+ is a Labelled; pass a plain .*\.to_local\(\)"):
        triton_op(sample.spec.name)(*args, **kwargs)


@pytest.mark.parametrize("sample", [one for one in TINY if one.spec.differentiable], ids=str)
def test_parameters_are_plain_tensors(sample: Sample) -> None:
    args, kwargs = _replaced(sample, str(sample.inputs().differentiable[0]), torch.nn.Parameter)
    result = triton_op(sample.spec.name)(*args, **kwargs)
    assert (result if isinstance(result, torch.Tensor) else result[0]).requires_grad


@pytest.mark.parametrize("sample", TINY, ids=str)
def test_a_device_without_triton_is_refused(sample: Sample) -> None:
    inputs = map_tensors(sample.inputs(), lambda tensor: tensor.to("meta"))
    with pytest.raises(ValueError, match=rf"^{sample.spec.name}: \w+ is on meta: .*use a CUDA or ROCm device"):
        triton_op(sample.spec.name)(*inputs.args, **inputs.kwargs)


@pytest.mark.parametrize(("sample", "name"), [one for one in _each_tensor() if one.values[1] != "0"])
def test_tensors_on_two_devices_are_refused(sample: Sample, name: str) -> None:
    args, kwargs = _replaced(sample, name, lambda tensor: tensor.to("meta"))
    with pytest.raises(ValueError, match=rf"^{sample.spec.name}: \w+ is on meta, the first tensor on {DEVICE}.*; use"):
        triton_op(sample.spec.name)(*args, **kwargs)


@pytest.mark.skipif(ON_GPU, reason="a card computes bfloat16")
@pytest.mark.parametrize("sample", [one for one in TINY if "bfloat16" in one.spec.dtypes], ids=str)
def test_bfloat16_is_refused_by_the_interpreter_which_computes_it_wrongly(sample: Sample) -> None:
    inputs = map_tensors(sample.inputs(), lambda one: one.bfloat16() if one.is_floating_point() else one)
    with pytest.raises(TypeError, match="interpreter computes bfloat16 wrongly; pass float32 or float16, or run"):
        triton_op(sample.spec.name)(*inputs.args, **inputs.kwargs)


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def _ids(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return _x(*shape, dtype=dtype)


# operator, arguments, keyword arguments, error, what its message says
REFUSED = [
    ("swiglu", (_x(2, 3), _x(2, 4)), {}, ValueError, r"gate is \[2, 3\], up is \[2, 4\]; pass equal shapes"),
    ("swiglu", (_x(3), _x(3).half()), {}, TypeError, "gate is torch.float32, up is torch.float16; pass equal dtypes"),
    ("rms_norm", (_x(2, 3), _x(2)), {}, ValueError, r"weight is \[2\], x is \[2, 3\]; pass weight of shape \[3\]"),
    ("rms_norm", (_x(2, 3), _x(1, 3)), {}, ValueError, r"weight is \[1, 3\].*pass weight of shape \[3\]"),
    ("rms_norm", (_x(2, 0), _x(0)), {}, ValueError, r"x is \[2, 0\]; pass \[\.\.\., hidden\] with hidden of at"),
    ("rms_norm", (_x(), _x(1)), {}, ValueError, r"x is \[\]; pass \[\.\.\., hidden\]"),
    ("logp", (_x(2, 5), _x(2)), {}, TypeError, "targets are torch.float32; pass int32 or int64 ids"),
    ("logp", (_x(2, 5), _ids(2, dtype=torch.bool)), {}, TypeError, "targets are torch.bool; pass int32 or int64"),
    ("logp", (_x(2, 5), _ids(2, dtype=torch.int16)), {}, TypeError, "targets are torch.int16; pass int32 or int64"),
    ("logp", (_x(2, 5), _ids(3)), {}, ValueError, r"targets are \[3\], logits are \[2, 5\]; pass targets of shape"),
    ("logp", (_x(2, 0), _ids(2)), {}, ValueError, r"logits are \[2, 0\]; pass \[\.\.\., vocab\] with vocab of at"),
    ("logp", (_x(2, 5), _ids(2)), {"temperature": 0.0}, ValueError, "temperature is 0.0; pass a number above 0"),
    ("logp", (_x(2, 5), _ids(2)), {"temperature": float("nan")}, ValueError, "temperature is nan; pass a number"),
    ("logp", (_x(2, 5), _ids(2) + 5), {"validate": True}, ValueError, r"2 ids outside \[0, 5\), the first is 5; mask"),
    ("logp", (_x(2, 5), _ids(2) - 1), {"validate": True}, ValueError, r"2 ids outside \[0, 5\), the first is -1"),
    ("group_advantages", (_x(2, 3),), {"samples_per_prompt": 3}, ValueError, r"rewards are \[2, 3\]; pass one"),
    ("group_advantages", (_x(6),), {}, ValueError, "pass exactly one of samples_per_prompt and group_boundaries"),
    ("group_advantages", (_x(6),), {"samples_per_prompt": 2, "group_boundaries": _ids(2)}, ValueError, "exactly one"),
    ("group_advantages", (_x(6),), {"samples_per_prompt": 4}, ValueError, "6 rewards do not split into groups of 4"),
    ("group_advantages", (_x(6),), {"samples_per_prompt": 0}, ValueError, "do not split into groups of 0"),
    ("group_advantages", (_x(6),), {"group_boundaries": _ids(0)}, ValueError, r"group_boundaries are \[0\]; pass \[gr"),
    ("group_advantages", (_x(6),), {"group_boundaries": _x(2)}, TypeError, "group_boundaries are torch.float32; pass"),
    ("grpo_loss", (_x(6), _x(6), _x(6), _x(6)), {}, ValueError, r"logps are \[6\]; pass \[sequences, tokens\]"),
    ("grpo_loss", (_x(2, 3), _x(3, 2), _x(2), _x(2, 3)), {}, ValueError, r"old_logps is \[3, 2\]; pass logps' shape"),
    ("grpo_loss", (_x(2, 3), _x(2, 3), _x(3), _x(2, 3)), {}, ValueError, r"advantages are \[3\]; pass \[2\], one a"),
    ("grpo_loss", (_x(2, 3), _x(2, 3), _x(2), _x(2, 4)), {}, ValueError, r"mask is \[2, 4\]; pass logps' shape"),
    ("grpo_loss", (_x(2, 3), _x(2, 3), _x(2), _x(2, 3)), {"beta": 0.1}, ValueError, "beta is 0.1 without ref"),
    ("grpo_loss", (_x(2, 3), _x(2, 3), _x(2), _x(2, 3)), {"kl": "k4"}, ValueError, "kl is 'k4'; pass one of k1, k2"),
    ("grpo_loss", (_x(2, 3), _x(2, 3), _x(2), _x(2, 3)), {"aggregation": "mean"}, ValueError, "aggregation is 'mean';"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "error", "message"),
    REFUSED,
    ids=[f"{row[0]}-{number}" for number, row in enumerate(REFUSED)],
)
def test_arguments_that_do_not_fit_are_refused(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=rf"^{name}: .*{message}"):
        triton_op(name)(*args, **kwargs)
