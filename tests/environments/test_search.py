"""The search environment: BM25, what its tools show, and the reward for citations."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from covey.environments import call
from covey.errors import CoveyError
from covey.recipes.agent_search.environment import Index
from covey.recipes.agent_search.library import Library, documents
from covey.types import Prompt
from tests.environments.scripted import Hand, rollouts, trained_text

TEXTS = {
    "a": "the red fox",
    "b": "the fox and the fox cub",
    "c": "a long text about the sea that has nothing else in it",
}


def test_bm25_has_the_value_of_its_formula() -> None:
    mean = (3 + 6 + 12) / 3
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    once = idf * 2.5 / (1 + 1.5 * (0.25 + 0.75 * 3 / mean))
    twice = idf * 2 * 2.5 / (2 + 1.5 * (0.25 + 0.75 * 6 / mean))
    assert Index(TEXTS).scores("Fox!") == pytest.approx({"a": once, "b": twice})


def test_the_best_documents_come_first_and_equal_ones_by_name() -> None:
    index = Index(TEXTS)
    assert index.best("fox", 5) == ["b", "a"]
    assert index.best("red fox", 1) == ["a"]
    assert index.best("whale", 5) == []
    assert Index({"y": "same", "x": "same"}).best("same", 2) == ["x", "y"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "birds").mkdir()
    (tmp_path / "birds/covey.md").write_text("A covey is a small flock of partridges.\n")
    (tmp_path / "sea.txt").write_text("x " * 3000 + "The narwhal has a tusk. " + "y " * 3000)
    (tmp_path / "image.png").write_bytes(b"\x00")
    return tmp_path


def prompt(target: str, sources: list[str] | None = None) -> Prompt:
    return Prompt(
        id="p", task="t", target=target, messages=({"role": "user", "content": "What is it?"},),
        info={} if sources is None else {"sources": sources},
    )  # fmt: skip


def test_documents_of_a_folder_are_found_and_read(folder: Path) -> None:
    hand = Hand("search", prompt("x"), folder=str(folder), snippet_chars=60, document_chars=500)
    assert hand.use("search", query="flock?") == (
        "[birds/covey] A covey is a small flock of partridges."
    )
    snippet = hand.use("search", query="narwhal tusk")
    assert re.fullmatch(r"\[sea\] \.\.\..*narwhal has a tusk.*\.\.\.", snippet.split("\n")[0])
    assert len(snippet.split("\n")[0]) == len("[sea] ......") + 60
    assert hand.use("search", query="zebra") == "nothing found"
    assert hand.use("read", document="[birds/covey]").startswith("A covey is")
    assert len(hand.use("read", document="sea")) < 550
    missing = hand.use("read", document="birds/cove")
    assert missing.startswith("error: there is no document 'birds/cove'")
    assert "birds/covey" in missing
    assert hand.use("read", document="../../etc/passwd").startswith("error: there is no document")


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_a_folder_without_documents_is_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CoveyError, match=name):
        Hand("search", prompt("x"), folder=str(tmp_path / name))


@pytest.mark.parametrize(
    ("seen", "answer", "outcome"),
    [
        (["doc-1", "doc-2"], "<answer>Rome</answer> [doc-1] [doc-2]", (0.7, 0.3)),
        (["doc-1", "doc-2"], "<answer>rome.</answer> [doc-1, doc-2]", (0.7, 0.3)),
        (["doc-1", "doc-2"], "<answer>Rome</answer> [doc-1]", (0.7, 0.15)),
        (["doc-1"], "<answer>Rome</answer> [doc-1]", (0.7, 0.15)),
        # A document that was never read, and one that does not exist, cost a quarter.
        (["doc-1"], "<answer>Rome</answer> [doc-1] [doc-2]", (0.7, 0.075)),
        (["doc-1", "doc-2"], "<answer>Rome</answer> [doc-1] [doc-2] [doc-9999]", (0.7, 0.225)),
        ([], "<answer>Rome</answer> [doc-1] [doc-2]", (0.7, 0.0)),
        (["doc-1", "doc-2"], "<answer>Bonn</answer> [doc-1] [doc-2]", (0.0, 0.3)),
        (["doc-1", "doc-2"], "", (0.0, 0.0)),
    ],
)
def test_a_citation_counts_if_it_is_a_source_that_was_shown(
    seen: list[str], answer: str, outcome: tuple[float, float]
) -> None:
    hand = Hand("search", prompt("Rome", ["doc-1", "doc-2"]))
    for document in seen:
        hand.use("read", document=document)
    assert hand.say(answer).done
    assert list(hand.outcome().values()) == pytest.approx(outcome)


def test_without_sources_the_answer_is_the_whole_reward() -> None:
    hand = Hand("search", prompt("Rome"))
    hand.say("<answer>Rome</answer>")
    assert hand.outcome() == {"answer": 1.0}


def test_an_episode_that_ends_at_a_limit_has_no_answer() -> None:
    hand = Hand("search", prompt("Rome", ["doc-1"]))
    hand.say("<answer>Rome</answer> [doc-1]" + call("read", document="doc-1"))
    assert hand.outcome() == {"answer": 0.0, "citations": 0.0}


def detective(text: str, turn: int) -> str:
    """Search for the building; then for its builder; then answer from what was found."""
    what = re.search(r"(?:was|of) the ([\w ]+) of (\w+) (?:opened|born)", text)
    assert what is not None
    if turn == 0:
        return call("search", query=f"{what[2]} {what[1]}")
    town = re.search(rf"\[(doc-\d+)\] {what[2]} is.*?built by (\w+ \w+) and opened in (\d+)", text)
    assert town is not None
    if "In which year" in text:
        return f"<answer>{town[3]}</answer> [{town[1]}]"
    if turn == 1:
        return call("search", query=f"{town[2]} born")
    person = re.search(rf"\[(doc-\d+)\] {town[2]}, \w+, was born in (\w+)", text)
    assert person is not None
    return f"<answer>{person[2]}</answer> [{town[1]}] [{person[1]}]"


def test_rollouts_follow_one_document_to_the_next() -> None:
    questions = Library().held_out()[:12]
    rewarded = [g.rollouts[0] for g in rollouts("search", questions, detective).groups]
    assert [(r.success, r.reward) for r in rewarded] == [(True, pytest.approx(1.0))] * 12
    turns = [sum(turn.role == "assistant" for turn in r.turns) for r in rewarded]
    assert turns == [2, 3] * 6  # one hop, two hops
    assert "is a town" not in "".join(map(trained_text, rewarded))


def test_guessing_does_not_pay() -> None:
    questions = Library().held_out()[:4]
    guess = lambda text, turn: "<answer>1800</answer> [doc-1]"  # noqa: E731
    rewards = [g.rollouts[0].reward for g in rollouts("search", questions, guess).groups]
    assert rewards == [0.0] * 4
    assert len(documents()) > 600
