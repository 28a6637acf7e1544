"""The lab finds the faults of bad rewards, and none in a good one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import run
from covey.errors import DataError
from covey.lab.rewards.cases import Case, read_cases, read_labelled
from covey.lab.rewards.checks import (
    Check,
    Lab,
    check_bounds,
    check_correct,
    check_determinism,
    check_hacks,
    check_labels,
    check_order,
    check_time,
)
from covey.recipes.agent_book import rewards as templates
from covey.rewards import ThinkAnswer
from covey.rewards.format import FORMATS
from covey.rewards.mix import Mix
from covey.scoring import Pool
from covey.tasks.arithmetic import Arithmetic
from tests.lab.rewards.bad_rewards import Faulty

PROMPTS = Arithmetic().held_out()[:6]


@contextmanager
def lab_of(reward: Any, timeout: float = 5.0) -> Iterator[Lab]:
    with closing(Pool(reward, "r", workers=2, timeout=timeout)) as pool:
        yield Lab(reward=reward, scorer=pool)


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.passed]


def test_a_good_reward_passes() -> None:
    with lab_of(ThinkAnswer()) as lab:
        solution, form = check_correct(lab, PROMPTS)
        assert (solution.passed, form.name) == (True, "think_answer")
        assert solution.figure == "think_answer 100%"
        hacks = check_hacks(lab, PROMPTS[:2], form)
        assert failed(hacks) == []
        assert len(hacks) > 40
        assert check_bounds(lab).passed
        assert check_determinism(lab).passed
        unscored, throughput = check_time(lab, PROMPTS, form)
        assert unscored.passed
        assert int(throughput.figure.split()[0].replace(",", "")) > 100


@pytest.mark.usefixtures("without_walls")
def test_a_reward_that_searches_the_whole_text_fails() -> None:
    with lab_of(Faulty(fault="contains")) as lab:
        solution, form = check_correct(lab, PROMPTS)
        assert solution.passed
        found = failed(check_hacks(lab, PROMPTS[:2], form))
    assert {
        "hack: answer in thinking only",
        "hack: numbers, target within",
        "hack: target in a comment",
        "hack: correct then wrong",
    } <= set(found)


@pytest.mark.usefixtures("without_walls")
def test_a_reward_for_an_empty_text_fails() -> None:
    paying = as_mix(correct_first=False)
    with lab_of(paying) as lab:
        _, form = check_correct(lab, PROMPTS)
        found = failed([*check_hacks(lab, PROMPTS[:2], form), check_order(lab, PROMPTS[:2], form)])
    assert set(found) == {"hack: empty text", "hack: gibberish with invented links", "order"}
    with lab_of(as_mix(correct_first=True)) as lab:
        _, form = check_correct(lab, PROMPTS)
        assert failed(check_hacks(lab, PROMPTS[:2], form)) == []
        assert check_order(lab, PROMPTS[:2], form).passed


def as_mix(correct_first: bool) -> Mix:
    """The default weights, as a plain sum or with `correct_first`."""
    return replace(templates.math(symbolic=False), correct_first=correct_first)


def test_a_reward_that_never_gives_its_maximum_fails() -> None:
    with lab_of(Faulty(fault="stingy")) as lab:
        solution, _ = check_correct(lab, PROMPTS)
    assert not solution.passed
    assert solution.figure == "none gets the full reward"
    assert "0.9" in solution.examples[0]


@pytest.mark.parametrize("fault", ["random", "process"])
def test_a_nondeterministic_reward_fails(fault: str) -> None:
    with lab_of(Faulty(fault=fault)) as lab:
        check_correct(lab, PROMPTS * 4)
        assert not check_determinism(lab).passed


def test_a_reward_outside_its_bounds_fails() -> None:
    with lab_of(Faulty(fault="range")) as lab:
        check_correct(lab, PROMPTS)
        check = check_bounds(lab)
    assert not check.passed
    assert check.figure == "-0.5 to 0.5 of 0 to 1"


def test_a_reward_that_hangs_fails() -> None:
    with lab_of(Faulty(fault="slow"), timeout=0.5) as lab:
        check_correct(lab, PROMPTS[:1])
        unscored, _ = check_time(lab, PROMPTS[:1], FORMATS["think_answer"])
    assert not unscored.passed
    assert unscored.figure.startswith("1 of 10")
    assert "took longer than 0.5 seconds" in unscored.examples[0]


def test_disagreement_with_labels_is_counted() -> None:
    prompt = PROMPTS[0]
    right = FORMATS["think_answer"].render("I add and subtract.", prompt.target)
    rows = [
        Case(prompt=prompt, text=right, correct=True),
        Case(prompt=prompt, text=prompt.target, correct=True),
        Case(prompt=prompt, text=right + " ", correct=False),
        Case(prompt=prompt, text="no", correct=False),
        Case(prompt=prompt, text="perhaps", correct=False),
    ]
    with lab_of(ThinkAnswer()) as lab:
        positives, negatives = check_labels(lab, rows, allowed=0.0)
        assert (positives.figure, negatives.figure) == ("1 of 3", "1 of 2")
        assert not positives.passed
        assert not negatives.passed
        lenient = check_labels(lab, rows, allowed=0.4)
        assert [check.passed for check in lenient] == [True, False]


def test_completions_are_read_from_files(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    rows = [
        {"completion": "<answer>2</answer>", "answer": 2, "question": "1+1?", "level": 3},
        {
            "text": "x",
            "answer": "y",
            "prompt": "?",
            "prompt_id": "p/1",
            "task": "t",
            "info": {"a": 1},
        },
        {"completion": "z", "correct": True},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, third = read_cases(file)
    assert (first.prompt.target, first.prompt.text, first.text) == (
        "2",
        "1+1?",
        "<answer>2</answer>",
    )
    assert first.prompt.info == {"level": 3}
    assert (second.prompt.id, second.prompt.task, second.prompt.info) == ("p/1", "t", {"a": 1})
    assert third.correct is True
    with pytest.raises(DataError, match="completion 1 has no label; add the field 'correct'"):
        read_labelled(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no completions"),
        ("{", "answers.jsonl:1 is not JSON"),
        ('{"text": "x"}\n[1]', "answers.jsonl:2 is a list, but each line must be a JSON object"),
        ('{"answer": "x"}', "answers.jsonl:1 has no completion text"),
        ('{"text": "x", "correct": 1}', "'correct' must be true or false, not 1"),
    ],
)
def test_bad_files_are_named_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "answers.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        read_cases(tmp_path / "answers.jsonl")


@pytest.mark.usefixtures("without_walls")
def test_the_command_fails_for_a_bad_reward(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rewards", "lab", "arithmetic", "--prompts", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"]
    assert report["reward_id"].startswith("think_answer@1#")
    arguments = ["rewards", "lab", "--prompts", "4", "--set", "reward.name=lm_book"]
    assert run(arguments) == 1
    shown = capsys.readouterr().out
    assert "FAIL" in shown
    assert "hack: repeated padding: the reward takes length for thinking" in shown
    assert "lm_book is kept as published. Known hacks: empty think;" in shown


def test_the_command_scores_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "answers.jsonl", tmp_path / "scores.jsonl"
    texts = [
        "<think>1 and 1</think><answer>2</answer>",
        "<think>1 or 1</think><answer>1</answer>",
        "2",
    ]
    file.write_text("".join(json.dumps({"text": t, "answer": "2"}) + "\n" for t in texts))
    assert run(["rewards", "score", str(file), "--out", str(out), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["completions"] == 3
    assert summary["mean_reward"] == pytest.approx((1.0 + 0.1 + 0.0) / 3)
    assert summary["success"] == pytest.approx(1 / 3)
    assert summary["parts"]["format"] == pytest.approx(2 / 3)
    assert [json.loads(line)["reward"] for line in out.read_text().splitlines()] == [1.0, 0.1, 0.0]
    assert run(["rewards", "score", str(file)]) == 0
    assert "correct 33.3%, unscored 0" in capsys.readouterr().out


def test_rollouts_of_a_run_can_be_scored_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    quick = [
        "train.steps=1",
        "rollout.prompts_per_step=4",
        "rollout.group_size=4",
        "evaluate.every=0",
    ]
    settings = [argument for setting in quick for argument in ("--set", setting)]
    assert run(["train", "--run", str(folder), *settings]) == 0
    capsys.readouterr()
    rollouts = folder / "rollouts" / "000001.jsonl"
    recorded = [json.loads(line) for line in rollouts.read_text().splitlines()]
    assert run(["rewards", "score", str(rollouts), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["mean_reward"] == pytest.approx(sum(r["reward"] for r in recorded) / 16)
    assert {r["reward_id"] for r in recorded} == {again["reward_id"]}


def test_rewards_are_listed_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rewards", "list"]) == 0
    listed = capsys.readouterr().out
    assert "lm_book" in listed
    assert "math_answer" in listed
    assert listed.count("Gamed by: ") == 5
    assert run(["rewards", "list", "math", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["accuracy"] == "0.6"
    assert run(["rewards", "list", "maths"]) == 2
    assert "did you mean 'math'?" in capsys.readouterr().err
