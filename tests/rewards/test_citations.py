from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.errors import ConfigError
from covey.recipes.agent_book.citations import Citations, addresses, sources
from covey.rewards.score import Score
from covey.types import Prompt


def judge(text: str, info: dict[str, Any] | None = None, **options: Any) -> Score:
    messages = ({"role": "user", "content": "?"},)
    prompt = Prompt(id="p", task="t", messages=messages, target="", info=info or {})
    return Citations(**options)(prompt, text)


LIST = "\n\nReferences\n[1] Vaswani et al., Attention Is All You Need, 2017\n[2] https://a.org/b"
CITED = [
    ("", 0),
    ("no sources at all", 0),
    ("https://a.org/b", 1),
    ("https://a.org/b and https://a.org/c", 2),
    ("https://a.org/b, again https://a.org/b.", 1),
    ("https://a.org/b/ http://www.a.org/b https://A.org/b#part (https://a.org/b)!", 1),
    ("<https://a.org/b> [text](https://a.org/b)", 1),
    ("https://a.org/b?x=1 https://a.org/b?x=2", 2),
    (
        "https://en.wikipedia.org/wiki/Tea_(drink) and (https://en.wikipedia.org/wiki/Tea_(drink))",
        1,
    ),
    ("http://localhost/x http://a http://", 0),
    ("doi:10.1038/s41586-024-07566-y", 1),
    ("https://doi.org/10.1038/S41586-024-07566-Y, 10.1038/s41586-024-07566-y.", 1),
    (
        "arXiv:2402.03300v3, https://arxiv.org/abs/2402.03300 and https://arxiv.org/pdf/2402.03300v1",
        1,
    ),
    ("arXiv:2402.03300 and arXiv 2503.14476", 2),
    ("arXiv:math/0211159", 1),
    ("as shown [1][2]", 0),
    ("as shown [1, 2]", 0),
    ("a[1] + b[2]", 0),
    ("as shown [1][2]" + LIST, 2),
    ("as shown [1, 2]" + LIST, 2),
    ("as shown [1-2]" + LIST, 2),
    ("as shown [1] and [1]" + LIST, 2),
    ("not cited" + LIST, 1),
    ("as shown [3]" + LIST, 1),
    ("as shown [^1]\n\n[^1]: The Art of Computer Programming", 1),
    ("as shown [1]\n[1] ok", 0),
    ("as shown [1]\n[1] https://a.org/b\nhttps://a.org/b", 1),
    ("as shown [1][2]\n[1] The Same Long Title\n[2] the same long title!", 1),
    ("as shown [1]\n\nSources:\n1. A Title of Words", 1),
    ("as shown [1]\n\n1. First we add the numbers", 0),
    ("1. First we add\n2. Then we divide by two", 0),
    ("<think>https://a.org/b https://a.org/c</think> so it is", 0),
    ("<think>hm</think> https://a.org/b https://a.org/c", 2),
    ("<think>https://a.org/b", 0),
]


@pytest.mark.parametrize(("text", "count"), CITED)
def test_different_sources_are_counted(text: str, count: int) -> None:
    score = judge(text)
    assert score == Score(
        reward=min(1.0, count / 2), success=count >= 2, parts={"sources": count, "unknown": 0.0}
    )


def test_a_parenthesis_opened_in_an_address_belongs_to_it() -> None:
    text = "https://a.org/tea_(drink) (see https://a.org/cup)"
    assert addresses(text) == {"a.org/tea_(drink)", "a.org/cup"}


@pytest.mark.parametrize(
    ("minimum", "reward", "success"), [(1, 1.0, True), (3, 1.0, True), (4, 0.75, False)]
)
def test_the_minimum_is_an_option(minimum: int, reward: float, success: bool) -> None:
    score = judge("http://a.org http://b.org http://c.org", minimum=minimum)
    assert (score.reward, score.success) == (reward, success)


GIVEN = [
    (["https://a.org/b", "https://a.org/c"], "http://a.org/b/ and https://www.a.org/c.", 2, 0),
    (["https://a.org/b", "https://a.org/c"], "https://a.org/b and https://fake.org", 1, 1),
    (["https://a.org/b"], "https://x.org https://y.org", 0, 2),
    (["arXiv:2402.03300"], "https://arxiv.org/abs/2402.03300v2", 1, 0),
    (["doc1", "doc2", "doc3"], "tea is old [doc1], green [doc3] or black [doc1]", 2, 0),
    (["doc1", "doc2"], "tea is old [doc1], as shown in [doc7]", 1, 1),
    (["doc1", "doc2"], "[doc1, doc2]", 2, 0),
    (["1", "2"], "tea [1] is [2] old [9]", 2, 1),
    ([1, 2], "tea [1] is [2]", 2, 0),
    (["1", "2"], "a list [x] and a[3]", 0, 0),
    (["Lu Yu 760", "doc2"], "tea [Lu Yu 760]", 1, 0),
    (["doc1"], "doc1 says so", 0, 0),
    (["https://a.org/b"], "as in [1]\n[1] https://a.org/b", 1, 0),
]


@pytest.mark.parametrize(("given_sources", "text", "known", "unknown"), GIVEN)
def test_of_given_sources_only_those_count_and_others_cost(
    given_sources: list[Any], text: str, known: int, unknown: int
) -> None:
    score = judge(text, {"sources": given_sources})
    assert score.parts == {"sources": known, "unknown": unknown}
    assert score.reward == max(0.0, min(1.0, known / 2) - 0.25 * unknown)
    assert score.success == (known >= 2)


def test_the_cost_of_an_unknown_source_is_an_option() -> None:
    info = {"sources": ["doc1", "doc2"]}
    assert judge("[doc1][doc2][doc3]", info, unknown_penalty=1.0).reward == 0.0
    assert judge("[doc1][doc2][doc3]", info, unknown_penalty=0.0).reward == 1.0


@pytest.mark.parametrize("given_sources", ["https://a.org", 7, []])
def test_sources_that_are_no_list_are_the_fault_of_the_prompt(given_sources: object) -> None:
    with pytest.raises(ValueError, match=r"^prompt p: info\['sources'\] must list"):
        judge("text", {"sources": given_sources})


@pytest.mark.parametrize(
    "options", [{"minimum": 0}, {"unknown_penalty": -0.1}, {"unknown_penalty": 2}]
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^reward: {next(iter(options))} must "):
        Citations(**options)


@given(
    st.lists(st.sampled_from([text for text, _ in CITED] + ["[", "]", "https://", "10.1234/"])).map(
        "\n".join
    )
)
@settings(deadline=None, max_examples=60)
def test_an_address_is_a_source_and_repetition_adds_none(text: str) -> None:
    assert addresses(text) <= sources(text)
    assert addresses(text + "\n" + text) == addresses(text)


HOSTILE = {
    "angles": "<" * 1_000_000,
    "brackets": "[" * 1_000_000,
    "open marks": "[a," * 300_000,
    "marks": "[1]" * 300_000,
    "url": "https://" + "a" * 1_000_000,
    "urls": "https://a.b/ " * 75_000,
    "closing": "https://a.b/" + ")" * 1_000_000,
    "points": "https://a.b/" + "." * 1_000_000,
    "labels": "https://" + "a." * 500_000,
    "doi": "10.1234/" * 120_000,
    "lines": "[1] \n" * 200_000,
    "blanks": "arxiv" + " " * 1_000_000,
    "surrogates": "\ud800" * 1_000_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_megabyte_takes_less_than_a_second(text: str) -> None:
    begin = time.process_time()
    judge(text)
    assert time.process_time() - begin < 1.0
