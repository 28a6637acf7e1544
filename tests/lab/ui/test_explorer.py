"""The step explorer: laws of the small step, and the page of the docs against the code."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from covey.errors import ConfigError
from covey.lab.explain.effect import small_step
from covey.objective import ALGORITHMS
from tests.lab.ui.browser import Browser

DOCS = Path(__file__).parents[3] / "docs"
GROUP = {"rewards": "1,0,0,1", "lengths": "2,4,3,1"}


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("explorer", DOCS / "images/step_explorer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_step_of_grpo_is_its_formula() -> None:
    # Four rewards of mean 1/2, with a standard deviation (ddof 1) of sqrt(1/3); no KL, no drift.
    found = small_step({"algorithm": "grpo", "beta": "0", "drift": "0", **GROUP})
    advantage = 0.5 / (1 / 3) ** 0.5
    for row, sign, length in zip(found["rows"], (1, -1, -1, 1), (2, 4, 3, 1), strict=True):
        assert row["ratio"] == [1.0] * length
        assert row["clipped"] == [""] * length
        assert row["advantage"] == pytest.approx([sign * advantage] * length, rel=1e-3)
        assert row["gradient"] == pytest.approx([-sign * advantage / length / 4] * length, rel=1e-3)


def test_a_token_beyond_the_clip_has_no_gradient() -> None:
    asked = {
        "algorithm": "grpo",
        "beta": "0",
        "drift": "0.5",
        "clip_high": "0.2",
        "clip_low": "0.2",
    }
    tokens = [
        (row["advantage"][t], ratio, row["clipped"][t], row["gradient"][t])
        for row in small_step({**asked, **GROUP})["rows"]
        for t, ratio in enumerate(row["ratio"])
    ]
    beyond = [(a > 0 and ratio > 1.2) or (a < 0 and ratio < 0.8) for a, ratio, _, _ in tokens]
    assert any(beyond)
    assert [gradient == 0 for *_, gradient in tokens] == beyond
    assert [clip != "" for _, _, clip, _ in tokens] == beyond


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_can_be_explored(name: str) -> None:
    found = small_step({"algorithm": name, "drift": "0.1", **GROUP})
    assert [len(row["gradient"]) for row in found["rows"]] == [2, 4, 3, 1]


@pytest.mark.parametrize("wrong", [{"rewards": "1"}, {"rewards": "a,b"}, {"algorithm": "gpro"}])
def test_a_wrong_question_is_an_error_in_words(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        small_step({**GROUP, **wrong})


def test_the_page_of_the_docs_has_our_script_and_our_numbers(made: ModuleType) -> None:
    # After a change: make docs.
    text = (DOCS / "step-explorer.html").read_text(encoding="utf-8")
    table = json.loads(re.search(r'id="table">(.*?)</script>', text, re.DOTALL).group(1))
    assert text == made.page(table["answers"])
    assert len(table["answers"]) == 6 * 4 * 3 * 3
    for key in list(table["answers"])[::37]:
        again = made.rounded(small_step(made.question(*key.split("|"))))
        assert table["answers"][key]["algorithm"] == again["algorithm"]
        for row, mine in zip(table["answers"][key]["rows"], again["rows"], strict=True):
            assert row["clipped"] == mine["clipped"]
            assert row["gradient"] == pytest.approx(mine["gradient"], rel=1e-5, abs=1e-8)


def test_the_page_of_the_docs_works_offline(browser: Browser) -> None:
    browser.open((DOCS / "step-explorer.html").as_uri())
    browser.wait("document.querySelectorAll('.step-token').length === 33")
    browser.wait("document.querySelectorAll('.step-token.clipped').length > 0")
    shown = "[...document.querySelectorAll('.step-row:not(.head)')].map((row) => row.innerText)"
    browser.wait(f"{shown}.length === 6")
    found = small_step(
        {"algorithm": "grpo", "rewards": "1,0,0,1,0,0", "lengths": "4,8,6,5,7,3", "drift": "0.3"}
    )
    for text, row in zip(browser.run(shown), found["rows"], strict=True):
        advantage, *ratios = [float(word) for word in text.split()]
        assert advantage == (1.29 if row["reward"] else -0.645)
        assert ratios == [float(f"{ratio:.3g}") for ratio in row["ratio"]]  # rounded once
    assert browser.run("document.querySelectorAll('.token-legend li').length") == 4
    browser.run(
        "(() => { const s = document.querySelectorAll('select')[1]; s.value = '1,1,1,1,1,1'; s.dispatchEvent(new Event('change')); })()"
    )
    gradients = "[...document.querySelectorAll('.step-token')].map((t) => Math.abs(Number(t.dataset.gradient)))"
    browser.wait(f"Math.max(...{gradients}) < 0.01")  # equal rewards teach nothing but the KL
    assert browser.problems() == []
