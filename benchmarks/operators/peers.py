"""What a user would call instead: torch eager, torch.compile of the same lines, and Liger where it is installed.

The eager lines are those of the field: Hugging Face's rotate_half, TRL's log-probabilities, GRPO loss and advantages.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  # the field's name for it

from benchmarks.operators.targets import PHASES, Phase

if TYPE_CHECKING:
    from rl_engine.backends.spec import Inputs

Prepare = Callable[["Inputs"], "Inputs"]


@dataclass(frozen=True)
class Peer:
    """A function that does an operator's work.

    Attributes:
        call: the function.
        prepare: from the operator's arguments to its own, before any timing.
        phases: what it can be timed in.
        writes: it writes into its arguments.
        forward_only: its forward does the whole work, so ``both`` times the forward.
        captured: it runs inside a CUDA graph; one that waits for the host does not.
        note: what a reader must know of its time.
    """

    call: Callable[..., Any]
    prepare: Prepare = lambda inputs: inputs
    phases: tuple[Phase, ...] = PHASES
    writes: bool = False
    forward_only: bool = False
    captured: bool = True
    note: str = ""


def eager(operator: str) -> Peer | None:
    """Return torch's own lines for an operator; None where there are none."""
    return _EAGER.get(operator)


def compiled(operator: str) -> Peer | None:
    """Return the eager lines through torch.compile: whole graphs, static shapes, default mode."""
    peer = _EAGER.get(operator)
    if peer is None:
        return None
    # a backward that gives its buffers away cannot run twice, which timing it alone needs
    importlib.import_module("torch._functorch.config").donated_buffer = False
    return replace(peer, call=torch.compile(peer.call, fullgraph=True, dynamic=False))


def liger(operator: str, phase: Phase) -> Peer | None:
    """Return Liger's function for an operator and phase; None where it has none, or is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    made = (make() for make in _LIGER.get(operator, ()))
    return next((peer for peer in made if phase in peer.phases), None)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x)


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


class _AddInto(torch.autograd.Function):
    """The identity, whose gradient is added to a tensor, as autograd adds to ``.grad``."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        ctx.into = into
        return table.view_as(table)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.into.add_(gradient)
        return None, None


def _embedding(
    token_ids: torch.Tensor, weight: torch.Tensor, *, accumulate_into: torch.Tensor | None = None
) -> torch.Tensor:
    table = weight if accumulate_into is None else _AddInto.apply(weight, accumulate_into)
    return F.embedding(token_ids, table)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _rotate_neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _rope(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, ...]:
    rotate = _rotate_neighbours if interleaved else _rotate_half
    return tuple(x * cos + rotate(x) * sin for x in (q, k) if x is not None)


def _tables(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return cos and sin [batch or 1, tokens, dim] in q's dtype, as Hugging Face's models hand them on."""
    found = {}
    for name in ("cos", "sin"):
        table = inputs.kwargs[name]
        both = table.repeat_interleave(2, -1) if inputs.kwargs.get("interleaved") else torch.cat((table, table), -1)
        found[name] = both.to(inputs.args[0].dtype).view(-1, inputs.args[0].shape[1], both.shape[-1])
    return found


def _prepare_rope(inputs: Inputs) -> Inputs:
    wide = {name: table.unsqueeze(-2) for name, table in _tables(inputs).items()}
    return replace(inputs, kwargs={**inputs.kwargs, **wide})


def _logp(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    scores = torch.log_softmax(logits, -1, dtype=torch.float32)
    return scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _ratio_kl(
    policy_logits: torch.Tensor,
    ref_logits: torch.Tensor,
    action_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    old_logps: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    logps, ref_logps = _logp(policy_logits, action_ids), _logp(ref_logits, action_ids)
    return _ratio_and_kl(logps, ref_logps, attention_mask, old_logps)


def _ratio_and_kl(
    logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor, old_logps: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    d = ref_logps - logps
    return torch.where(mask, torch.exp(logps - old_logps), 1.0), torch.where(mask, torch.exp(d) - d - 1, 0.0)


def _policy_and_kl(
    logps: torch.Tensor, old_logps: torch.Tensor, advantages: torch.Tensor, ref_logps: torch.Tensor, beta: float
) -> torch.Tensor:
    ratio = torch.exp(logps - old_logps)
    advantage = advantages.unsqueeze(1)
    policy = -torch.min(ratio * advantage, torch.clamp(ratio, 0.8, 1.2) * advantage)
    d = ref_logps - logps
    return policy + beta * (torch.exp(d) - d - 1)


def _grpo_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    ref_logps: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    tokens = _policy_and_kl(logps, old_logps, advantages, ref_logps, beta)
    return (tokens * mask).sum() / mask.sum().clamp(min=1.0)


def _grpo_loss_from_logits(
    policy_logits: torch.Tensor,
    ref_logits: torch.Tensor | None,
    action_ids: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    beta: float,
    ref_logps: torch.Tensor | None = None,
    overwrite_logits: bool = False,  # noqa: ARG001  # a permission that torch has no use for
) -> torch.Tensor:
    if ref_logits is not None:
        with torch.no_grad():
            ref_logps = _logp(ref_logits, action_ids)
    return _grpo_loss(_logp(policy_logits, action_ids), old_logps, advantages, mask, ref_logps=ref_logps, beta=beta)


def _group_advantages(
    rewards: torch.Tensor, *, samples_per_prompt: int | None = None, group_boundaries: torch.Tensor | None = None
) -> torch.Tensor:
    if group_boundaries is None:
        groups = rewards.view(-1, samples_per_prompt)
        std, mean = torch.std_mean(groups, 1, correction=0, keepdim=True)
        return ((groups - mean) / (std + 1e-6)).view(-1)
    sizes = group_boundaries.diff()
    index = torch.arange(rewards.numel(), device=rewards.device)
    group = torch.bucketize(index, group_boundaries[1:], right=True)
    zeros = rewards.new_zeros(sizes.numel())
    centred = rewards - (zeros.index_add(0, group, rewards) / sizes)[group]
    std = (zeros.index_add(0, group, centred.square()) / sizes).sqrt()
    return centred / (std + 1e-6)[group]


_EAGER = {
    "det_gemm": Peer(torch.matmul),
    "silu": Peer(_silu),
    "swiglu": Peer(_swiglu),
    "rms_norm": Peer(_rms_norm),
    "embedding": Peer(_embedding),
    "rope": Peer(_rope, _prepare_rope),
    "logp": Peer(_logp),
    "ratio_kl": Peer(_ratio_kl),
    "grpo_loss": Peer(_grpo_loss),
    "grpo_loss_from_logits": Peer(_grpo_loss_from_logits),
    "group_advantages": Peer(_group_advantages),
}


def _liger(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)


def _liger_swiglu() -> Peer:
    note = "its backward writes over gate and up"
    return Peer(_liger("swiglu", "LigerSiLUMulFunction").apply, writes=True, note=note)


def _liger_rms_norm() -> Peer:
    apply = _liger("rms_norm", "LigerRMSNormFunction").apply

    def call(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Any:
        # in place would overwrite the incoming gradient, which is used again
        return apply(x, weight, eps, 0.0, "llama", False)  # noqa: FBT003  # positional in Liger

    return Peer(call)


def _liger_embedding() -> Peer:
    apply = _liger("experimental.embedding", "LigerEmbeddingFunction").apply

    def call(token_ids: torch.Tensor, weight: torch.Tensor, *, accumulate_into: torch.Tensor | None = None) -> Any:
        return apply(weight if accumulate_into is None else _AddInto.apply(weight, accumulate_into), token_ids)

    return Peer(call, note="its backward adds with atomics, in bf16")


def _liger_rope() -> Peer:
    apply = _liger("rope", "LigerRopeFunction").apply

    def prepare(inputs: Inputs) -> Inputs:
        if inputs.kwargs.get("interleaved"):
            raise ValueError("it turns halves, not neighbours")
        return replace(inputs, args=inputs.args[:2], kwargs=_tables(inputs))

    def call(q: torch.Tensor, k: torch.Tensor, *, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.transpose(1, 2) for x in apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin))

    return Peer(call, prepare, writes=True, note="in place")


def _with_one_more_token(logits: torch.Tensor) -> torch.Tensor:
    """Return [batch, N + 1, vocab], a batch of 1 for [N, vocab]: Liger reads the first N rows of a sequence's N + 1."""
    sequences = logits.detach().unsqueeze(0) if logits.dim() == 2 else logits.detach()
    batch, tokens, vocab = sequences.shape
    room = torch.empty(batch, tokens + 1, vocab, dtype=logits.dtype, device=logits.device)
    room[:, :-1] = sequences
    return room


def _liger_logp_forward() -> Peer:
    select = _liger("grpo_loss", "fused_selective_log_softmax")

    def prepare(inputs: Inputs) -> Inputs:
        logits, targets = inputs.args
        return replace(inputs, args=(_with_one_more_token(logits), targets.unsqueeze(0)), differentiable=())

    def call(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = select(logits, targets, temperature=1.0).squeeze(0)
        return scores

    return Peer(call, prepare, phases=("fwd",))


def _liger_ratio_kl_forward() -> Peer:
    select = _liger("grpo_loss", "fused_selective_log_softmax")

    def prepare(inputs: Inputs) -> Inputs:
        policy, ref, ids, mask, old = inputs.args
        logits = (_with_one_more_token(policy), _with_one_more_token(ref))
        return replace(inputs, args=(*logits, ids.unsqueeze(0), mask, old), differentiable=())

    def call(policy: torch.Tensor, ref: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, old: torch.Tensor) -> Any:
        logps, ref_logps = (select(logits, ids, temperature=1.0).squeeze(0) for logits in (policy, ref))
        return _ratio_and_kl(logps, ref_logps, mask, old)

    return Peer(call, prepare, phases=("fwd",), note="its log-probabilities, then torch's ratio and KL")


def _liger_grpo_loss_from_logits() -> Peer:
    apply = _liger("grpo_loss", "GrpoLossFunction").apply
    select = _liger("grpo_loss", "fused_selective_log_softmax")

    def prepare(inputs: Inputs) -> Inputs:
        policy, ref, *others = inputs.args
        longer = (None if one is None else _with_one_more_token(one) for one in (policy, ref))
        return replace(inputs, args=(*longer, *others))

    def call(
        policy: torch.Tensor,
        ref: torch.Tensor | None,
        ids: torch.Tensor,
        old: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        *,
        beta: float,
        ref_logps: torch.Tensor | None = None,
        overwrite_logits: bool = False,  # noqa: ARG001  # see below
    ) -> Any:
        ref_logps = ref_logps if ref is None else select(ref, ids, temperature=1.0)
        # bnpo: the mean over this batch's unmasked tokens; not in place, since the logits are used again
        options = (1.0, beta, 0.2, 0.2, False, "bnpo", None, True)
        return apply(policy, old, ref_logps, ids, advantages, mask, *options)[0]

    return Peer(call, prepare, note="its reference log-probabilities, then its loss; not in place")


def _liger_logp_both() -> Peer:
    apply = _liger("cross_entropy", "LigerCrossEntropyFunction").apply

    def call(logits: torch.Tensor, targets: torch.Tensor) -> Any:
        return -apply(logits, targets, None, -100, 0.0, 0.0, "none")[0]

    note = "cross entropy's forward, which writes the gradient of the sum over the logits; timed without a graph"
    return Peer(call, phases=("both",), writes=True, forward_only=True, captured=False, note=note)


_LIGER: Mapping[str, tuple[Callable[[], Peer], ...]] = {
    "swiglu": (_liger_swiglu,),
    "rms_norm": (_liger_rms_norm,),
    "embedding": (_liger_embedding,),
    "rope": (_liger_rope,),
    "logp": (_liger_logp_forward, _liger_logp_both),
    "ratio_kl": (_liger_ratio_kl_forward,),
    "grpo_loss_from_logits": (_liger_grpo_loss_from_logits,),
}
