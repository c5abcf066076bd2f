"""Log-probability of selected tokens: the declaration and the PyTorch operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_engine.backends.reference.dtypes import require_float
from rl_engine.backends.reference.selected_logps import require_temperature, selected_logps
from rl_engine.backends.reference.token_ids import require_ids, validate_ids
from rl_engine.backends.spec import Case, InputMaker, Inputs, Tolerance, Traffic, operator

if TYPE_CHECKING:
    import torch


def _inputs(make: InputMaker, rows: int, vocab: int) -> Inputs:
    return Inputs((make.normal(rows, vocab, scale=2.0), make.integers(0, vocab, rows)))


def _traffic(itemsize: int, rows: int, vocab: int) -> Traffic:
    return Traffic(forward=itemsize * rows * vocab, backward=2 * itemsize * rows * vocab)


def check_logp(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> None:
    """Raise unless ``targets`` are int32 or int64 ids of shape ``logits.shape[:-1]`` and temperature is positive."""
    require_ids("logp", targets=targets)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logp: logits are {list(logits.shape)}; pass [..., vocab] with vocab of at least 1")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"logp: targets are {list(targets.shape)}, logits are {list(logits.shape)}; "
            f"pass targets of shape {list(logits.shape[:-1])}"
        )
    require_temperature("logp", temperature)


@operator(
    "logp",
    family="logprob",
    contract=(
        "logp.v1: chunks of 4096 columns from column 0, each with its exact maximum and its sum of"
        " exp2((z - m) * log2(e)) folded neighbours first, padded with zeros; chunks merged ascending; z is multiplied"
        " by fp32(1 / temperature) first, and not at all at 1; logp = (z - m) - ln(sum)"
    ),
    inputs=_inputs,
    cases=(
        Case("tiny", {"rows": 3, "vocab": 7}),
        Case("odd", {"rows": 5, "vocab": 4099}),
        Case("one", {"rows": 2, "vocab": 1}),
        Case("warm", {"rows": 4, "vocab": 33}, {"temperature": 0.7}),
        Case("empty", {"rows": 0, "vocab": 8}),
        Case("small", {"rows": 64, "vocab": 151936}, tags=frozenset({"speed"})),
        Case("thr", {"rows": 8192, "vocab": 151936}, tags=frozenset({"speed"})),
        Case("thr-ll", {"rows": 8192, "vocab": 128256}, tags=frozenset({"speed"})),
    ),
    tolerance=Tolerance({"float32": 8, "float16": 4, "bfloat16": 4}, "a balanced sum of vocab exponentials, a log"),
    traffic=_traffic,
)
def logp(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    validate: bool = False,
) -> torch.Tensor:
    """Return ``log_softmax(logits / temperature)`` at ``targets``, in fp32 (fp64 for fp64).

    Args:
        logits: [..., vocab], bf16, fp16, fp32 or fp64, any strides.
        targets: [...], int32 or int64. ``ignore_index`` gives 0 and a zero gradient row. Another id outside
            [0, vocab) gives NaN and a zero gradient row; nothing is read out of bounds.
        ignore_index: the id that marks padding.
        temperature: positive; 1.0 leaves the logits as they are, bit for bit.
        validate: raise for ids out of range, at the price of waiting for the device.

    Returns:
        [...], fp32 (fp64 for fp64).

    Raises:
        ValueError: shapes disagree, temperature is not positive, or ``validate`` found an id out of range.
        TypeError: logits are not floating point, or targets are not int32 or int64.
    """
    require_float("logp", logits=logits)
    check_logp(logits, targets, temperature)
    use = targets != ignore_index
    if validate:
        validate_ids("logp", targets, logits.shape[-1], use)
    return selected_logps(logits, targets, use, temperature)
