from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.errors import ConfigError
from covey.recipes.agent_book.rewards import code
from covey.rewards.coherence import Efficiency, repetition, sentences
from covey.rewards.score import Score
from covey.types import Episode, EpisodeText, Prompt

CALL = "<tool_call>"


def judge(text: str, **options: int) -> Score:
    prompt = Prompt(id="p", task="t", messages=({"role": "user", "content": "?"},), target="49")
    return Efficiency(**options)(prompt, text)


def numbered(count: int) -> str:
    """Return this many different words."""
    return " ".join(f"w{i}" for i in range(count))


@pytest.mark.parametrize(
    ("calls", "reward"),
    [(0, 1.0), (3, 1.0), (4, 0.9), (5, 0.8), (7, 0.6), (8, 0.5), (9, 0.5)],
)
def test_steps_above_the_expected_cost_a_tenth_each_up_to_a_half(calls: int, reward: float) -> None:
    text = "".join(f"{CALL}f{i}(a{i})</tool_call>" for i in range(calls))
    score = judge(text)
    assert score.reward == pytest.approx(reward)
    assert score.parts["steps"] == pytest.approx(1 - (1 - reward) / 0.5)
    assert score.success == (reward == 1.0)


@pytest.mark.parametrize(
    ("words", "reward"),
    [(0, 1.0), (512, 1.0), (513, 1 - 0.3 / 512), (768, 0.85), (1024, 0.7), (5000, 0.7)],
)
def test_words_above_the_most_cost_up_to_three_tenths(words: int, reward: float) -> None:
    score = judge(numbered(words))
    assert score.reward == pytest.approx(reward)
    assert score.parts["length"] == pytest.approx(1 - (1 - reward) / 0.3)


def test_every_character_of_a_script_without_spaces_is_a_word() -> None:
    text = "".join(chr(0x4E00 + i) for i in range(768))
    assert judge(text).reward == pytest.approx(0.85)


SAID = [
    f"this is sentence number {word}"
    for word in ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
]


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("", 0.0),
        (". ".join(SAID), 0.0),
        (". ".join(SAID[:7] + SAID[:3]), 0.3),
        (". ".join(SAID[:6] + SAID[:4]), 0.4),
        ("! ".join(SAID[:6] + SAID[:4]), 0.4),
        ("? ".join(SAID[:6] + SAID[:4]), 0.4),
        ("\n".join(SAID[:6] + SAID[:4]), 0.4),
        ("\u3002".join(SAID[:6] + SAID[:4]), 0.4),
        ("\uff01".join(SAID[:6] + SAID[:4]), 0.4),
        ("\uff1f".join(SAID[:6] + SAID[:4]), 0.4),
        ("Some words here. some  words here. SOME WORDS HERE. Other words here.", 0.5),
        ("Again and again. Again and again. Again and again.", 0.0),
        ("yes. yes. yes. yes. yes.", 0.0),
    ],
)
def test_the_share_of_sentences_said_before(text: str, share: float) -> None:
    assert repetition(text) == share


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("It is 3.14159 or so. Then 2.5 more", ["it is 3.14159 or so", "then 2.5 more"]),
        ("version 1.2.3 works", ["version 1.2.3 works"]),
        ("short. ok. longer one", ["longer one"]),
    ],
)
def test_a_point_in_a_number_ends_no_sentence(text: str, kept: list[str]) -> None:
    assert sentences(text) == kept


PADDING = {
    "a word": "very " * 200,
    "a phrase": "let me think about it again " * 40,
    "no blanks": "ha" * 500,
    "one letter": "a" * 1000,
    "signs": "= " * 300,
    "signs without blanks": "-" * 400,
    "chinese": "\u6211\u4eec\u518d\u60f3\u60f3" * 60,
    "in a sentence": "The answer, which is " + "really " * 100 + "simple, is four.",
    "other case": "So It Is so it is " * 40,
}
HONEST = {
    "steps": "47+8=55, 55-6=49, 49+3=52, 52-9=43, 43+7=50, 50-4=46, 46+5=51, 51-8=43",
    "prose": "First add the eggs of all the hens, which makes sixty. Half of them are sold at the market "
    "for two coins each, so the farmer earns sixty coins. He pays ten for the cart and keeps fifty.",
    "code": "def area(r):\n    return 3.14159 * r ** 2\n\ndef rim(r):\n    return 2 * 3.14159 * r\n\n"
    "for r in range(10):\n    print(area(r), rim(r))\n",
    "json": '[{"name": "a", "age": 3}, {"name": "b", "age": 4}, {"name": "c", "age": 5}, {"name": "d", "age": 6}]',
    "many words": numbered(400),
}


@pytest.mark.parametrize("text", PADDING.values(), ids=PADDING)
def test_padding_without_sentence_marks_is_repetition_too(text: str) -> None:
    assert repetition(text) > 0.7
    assert judge(text).parts["repetition"] == 0.0


@pytest.mark.parametrize("text", HONEST.values(), ids=HONEST)
def test_honest_work_is_not(text: str) -> None:
    assert repetition(text) < 0.2
    assert judge(text) == Score(
        reward=1.0, success=True, parts={"steps": 1.0, "length": 1.0, "repetition": 1.0}
    )


@pytest.mark.parametrize("padded", [("begin", 1), ("end", -1)], ids=lambda p: p[0])
def test_of_a_long_text_beginning_and_end_are_read(padded: tuple[str, int]) -> None:
    halves = [numbered(30_000), "again " * 50_000][:: padded[1]]
    assert repetition(halves[0]) in (0.0, pytest.approx(1.0, abs=1e-3))
    assert repetition(" ".join(halves)) == pytest.approx(0.5, abs=0.1)


def test_three_tenths_said_twice_are_free_and_more_costs_two_tenths() -> None:
    assert judge(". ".join(SAID[:7] + SAID[:3])).reward == 1.0
    assert judge(". ".join(SAID[:6] + SAID[:4])).reward == pytest.approx(0.8)


def test_everything_at_once_leaves_nothing() -> None:
    score = judge(f"{CALL} again and again. " * 600)
    assert score == Score(
        reward=0.0, success=False, parts={"steps": 0.0, "length": 0.0, "repetition": 0.0}
    )


def test_limits_are_options() -> None:
    assert judge(CALL, expected_steps=0).reward == 0.9
    assert judge("a b c", max_words=2).reward == pytest.approx(0.85)


@pytest.mark.parametrize("options", [{"expected_steps": -1}, {"max_words": 0}])
def test_options_are_checked(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"^reward: {next(iter(options))} must be .* not -?[01]$"):
        Efficiency(**options)


@given(st.text(st.characters(), max_size=300), st.integers(1, 40))
@settings(deadline=None, max_examples=100)
def test_shares_and_rewards_lie_between_0_and_1(text: str, times: int) -> None:
    assert 0.0 <= repetition(text * times) <= 1.0
    score = judge(text * times)
    assert 0.0 <= score.reward <= 1.0
    assert all(0.0 <= part <= 1.0 for part in score.parts.values())


@pytest.mark.parametrize("unit", ["<", "a ", ". ", "\u4e2d", "\ud800", "\n", "a.b!"])
def test_a_megabyte_takes_less_than_a_second(unit: str) -> None:
    begin = time.process_time()
    judge(unit * (1_000_000 // len(unit)))
    assert time.process_time() - begin < 1.0


def episode(edits: int, rounds: int, tests: int = 0) -> EpisodeText:
    """Return the last text of an episode with this many edits, runs of the tests and turns."""
    names = ["edit", "rewrite"] * edits
    calls = [
        {"function": {"name": n, "arguments": {}}} for n in [*names[:edits], *["test"] * tests]
    ]
    turns = [{"role": "assistant", "content": "", "tool_calls": calls}]
    turns += [{"role": "assistant", "content": "", "tool_calls": [{"error": "malformed"}]}] * (
        rounds - 1
    )
    messages = ({"role": "user", "content": "?"}, *turns)
    whole = Episode(messages=messages, turn_rewards=(None,) * rounds, outcome=None, finish="stop")
    return EpisodeText.of("done", whole)


@pytest.mark.parametrize(
    ("edits", "rounds", "reward"),
    [(3, 5, 1.0), (4, 5, 0.9), (3, 6, 0.9), (5, 6, 0.7), (20, 1, 0.5), (20, 30, 0.5)],
)
def test_edits_and_rounds_above_the_expected_cost_a_tenth_each(
    edits: int, rounds: int, reward: float
) -> None:
    text = episode(edits, rounds, tests=9)
    assert judge(text, expected_edits=3, max_rounds=5).reward == pytest.approx(reward)
    assert judge(text).reward == 1.0, "without these options only the text counts"
    part = code(unsafe=True).parts["efficiency"]
    prompt = Prompt(id="p", task="t", messages=({"role": "user", "content": "?"},), target="")
    assert part(prompt, text).reward == pytest.approx(reward)
