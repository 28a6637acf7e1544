"""Chat templates, which turn a conversation into the text and tokens of a prompt.

    auto     the tokenizer's chat template if it has one, else plain
    chat     the tokenizer's chat template
    plain    the messages' contents, joined by newlines
    a text   with {question}, and with {system} if the task has a system message

The prefill is text with which every completion begins. The prefill is part of the prompt, and is
never trained.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import string
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from signal import SIGPROF
from typing import Any

import jinja2

from covey.errors import ConfigError, DataError, ModelError, nearest
from covey.subprocesses import PipedProcess
from covey.types import Message

FORMS = ("auto", "chat", "plain")
FIELDS = ("question", "system")

RESERVED = frozenset(
    ("conversation", "messages", "chat_template", "tokenize", "add_generation_prompt",
     "continue_final_message", "return_dict", "strftime_now")
)  # fmt: skip
"""Arguments that Covey or transformers always passes to a chat template."""

MARK, SYSTEM_MARK = "COVEYUSER", "COVEYSYSTEM"
ADVICE = "set model.template to 'plain', or to a text with the field {question}"


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
            folded = _fold_system(messages) if self.folds_system else messages
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
        return _filled(self.template.form, messages) + self.template.prefill

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
    """Combine a template with a tokenizer, and test which features the chat template supports."""
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
    return Renderer(
        template=template,
        tokenizer=tokenizer,
        chat=True,
        folds_system=not (SYSTEM_MARK in both and MARK in both),
        turn_end=_turn_end(tokenizer, user, options),
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
    return _PROCESS.render(
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


def _turn_end(tokenizer: Any, user: Message, options: Mapping[str, Any]) -> int | None:
    """Return the special token that ends the assistant's turn in the chat template."""
    assistant: Message = {"role": "assistant", "content": SYSTEM_MARK}
    text = probed(tokenizer, [user, assistant], options, add_generation_prompt=False)
    _, shown, after = text.rpartition(SYSTEM_MARK)
    if not shown:  # the template shows no assistant messages, so nothing ends them
        return None
    ids = tokenizer.encode(after.strip(), add_special_tokens=False)
    return int(ids[0]) if ids and ids[0] in tokenizer.all_special_ids else None


def _fold_system(messages: Sequence[Message]) -> Sequence[Message]:
    """Move the system message into the first user message."""
    if len(messages) < 2 or messages[0]["role"] != "system":
        return messages
    system, first, *rest = messages
    content = f"{system['content']}\n\n{first['content']}"
    return [{**first, "content": content}, *rest]


def _filled(form: str, messages: Sequence[Message]) -> str:
    system = [m["content"] for m in messages if m["role"] == "system"]
    rest = [m["content"] for m in messages if m["role"] != "system"]
    if len(rest) != 1:
        raise DataError(
            "model: the text in model.template accepts only one message per prompt, but a prompt "
            f"has {len(rest)} messages; set model.template to 'chat' or 'plain'"
        )
    return form.format(question=rest[0], system="\n".join(system))


# Chat template rendering in a separate process with limits on time and memory.
#
# A chat template is a Jinja program that comes with a downloaded tokenizer. Jinja's sandbox
# protects Python objects, but does not prevent endless loops or gigabytes of output. A separate
# process therefore renders the templates, and the operating system limits its time and memory.

SECONDS = 5.0
"""Maximum CPU seconds to render one conversation; ordinary templates take milliseconds."""
MEGABYTES = 1024
LONGEST = 64 * 2**20
"""Maximum size of a rendered prompt in bytes."""


TO_START = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")
"""The environment variables that the process gets, because Python may not start without them."""
FAILED = 1
"""Python's exit code after an uncaught exception."""


class RenderProcess:
    """The process that renders templates; it starts on first use and restarts if it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: PipedProcess | None = None
        self._owner = 0

    def render(self, request: Mapping[str, Any]) -> str:
        """Render one conversation; raise jinja2.TemplateError if the template refuses it."""
        # Values that are not JSON, such as a token with properties, reach the template as text.
        data = json.dumps(request, default=str).encode()
        with self._lock:
            try:
                connection = self._connected()
                connection.send_bytes(data)
                reply = json.loads(connection.recv_bytes(LONGEST))
            except (EOFError, OSError):
                raise _unusable_worker(self._end()) from None
            except BaseException:  # otherwise the next request would read the old reply
                self._end()
                raise
        if "error" in reply:
            raise jinja2.TemplateError(reply["error"])
        return str(reply["text"])

    def start(self) -> None:
        """Start the rendering process if it is not running; a start takes a second."""
        with self._lock:
            self._connected()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _connected(self) -> Connection:
        # After a fork, parent and child share the pipe and could read each other's replies.
        if self._child is None or self._owner != os.getpid():
            self._child = PipedProcess(
                "covey.models.template_worker",
                str(SECONDS),
                str(MEGABYTES),
                environment={name: os.environ[name] for name in TO_START if name in os.environ},
            )
            self._owner = os.getpid()
        return self._child.connections[0]

    def _end(self) -> int:
        """End the process if it is still running, and return its exit code."""
        child = self._child
        if child is None or self._owner != os.getpid():
            return 0
        child.connections[0].close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(0.2)
        child.kill()
        self._child = None
        return child.process.returncode


def _unusable_worker(code: int) -> ModelError:
    if code == FAILED:
        return ModelError("model: the process that renders chat templates failed to start")
    why = f"took longer than {SECONDS:g} seconds" if code == -SIGPROF else "took too much memory"
    return ModelError(f"model: the chat template cannot render a prompt: it {why}; {ADVICE}")


_PROCESS = RenderProcess()
atexit.register(_PROCESS.close)


def start_rendering() -> None:
    """Start the rendering process in the background."""
    _PROCESS.start()
