"""Async environments of one process share one event loop, however many episodes start at once."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import ModuleType
from typing import Any

import pytest

from covey.environments import host
from covey.environments.environment import Start
from covey.types import Prompt

EPISODES, ROUNDS = 32, 30
PROMPT = Prompt(id="1", task="t", messages=({"role": "user", "content": "?"},), target="")


def fresh_module() -> ModuleType:
    """The module as a new process has it: nobody has asked for its loop yet."""
    spec = importlib.util.spec_from_file_location("drive_of_a_round", host.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_episodes_that_start_at_once_share_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(ROUNDS):
        module, begin = fresh_module(), Barrier(EPISODES)
        limit, loops = asyncio.Semaphore(2), set[int]()  # as environments limit their requests

        class Limited:
            async def reset(self, prompt: Prompt, seed: int) -> Start:
                # A waiter of another loop is never woken.
                async with asyncio.timeout(5), limit:  # noqa: B023 - it is used within its round
                    loops.add(id(asyncio.get_running_loop()))  # noqa: B023
                    await asyncio.sleep(0.001)
                return Start(messages=prompt.messages)

        def play(number: int) -> Any:
            driver = module.Driver(Limited)  # noqa: B023
            begin.wait()  # noqa: B023
            return driver.start(PROMPT, number)

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(EPISODES) as pool:
                replies = list(pool.map(play, range(EPISODES)))
        finally:
            sys.setswitchinterval(before)
        errors = [reply.error for reply in replies if reply.error]
        assert (errors, len(loops)) == ([], 1)
    monkeypatch.delitem(sys.modules, "drive_of_a_round")
