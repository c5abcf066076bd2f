"""The environment: what each word means, when it is read, and where the cache lies."""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path

import pytest

from rl_engine.errors import SettingsError
from rl_engine.settings import Settings
from tests.support.processes import ROOT, environment, run

# the variable at start, what is assigned after the import, what is assigned after the first use
WITNESS = """
import os, sys
from pathlib import Path
from rl_engine import settings
from rl_engine.errors import SettingsError
from rl_engine.platforms import autotuner
from rl_engine.runtime.policy import launch_policy
from tests.support.tuning import CANDIDATES, FakeTrial, make_key
after_import, after_use = sys.argv[1:]
if after_import != "-":
    os.environ["RL_KERNEL_AUTOTUNE"] = after_import
def launch(key):
    mode = launch_policy().mode  # as the adapter does
    return "off" if mode == "off" else autotuner.process_autotuner().select(key, CANDIDATES, trial, mode=mode).source
trial = FakeTrial()
try:
    first = launch(make_key(n=1))
except SettingsError as error:
    print("error", error)
else:
    if after_use != "-":
        os.environ["RL_KERNEL_AUTOTUNE"] = after_use
    cache = Path(os.environ["RL_KERNEL_AUTOTUNE_CACHE_DIR"])
    print(first, launch(make_key(n=2)), trial.count("sample"), cache.exists())
"""
OFF, ON, REPLAY = "off off 0 False", "tuned tuned 102 True", "fixed fixed 0 False"


def witness(tmp_path: Path, word: str | None, after_import: str = "-", after_use: str = "-") -> str:
    env = environment(RL_KERNEL_AUTOTUNE_CACHE_DIR=str(tmp_path / "cache"))
    if word is not None:
        env["RL_KERNEL_AUTOTUNE"] = word
    return run(WITNESS, after_import, after_use, env=env).strip()


@pytest.mark.parametrize(
    ("word", "behaviour"),
    [
        (None, OFF), ("", OFF), ("0", OFF), ("FALSE", OFF), ("off", OFF), ("no", OFF),
        ("1", ON), ("true", ON), (" 1 ", ON), ("yes", ON), ("On", ON), ("replay", REPLAY),
    ],
)  # fmt: skip
def test_each_word_means_what_it_says(tmp_path: Path, word: str | None, behaviour: str) -> None:
    assert witness(tmp_path, word) == behaviour


def test_another_word_is_an_error_that_lists_the_words(tmp_path: Path) -> None:
    assert witness(tmp_path, "2") == (
        "error RL_KERNEL_AUTOTUNE is '2'; set it to one of 0, false, off, no, 1, true, on, yes, replay, or unset it"
    )
    assert not (tmp_path / "cache").exists()


def test_the_variable_counts_until_the_first_launch_and_not_after(tmp_path: Path) -> None:
    assert witness(tmp_path, None, after_import="1", after_use="0") == ON
    shutil.rmtree(tmp_path / "cache")
    assert witness(tmp_path, "1", after_import="0", after_use="1") == OFF
    assert witness(tmp_path, "0", after_use="nonsense") == OFF


def parse(**variables: str) -> Settings:
    return Settings.from_environment({"HOME": "/home/user", **variables})


def test_an_empty_environment_means_the_defaults() -> None:
    assert parse() == Settings(
        mode="auto",
        autotune="off",
        cache_dir=Path("/home/user/.cache/rl_kernel/autotune"),
        shared=(),
        budget_s=120.0,
        scope="device",
    )


@pytest.mark.parametrize("word", ["strict", "audit", "auto", "off"])
def test_modes_are_words_in_any_case(word: str) -> None:
    assert parse(RL_KERNEL_MODE=f" {word.upper()}\t").mode == word


def test_scopes_are_words_in_any_case() -> None:
    assert [parse(RL_KERNEL_AUTOTUNE_SCOPE=word).scope for word in ("", "Device", "model ")] == [
        "device",
        "device",
        "model",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("RL_KERNEL_MODE", "auto, strict, audit, off"),
        ("RL_KERNEL_AUTOTUNE", "0, false, off, no, 1, true, on, yes, replay"),
        ("RL_KERNEL_AUTOTUNE_SCOPE", "device, model"),
    ],
)
@pytest.mark.parametrize("seen", ["2", "yes please", "onn", "None", "\N{FULLWIDTH DIGIT ONE}"])
def test_errors_name_the_variable_the_words_and_what_was_seen(name: str, words: str, seen: str) -> None:
    with pytest.raises(SettingsError) as error:
        parse(**{name: seen})
    assert str(error.value) == f"{name} is {seen!r}; set it to one of {words}, or unset it"


@pytest.mark.parametrize(("seen", "seconds"), [("", 120.0), (" ", 120.0), ("0", 0.0), (" 2.5 ", 2.5), ("1e3", 1000.0)])
def test_budgets_are_seconds(seen: str, seconds: float) -> None:
    assert parse(RL_KERNEL_AUTOTUNE_BUDGET_S=seen).budget_s == seconds


@pytest.mark.parametrize("seen", ["-1", "-0.001", "nan", "inf", "-inf", "2m", "two", "1,5", "0x10"])
def test_other_budgets_are_errors(seen: str) -> None:
    with pytest.raises(SettingsError) as error:
        parse(RL_KERNEL_AUTOTUNE_BUDGET_S=seen)
    assert str(error.value) == (
        f"RL_KERNEL_AUTOTUNE_BUDGET_S is {seen!r}; set it to a number of seconds, 0 or more, or unset it"
    )


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "/home/user/.cache/rl_kernel/autotune"),
        ({"XDG_CACHE_HOME": "/var/cache"}, "/var/cache/rl_kernel/autotune"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/user/.cache/rl_kernel/autotune"),
        ({"XDG_CACHE_HOME": " "}, "/home/user/.cache/rl_kernel/autotune"),
        ({"XDG_CACHE_HOME": "/var/cache", "RL_KERNEL_AUTOTUNE_CACHE_DIR": "/exactly/here"}, "/exactly/here"),
        ({"RL_KERNEL_AUTOTUNE_CACHE_DIR": " "}, "/home/user/.cache/rl_kernel/autotune"),
        ({"RL_KERNEL_AUTOTUNE_CACHE_DIR": "here"}, str(ROOT / "here")),
        ({"HOME": ""}, None),
        ({"HOME": "relative"}, None),
    ],
)
def test_the_cache_lies_where_the_user_says(
    variables: dict[str, str], folder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert parse(**variables).cache_dir == (None if folder is None else Path(folder))


def test_packs_are_a_path_list_of_absolute_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert parse(RL_KERNEL_AUTOTUNE_SHARED=f"/a{os.pathsep}{os.pathsep} {os.pathsep} b/c {os.pathsep}/d").shared == (
        Path("/a"),
        ROOT / "b" / "c",
        Path("/d"),
    )


PRINT_CACHE = "from rl_engine.settings import current; print(current().cache_dir, current() is current())"


def test_without_home_the_passwd_entry_counts() -> None:
    env = environment()
    env.pop("HOME", None)
    env.pop("XDG_CACHE_HOME", None)
    home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    assert run(PRINT_CACHE, env=env).split() == [str(home / ".cache" / "rl_kernel" / "autotune"), "True"]


def test_a_uid_without_a_passwd_entry_has_no_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert Settings.from_environment({}).cache_dir is None


PRINT_CACHE_OF_NOBODY_KNOWN = """
import os
from rl_engine.settings import Settings  # before the identity changes: the new user may not read this checkout
os.setgroups([])
os.setresuid(12345, 12345, 12345)
del os.environ["HOME"]
print(os.geteuid(), Settings.from_environment({}).cache_dir)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without a passwd entry")
def test_a_user_without_home_and_passwd_entry_has_no_cache_folder() -> None:
    assert run(PRINT_CACHE_OF_NOBODY_KNOWN, env=environment(HOME="/root")).split() == ["12345", "None"]
