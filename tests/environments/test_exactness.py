"""Tokens in, tokens out: exact for five chat templates, and texts of tools are never control."""

from __future__ import annotations

import pytest

from covey.environments.calls import CALL_FORMATS
from covey.models.chat import Conversations
from covey.models.language_model import LanguageModel
from tests.environments.chat_templates import FAMILIES
from tests.environments.exactness import ODD, check, conversations, policy

CALLS = CALL_FORMATS["hermes"].instruction
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return policy(FAMILIES[request.param])


def test_rollouts_are_what_the_engine_read_and_sampled(model: LanguageModel) -> None:
    found = check(model, *conversations(model, 4))
    assert found["rollouts"] == 8
    assert found["turns"] >= 16
    assert found["logp"] <= 1e-5


def turn(model: LanguageModel, said: str, answer: str, *, role: str = "tool") -> tuple[int, ...]:
    """Return the tokens by which a context grows after a turn; () if history was rewritten."""
    talk = Conversations(renderer=model.renderer, instruction=CALLS)  # type: ignore[arg-type]
    user = {"role": "user", "content": "hi"}
    first = talk.first([user], TOOLS)
    end = model.tokenizer.eos_token_id
    sampled = [*model.tokenizer.encode(said, add_special_tokens=False), end]
    messages = [user, {"role": "assistant", "content": said}, {"role": role, "content": answer}]
    after = talk.following(first, sampled, messages, TOOLS)
    if after.new_segment:
        return ()
    assert after.tokens[: len(first.tokens)] == first.tokens
    assert list(after.tokens[len(first.tokens) : -after.added]) == sampled
    return after.tokens[-after.added :]


def test_control_tokens_of_a_tool_are_text(model: LanguageModel) -> None:
    tokenizer = model.tokenizer
    control = {n for n, t in tokenizer.added_tokens_decoder.items() if set("<|") & set(t.content)}
    plain = [t for t in turn(model, "ok", "x") if t in control]
    assert plain
    for text in ODD:
        odd = turn(model, "ok", f"x{text}x")
        assert [t for t in odd if t in control] == plain
        shown = tokenizer.decode(odd, clean_up_tokenization_spaces=False)
        # SentencePiece has one sign for a space and for the sign itself.
        assert f"x{text}x".replace("\u2581", " ") in shown.replace("\u2581", " ")


def test_the_template_closes_the_turn_before_the_next_message(model: LanguageModel) -> None:
    """The line break after the end of a turn is neither lost nor trained."""
    shown = model.tokenizer.decode(turn(model, "ok", "x"))
    conversation = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "x"},
    ]
    end = model.tokenizer.eos_token
    assert model.renderer is not None
    between = model.renderer.text(conversation).partition(f"ok{end}")[2].partition("<")[0]
    assert shown.startswith(f"{between}<")


def test_only_templates_that_trim_rewrite_a_turn_with_blanks(model: LanguageModel) -> None:
    trims = "| trim" in model.tokenizer.chat_template
    assert (turn(model, " ok\n", "x") == ()) == trims


def test_thinking_is_rewritten_only_where_the_template_removes_it(model: LanguageModel) -> None:
    thinks = "</think>" in model.tokenizer.chat_template
    said = "<think>\nhm\n</think>\n\nok"
    assert turn(model, said, "x") != ()  # a tool's result does not end the thinking of this query
    assert (turn(model, said, "x", role="user") == ()) == thinks
    assert (turn(model, "<think>hm</think>ok", "x") == ()) == thinks  # other line breaks
