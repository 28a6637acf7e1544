"""Multi-turn conversations as tokens: sampled tokens stay unchanged, and later turns are appended.

After a turn of the policy, the chat template renders the conversation, including the new messages.
If the rendered text begins with the previous prompt and the sampled text, Covey tokenizes only the
new text and keeps all earlier tokens. Some templates change earlier turns: they remove thinking,
trim whitespace or change the end of a turn. If a template changes earlier turns, the rendered
conversation becomes the prompt of a new segment. The trainer treats each segment as a separate row.

Some formats of tool calls consist of special tokens, which the content of a message cannot hold.
Templates with such a format render a call from the message's `tool_calls`, in their own spelling.
The policy's tokens are then followed by what the template renders between that call and the next
turn.

The text of a message never becomes a special token. If a message contains the text of a special
token, such as `<|im_end|>`, Covey splits this text into ordinary tokens. In tool results, Covey
also splits the text of other control tokens, such as `<think>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from covey.errors import DataError
from covey.models.chat_template import Renderer, probed
from covey.types import Message

CUT = "\ue0c7"
"""The split mark, a private-use character at which Covey splits texts before tokenization. Covey
removes split marks that a message already contains."""
PROBE = "COVEYTOOL"


class Context(NamedTuple):
    """The prompt of a turn, as text and tokens: the conversation before that turn."""

    text: str
    """The text of the conversation before the turn, including split marks (`CUT`)."""
    tokens: tuple[int, ...]
    """All tokens before the turn, from the beginning of the segment."""
    added: int
    """Number of tokens after the last sampled token."""
    new_segment: bool
    """Whether the turn begins a new segment. A new segment begins at the first turn, and whenever
    the chat template changes earlier text."""


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """Renders conversations with the chat template of a model."""

    renderer: Renderer
    instruction: str
    """Tool instructions with the field {tools}, used if the chat template does not support
    tools."""
    apart: bool = False
    """Whether the chat template renders tool calls from `tool_calls` only."""
    arguments_as_text: bool = False
    """Whether the chat template expects the arguments of a call as JSON text."""

    def first(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Context:
        """Return the prompt of the first turn as a `Context`."""
        return self._fresh(self._text(messages, tools))

    def following(
        self,
        before: Context,
        sampled: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> Context:
        """Return the prompt of the next turn; `sampled` are the tokens of the previous turn.

        `messages` is the whole conversation, including the sampled message and all later messages.
        """
        raw = self.renderer.tokenizer.decode(
            list(sampled), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        stands = _plain(before.text) + raw
        if not self.renderer.chat:
            last = max(n for n, m in enumerate(messages) if m["role"] == "assistant")
            later = [self._inert(m["content"], every=True) for m in messages[last + 1 :]]
            text = stands + "\n".join(["", *later, ""])
            return self._extended(before, sampled, stands, text + self.renderer.template.prefill)
        after = self._after_turn(messages, tools, raw) if self._result_role else None
        if after is not None:
            return self._extended(before, sampled, stands, stands + after)
        text = self._text(messages, tools)
        if _plain(text).startswith(stands):
            return self._extended(before, sampled, stands, text)
        return self._fresh(text)

    def _extended(self, before: Context, sampled: Sequence[int], stands: str, text: str) -> Context:
        more = self._tokens(_after(text, len(stands)))
        return Context(text, (*before.tokens, *sampled, *more), len(more), False)

    def _fresh(self, text: str) -> Context:
        """Return the prompt of a new segment."""
        ids = self._tokens(text)
        tokens = tuple(ids) if self.renderer.chat else self.renderer.with_start(ids)
        return Context(text, tokens, len(tokens), True)

    def _tokens(self, text: str) -> list[int]:
        """Tokenize the text between split marks, so that no token spans a split mark."""
        encode = self.renderer.tokenizer.encode
        pieces = [piece for piece in text.split(CUT) if piece]
        return [token for piece in pieces for token in encode(piece, add_special_tokens=False)]

    def _after_turn(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], sampled: str
    ) -> str | None:
        """Return the text between the policy's last turn and its next turn, which tools answered.

        `sampled` is the text of the last turn. Return None if the template rewrites the turn when
        results follow, or if other messages follow.
        """
        last = max(n for n, m in enumerate(messages) if m["role"] == "assistant")
        if any(message["role"] != "tool" for message in messages[last + 1 :]):
            return None
        try:
            turn = self._text(messages[: last + 1], tools, next_turn=False)
            whole = self._text(messages, tools)
        except DataError:
            return None
        special = self._control[0]
        if special is None or not whole.startswith(turn):
            return None
        after = whole[len(turn) :]
        closing = re.search(rf"({special.pattern})\s*\Z", turn)
        end = re.search(rf"({special.pattern})\Z", sampled)
        if end is None:
            return (closing[0] if closing else "") + after
        if (
            closing is not None
        ):  # the turn has ended, perhaps with another token than the template's
            return closing[0][len(closing[1]) :] + after
        return after.removeprefix(end[1])

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        next_turn: bool = True,
    ) -> str:
        """Render a conversation, by default up to where the policy's next turn begins."""
        begun = next((n for n, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
        inert: list[Message] = [
            # Tool results must not contain control tokens, but prompts and the policy's own text
            # may contain control tokens that are not special, such as <think>. Tool calls are
            # already part of the content, unless the template renders them apart.
            {k: v for k, v in m.items() if k != "tool_calls" or self._result_role}
            | {"content": self._inert(m["content"], every=n > begun and m["role"] != "assistant")}
            for n, m in enumerate(messages)
        ]
        if not self.renderer.chat:
            return self.renderer.text(inert)
        shown: Sequence[Message] = (
            inert if not tools or self.takes_tools else self._with_instruction(inert, tools)
        )
        if self._result_role:
            shown = self._native(shown, self._result_role)
        elif not self._takes_results:
            shown = _as_user(shown)
        renderer = self.renderer
        if tools and self.takes_tools:
            options = {**renderer.template.chat_options, "tools": list(tools)}
            renderer = replace(renderer, template=replace(renderer.template, chat_options=options))
        return renderer.text(shown, next_turn=next_turn)

    def _native(self, messages: Sequence[Message], role: str) -> list[Message]:
        """Return messages as a template wants them that renders calls apart.

        Each call and its result get the same identifier. `role` is the role of results.
        """
        shown: list[Message] = []
        open_calls: list[str] = []
        count = 0
        for message in messages:
            if message["role"] == "tool":
                given = open_calls.pop(0) if open_calls else f"call{count:05d}"
                shown.append({"tool_call_id": given, **message, "role": role})
                continue
            calls = message.get("tool_calls", ())
            if not calls:
                shown.append(message)
                continue
            if role != "tool":  # such a template names the tool in the metadata
                function = calls[0]["function"]
                text = json.dumps(function["arguments"], ensure_ascii=False)
                shown.append({**message, "metadata": function["name"], "content": text})
                continue
            written: list[dict[str, Any]] = []
            for call in calls:
                count += 1
                function = call["function"]
                arguments: Any = function["arguments"]
                if self.arguments_as_text:
                    arguments = json.dumps(arguments, ensure_ascii=False)
                given = call.get("id", f"call{count:05d}")
                named = {"name": function["name"], "arguments": arguments}
                written.append({"id": given, "type": "function", "function": named})
            open_calls = [call["id"] for call in written]
            shown.append({**message, "content": "", "tool_calls": written})
        return shown

    def _with_instruction(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[Message]:
        """Describe the tools in the system message."""
        if not self.instruction:
            return list(messages)
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = self.instruction.format(tools=listed)
        first, *rest = messages
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
        return [{"role": "system", "content": text}, *messages]

    def _inert(self, text: str, *, every: bool) -> str:
        """Insert split marks into a text, so that tokenization produces no special tokens."""
        special, added = self._control
        pattern = added if every else special
        text = text.replace(CUT, "")
        if pattern is None:
            return text
        return pattern.sub(lambda found: f"{found[0][:1]}{CUT}{found[0][1:]}", text)

    @cached_property
    def _control(self) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
        """The patterns that match the text of any special token, and of any control token.

        Added tokens for runs of spaces or line breaks are not control tokens.
        """
        added = self.renderer.tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special}
        others = {token.content for token in added if set("<[|") & set(token.content)}
        return _any_of(special), _any_of(special | others)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the chat template renders the tools that are passed to it."""
        function = {"name": PROBE, "description": PROBE, "parameters": {}}
        user = {"role": "user", "content": "1"}
        tools = [{"type": "function", "function": function}]
        return self._shows_probe([user], {"tools": tools})

    @cached_property
    def _takes_results(self) -> bool:
        """Whether the chat template renders messages with the role `tool`."""
        roles = (("user", "1"), ("assistant", "2"), ("tool", PROBE))
        return self._shows_probe([{"role": r, "content": c} for r, c in roles], {})

    @cached_property
    def _result_role(self) -> str:
        """The role of tool results in a template that renders calls apart; otherwise empty."""
        if not self.apart or not self.renderer.chat:
            return ""
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        talk: list[Message] = [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": PROBE},
        ]
        roles = ("tool", "observation")
        return next((r for r in roles if self._shows_probe(self._native(talk, r), {})), "")

    def _shows_probe(self, messages: Sequence[Message], more: Mapping[str, Any]) -> bool:
        options = {**self.renderer.template.chat_options, **more}
        return PROBE in probed(self.renderer.tokenizer, messages, options)


def _any_of(texts: set[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any of the texts, the longest first."""
    longest = sorted(filter(None, texts), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest))) if longest else None


def _plain(text: str) -> str:
    return text.replace(CUT, "")


def _after(text: str, count: int) -> str:
    """Return the text after the first `count` characters, not counting split marks."""
    pieces = text.split(CUT)
    for number, piece in enumerate(pieces):
        if len(piece) >= count:
            return CUT.join([piece[count:], *pieces[number + 1 :]])
        count -= len(piece)
    raise DataError(
        "model: the chat template changes or drops the text of a message; set model.template to "
        "'plain'"
    )


def _as_user(messages: Sequence[Message]) -> list[Message]:
    """Turn tool messages into user messages, and join consecutive user messages."""
    shown: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            content = f"<tool_response>\n{message['content']}\n</tool_response>"
            message = {"role": "user", "content": content}
        if shown and message["role"] == shown[-1]["role"] == "user":
            joined = f"{shown[-1]['content']}\n{message['content']}"
            message = {**shown.pop(), "content": joined}
        shown.append(message)
    return shown
