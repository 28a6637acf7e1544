"""Completion formats: how a completion marks its thinking and its final answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

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
        """Return the completion with the given thinking and answer."""
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
