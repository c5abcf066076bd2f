"""Which policy is in force: the innermost block's, in this context only, else the process's."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator

import pytest

from rl_engine import settings
from rl_engine.errors import SettingsError
from rl_engine.runtime import policy
from rl_engine.runtime.policy import LaunchPolicy, RLKernelMode, autotune, launch_policy, pinned, rl_kernel_mode


@pytest.fixture(autouse=True)
def read_again() -> Iterator[None]:
    """Let each test read its own environment, and the rest of the session theirs."""
    for cached in (settings.current, policy.process_policy):
        cached.cache_clear()
    yield
    for cached in (settings.current, policy.process_policy):
        cached.cache_clear()


def test_without_a_block_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_KERNEL_AUTOTUNE", "replay")
    assert launch_policy() == LaunchPolicy("replay", "forward")
    monkeypatch.setenv("RL_KERNEL_AUTOTUNE", "on")
    assert launch_policy().mode == "replay", "read once"


def test_without_anything_launches_are_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RL_KERNEL_AUTOTUNE", raising=False)
    assert launch_policy() == LaunchPolicy("off", "forward")


def test_a_block_decides_even_where_the_environment_holds_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_KERNEL_AUTOTUNE", "nonsense")
    with autotune("on"):
        assert launch_policy().mode == "on"
    with pytest.raises(SettingsError, match="RL_KERNEL_AUTOTUNE is 'nonsense'"):
        launch_policy()


def test_the_innermost_block_wins_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_KERNEL_AUTOTUNE", "off")
    seen = [launch_policy().mode]

    def fail() -> None:
        with autotune("replay"):
            seen.append(launch_policy().mode)
            raise RuntimeError("inside")

    with autotune("on"):
        with pytest.raises(RuntimeError, match="inside"):
            fail()
        seen.append(launch_policy().mode)
    seen.append(launch_policy().mode)
    assert seen == ["off", "replay", "on", "off"]


def test_a_block_inside_a_backward_stays_a_backward() -> None:
    with pinned(LaunchPolicy("off", "backward")):
        assert launch_policy() == LaunchPolicy("off", "backward")
        with autotune("on"):
            assert launch_policy() == LaunchPolicy("on", "backward")
        assert launch_policy() == LaunchPolicy("off", "backward")


@pytest.mark.parametrize("word", ["", "ON", "1", "yes", True, None, 1])
def test_another_word_is_an_error_that_lists_the_words(word: object) -> None:
    with pytest.raises(ValueError, match="pass one of off, on, replay"), autotune(word):  # type: ignore[arg-type]  # wrong on purpose
        pytest.fail("the block ran")


def test_a_block_is_of_its_thread_and_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_KERNEL_AUTOTUNE", "off")
    seen: dict[str, str] = {}

    def look(name: str) -> None:
        seen[name] = launch_policy().mode

    async def tune(mode: str) -> None:
        with autotune(mode):  # type: ignore[arg-type]  # one of the words
            await asyncio.sleep(0)
            look(mode)

    async def both() -> None:
        await asyncio.gather(tune("on"), tune("replay"))

    with autotune("on"):
        threads = [
            threading.Thread(target=look, args=("bare",)),
            threading.Thread(target=contextvars.copy_context().run, args=(look, "copied")),
        ]
        for thread in threads:
            thread.start()
            thread.join(10)
    asyncio.run(both())
    assert seen == {"bare": "off", "copied": "on", "on": "on", "replay": "replay"}


@pytest.mark.parametrize("mode", list(RLKernelMode))
def test_the_dispatch_mode_comes_from_its_variable(monkeypatch: pytest.MonkeyPatch, mode: RLKernelMode) -> None:
    monkeypatch.setenv("RL_KERNEL_MODE", mode.value.upper())
    assert rl_kernel_mode() is mode


def test_the_dispatch_mode_is_auto_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RL_KERNEL_MODE", raising=False)
    assert rl_kernel_mode() is RLKernelMode.AUTO
