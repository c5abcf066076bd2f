"""The library's operators that the job is made of, chosen once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from rl_engine.runtime.registry import get_op

if TYPE_CHECKING:
    from rl_engine.runtime.registry import Operator

OperatorFamily = Literal["triton", "pytorch"]


@dataclass(frozen=True)
class Operators:
    """One operator a field, named as in the registry."""

    embedding: Operator
    det_gemm: Operator
    rms_norm: Operator
    rope: Operator
    swiglu: Operator
    logp: Operator
    grpo_loss: Operator
    group_advantages: Operator

    @classmethod
    def load(cls, family: OperatorFamily, device: str) -> Operators:
        """Return the operators of ``family`` on ``device``; raises BackendError where one cannot run there."""
        names = (field.name for field in fields(cls))
        return cls(**{name: get_op(name, device, backend=f"rlkernel.{family}.{name}") for name in names})
