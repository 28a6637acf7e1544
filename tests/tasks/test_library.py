"""The library and worlds tasks: what their prompts hold."""

from __future__ import annotations

import pytest

from covey.errors import ConfigError
from covey.recipes.agent_search.library import Library, documents
from covey.recipes.games.environment import Worlds


def test_every_answer_stands_in_the_documents_that_are_its_sources() -> None:
    texts = documents()
    task = Library()
    prompts = [*task.train(), *task.held_out()]
    assert len({p.id for p in prompts}) == len(prompts) == 800
    for prompt in prompts:
        first, last = (texts[prompt.info["sources"][end]] for end in (0, -1))
        town = prompt.id.split("/")[2]
        assert town in prompt.text.partition("?")[0]
        assert first.startswith(f"{town} is a town.")
        assert prompt.target in last


def test_no_town_is_in_both_splits() -> None:
    task = Library()
    town = lambda prompt: prompt.id.split("/")[2]  # noqa: E731
    train, held_out = ({town(p) for p in split} for split in (task.train(), task.held_out()))
    assert not train & held_out
    assert len(train) + len(held_out) == 400
    assert 0.2 < len(held_out) / 400 < 0.3


def test_questions_of_one_hop_have_one_source() -> None:
    prompts = Library(max_hops=1).train()
    assert {len(p.info["sources"]) for p in prompts} == {1}
    assert {len(p.info["sources"]) for p in Library().train()} == {1, 2}
    with pytest.raises(ConfigError, match="max_hops"):
        Library(max_hops=3)


def test_no_world_is_in_both_splits() -> None:
    task = Worlds(train_size=50, held_out_size=50)
    worlds = [p.info["world"] for p in [*task.train(), *task.held_out()]]
    assert len(set(worlds)) == 100
