"""The command rl-kernel, as a user runs it: what it prints, and one plain line where it cannot."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rl_engine import cli, settings
from rl_engine.cli import main
from rl_engine.platforms.tuning.key import Candidate, TuningKey
from rl_engine.platforms.tuning.store import FileStore
from rl_engine.platforms.tuning.trial import Rejection
from tests.support.processes import ROOT, environment, run
from tests.support.tuning import CANDIDATES, FAST, FIXED, SLOW, make_key, make_record

Run = Callable[..., tuple[int, str, str]]
KEY, FIXED_KEY = make_key(), make_key("_swiglu_fwd_kernel", n=2)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """A folder with one record whose winner is a challenger and one where the fixed launch stays."""
    store = FileStore(tmp_path / "cache")
    store.publish(KEY.digest, make_record().to_json())
    stays = make_record(FIXED_KEY, winner=FIXED, ratio=1.0, noise=0.0, reason="no other candidate qualified")
    store.publish(FIXED_KEY.digest, stays.to_json())
    return store


@pytest.fixture
def rl_kernel(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*argv: str | Path) -> tuple[int, str, str]:
        code = main([str(argument) for argument in argv])
        out, error = capsys.readouterr()
        assert error.count("\n") == (code == 1), "one line on stderr where it fails, none otherwise"
        assert "Traceback" not in error
        return code, out, error

    return call


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Let a test set the variables that the next command reads; the library's others are unset."""

    def choose(**variables: str) -> None:
        for name in [name for name in os.environ if name.startswith("RL_KERNEL_")]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        settings.current.cache_clear()

    yield choose
    settings.current.cache_clear()


def test_list_prints_a_table(rl_kernel: Run, store: FileStore) -> None:
    code, out, _error = rl_kernel("list", "--cache-dir", store.folder)
    end = f"2023-11-14T22:13:20Z  {store.folder}"
    rows = {
        KEY.digest: f"  _silu_fwd_kernel    BLOCK=1024 num_warps=8          20.0    0.1      {end}",
        FIXED_KEY.digest: f"  _swiglu_fwd_kernel  BLOCK=1024 num_warps=4 (fixed)  0.0     0.0      {end}",
    }
    assert out.splitlines() == [
        f"key           kernel              winner{' ' * 26}gain %  noise %  when                  folder",
        *(digest[:12] + rows[digest] for digest in sorted(rows)),
    ]
    assert code == 0


def test_list_prints_json(rl_kernel: Run, store: FileStore) -> None:
    code, out, _error = rl_kernel("list", "--json", "--cache-dir", store.folder)
    assert code == 0
    assert {one["key"]: one for one in json.loads(out)}[KEY.digest] == {
        "key": KEY.digest,
        "kernel": "_silu_fwd_kernel",
        "winner": {"BLOCK": 1024, "num_warps": 8},
        "gain_percent": pytest.approx(20.0),
        "noise_percent": pytest.approx(0.1),
        "created": "2023-11-14T22:13:20Z",
        "folder": str(store.folder),
    }
    assert len(json.loads(out)) == 2


def test_show_prints_what_the_record_was_judged_by(rl_kernel: Run, store: FileStore) -> None:
    first, last, gone, same = (Candidate.of(BLOCK=1 << n, num_warps=1) for n in range(4))
    samples = {FIXED: (12.0, 10.0, 11.0), FAST: (8.0, 8.25, 8.5), first: (10.0,)}
    record = make_record(
        make_key(plain=True),
        candidates=(*CANDIDATES, first, last, gone, same),
        screening={**samples, last: (99.0,)},
        final=samples,
        rejections=(Rejection(SLOW, "other bytes in y"), Rejection(gone, "compile error")),
    )
    store.publish(record.key.digest, record.to_json())
    code, out, _error = rl_kernel("show", record.key.digest[:20].upper(), "--cache-dir", store.folder)
    assert code == 0
    assert (
        out
        == f"""\
_silu_fwd_kernel  {record.key.digest}
from    {store.folder}, 2023-11-14T22:13:20Z
winner  BLOCK=1024 num_warps=8: 8.25 µs
fixed   BLOCK=1024 num_warps=4: 11.00 µs
gain    20.0% (noise 0.1%): 20.0% faster than the fixed launch

candidates
  BLOCK=1024 num_warps=4      11.00 µs  the fixed launch
  BLOCK=1024 num_warps=8       8.25 µs  won
  BLOCK=2048 num_warps=4     not timed  rejected: other bytes in y
  BLOCK=1 num_warps=1         10.00 µs  not the fastest beyond the noise
  BLOCK=2 num_warps=1         99.00 µs  not among the fastest in the first rounds
  BLOCK=4 num_warps=1        not timed  rejected: compile error
  BLOCK=8 num_warps=1        not timed  gave no time, or was the same launch as another

evidence
  12 byte comparisons, 2 launches an input set each
  inputs: live, perturbed
  bit class: 5eed-c0de
  timer: fake, cold cache, 3 rounds in the final

key: bucket
  n  1024

key: device
  name  "card"

key: launch
  x_ptr.dtype  "fp32"

key: plain
  plain  true

provenance (not part of the key)
  device.uuid  "GPU-1"
  ranks        8
"""
    )


def test_show_prints_the_record_as_json(rl_kernel: Run, store: FileStore) -> None:
    code, out, _error = rl_kernel("show", KEY.digest, "--json", "--cache-dir", store.folder)
    assert (code, out) == (0, make_record().to_json())


def test_show_of_a_record_without_times_and_provenance(rl_kernel: Run, store: FileStore) -> None:
    record = make_record(make_key(n=9), winner=FIXED, screening={}, final={}, provenance=())
    store.publish(record.key.digest, record.to_json())
    code, out, _error = rl_kernel("show", record.key.digest, "--cache-dir", store.folder)
    assert code == 0
    assert "winner  BLOCK=1024 num_warps=4 (fixed): not timed\n" in out
    assert "0 rounds in the final" in out
    assert "provenance" not in out


def test_without_a_folder_the_settings_say_where_to_look_packs_included(
    rl_kernel: Run, environ: Callable[..., None], tmp_path: Path, store: FileStore
) -> None:
    pack = FileStore(tmp_path / "pack")
    pack.publish(KEY.digest, make_record(reason="from the pack").to_json())
    shared = make_key("_rms_norm_fwd_kernel")
    pack.publish(shared.digest, make_record(shared).to_json())
    environ(
        RL_KERNEL_AUTOTUNE_CACHE_DIR=str(store.folder), RL_KERNEL_AUTOTUNE_SHARED=f"{tmp_path / 'absent'}:{pack.folder}"
    )
    listed = json.loads(rl_kernel("list", "--json")[1])
    assert [(one["key"], one["folder"]) for one in listed] == [
        *((digest, str(store.folder)) for digest in store.digests()),
        *((digest, str(pack.folder)) for digest in pack.digests()),
    ]
    assert "from the pack" not in rl_kernel("show", KEY.digest)[1], "the own record comes first, as for a launch"
    assert f"from    {pack.folder}, " in rl_kernel("show", shared.digest)[1]
    environ(HOME="", XDG_CACHE_HOME="", RL_KERNEL_AUTOTUNE_SHARED=str(pack.folder))
    assert {one["folder"] for one in json.loads(rl_kernel("list", "--json")[1])} == {str(pack.folder)}


def test_a_folder_of_broken_records_only_is_a_failure(rl_kernel: Run, tmp_path: Path) -> None:
    store = FileStore(tmp_path / "cache")
    store.publish("ab" * 32, "{")
    code, printed, complaint = rl_kernel("list", "--cache-dir", store.folder)
    assert (code, printed) == (1, "")
    assert complaint.startswith(f"rl-kernel: {store.folder}/{'ab' * 32}.json: not JSON")


def test_a_reader_that_has_seen_enough_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def cut_off(_arguments: object) -> int:
        raise BrokenPipeError

    monkeypatch.setitem(cli._COMMANDS, "list", replace(cli._COMMANDS["list"], run=cut_off))
    assert cli.main(["list"]) == 0
    assert capfd.readouterr() == ("", "")


def test_an_empty_folder_has_no_records_and_is_not_made(rl_kernel: Run, tmp_path: Path) -> None:
    assert rl_kernel("list", "--cache-dir", tmp_path / "none") == (0, f"no records in {tmp_path / 'none'}\n", "")
    assert rl_kernel("list", "--json", "--cache-dir", tmp_path / "none") == (0, "[]\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("list",), ("show", "ab")])
def test_an_unusable_folder_is_one_line(rl_kernel: Run, store: FileStore, command: tuple[str, ...]) -> None:
    store.folder.chmod(0o755)
    code, out, error = rl_kernel(*command, "--cache-dir", store.folder)
    assert (code, out) == (1, "")
    assert error.startswith(f"rl-kernel: {store.folder}: not ours alone; chmod 700 it, or set RL_KERNEL_AUTOTUNE")


def test_a_key_without_a_record_is_one_line(rl_kernel: Run, store: FileStore) -> None:
    assert rl_kernel("show", "zz", "--cache-dir", store.folder) == (
        1,
        "",
        f"rl-kernel: no record whose key begins with 'zz' in {store.folder}; rl-kernel list shows them\n",
    )


def test_an_ambiguous_prefix_is_one_line_that_lists_the_keys(rl_kernel: Run, store: FileStore) -> None:
    keys = ", ".join(digest[:12] for digest in store.digests())
    assert rl_kernel("show", "", "--cache-dir", store.folder) == (
        1,
        "",
        f"rl-kernel: '' is ambiguous: {keys}; give more digits\n",
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", "schema: missing"),
        (make_record(ratio=0.5).to_json()[:-5], "not JSON: JSONDecodeError"),
        (make_record(make_key(n=5)).to_json(), f"holds the record of another key, {make_key(n=5).digest}"),
    ],
)
def test_a_broken_record_is_one_line_and_the_others_are_listed(
    rl_kernel: Run, store: FileStore, text: str, complaint: str
) -> None:
    (store.folder / f"{KEY.digest}.json").write_text(text)
    line = f"rl-kernel: {store.folder}/{KEY.digest}.json: {complaint}\n"
    assert rl_kernel("show", KEY.digest, "--cache-dir", store.folder) == (1, "", line)
    code, out, error = rl_kernel("list", "--cache-dir", store.folder)
    assert (code, error) == (1, line)
    assert [row.split()[1] for row in out.splitlines()] == ["kernel", "_swiglu_fwd_kernel"]


def test_a_record_that_others_may_write_to_is_one_line(rl_kernel: Run, store: FileStore) -> None:
    (store.folder / f"{KEY.digest}.json").chmod(0o666)
    code, out, error = rl_kernel("show", KEY.digest, "--cache-dir", store.folder)
    assert (code, out) == (1, "")
    assert error == (
        f"rl-kernel: {store.folder}/{KEY.digest}.json: not a plain file of ours that nobody else may write to\n"
    )


def test_texts_of_a_record_cannot_steer_the_terminal(rl_kernel: Run, store: FileStore) -> None:
    key = TuningKey.of("_kernel\x1b[2J\nrow", {"a\rb": "\ud800 ö"})
    store.publish(key.digest, make_record(key, reason="\x9b31m").to_json())
    for argv in (("list",), ("show", key.digest)):
        code, out, _error = rl_kernel(*argv, "--cache-dir", store.folder)
        assert code == 0
        assert "_kernel\\x1b[2J\\nrow" in out
        assert all(one.isprintable() or one == "\n" for one in out)


@pytest.mark.parametrize(
    "argv", [[], ["lst"], ["show"], ["list", "KEY"], ["list", "--cache-dir"], ["show", "ab", "--yaml"]]
)
def test_a_command_line_without_meaning_is_exit_code_2(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "usage: rl-kernel" in capsys.readouterr().err


def module(*argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rl_engine.cli", *argv],
        env=environment(**variables),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_module_is_the_command(store: FileStore) -> None:
    shown = module("show", KEY.digest, "--cache-dir", str(store.folder), PYTHONIOENCODING="ascii")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "winner  BLOCK=1024 num_warps=8: 8.25 \\xb5s\n" in shown.stdout
    helped = module("--help")
    assert helped.returncode == 0
    assert "show      Show one record with everything it was judged by." in helped.stdout


def test_the_exit_code_is_the_commands(monkeypatch: pytest.MonkeyPatch, store: FileStore) -> None:
    for command, code in ((("list",), 0), (("show", "ffff"), 1)):
        monkeypatch.setattr(sys, "argv", ["rl-kernel", *command, "--cache-dir", str(store.folder)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(cli.__file__, run_name="__main__")
        assert ended.value.code == code


def test_settings_without_meaning_and_a_user_without_a_home_are_one_line(
    rl_kernel: Run, environ: Callable[..., None]
) -> None:
    environ(RL_KERNEL_AUTOTUNE="2")
    code, out, error = rl_kernel("list")
    assert (code, out) == (1, "")
    assert error.startswith("rl-kernel: RL_KERNEL_AUTOTUNE is '2'; set it to one of ")
    environ(HOME="", XDG_CACHE_HOME="")
    line = "rl-kernel: this user has no home and so no cache folder; name one with --cache-dir\n"
    assert rl_kernel("list") == (1, "", line)


def test_the_command_imports_neither_torch_nor_triton(store: FileStore) -> None:
    code = (
        "import sys\nfrom rl_engine.cli import main\n"
        "assert main(['list', '--cache-dir', sys.argv[1]]) == 0\n"
        "print({'torch', 'triton', 'numpy'} & set(sys.modules))"
    )
    assert run(code, str(store.folder)).endswith("set()\n")
