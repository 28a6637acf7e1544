"""Format rewards, which check the tags of a completion but not the final answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from covey.rewards.score import Reward, Score, check_option
from covey.rewards.text import only_tags, split_tags, tag_contents
from covey.types import Prompt

_TAG_NAME = re.compile(r"[A-Za-z][\w-]*")
_TAG = re.compile(r"</?(?:think|tool_call)>")
_CALL = re.compile(r"[^\W\d][\w.]*\(.*\)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkAnswerForm(Reward):
    """1 for a non-empty thinking part followed by a non-empty answer part, otherwise 0.

    The format is wrong if a tag is repeated, nested or not closed, or if there is text outside the
    tags. With `graded`, a completion with a wrong format still gets 0.25 for the thinking part and
    0.25 for the answer part. The thinking part or the answer part counts only if it occurs exactly
    once, is closed and is not empty.
    """

    graded: bool = False
    think: str = "think"
    answer: str = "answer"
    prefilled: bool = False
    """Whether the prompt ends with the opening thinking tag, so that the completion starts inside
    the thinking."""

    def __post_init__(self) -> None:
        for name in (self.think, self.answer):
            check_option(
                _TAG_NAME.fullmatch(name) is not None,
                f"{name!r} is not a tag name; use letters, as in 'think'",
            )
        check_option(
            self.think != self.answer, f"think and answer are both {self.think!r}; they must differ"
        )

    def __call__(self, prompt: Prompt, text: str) -> Score:
        if self.prefilled:
            text = f"<{self.think}>{text}"
        names = (self.think, self.answer)
        whole = only_tags(text, names) is not None
        parts = {"whole": float(whole)}
        for role, name in zip(("think", "answer"), names, strict=True):
            alone = split_tags(text, (name,))
            parts[role] = float(alone is not None and bool(alone[1][0].strip()))
        partial = 0.25 * (parts["think"] + parts["answer"]) if self.graded else 0.0
        return Score(reward=1.0 if whole else partial, success=whole, parts=parts)


def is_call(text: str) -> bool:
    """Return whether a text looks like the call `name(arguments)` or a JSON object with a name.

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


def _paired(text: str, tag: str) -> bool | None:
    """Return whether opening and closing tags alternate, or None for a text without tags."""
    tags = re.findall(f"</?{tag}>", text)
    return tags == [f"<{tag}>", f"</{tag}>"] * (len(tags) // 2) if tags else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkToolForm(Reward):
    """A format reward for completions with thinking, followed by tool calls or an answer.

    The reward is `0.4 * think + 0.4 * tool + 0.2 * tidy`, but at least 0.

    | part | value |
    |---|---|
    | think | 1: one closed block with at least `min_thinking` characters; 0.5: with fewer |
    | tool | 1: every `<tool_call>` is closed and a call, `name(...)` or JSON; 0.5: closed only |
    | direct | instead of tool if there is none: 1 for text after the thinking |
    | tidy | 1: one think block first, nothing nested; several tool calls may follow |

    Unpaired `<think>` tags set `think` to -0.5, and unpaired `<tool_call>` tags set `tool` to -0.5.

    The published code of this reward checks only the first tool call, and lacks the parts `tidy`
    and `direct`. With the published code, no completion can score above 0.8.
    """

    min_thinking: int = 20

    def __post_init__(self) -> None:
        check_option(
            self.min_thinking >= 1,
            f"min_thinking must be at least 1 character, not {self.min_thinking}",
        )

    def __call__(self, prompt: Prompt, text: str) -> Score:
        thinking = split_tags(text, ("think",))
        think, direct = 0.0, 0.0
        if thinking is not None:
            think = 1.0 if len(thinking[1][0].strip()) >= self.min_thinking else 0.5
            direct = float(bool(thinking[0][1].strip()))
        elif _paired(text, "think") is False:
            think = -0.5
        parts = {"think": think}
        paired = _paired(text, "tool_call")
        if paired is None:
            parts["direct"] = direct
        elif paired:
            parts["tool"] = 1.0 if all(map(is_call, tag_contents(text, "tool_call"))) else 0.5
        else:
            parts["tool"] = -0.5
        tags = _TAG.findall(text)
        tidy = ["<think>", "</think>", *["<tool_call>", "</tool_call>"] * (len(tags) // 2 - 1)]
        parts["tidy"] = float(tags == tidy)
        # In tenths, so that the maximum is 1.0 without rounding error.
        tenths = sum(weight * part for weight, part in zip((4, 4, 2), parts.values(), strict=True))
        reward = max(0.0, tenths / 10)
        return Score(reward=reward, success=reward == 1.0, parts=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentExampleForm(Reward):
    """A simple format reward for agents, from published example code, with values from 0 to 0.8.

    | condition | value |
    |---|---|
    | closed think tags | 0.2 |
    | more than 20 characters between them | 0.1 |
    | closed tool_call tags | 0.3 |
    | parentheses in the first call | 0.2 |
    | each call above 5 | -0.1, with a total of at least 0 |

    Unlike the published code of this reward, Covey rejects a closing tag without an opening tag
    before it.
    """

    bounds: ClassVar[tuple[float, float]] = (0.0, 0.8)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        thoughts, calls = tag_contents(text, "think"), tag_contents(text, "tool_call")
        think = 2 * bool(thoughts) + bool(thoughts and len(thoughts[0].strip()) > 20)
        tool = 3 * bool(calls) + 2 * bool(calls and "(" in calls[0] and ")" in calls[0])
        excess = max(0, text.count("<tool_call>") - 5)
        reward = max(0, think + tool - excess) / 10
        return Score(
            reward=reward,
            success=reward == 0.8,
            parts={"think": think / 3, "tool": tool / 5, "excess": float(excess)},
        )


# Completion formats: how a completion marks its thinking and its final answer.


THINKING = (
    "First I read the question carefully and note what is given and what is asked. Then I work "
    "through it one step at a time, check each step against the question, and only after that "
    "write down the result."
)
"""Generic text for the thinking, which suits every problem and is long enough for every format."""
FENCE, TOOL_CALL = ("```python\n", "\n```"), ("<tool_call>", "</tool_call>")


def wrapped(marks: tuple[str, str], answer: str) -> str:
    """Put the opening and closing marks around an answer that does not have them yet."""
    opening, closing = marks
    return answer if answer.startswith(opening.strip()) and opening else opening + answer + closing


@dataclass(frozen=True, slots=True)
class Format:
    """A format of completions: how a completion marks its thinking and its final answer."""

    name: str
    template: str
    """The template of a completion, with the placeholders `{thinking}` and `{answer}`."""
    thinking_tag: str = ""
    """The name of the thinking tag, or an empty string if the format has no thinking tag."""
    answer_tag: str = ""
    marks: tuple[str, str] = ("", "")
    """The strings before and after an answer, such as the fences of a code block."""

    def render(self, thinking: str, answer: str) -> str:
        text = self.template.format(thinking=thinking, answer=wrapped(self.marks, answer))
        return text if thinking else text.removeprefix("\n")


LINKS = "Sources: https://example.org/one and https://example.org/two"
_THINK = "<think>{thinking}</think>\n"
_ANSWER = "<answer>{answer}</answer>"
_FORMATS = (
    Format("think_answer", _THINK + _ANSWER, "think", "answer"),
    Format(
        "reasoning_answer",
        "<reasoning>\n{thinking}\n</reasoning>\n<answer>\n{answer}\n</answer>",
        "reasoning",
        "answer",
    ),
    Format("boxed", "{thinking}\n\\boxed{{{answer}}}"),
    Format("hashes", "{thinking}\n#### {answer}"),
    Format("plain", "{answer}"),
    # For prompts that end with the opening tag.
    Format("prefilled", "{thinking}</think>\n" + _ANSWER, answer_tag="answer"),
    Format("think_plain", _THINK + "{answer}", "think"),
    Format("think_tool", _THINK + "{answer}", "think", "tool_call", marks=TOOL_CALL),
    Format("fenced", _THINK + "{answer}", "think", marks=FENCE),
    # For rewards that count sources.
    Format("cited", f"{_THINK}{_ANSWER}\n{LINKS}", "think", "answer"),
)
FORMATS: Mapping[str, Format] = MappingProxyType({each.name: each for each in _FORMATS})
