"""Chat templates, which turn a conversation into the text and tokens of a prompt.

    auto     the tokenizer's chat template if it has one, else plain
    chat     the tokenizer's chat template
    plain    the messages' contents, joined by newlines
    a text   with {question}, and with {system} if the task has a system message

The prefill is text with which every completion begins. The prefill is part of the prompt, and is
never trained.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jinja2

from covey.errors import ConfigError, DataError, ModelError, nearest
from covey.models.template_worker import ADVICE, RENDERER
from covey.types import Message

FORMS = ("auto", "chat", "plain")
FIELDS = ("question", "system")

RESERVED = frozenset(
    ("conversation", "messages", "chat_template", "tokenize", "add_generation_prompt",
     "continue_final_message", "return_dict", "strftime_now")
)  # fmt: skip
"""Arguments that Covey or transformers always passes to a chat template."""

MARK, SYSTEM_MARK = "COVEYUSER", "COVEYSYSTEM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A prompt format from the configuration, validated on construction."""

    form: str = "auto"
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    """Extra arguments that Covey passes to the tokenizer's chat template."""
    prefill: str = ""
    prefill_in_text: bool = True
    """Whether completions are scored and saved with the prefill at their beginning."""

    def __post_init__(self) -> None:
        if self.form in FORMS:
            return
        fields = _fields(self.form)
        if not fields:
            hint = nearest(self.form, FORMS) if len(self.form) < 20 else ""
            raise ConfigError(
                f"config: model.template = {self.form!r} must be 'auto', 'chat', 'plain' or a text "
                f"with the field {{question}}{hint}"
            )
        for name in fields:
            if name not in FIELDS:
                raise ConfigError(
                    f"config: model.template has the unknown field {{{name}}}; use only the fields "
                    "{question} and {system}, and write {{ and }} for other braces"
                )
        if "question" not in fields:
            raise ConfigError("config: model.template must contain the field {question}")

    @property
    def opening(self) -> str:
        """The text that is put in front of completions when they are scored and shown."""
        return self.prefill if self.prefill_in_text else ""

    def without_prefill(self, text: str) -> str:
        """Return the text of a completion without the prefill, which belongs to the prompt."""
        return text.removeprefix(self.prefill)


def _fields(text: str) -> list[str]:
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(
            f"config: model.template = {text!r} is invalid: {error}; write {{{{ and }}}} for "
            "braces that do not mark a field"
        ) from None
    # The suffix is kept, because {question!r}, {question:>9} and {question.x} are refused.
    return [
        name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
        for _, name, spec, conversion in parsed
        if name is not None
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Renderer:
    """Renders messages as a prompt, with a prompt format and a tokenizer."""

    template: Template
    tokenizer: Any
    chat: bool
    """Whether the tokenizer's chat template is used."""
    folds_system: bool = False
    """Whether Covey puts the system message at the beginning of the first user message, because the
    chat template drops or refuses system messages."""
    turn_end: int | None = None
    """Id of the special token that ends the assistant's turn; None if no special token ends it."""

    def text(self, messages: Sequence[Message], *, next_turn: bool = True) -> str:
        """Return the prompt's text, up to where the completion begins.

        Without `next_turn`, return the text of the conversation alone.
        """
        if self.chat:
            folded = messages
            if self.folds_system and len(messages) > 1 and messages[0]["role"] == "system":
                system, first, *rest = messages
                content = f"{system['content']}\n\n{first['content']}"
                folded = [{**first, "content": content}, *rest]
            try:
                text = chat_text(
                    self.tokenizer, folded, self.template.chat_options,
                    add_generation_prompt=next_turn,
                )  # fmt: skip
            except jinja2.TemplateError as error:
                roles = ", ".join(m["role"] for m in folded)
                raise DataError(
                    f"model: the chat template rejects a conversation with the roles {roles}: "
                    f"{error}; {ADVICE}"
                ) from None
            return text + self.template.prefill if next_turn else text
        if self.template.form in FORMS:
            return "\n".join(m["content"] for m in messages) + self.template.prefill
        system_text = "\n".join(m["content"] for m in messages if m["role"] == "system")
        others = [m["content"] for m in messages if m["role"] != "system"]
        if len(others) != 1:
            raise DataError(
                "model: the text in model.template accepts only one message per prompt, but a "
                f"prompt has {len(others)} messages; set model.template to 'chat' or 'plain'"
            )
        filled = self.template.form.format(question=others[0], system=system_text)
        return filled + self.template.prefill

    def tokens(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt's tokens.

        A chat template contains its own BOS token. Without a chat template, this method adds the
        BOS token.
        """
        ids = self.tokenizer.encode(self.text(messages), add_special_tokens=False)
        return tuple(ids) if self.chat else self.with_start(ids)

    def with_start(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Put the BOS token in front of `ids` if the tokenizer normally adds BOS tokens."""
        start = self.tokenizer.bos_token_id
        if start is not None and list(ids[:1]) != [start]:
            begun = self.tokenizer.encode(MARK, add_special_tokens=True)
            ids = [start, *ids] if begun[:1] == [start] else ids
        return tuple(ids)


def make_renderer(tokenizer: Any, template: Template, name: str = "model") -> Renderer:
    has_chat = bool(tokenizer.chat_template)
    if template.form == "chat" and not has_chat:
        raise ModelError(f"model: {name} has no chat template; {ADVICE}")
    if template.form not in ("auto", "chat") or not has_chat:
        _check_options(template, "", name)
        return Renderer(template=template, tokenizer=tokenizer, chat=False)
    _check_options(template, tokenizer.get_chat_template(), name)
    options = template.chat_options
    user: Message = {"role": "user", "content": MARK}
    try:
        alone = chat_text(tokenizer, [user], options)
        problem = "" if MARK in alone else "drops the user message"
    except jinja2.TemplateError as error:
        problem = f"fails: {error}"
    if problem:
        raise ModelError(f"model: the chat template of {name} is unusable: it {problem}; {ADVICE}")
    system: Message = {"role": "system", "content": SYSTEM_MARK}
    both = probed(tokenizer, [system, user], options)
    assistant: Message = {"role": "assistant", "content": SYSTEM_MARK}
    talk = probed(tokenizer, [user, assistant], options, add_generation_prompt=False)
    _, shown, after = talk.rpartition(SYSTEM_MARK)
    # If the template shows no assistant messages, nothing ends them.
    ids = tokenizer.encode(after.strip(), add_special_tokens=False) if shown else []
    return Renderer(
        template=template,
        tokenizer=tokenizer,
        chat=True,
        folds_system=not (SYSTEM_MARK in both and MARK in both),
        turn_end=int(ids[0]) if ids and ids[0] in tokenizer.all_special_ids else None,
    )


def _check_options(template: Template, source: str, name: str) -> None:
    """Refuse options that the chat template would silently ignore."""
    for option in template.chat_options:
        if option in RESERVED:
            raise ConfigError(
                f"config: model.chat_options.{option} cannot be set, because Covey sets this "
                "option itself"
            )
        if not source:
            raise ConfigError(
                f"config: model.chat_options.{option} has no effect, because {name} is used "
                "without a chat template"
            )
        if not re.search(rf"\b{re.escape(option)}\b", source):
            raise ConfigError(
                f"config: model.chat_options.{option} has no effect, because the chat template of "
                f"{name} does not use this option"
            )


def chat_text(
    tokenizer: Any,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Apply the tokenizer's chat template, with or without the assistant's header."""
    arguments = {
        **tokenizer.special_tokens_map,
        **options,
        "add_generation_prompt": add_generation_prompt,
    }
    template = tokenizer.get_chat_template()
    return RENDERER.render(
        {"template": template, "messages": list(messages), "arguments": arguments}
    )


def probed(
    tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any], **more: bool
) -> str:
    """Return the result of `chat_text`; return empty text if the template refuses the messages."""
    try:
        return chat_text(tokenizer, messages, options, **more)
    except jinja2.TemplateError:
        return ""


# Multi-turn conversations as tokens: sampled tokens stay unchanged, and later turns are
# appended.
#
# After a turn of the policy, the chat template renders the conversation, including the new
# messages. If the rendered text begins with the previous prompt and the sampled text, Covey
# tokenizes only the new text and keeps all earlier tokens. Some templates change earlier turns:
# they remove thinking, trim whitespace or change the end of a turn. If a template changes
# earlier turns, the rendered conversation becomes the prompt of a new segment. The trainer
# treats each segment as a separate row.
#
# Some formats of tool calls consist of special tokens, which the content of a message cannot
# hold. Templates with such a format render a call from the message's `tool_calls`, in their own
# spelling. The policy's tokens are then followed by what the template renders between that call
# and the next turn.
#
# The text of a message never becomes a special token. If a message contains the text of a
# special token, such as `<|im_end|>`, Covey splits this text into ordinary tokens. In tool
# results, Covey also splits the text of other control tokens, such as `<think>`.


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
        function = {"name": PROBE, "description": PROBE, "parameters": {}}
        user = {"role": "user", "content": "1"}
        tools = [{"type": "function", "function": function}]
        return self._shows_probe([user], {"tools": tools})

    @cached_property
    def _takes_results(self) -> bool:
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
