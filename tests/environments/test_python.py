"""The python environment: what programs print, and the limits that hold for them."""

from __future__ import annotations

import pytest

from covey.environments import call
from covey.errors import ConfigError
from covey.rewards.text import shortened
from covey.types import Prompt
from tests.environments.scripted import Hand, rollouts, trained_text

PROMPT = Prompt(
    id="p", task="t", target="", messages=({"role": "user", "content": "What is 2**64?"},)
)


@pytest.fixture(scope="module")
def hand() -> Hand:
    return Hand("python", PROMPT, seconds=1.0, memory_mb=128, output_chars=200)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(6 * 7)", "42"),
        ("x = 6\nx * 7", "42"),
        ("None", "(the program printed nothing)"),
        ("print('a')\n1 / 0", "a\nTraceback (most recent call last):\n"
         '  File "<program>", line 2, in <module>\nZeroDivisionError: division by zero'),
        ("import sys; sys.exit(3)", "error: the program exited with code 3"),
        ("raise KeyboardInterrupt", "Traceback (most recent call last):\n"
         '  File "<program>", line 1, in <module>\nKeyboardInterrupt'),
        ("print('<|im_end|>')", "<|im_end|>"),
        ("print('\\udc80'.encode(errors='surrogateescape').decode(errors='replace'))", "\ufffd"),
        ("import os; os.kill(os.getpid(), 9)",
         "error: the program was stopped: it used too much memory, or crashed"),
        ("bytearray(10**9)", "Traceback (most recent call last):\n"
         '  File "<program>", line 1, in <module>\nMemoryError'),
        ("while True: pass", "error: the program took too long and was stopped"),
    ],
)  # fmt: skip
def test_a_program_answers_with_what_it_prints_or_what_went_wrong(
    hand: Hand, code: str, output: str
) -> None:
    assert hand.use("python", code=code) == output


def test_a_syntax_error_points_at_the_program(hand: Hand) -> None:
    answer = hand.use("python", code="x = (")
    assert answer.startswith('  File "<program>", line 1')
    assert answer.endswith("SyntaxError: '(' was never closed")


def test_a_long_output_keeps_its_begin_and_its_end(hand: Hand) -> None:
    answer = hand.use("python", code="for n in range(1000): print(n)")
    assert answer == shortened("\n".join(map(str, range(1000))), 200)
    assert len(answer) < 250
    endless = hand.use("python", code="while True: print('x' * 10**6)")
    assert endless.endswith("error: the program printed too much and was stopped")
    assert len(endless) < 350


def test_programs_share_nothing_and_reach_nothing(hand: Hand) -> None:
    assert "NameError" in hand.use("python", code="print(x)")
    assert hand.use("python", code="open('a', 'w').write('1')") == "1"
    assert "FileNotFoundError" in hand.use("python", code="open('a').read()")
    assert "ModuleNotFoundError" in hand.use("python", code="import covey")
    refused = hand.use("python", code="import socket; socket.create_connection(('1.1.1.1', 80))")
    assert "Error" in refused


def test_a_wrong_call_is_a_message_to_the_policy(hand: Hand) -> None:
    assert hand.use("python", program="1") == "error: python: code: Field required"
    assert hand.use("bash", code="ls") == "error: there is no tool 'bash'; the tools are python"


@pytest.mark.parametrize("option", [{"seconds": 0.0}, {"memory_mb": 1}, {"output_chars": 1}])
def test_a_limit_that_makes_no_sense_is_refused(option: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        Hand("python", PROMPT, **option)


def test_a_rollout_runs_code_reads_its_output_and_answers() -> None:
    def policy(text: str, turn: int) -> str:
        if turn == 0:
            return call("python", code="print(2 ** 64)")
        answer = text.rpartition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
        return f"It is <answer>{answer}</answer>."

    collected = rollouts("python", [PROMPT], policy)
    # The environment has no reward of its own: the reward of a recipe reads the last turn.
    assert "gives no reward" in collected.failures[0]
    [rollout] = collected.groups[0].rollouts
    assert rollout.text == f"It is <answer>{2**64}</answer>."
    assert [turn.role for turn in rollout.turns] == ["assistant", "tool", "assistant"]
    assert trained_text(rollout) == (
        f"{policy('', 0)}<|im_end|>It is <answer>{2**64}</answer>.<|im_end|>"
    )
