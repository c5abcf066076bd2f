"""Many processes that tune the same keys at once, by fork or spawn; each says what it was answered and how fast."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_engine.platforms.autotuner import PersistentAutotuner
from rl_engine.platforms.tuning.events import EventLog
from rl_engine.platforms.tuning.key import TuningKey
from rl_engine.platforms.tuning.store import FileStore
from tests.support.tuning import CANDIDATES, FakeTrial, make_key

HASTE = 20  # the tuner's clock runs so much faster: a key found busy is looked at again after 50 ms
PATIENCE_S = 60.0  # for keys that others measure


def keys(n_keys: int) -> list[TuningKey]:
    """Return the keys that all ranks tune."""
    return [make_key(n=n) for n in range(n_keys)]


def one_rank(rank: int, folder: str, n_keys: int, exclusive: bool, start: Any, out: str) -> None:
    """Tune every key, then look at the unsettled ones again until all are settled; writes JSON to ``out``."""
    if not exclusive:
        fcntl.flock = lambda _handle, _operation: None  # type: ignore[assignment]  # a mount on which locks do nothing
    favourite = CANDIDATES[rank % len(CANDIDATES)]
    trial = FakeTrial(costs_us={one: 5.0 if one == favourite else 10.0 for one in CANDIDATES})
    log = EventLog()
    tuner = PersistentAutotuner(FileStore(Path(folder)), budget_s=1e9, clock=lambda: HASTE * time.monotonic(), log=log)
    open_keys = keys(n_keys)
    random.Random(rank).shuffle(open_keys)
    answers: dict[str, Any] = {}
    slowest_s, asked, pending = 0.0, 0, set()
    start.wait(PATIENCE_S)
    ends_s = time.monotonic() + PATIENCE_S
    while open_keys and time.monotonic() < ends_s:
        for key in tuple(open_keys):
            began_s = time.monotonic()
            chosen = tuner.select(key, CANDIDATES, trial)
            slowest_s, asked = max(slowest_s, time.monotonic() - began_s), asked + 1
            if chosen.settled:
                answers[key.digest] = [str(chosen.winner), chosen.source]
                open_keys.remove(key)
            else:
                assert chosen.winner == CANDIDATES[0], "the fixed launch meanwhile"
                pending.add(key.digest)
        time.sleep(0.005 if open_keys else 0)
    result = {
        "answers": answers, "slowest_s": slowest_s, "asked": asked, "pending": len(pending),
        "measured": trial.count("qualify"), "warnings": [one.reason for one in log.events("warning")],
    }  # fmt: skip
    Path(out).write_text(json.dumps(result))


def together(method: str, folder: str, n_ranks: int, n_keys: int, exclusive: bool) -> None:
    """Start the ranks by ``method``, let them go at once, and print what each said as JSON."""
    context = multiprocessing.get_context(method)
    start = context.Barrier(n_ranks)
    outs = [Path(f"{folder}.rank{rank}") for rank in range(n_ranks)]
    target: Callable[..., None] = one_rank
    ranks = [
        context.Process(target=target, args=(rank, folder, n_keys, exclusive, start, str(out)))
        for rank, out in enumerate(outs)
    ]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(2 * PATIENCE_S)
    codes = [one.exitcode for one in ranks]
    assert codes == [0] * n_ranks, codes
    json.dump([json.loads(out.read_text()) for out in outs], sys.stdout)
