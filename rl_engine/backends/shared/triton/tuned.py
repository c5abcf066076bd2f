"""The explicit backends that open to the tuner what the default operators keep to their rules: paths and tiles.

They are the default operators, contract and bits included, run under a policy that names the backend; what they open
is asked for where it is chosen (`gemm/product.py`, `rows/selected_logps.py`). With tuning off they are the default
operators altogether. One more is an entry here: its operator's body, its graph operator, its id.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rl_engine.backends.shared.triton.compiler import unavailable
from rl_engine.backends.shared.triton.gemm.det_gemm import checked_gemm, det_gemm, graph_gemm
from rl_engine.backends.shared.triton.logprob.logp import checked_logp, graph_logp, logp
from rl_engine.backends.spec import implements
from rl_engine.runtime.policy import LaunchPolicy, launch_policy, pinned

if TYPE_CHECKING:
    from collections.abc import Callable


@functools.cache
def _opened(policy: LaunchPolicy, backend: str) -> LaunchPolicy:
    return replace(policy, backend=backend)


def _register(
    op: str, backend: str, default: Callable[..., Any], checked: Callable[..., Any], graph: Callable[..., Any]
) -> Callable[..., Any]:
    """Register operator ``op`` under its tuned id and return it.

    Args:
        op: the operator's name.
        backend: last part of the id.
        default: the default operator, whose signature and text it has.
        checked: the same but for ``in_graph``, what stands for it inside ``torch.compile``.
        graph: (name, backend id) -> that.
    """
    backend_id = f"rlkernel.triton.{backend}"
    in_graph = graph(backend, backend_id)

    @implements(op, backend_id=backend_id, unavailable=unavailable, explicit_only=True)
    @functools.wraps(default)
    def tuned(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a context variable cannot be read there; the graph operator names itself
            return checked(*args, **kwargs, in_graph=in_graph)
        with pinned(_opened(launch_policy(), backend_id)):
            return checked(*args, **kwargs, in_graph=in_graph)

    return tuned


tuned_gemm = _register("det_gemm", "tuned_gemm", det_gemm, checked_gemm, graph_gemm)
tuned_logp = _register("logp", "tuned_logp", logp, checked_logp, graph_logp)
