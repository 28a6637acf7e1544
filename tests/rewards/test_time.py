"""Every quick reward takes time linear in the length of a completion, whatever the completion is.

Quick rewards run in the training process without a time limit, so one slow pattern stalls a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from covey.config.schema import Named
from covey.rewards import Reward
from covey.rewards.instructions import CHECKS, MOST_CHARACTERS, follows
from covey.rewards.registry import REWARDS, make_reward, reward_options
from tests.rewards.test_mutations import NEEDS, PROMPTS

SHORT, FACTOR = 2000, 4
NOTICED = 0.01
"""Seconds of CPU below which a long text is fast; a quadratic pattern takes far longer."""

PIECES = [
    ".", "!", '."', ".)", ". ", ".\n", ".a", "...", "\u2026", "[", "]", "(", "{", "1", "1 ", "9.", "1,", "0x", "1e", " ",
    "\n", "\n ", " \n", "\t", "\r\n", "\\", "\\ ", "\u00e9", "\u6211", "\u2028", "\u0301", "\u00bd", "\u00b2", "\x00",
    "\ud800", "*", "**", "* ", "*a", "* * ", "***", "<", "<<", "<<a", ">", "`", "```", "```\n", "```json ", '"', "'",
    "-", "--", "#", "####", "=", "x=", "a", "a ", "A ", "A.", "Mr.", "e.g", "P.S.", "\nP.S.", "P", "Section ",
    "Section 1", "[a", "[a]", "<think>", "</think>", "<answer>", "</answer>", "<answer", "<tool_call>", '{"a":', "[1,",
    "\\boxed{", "}", "\\frac{", "\\text{", "_", "^", "^{", "~", "$", "|", ":", "a:", "http://", "http://a.", "@", "a@",
    "a.b", "sk-", "rm ", "rm -rf ", "sudo ", "eval(", "; ", "\\left", "=1", ",", ", ", "/", "1/", "+1",
]  # fmt: skip
ENDS = [("", "x"), ("```json", ""), ("<think>", "</think>1"), ("<answer>", "</answer>")]
"""What may stand before and after the repeated pieces, because many patterns fail only at the end."""

GIVEN: dict[str, Any] = {
    "keyword": "a", "keywords": ["a", "b"], "forbidden_words": ["zz"], "letter": "a", "let_frequency": 3,
    "let_relation": "at least", "relation": "at least", "num_sentences": 3, "num_paragraphs": 3, "nth_paragraph": 1,
    "first_word": "a", "num_words": 3, "num_placeholders": 2, "postscript_marker": "P.S.", "num_bullets": 2,
    "num_highlights": 2, "section_spliter": "Section", "num_sections": 2, "prompt_to_repeat": "a", "end_phrase": "end",
    "capital_relation": "at least", "capital_frequency": 2, "language": "en", "frequency": 2,
}  # fmt: skip


def seconds(function: Callable[[str], object], text: str, tries: int) -> float:
    taken = []
    for _ in range(tries):
        started = time.thread_time()
        function(text)
        taken.append(time.thread_time() - started)
    return min(taken)


def slow_pieces(function: Callable[[str], object]) -> dict[str, float]:
    """Return how much longer four times as long a text takes, for texts where it is over 8 times."""
    slow = {}
    for piece in PIECES:
        for before, after in ENDS:
            short = before + (piece * SHORT)[:SHORT] + after
            long = before + (piece * SHORT * FACTOR)[: SHORT * FACTOR] + after
            if seconds(function, long, 1) < NOTICED:
                continue
            ratio = seconds(function, long, 3) / seconds(function, short, 3)
            if ratio > 2 * FACTOR:
                slow[f"{before}{piece!a}{after}"] = round(ratio, 1)
    return slow


@pytest.mark.parametrize("name", CHECKS)
def test_every_instruction_is_checked_in_linear_time(name: str) -> None:
    assert slow_pieces(lambda text: follows(text, name, GIVEN)) == {}


OPTIONS: dict[str, dict[str, Any]] = {
    "math_answer": {"symbolic": False},
    "math": {"symbolic": False},
    "mix": {
        "parts": {
            "accuracy": {"name": "exact_text", "weight": 0.8},
            "format": {"name": "think_answer_form", "weight": 0.2, "graded": True},
        },
        "robust": True,
    },
    "by_task": {"tasks": {p.task: {"name": "lm_book"} for p in PROMPTS.values()}},
}


def quick_rewards() -> dict[str, Reward]:
    made = {}
    for name in REWARDS:
        if name not in ("judge", "environment", "code", "code_tests", "reasoning_gym", "sum"):
            section = Named.model_validate({"name": name, **OPTIONS.get(name, {})})
            made[name] = make_reward(name, reward_options(section))
    return {name: reward for name, reward in made.items() if reward.quick}


@pytest.mark.parametrize("name", quick_rewards())
def test_every_quick_reward_scores_in_linear_time(name: str) -> None:
    reward, prompt = quick_rewards()[name], PROMPTS[NEEDS.get(name, "arithmetic")]
    assert slow_pieces(lambda text: reward(prompt, text)) == {}


def test_the_longest_text_of_dots_is_counted_at_once() -> None:
    text = "." * (MOST_CHARACTERS - 1) + "x"
    assert seconds(lambda t: follows(t, "length_constraints:number_sentences", GIVEN), text, 1) < 1
