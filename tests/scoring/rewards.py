"""Rewards that scoring processes load: good ones and bad ones."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from covey.rewards import Score
from covey.types import Prompt


def loop(_: str = "") -> Score:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def sleep(seconds: str) -> Score:
    time.sleep(float(seconds))
    return Score(reward=float(seconds), success=True)


def wait_for(file: str) -> Score:
    while not os.path.exists(file):
        time.sleep(0.01)
    return Score(reward=1.0, success=True)


def fail(why: str) -> Score:
    raise KeyError(why)


def noise(text: str) -> Score:
    print(text, flush=True)
    os.write(1, b"noise on the pipe\n")
    return Score(reward=0.5, success=False)


def child(then: str) -> Score:
    """Leave a process behind, then raise its number or never come back."""
    pid = os.fork()
    if pid == 0:
        time.sleep(100)
    if then != "raise":
        loop()
    raise ChildProcessError(str(pid))


ACTIONS: dict[str, Callable[[str], Any]] = {
    "loop": loop,
    "sleep": sleep,
    "wait": wait_for,
    "raise": fail,
    "exit": lambda _: os._exit(3),
    "quit": lambda _: sys.exit(4),
    "crash": lambda _: ctypes.string_at(0),
    "print": noise,
    "big": lambda _: Score(reward=1.0, success=True, parts={"x" * 3_000_000: 1.0}),
    "child": child,
    "type": lambda _: 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Obeys:
    """Does what the completion says: a number is the reward, a word is a way to go wrong."""

    quick: ClassVar[bool] = False
    version: ClassVar[int] = 1
    bounds: ClassVar[tuple[float, float]] = (-math.inf, math.inf)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        what, _, rest = text.partition(" ")
        if what in ACTIONS:
            return ACTIONS[what](rest)
        return Score(reward=float(text), success=float(text) > 0.5, parts={"pid": os.getpid()})


def plain(prompt: Prompt, text: str, *, scale: float = 1.0) -> float:
    return scale * len(text)


def half_marks(prompt: Prompt, text: str) -> dict[str, float]:
    return {"length": len(text) / 10, "right": float(text == prompt.target)}


async def waits(prompt: Prompt, text: str) -> float:
    await asyncio.sleep(float(text))
    return float(text)


async def obeys_async(prompt: Prompt, text: str) -> float:
    """Does what the completion says, once all others have begun to wait."""
    await asyncio.sleep(0.05)
    what, _, rest = text.partition(" ")
    if what == "thread":
        await asyncio.to_thread(time.sleep, 60)
    return ACTIONS[what](rest).reward if what in ACTIONS else float(text)


def trl_lengths(completions: list[str], **columns: Any) -> list[float | None]:
    given = {"prompts", "target", "answer", "level", "completion_ids", "trainer_state"}
    assert set(columns) == given, columns
    return [None if c == "?" else float(len(c) + 100 * columns["level"][0]) for c in completions]


async def trl_async(completions: list[Any], prompts: list[Any], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(c[0]["content"] == prompts[0][-1]["content"]) for c in completions]


def relative(completions: list[str], **_: Any) -> list[float]:
    """Scores completions relative to each other, which needs the whole group."""
    longest = max(len(c) for c in completions)
    return [len(c) / longest for c in completions]


def too_few(completions: list[str], **_: Any) -> list[float]:
    return [1.0]


class Listed:
    """An object without anything that a reward of its own would have."""

    def __init__(self, *, words: Any) -> None:
        self.words = words

    def __call__(self, prompt: Prompt, text: str) -> float:
        return float(text in self.words)

    def judge(self, prompt: Prompt, text: str) -> float:
        return self(prompt, text)


class Counting:
    """A class: its options are those of its constructor."""

    quick = True
    version = 7
    bounds = (0.0, 1.0)

    def __init__(self, *, word: str, most: int = 3) -> None:
        self.word, self.most = word, most

    def __call__(self, prompt: Prompt, text: str) -> Score:
        count = min(text.count(self.word), self.most)
        return Score(reward=count / self.most, success=count == self.most)
