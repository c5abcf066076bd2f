"""Inputs that show a sum in another order, or a value that reached its neighbours, where random numbers hide it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rl_engine.backends.spec import Inputs

Family = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
_SEED = 20_240_607


def _cancelling(x: torch.Tensor, _generator: torch.Generator) -> torch.Tensor:
    """Make neighbours cancel but for their last bits, so that what is left depends on who met whom."""
    flat = x.reshape(-1).clone()
    pairs = flat.numel() // 2
    flat[1 : 2 * pairs : 2] = -flat[0 : 2 * pairs : 2] * (1 + 4 * torch.finfo(x.dtype).eps)
    return flat.reshape(x.shape)


def _exponents(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Spread magnitudes over 2^±20; over 2^±8 in fp16, whose largest number is 2^16."""
    most = 8 if x.dtype == torch.float16 else 20
    powers = torch.randint(-most, most + 1, x.shape, generator=generator).to(x.device)
    return torch.ldexp(x.float(), powers).to(x.dtype)


def _subnormal(x: torch.Tensor, _generator: torch.Generator) -> torch.Tensor:
    return x * torch.finfo(x.dtype).tiny


def _planted(*values: float) -> Family:
    """Return a family with a value in every seventh place, each in its turn."""

    def plant(x: torch.Tensor, _generator: torch.Generator) -> torch.Tensor:
        flat = x.reshape(-1).clone()
        for number, value in enumerate(values):
            flat[number * 7 :: 7 * len(values)] = value
        return flat.reshape(x.shape)

    return plant


FAMILIES: dict[str, Family] = {
    "normal": lambda x, _generator: x,
    "cancelling": _cancelling,
    "exponents": _exponents,
    "subnormal": _subnormal,
    "infinite": _planted(float("inf"), -float("inf")),
    "nan": _planted(float("nan")),
    "zeros": _planted(0.0, -0.0),
    "equal": lambda x, _generator: torch.full_like(x, 0.1),
}


def of_family(inputs: Inputs, family: str) -> Inputs:
    """Return inputs whose floating-point tensors are of a family; ids, offsets and masks stay."""
    generator = torch.Generator().manual_seed(_SEED)
    make = FAMILIES[family]

    def changed(one: object) -> object:
        return make(one, generator) if isinstance(one, torch.Tensor) and one.is_floating_point() else one

    kwargs = {name: changed(one) for name, one in inputs.kwargs.items()}
    return replace(inputs, args=tuple(changed(one) for one in inputs.args), kwargs=kwargs)
