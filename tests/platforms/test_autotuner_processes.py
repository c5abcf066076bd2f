"""What only processes show: a core without torch or Triton, imports that touch nothing, one winner a key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_engine.platforms.tuning.record import TuningRecord
from rl_engine.platforms.tuning.store import FileStore
from tests.support.processes import ROOT, run, start
from tests.support.tuning import CANDIDATES, make_key

CORE = ["rl_engine.settings", "rl_engine.platforms.autotuner"]
CORE += [f"rl_engine.platforms.tuning.{name}" for name in ("key", "record", "store", "trial", "decision", "events")]
CORE += ["rl_engine.platforms.tuning.limits"]
PROCESSES, KEYS = 8, 5

TUNE_AND_LOOK = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from tests.support.tuning import FakeTrial, Lab
from rl_engine.platforms.tuning.store import MemoryStore
assert Lab(MemoryStore()).select(FakeTrial()).source == "tuned"
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "triton", "numpy"}))
"""

IMPORT_UNDER_WATCH = """
import os, sys
class Refusing:
    def __getattr__(self, name):
        raise AssertionError(f"the environment was asked for {name}")
    __getitem__ = __contains__ = __iter__ = __len__ = __getattr__
def watch(event, arguments):
    if event == "open":
        mode, flags = arguments[1], arguments[2]
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT), f"opened for writing: {arguments}"
    assert event not in ("os.mkdir", "os.rename", "os.remove", "socket.connect", "subprocess.Popen"), event
import contextlib, contextvars, dataclasses, enum, functools, pathlib, typing  # these may read what they like
os.environ = os.environb = Refusing()
os.getenv = Refusing().__getitem__
sys.addaudithook(watch)
sys.dont_write_bytecode = True
import rl_engine
import rl_engine.runtime.policy
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "triton", "numpy", "filelock"}))
"""


def test_the_core_tunes_without_torch_or_triton_in_the_process() -> None:
    assert run(TUNE_AND_LOOK, *CORE) == "[]\n"


def test_importing_the_package_and_the_policy_touches_nothing() -> None:
    assert run(IMPORT_UNDER_WATCH) == "[]\n"


def test_packages_are_empty() -> None:
    packages = sorted((ROOT / "rl_engine").rglob("__init__.py"))
    assert len(packages) > 10
    filled = [path for path in packages if path.read_text().strip()]
    assert filled == [ROOT / "rl_engine" / "__init__.py"]
    assert "import " not in filled[0].read_text().replace("import from its submodules", "")


ONE_OF_MANY = """
import json, random, sys, time
from pathlib import Path
from rl_engine.platforms.autotuner import PersistentAutotuner
from rl_engine.platforms.tuning.store import FileStore
from tests.support.tuning import CANDIDATES, FakeTrial, make_key
rank, folder, n_keys = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
chance = random.Random(rank)
favourite = CANDIDATES[rank % len(CANDIDATES)]
slow_start = lambda: time.sleep(chance.uniform(0, 0.2))
trial = FakeTrial(costs_us={one: 5.0 if one == favourite else 10.0 for one in CANDIDATES}, before_qualify=slow_start)
tuner = PersistentAutotuner(FileStore(folder), budget_s=120)
keys = [make_key(n=n) for n in range(n_keys)]
chance.shuffle(keys)
print("ready", flush=True)
sys.stdin.readline()  # the barrier
answers = {}
for key in keys:
    qualified = trial.count("qualify")
    chosen = tuner.select(key, CANDIDATES, trial)
    answers[key.digest] = [str(chosen.winner), chosen.source, chosen.settled, trial.count("qualify") > qualified]
print(json.dumps(answers))
"""


def together(folder: Path) -> list[dict[str, list[object]]]:
    """Start eight processes, let them go at once, and return what each was answered by key."""
    processes = [start(ONE_OF_MANY, str(rank), str(folder), str(KEYS)) for rank in range(PROCESSES)]
    for one in processes:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    for one in processes:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    outputs = [one.communicate(timeout=60) for one in processes]
    assert [one.returncode for one in processes] == [0] * PROCESSES, [error for _out, error in outputs]
    return [json.loads(out) for out, _error in outputs]


@pytest.mark.timeout(60)
def test_eight_processes_that_start_together_leave_one_winner_a_key(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    ranks = together(folder)
    keys = [make_key(n=n) for n in range(KEYS)]
    store = FileStore(folder)
    assert store.digests() == tuple(sorted(key.digest for key in keys))
    left = sorted(path.name for path in folder.iterdir())
    assert left == sorted(f"{key.digest}.{end}" for key in keys for end in ("json", "lock")), "no temporary file"
    recorded = {}
    for key in keys:
        record = TuningRecord.from_json(store.load(key.digest) or "")
        record.check(key, CANDIDATES)
        recorded[key.digest] = str(record.winner)
        measured = [rank[key.digest] for rank in ranks if rank[key.digest][3]]
        assert [one[:2] for one in measured] == [[recorded[key.digest], "tuned"]], "measured once, by one process"
        for winner, source, settled, _measured in (rank[key.digest] for rank in ranks):
            if source == "fixed":  # another process was measuring
                assert (winner, settled) == (str(CANDIDATES[0]), False)
            else:
                assert (winner, settled) == (recorded[key.digest], True)
    for rank in together(folder):
        assert {digest: answer[0] for digest, answer in rank.items()} == recorded
        assert {(answer[1], answer[3]) for answer in rank.values()} == {("disk", False)}
