"""Rewards of the form alone: they look at tags and never at whether an answer is right."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import ClassVar

from covey.errors import ConfigError
from covey.rewards.score import Score
from covey.rewards.text import inside, parted
from covey.types import Prompt

_TAG_NAME = re.compile(r"[A-Za-z][\w-]*")
_TAG = re.compile(r"</?(?:think|tool_call)>")
_CALL = re.compile(r"[^\W\d][\w.]*\(.*\)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkAnswerForm:
    """1 where the whole text is one thinking part, then one answer part, neither of them empty.

    Tags repeated, nested, left open, or text outside of them break the form. `graded` gives a
    broken form 0.25 for each of the two parts that stands there once, paired and not empty.
    """

    graded: bool = False
    think: str = "think"
    answer: str = "answer"
    prefilled: bool = False
    """The prompt ends with the opening thinking tag, so the text begins inside of it."""

    quick: ClassVar[bool] = True
    version: ClassVar[int] = 1
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __post_init__(self) -> None:
        for name in (self.think, self.answer):
            if not _TAG_NAME.fullmatch(name):
                raise ConfigError(f"reward: {name!r} is no tag name; use letters, as in 'think'")
        if self.think == self.answer:
            raise ConfigError(f"reward: think and answer are both {self.think!r}; they must differ")

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer."""
        if self.prefilled:
            text = f"<{self.think}>{text}"
        names = (self.think, self.answer)
        found = parted(text, names)
        whole = (
            found is not None and all(map(str.strip, found[1])) and not "".join(found[0]).strip()
        )
        parts = {"whole": float(whole)}
        for role, name in zip(("think", "answer"), names, strict=True):
            alone = parted(text, (name,))
            parts[role] = float(alone is not None and bool(alone[1][0].strip()))
        partial = 0.25 * (parts["think"] + parts["answer"]) if self.graded else 0.0
        return Score(reward=1.0 if whole else partial, success=whole, parts=parts)


def is_call(text: str) -> bool:
    """Tell whether a text reads as a call: `name(arguments)`, or a JSON object with a name.

    >>> is_call("search('tea')"), is_call('{"name": "search"}'), is_call("search")
    (True, True, False)
    """
    text = text.strip()
    if not text.startswith("{"):
        return _CALL.fullmatch(text) is not None
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return False
    name = call.get("name")
    return isinstance(name, str) and bool(name)


def _paired(text: str, tag: str) -> bool:
    """Whether opening and closing tags take turns, the opening one first, and there is one."""
    tags = re.findall(f"</?{tag}>", text)
    return bool(tags) and tags == [f"<{tag}>", f"</{tag}>"] * (len(tags) // 2)


def _unpaired(text: str, tag: str) -> bool:
    return (f"<{tag}>" in text or f"</{tag}>" in text) and not _paired(text, tag)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkToolForm:
    """`<think>...</think>`, then tool calls or a direct answer: 0.4 think + 0.4 tool + 0.2 tidy.

    | part | value |
    |---|---|
    | think | 1: one paired block with at least `min_thinking` characters; 0.5: with fewer |
    | tool | 1: every `<tool_call>` paired and a call, `name(...)` or JSON; 0.5: paired only |
    | direct | in place of tool where there is none: 1 for text after the thinking |
    | tidy | 1: one think block first, nothing nested; tool calls may follow each other |

    Tags that are not paired make -0.5 of think or tool. The sum is kept within 0 and 1.

    The published code checks the first call alone, and forgets tidy and the direct answer: no text
    could reach more than 0.8.
    """

    min_thinking: int = 20

    quick: ClassVar[bool] = True
    version: ClassVar[int] = 1
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.min_thinking < 1:
            raise ConfigError(
                f"reward: min_thinking must be at least 1 character, not {self.min_thinking}"
            )

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer."""
        thinking = parted(text, ("think",))
        think, direct = 0.0, 0.0
        if thinking is not None:
            think = 1.0 if len(thinking[1][0].strip()) >= self.min_thinking else 0.5
            direct = float(bool(thinking[0][1].strip()))
        elif _unpaired(text, "think"):
            think = -0.5
        parts = {"think": think}
        if _paired(text, "tool_call"):
            parts["tool"] = 1.0 if all(map(is_call, inside(text, "tool_call"))) else 0.5
        elif _unpaired(text, "tool_call"):
            parts["tool"] = -0.5
        else:
            parts["direct"] = direct
        parts["tidy"] = float(_tidy(text))
        # In tenths, so that full marks are 1.0 and not a rounding error away from it.
        tenths = sum(weight * part for weight, part in zip((4, 4, 2), parts.values(), strict=True))
        reward = max(0.0, tenths / 10)
        return Score(reward=reward, success=reward == 1.0, parts=parts)


def _tidy(text: str) -> bool:
    tags = _TAG.findall(text)
    calls = tags[2:]
    return tags[:2] == ["<think>", "</think>"] and (
        calls == ["<tool_call>", "</tool_call>"] * (len(calls) // 2)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentExampleForm:
    """The short example of the chapter on agents: 0 to 0.8.

    | what | value |
    |---|---|
    | think tags, paired | 0.2 |
    | more than 20 characters between them | 0.1 |
    | tool_call tags, paired | 0.3 |
    | parentheses in the first call | 0.2 |
    | each call above 5 | -0.1, not below 0 in all |

    The published code takes tags in any order for a pair; here the closing one comes after.
    """

    quick: ClassVar[bool] = True
    version: ClassVar[int] = 1
    bounds: ClassVar[tuple[float, float]] = (0.0, 0.8)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer."""
        thoughts, calls = inside(text, "think"), inside(text, "tool_call")
        think = 2 * bool(thoughts) + bool(thoughts and len(thoughts[0].strip()) > 20)
        tool = 3 * bool(calls) + 2 * bool(calls and "(" in calls[0] and ")" in calls[0])
        excess = max(0, text.count("<tool_call>") - 5)
        reward = max(0, think + tool - excess) / 10
        return Score(
            reward=reward,
            success=reward == 0.8,
            parts={"think": think / 3, "tool": tool / 5, "excess": float(excess)},
        )
