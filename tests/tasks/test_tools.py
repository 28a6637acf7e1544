from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest

from covey.tasks.tools import SIGNATURES, Tools
from covey.types import Prompt

PROMPTS = {p.id: p for p in [*Tools().train(), *Tools().held_out()]}
TYPES = {"number": (int, float), "integer": (int,), "string": (str,)}


def tools() -> dict[str, dict[str, str]]:
    found = {}
    for name, inside in re.findall(r"^(\w+)\((.*)\)$", SIGNATURES, re.MULTILINE):
        found[name] = dict(part.split(": ", 1) for part in inside.split(", "))
    return found


def fits(value: Any, kind: str) -> bool:
    if kind.startswith('"'):
        return value in [choice.strip('"') for choice in kind.split(" | ")]
    return type(value) in TYPES[kind]


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_every_call_fits_the_signature_that_the_prompt_shows(prompt: Prompt) -> None:
    call = prompt.info["call"]
    signature = tools()[call["name"]]
    assert list(call["arguments"]) == list(signature)
    assert [k for k, v in call["arguments"].items() if not fits(v, signature[k])] == []
    assert SIGNATURES in prompt.messages[0]["content"]


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_answer_and_solution_are_the_call_as_json(prompt: Prompt) -> None:
    assert json.loads(prompt.target) == prompt.info["call"]
    inner = re.fullmatch(r"<tool_call>(.*)</tool_call>", prompt.info["solution"])
    assert inner is not None
    assert json.loads(inner.group(1)) == prompt.info["call"]


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_texts_that_must_be_copied_stand_in_the_request(prompt: Prompt) -> None:
    copied = {"city", "title", "query", "text", "label", "folder"}
    for key, value in prompt.info["call"]["arguments"].items():
        if key in copied:
            assert value in prompt.text


def test_there_are_enough_requests_for_every_tool_on_both_sides() -> None:
    assert len(PROMPTS) == 72
    assert len({p.text for p in PROMPTS.values()}) == 72
    task = Tools()
    assert (len(task.train()), len(task.held_out())) == (55, 17)
    for split in (task.train(), task.held_out()):
        assert set(Counter(p.info["call"]["name"] for p in split)) == set(tools())


def test_the_system_message_can_be_another_one() -> None:
    assert Tools(system="S").train()[0].messages[0]["content"] == "S"
