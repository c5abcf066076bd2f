"""A guard against tuning storms: how many keys of one kernel a process may measure, and which part keeps changing."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_engine.platforms.tuning.key import Part, TuningKey

MAX_SIGNATURES = 64  # static signatures of one kernel
MAX_BUCKETS = 16  # sizes of one static signature: powers of two from 1 to 32768


class KeyLimits:
    """Counts the keys of each kernel that were let through to measuring. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._signatures: dict[str, dict[str, set[str]]] = defaultdict(dict)
        self._values: dict[str, dict[str, set[tuple[type, Part]]]] = defaultdict(lambda: defaultdict(set))

    def refuse(self, key: TuningKey) -> str | None:
        """Return None and count ``key``, or the reason why it must run fixed."""
        with self._lock:
            signatures = self._signatures[key.kernel]
            buckets = signatures.get(key.static_digest)
            full = len(signatures) >= MAX_SIGNATURES if buckets is None else len(buckets) >= MAX_BUCKETS
            if full and (buckets is None or key.digest not in buckets):
                return (
                    f"{key.kernel}: more than {MAX_SIGNATURES} signatures or {MAX_BUCKETS} sizes of one; "
                    f"{self._busiest(key.kernel)} keeps changing, so new ones run the fixed launch"
                )
            signatures.setdefault(key.static_digest, set()).add(key.digest)
            for name, value in key.parts:
                self._values[key.kernel][name].add((type(value), value))
            return None

    def _busiest(self, kernel: str) -> str:
        values = self._values[kernel]
        return max(values, key=lambda name: len(values[name]))
