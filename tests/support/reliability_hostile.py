"""Records as an enemy, a broken disk or another version might leave them; all drawn from a seed."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import random
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rl_engine.platforms.tuning.key import TuningKey
from tests.support.tuning import CANDIDATES, FAST, make_key, make_record

KEY = make_key()
GOOD = make_record(KEY).to_json()
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, -1, 3, 10**30, 10**4000, 0.0, -0.5, 1e308, math.nan, math.inf, -math.inf, "", "0", "3",
    "x" * 5_000, "\ud800", "\x00\n\r\x1b[31m", "__class__", [], {}, [[]], {"": None}, [0],
    {"0": [1.0]}, {"0": [math.nan]},
)  # fmt: skip


def _paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    for step in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from _paths(value[step], (*at, step))


def _holder(data: Any, path: tuple[Any, ...]) -> Any:
    for step in path[:-1]:
        data = data[step]
    return data


def _text(data: Any) -> bytes:
    return json.dumps(data).encode()


def _truncated(chance: random.Random) -> bytes:
    return GOOD.encode()[: chance.randrange(len(GOOD))]


def _flipped(chance: random.Random) -> bytes:
    text = bytearray(GOOD.encode())
    for _ in range(chance.randint(1, 4)):
        text[chance.randrange(len(text))] ^= 1 << chance.randrange(8)
    return bytes(text)


def _noise(chance: random.Random) -> bytes:
    return chance.choice((
        b"", b"{", b"null", b"[]", b'"text"', b"3", b"\xff\xfe\x00", bytes(4096), GOOD.encode() + b"}", b"\xef\xbb\xbf",
        chance.randbytes(chance.randrange(2_000)),
    ))  # fmt: skip


def _deep(chance: random.Random) -> bytes:
    depth = chance.choice((500, 5_000, 100_000))
    opening, closing = chance.choice(((b"[", b"]"), (b'{"a":', b"}")))
    nested = opening * depth + b"1" + (closing * depth if chance.random() < 0.5 else b"")
    return nested if chance.random() < 0.5 else GOOD.encode().replace(b'"card"', nested, 1)


def _huge(chance: random.Random) -> bytes:
    value = chance.choice(("9" * 4_000, "9" * 6_000, '"' + "x" * 500_000 + '"', "[" + "1," * 100_000 + "1]", "1e999"))
    data = json.loads(GOOD)
    path = chance.choice(list(_paths(data)))
    _holder(data, path)[path[-1]] = "HERE"
    return json.dumps(data).replace('"HERE"', value, 1).encode()


def _replaced(chance: random.Random) -> bytes:
    data = json.loads(GOOD)
    for _ in range(chance.randint(1, 2)):
        path = chance.choice(list(_paths(data)))
        _holder(data, path)[path[-1]] = copy.deepcopy(chance.choice(VALUES))
    return _redigested(data, chance)


def _dropped_or_added(chance: random.Random) -> bytes:
    data = json.loads(GOOD)
    path = chance.choice(list(_paths(data)))
    holder = _holder(data, path)
    if chance.random() < 0.5:
        del holder[path[-1]]
    elif isinstance(holder, dict):
        holder[chance.choice(("extra", "num_ctas", "schema2", ""))] = copy.deepcopy(chance.choice(VALUES))
    else:
        holder.append(copy.deepcopy(chance.choice(VALUES)))
    return _redigested(data, chance)


def _other_schema(chance: random.Random) -> bytes:
    data = json.loads(GOOD)
    if chance.random() < 0.5:
        data["schema"] = chance.choice((0, 1, -1, "2", 2.0, True, None, 10**30))
    else:
        data["evidence"]["protocol"] = chance.choice((0, 1, 99, "2", 2.0, True))
    return _text(data)


def _foreign_key(chance: random.Random) -> bytes:
    parts: dict[str, Any] = dict(KEY.parts)
    name = chance.choice((*parts, "launch.extra"))
    parts[name] = chance.choice((True, 1, 0, 2048, "other", None, "1024"))
    return make_record(TuningKey.of(chance.choice((KEY.kernel, "_other")), parts)).to_json().encode()


def _not_among_todays(chance: random.Random) -> bytes:
    data = json.loads(GOOD)
    option = chance.choice((
        {"num_warps": 3}, {"num_stages": 3}, {"BLOCK": 1 << 40}, {"num_warps": -8}, {"cls": 1}, {"BLOCK": 10**200},
        {"x" * 200: 1}, {"new\nline": 1},
    ))  # fmt: skip
    data["candidates"][data["winner"]] = {**data["candidates"][data["winner"]], **option}
    return _text(data)


def _without_times(chance: random.Random) -> bytes:
    data = json.loads(GOOD)
    times = data[chance.choice(("screening_us", "final_us"))][chance.choice(("0", "1"))]
    times[chance.randrange(len(times))] = chance.choice((math.nan, math.inf, -math.inf, -1.0, 0, "8.0", None, True))
    if chance.random() < 0.3:
        data[chance.choice(("ratio", "noise"))] = chance.choice((math.nan, math.inf, -1.0))
    return _text(data)


def _duplicate_names(chance: random.Random) -> bytes:
    name = chance.choice(("winner", "schema", "digest", "kernel", "ratio", "candidates"))
    value = json.dumps(chance.choice((0, 1, 2, 7, "x", None, [{"num_warps": 3}])))
    first = chance.random() < 0.5
    return (f'{{"{name}": {value},' + GOOD[1:] if first else GOOD.rstrip()[:-1] + f', "{name}": {value}}}').encode()


def _redigested(data: Any, chance: random.Random) -> bytes:
    """Return the record, usually with the digest that an enemy would compute for its key."""
    if chance.random() < 0.8 and isinstance(data.get("key"), dict):
        with contextlib.suppress(TypeError, ValueError):
            data["digest"] = TuningKey.of(data.get("kernel"), data["key"]).digest  # type: ignore[arg-type]  # anything
    return _text(data)


TEXTS: dict[str, Callable[[random.Random], bytes]] = {
    "truncated": _truncated, "bits flipped": _flipped, "not a record": _noise, "deeply nested": _deep,
    "huge numbers, texts, lists": _huge, "another type somewhere": _replaced,
    "a field more or less": _dropped_or_added, "another schema or protocol": _other_schema,
    "a foreign key": _foreign_key, "an option not among today's": _not_among_todays,
    "times that are none": _without_times, "names twice": _duplicate_names,
}  # fmt: skip


def _elsewhere(path: Path, text: str = GOOD) -> Path:
    other = path.with_name("elsewhere")
    other.unlink(missing_ok=True)
    other.write_text(text)
    other.chmod(0o600)
    return other


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))  # the whole path may be too long for a socket's name


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero: endless
    except PermissionError:  # root's privilege
        os.mkfifo(path, 0o600)


PLACES: dict[str, Callable[[Path], object]] = {
    "FIFO": lambda path: os.mkfifo(path, 0o600),
    "folder": lambda path: path.mkdir(mode=0o700),
    "symbolic link to a good record": lambda path: path.symlink_to(_elsewhere(path)),
    "hard link to a good record": lambda path: path.hardlink_to(_elsewhere(path)),
    "symbolic link to itself": lambda path: path.symlink_to(path.name),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "device": _device,
    "socket": _socket,
    "2 MiB": lambda path: _elsewhere(path, GOOD + " " * (2 << 20)).replace(path),
    "writable by all": lambda path: _elsewhere(path).replace(path).chmod(0o666),
}


def may_be_launched(text: bytes) -> bool:
    """Say whether a record is one that a tuner of today may follow; written apart from the code it judges."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    winner = data["candidates"][data["winner"]]
    times = [one for table in (data["screening_us"], data["final_us"]) for row in table.values() for one in row]
    return (
        (type(data["schema"]), data["schema"]) == (int, 2)
        and (type(data["evidence"]["protocol"]), data["evidence"]["protocol"]) == (int, 2)
        and data["kernel"] == KEY.kernel
        and data["digest"] == KEY.digest
        and sorted(map(repr, data["key"].items())) == sorted(map(repr, KEY.parts))
        and sorted(map(repr, winner.items())) in [sorted(map(repr, one.options)) for one in CANDIDATES]
        and all(type(one) in (int, float) and 0 < one < math.inf for one in (*times, data["ratio"]))
    )


assert may_be_launched(GOOD.encode()), "the record that all others are made from is good"
assert json.loads(GOOD)["candidates"][json.loads(GOOD)["winner"]] == dict(FAST.options), "and is not the fixed launch"
