"""Defines tool-call formats: how models write tool calls, and how Covey parses them.

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen and others do
    qwen3_coder  <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    llama3       a message that is {"name": ..., "parameters": {...}}, several separated by ;
    mistral      [TOOL_CALLS] [{"name": ..., "arguments": {...}}], and since version 11 of
                 Mistral's tokenizer [TOOL_CALLS]NAME[ARGS]{...} for each call
    glm4         NAME, a line break and a JSON object, ended by <|observation|> (GLM-4)
    glm45        <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
    deepseek     <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, a line break and the arguments in
                 a ```json block (V3, R1), or <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...} (V3.1)
    gpt_oss      <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    tags         <name>argument</name>, for tools that take one text

Covey parses the decoded tokens of a turn with their special tokens, because most formats mark calls
with special tokens. A tool call that cannot be parsed has an `error` instead of arguments. The
environment shows the error to the policy.
"""

# ruff: noqa: RUF001, RUF002 - DeepSeek's tokens are written with these signs

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from covey.types import Message

Call = dict[str, Any]
Tools = Mapping[str, Any]
"""Maps the name of each tool to the JSON schema of its arguments."""
LONGEST = 100_000
"""Maximum number of characters in a tool call. A tool call with more than LONGEST characters gets
an error instead of being parsed."""
_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*\Z", re.DOTALL)
_GLM4 = re.compile(r"\s*([A-Za-z_][\w.-]*)[ \t]*\n\s*(\{.*)\Z", re.DOTALL)
_MISTRAL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w*)\s*)?(?:\[ARGS\]|(?=\{))")
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
_DEEPSEEK = re.compile("<｜tool▁call▁begin｜>(.*?)(<｜tool▁call▁end｜>|\\Z)", re.DOTALL)
_DEEPSEEK_V3 = re.compile(r"\s*([^\s`{]+)\s*\n```(?:json)?\n(.*?)\n?```\s*\Z", re.DOTALL)
_HARMONY_END = re.compile(r"<\|(?:end|call|return|start)\|>")
_HARMONY_TO = re.compile(r"\bto=([\w.-]+)")


def call_of(name: str, arguments: Mapping[str, Any]) -> Call:
    return {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def unreadable(text: str, error: str, name: str = "") -> Call:
    """Return a placeholder for a tool call that could not be parsed, with the error."""
    return {**call_of(name, {}), "error": error, "text": text[:200]}


def hermes_calls(text: str, tools: Tools) -> list[Call]:
    """Parse the tool calls between `<tool_call>` and `</tool_call>`."""
    return _tagged_calls(text, _json_call)


def qwen3_coder_calls(text: str, tools: Tools) -> list[Call]:
    """Parse the calls of Qwen3-Coder and later models, in which every argument has a tag."""

    def read(body: str) -> Call:
        function = _FUNCTION.match(body)
        if function is None:
            return unreadable(body, "a call is <function=NAME>...</function>")
        name, (before, *parts) = function[1].strip(), function[2].split("<parameter=")
        given = []
        for part in parts:
            key, opened, rest = part.partition(">")
            value, _, after = rest.partition("</parameter>")
            before += after.strip() if opened else part
            given.append((key, value.removeprefix("\n").removesuffix("\n")))
        if before.strip():
            error = "an argument is <parameter=KEY>VALUE</parameter>, without text around it"
            return unreadable(body, error, name)
        return _typed_call(name, given, tools)

    return _tagged_calls(text, read)


def glm45_calls(text: str, tools: Tools) -> list[Call]:
    """Parse the calls of GLM-4.5 and later models."""

    def read(body: str) -> Call:
        name, *pairs = body.split("<arg_key>")
        if len(name.split()) != 1 or "<" in name:
            return unreadable(body, "a call begins with the name of a tool, and <arg_key> follows")
        given, wrong = [], False
        for pair in pairs:
            key, closed, rest = pair.partition("</arg_key>")
            between, opened, rest = rest.partition("<arg_value>")
            value, ended, after = rest.partition("</arg_value>")
            wrong |= not (closed and opened and ended) or bool((between + after).strip())
            given.append((key, value))
        if wrong:
            error = "an argument is <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value>"
            return unreadable(body, error, name.strip())
        return _typed_call(name.strip(), given, tools)

    return _tagged_calls(text, read)


def _tagged_calls(text: str, read: Callable[[str], Call]) -> list[Call]:
    return [
        unreadable(body, "the call has no </tool_call>")
        if not end
        else unreadable(body, f"the call is longer than {LONGEST} characters")
        if len(body) > LONGEST
        else read(body)
        for body, end in _HERMES.findall(text)
    ]


def _typed_call(name: str, given: Sequence[tuple[str, str]], tools: Tools) -> Call:
    """Return a call whose arguments were written as text, with the types that the tool declares."""
    declared = tools.get(name) or {}
    properties = declared.get("properties", {}) if isinstance(declared, Mapping) else {}
    keys = [key.strip() for key, _ in given]
    if len(set(keys)) < len(keys):
        return unreadable(name, "the call gives an argument twice", name)
    values = [
        _typed(value, properties.get(key)) for key, (_, value) in zip(keys, given, strict=True)
    ]
    return call_of(name, dict(zip(keys, values, strict=True)))


def _typed(text: str, schema: Any) -> Any:
    """Return an argument's text as the type in its JSON schema; text that does not fit stays text.

    Python's words for true, false and null are accepted, because templates write them.
    """
    words = {"True": "true", "False": "false", "None": "null"}
    written = words.get(text.strip(), text)
    options = schema.get("anyOf", [schema]) if isinstance(schema, Mapping) else []
    types = {option.get("type") for option in options if isinstance(option, Mapping)}
    if "string" in types:
        return None if "null" in types and written.strip() == "null" else text
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return text


def llama3_calls(text: str, tools: Tools) -> list[Call]:
    """Parse Llama 3 tool calls, which are messages of one or more JSON objects and nothing else."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return []
    calls: list[Call] = []
    decoder = json.JSONDecoder()
    while body:
        try:
            _, end = decoder.raw_decode(body)
        except (ValueError, RecursionError):
            return [*calls, _json_call(body)]
        calls.append(_json_call(body[:end]))
        body = body[end:].lstrip("; \n\t\r,")
        if body and not body.startswith("{"):
            return [*calls, unreadable(body, "text follows the call")]
    return calls


def mistral_calls(text: str, tools: Tools) -> list[Call]:
    """Parse the calls after each `[TOOL_CALLS]`: a JSON list, or names with arguments."""
    _, *pieces = text.split("[TOOL_CALLS]")
    calls: list[Call] = []
    for piece in pieces:
        if piece.lstrip().startswith(("[", "{")):
            calls += _mistral_list(piece.strip())
        elif call := _MISTRAL.match(piece):
            calls.append(_with_id(_arguments_call(call[1], piece[call.end() :]), call[2]))
        else:
            calls.append(unreadable(piece, "[TOOL_CALLS] is followed by NAME[ARGS]{...} or a list"))
    return calls


def _mistral_list(body: str) -> list[Call]:
    listed, error = _json(body, "the call is")
    if error:
        return [unreadable(body, error)]
    return [
        _with_id(_call_of_value(value, body), value.get("id") if isinstance(value, dict) else None)
        for value in (listed if isinstance(listed, list) else [listed])
    ] or [unreadable(body, "the list of calls is empty")]


def _with_id(call: Call, given: Any) -> Call:
    """Add the identifier that the policy gave its call, if Mistral's templates would accept it."""
    fits = isinstance(given, str) and _MISTRAL_ID.fullmatch(given)
    return {**call, "id": given} if fits else call


def glm4_calls(text: str, tools: Tools) -> list[Call]:
    """Parse GLM-4's calls: a message that is the name of a tool and a JSON object below it."""
    found = [_GLM4.match(message) for message in text.split("<|assistant|>")]
    return [_arguments_call(call[1], call[2]) for call in found if call]


def deepseek_calls(text: str, tools: Tools) -> list[Call]:
    """Parse DeepSeek's calls, with a ```json block (V3, R1) or with the bare arguments (V3.1)."""
    found = _DEEPSEEK.findall(text)
    if not found and "<｜tool▁calls▁begin｜>" in text:
        return [unreadable(text, "the list of calls is empty")]
    return [
        _deepseek_call(body) if end else unreadable(body, "the call has no <｜tool▁call▁end｜>")
        for body, end in found
    ]


def _deepseek_call(body: str) -> Call:
    kind, separator, rest = body.partition("<｜tool▁sep｜>")
    if not separator:
        return unreadable(body, "the call has no <｜tool▁sep｜>")
    if fenced := _DEEPSEEK_V3.match(rest):
        return _arguments_call(fenced[1], fenced[2])
    return _arguments_call(kind.strip(), rest)


def gpt_oss_calls(text: str, tools: Tools) -> list[Call]:
    """Parse gpt-oss's calls: messages to a recipient in the harmony format."""
    addressed = [(_HARMONY_TO.search(head), body) for head, body in _harmony_messages(text)]
    return [_arguments_call(to[1].removeprefix("functions."), body) for to, body in addressed if to]


def gpt_oss_content(text: str) -> str:
    """Return the text of a harmony turn that is meant for the user: its last final message."""
    found = _harmony_messages(text)
    final = [body for head, body in found if "<|channel|>final" in head]
    return final[-1] if final else "" if found else text


def _harmony_messages(text: str) -> list[tuple[str, str]]:
    """Return the header and the body of each message of a harmony turn."""
    parts = [part.partition("<|message|>") for part in _HARMONY_END.split(text)]
    return [(head, body) for head, found, body in parts if found]


def tag_calls(text: str, tools: Tools) -> list[Call]:
    """Parse tool calls of the form `<name>argument</name>`, where `name` is the name of a tool."""
    if not tools:
        return []
    names = "|".join(map(re.escape, tools))
    return [
        call_of(name, {"": body})
        if end
        else unreadable(body, f"the call of {name} has no </{name}>")
        for name, body, end in re.findall(rf"<({names})>(.*?)(</\1>|\Z)", text, re.DOTALL)
    ]


def _json_call(body: str) -> Call:
    value, error = _json(body, "the call is")
    return unreadable(body, error) if error else _call_of_value(value, body)


def _call_of_value(value: Any, body: str) -> Call:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return unreadable(body, "a call is an object with a name and arguments")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return _arguments_call(name, arguments)
    if not isinstance(arguments, dict):
        return unreadable(body, "the arguments are not an object", name)
    return call_of(name, arguments)


def _arguments_call(name: str, written: str) -> Call:
    """Parse the arguments of the call of `name`, a JSON object."""
    arguments, error = _json(written.strip() or "{}", "the arguments are")
    if error:
        return unreadable(written, error, name)
    if not isinstance(arguments, dict):
        return unreadable(written, "the arguments are not an object", name)
    return call_of(name, arguments)


def _json(text: str, what: str) -> tuple[Any, str]:
    """Return the parsed text and no error, or the error; `what` begins the error."""
    if len(text) > LONGEST:
        return None, f"{what} longer than {LONGEST} characters"
    try:
        return json.loads(text), ""
    except ValueError as error:
        return None, f"{what} not JSON: {error}"
    except RecursionError:
        return None, f"{what} nested too deeply"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A format of tool calls."""

    read: Callable[[str, Tools], list[Call]]
    """A function that parses the tool calls in a text, given the tools."""
    example: str
    """A call as a model writes it, for messages."""
    marks: tuple[str, ...] = ()
    """Texts that all occur in a chat template that describes this format."""
    stops: Callable[[Tools], list[str]] = lambda tools: []
    """A function that returns the stop strings of tool calls, given the tools."""
    instruction: str = ""
    """Instructions for models whose chat template does not support tools. Covey replaces the
    placeholder `{tools}` with the JSON schemas of the tools."""
    apart: bool = False
    """Whether chat templates render a call from the message's `tool_calls` only, because the
    content of a message cannot hold the special tokens of the format."""
    arguments_as_text: bool = False
    """Whether chat templates expect the arguments as JSON text and not as an object."""
    one_per_turn: bool = False
    """Whether a turn ends after its first call anyway."""
    content: Callable[[str], str] | None = None
    """A function that returns a message's content from a turn with its special tokens; None if the
    content is the turn without its special tokens."""


_JSON_INSTRUCTION = (
    "You can call tools. Each is described by a JSON schema between <tools> and </tools>:\n"
    "<tools>\n{tools}\n</tools>\n\n"
)
CALL_FORMATS: Mapping[str, CallFormat] = MappingProxyType(
    {
        "gpt_oss": CallFormat(
            read=gpt_oss_calls,
            example="<|channel|>commentary to=functions.NAME<|message|>{...}<|call|>",
            marks=("<|channel|>", "functions."),
            apart=True,
            one_per_turn=True,
            content=gpt_oss_content,
        ),
        "deepseek": CallFormat(
            read=deepseek_calls,
            example="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>",
            marks=("<｜tool▁call▁begin｜>",),
            stops=lambda tools: ["<｜tool▁call▁end｜>"],
            apart=True,
            arguments_as_text=True,
        ),
        "mistral": CallFormat(
            read=mistral_calls,
            example='[TOOL_CALLS] [{"name": ..., "arguments": {...}}]',
            marks=("[TOOL_CALLS]",),
            apart=True,
        ),
        "glm45": CallFormat(
            read=glm45_calls,
            example="<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
            marks=("<tool_call>", "<arg_key>"),
            stops=lambda tools: ["</tool_call>"],
            apart=True,
        ),
        "qwen3_coder": CallFormat(
            read=qwen3_coder_calls,
            example="<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function>"
            "</tool_call>",
            marks=("<tool_call>", "<function="),
            stops=lambda tools: ["</tool_call>"],
        ),
        "hermes": CallFormat(
            read=hermes_calls,
            example='<tool_call>{"name": ..., "arguments": {...}}</tool_call>',
            marks=("<tool_call>",),
            stops=lambda tools: ["</tool_call>"],
            instruction=_JSON_INSTRUCTION + "To call a tool, write its name and arguments as JSON:"
            '\n<tool_call>\n{{"name": <name>, "arguments": <arguments>}}\n</tool_call>',
        ),
        "glm4": CallFormat(
            read=glm4_calls,
            example="NAME, a line break and {...}",
            marks=("[gMASK]", "metadata"),
            apart=True,
            one_per_turn=True,
        ),
        "llama3": CallFormat(
            read=llama3_calls,
            example='{"name": ..., "parameters": {...}} and nothing else',
            marks=("ipython",),
            instruction=_JSON_INSTRUCTION + "To call a tool, answer with nothing but JSON:\n"
            '{{"name": <name>, "parameters": <arguments>}}',
        ),
        "tags": CallFormat(
            read=tag_calls,
            example="<NAME>argument</NAME>",
            stops=lambda tools: [f"</{name}>" for name in tools],
        ),
    }
)
"""The tool-call formats. The first format whose `marks` occur in a chat template is its format."""


def format_in(template: str) -> str:
    """Return the name of the format that a chat template describes, or an empty text."""
    described = (
        name
        for name, form in CALL_FORMATS.items()
        if form.marks and all(mark in template for mark in form.marks)
    )
    return next(described, "")


def assistant_message(text: str, call_format: CallFormat, tools: Tools, raw: str = "") -> Message:
    """Return the policy's text as a chat message, with the tool calls found in the turn.

    `raw` is the turn with its special tokens, in which the calls are; without `raw`, it is `text`.
    A call in another format becomes an unreadable call, whose error names both formats.
    """
    before, thought, after = (raw or text).partition("</think>")
    spoken = after if thought else before
    calls = call_format.read(spoken, tools)
    if tools and all("error" in call for call in calls):
        calls = _foreign_calls(spoken, call_format, tools) or calls
    content = call_format.content(raw) if raw and call_format.content else text
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return {**message, "tool_calls": calls} if calls else message


def _foreign_calls(text: str, call_format: CallFormat, tools: Tools) -> list[Call]:
    """Return the calls of known tools in another format as one unreadable call, or nothing."""
    for name, other in CALL_FORMATS.items():
        if other is call_format or name == "tags":
            continue
        called = [call["function"]["name"] for call in other.read(text, tools)]
        if any(each in tools for each in called):
            error = (
                f"this call has the format {name}, which is not read here; write a call as "
                f"{call_format.example}"
            )
            return [{**unreadable(text, error), "format": name}]
    return []
