"""The Reasoning Gym reward: the score from the dataset's own scorer, corrected for known flaws.

Some scorers of reasoning_gym evaluate the answer as code. A scorer that evaluates the answer runs
in a sandbox, and gets only plain data or arithmetic. Some scorers are flawed: one scorer accepts
every answer, another accepts `nan`, a third accepts `0` for `0.375`, and several accept `not A` and
`A or B` for `A`. This reward gives 0 to wrong answers that a flawed scorer accepts.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from typing import Any, ClassVar

from covey.rewards.extract import extract_text
from covey.rewards.math.number import asked_nouns, parse_number
from covey.rewards.score import Reward, Score
from covey.sandbox import require_isolation
from covey.sandbox.scorer import LONGEST, sandboxed
from covey.types import Prompt

BY_FIRST_DIGITS = frozenset({"coin_flip"})
"""Datasets whose scorer accepts the first digits of the expected number, such as 0 for 0.375."""
ONE_ANSWER = frozenset(
    {"fraction_simplification", "gsm_symbolic", "knights_knaves", "letter_jumble", "spell_backward",
     "time_intervals", "word_sorting"}
)  # fmt: skip
"""Datasets whose scorer finds the expected answer inside a longer one, such as `not 84`."""
SEVERAL_ANSWERS = frozenset(
    {"advanced_geometry", "kakurasu", "quantum_lock", "rubiks_cube", "sokoban", "survo",
     "tower_of_hanoi"}
)  # fmt: skip
"""The same for datasets that accept other answers than the expected one."""
REVIEWED_VERSION = "0.1.25"
REVIEWED = frozenset(
    {
        "ab", "circuit_logic", "color_cube_rotation", "cryptarithm", "decimal_chain_sum", "dice",
        "emoji_mystery", "family_relationships", "figlet_font", "futoshiki", "game_of_life",
        "game_of_life_halting", "graph_color", "group_anagrams", "gsm_symbolic", "knight_swap",
        "letter_jumble", "manipulate_matrix", "mini_sudoku", "needle_haystack", "number_format",
        "palindrome_generation", "palindrome_partitioning", "path_star", "polynomial_equations",
        "prime_factorization", "products", "quantum_lock", "rectangle_count", "self_reference",
        "sentence_reordering", "shortest_path", "spell_backward", "sudoku", "time_intervals",
        "tsumego", "word_sorting", "zebra_puzzles", "chain_sum",
    }
)  # fmt: skip
"""Datasets with a scorer of their own that was read in version REVIEWED_VERSION of reasoning_gym:
it only reads and compares text, ends soon on any answer of MOST_CHARACTERS, and keeps no state."""
MOST_CHARACTERS = 4_000
"""Maximum length of an answer that is scored outside the sandbox. Some scorers take time quadratic
in the length of the answer."""
NEAR = 1e-4
NONSENSE = "?"

_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_NOT_A_NUMBER = re.compile(r"(?<![a-z])(?:nan|inf|infinity)j?(?![a-z])", re.IGNORECASE)
_SCORER = (
    "covey.errors",
    "covey.types",
    "covey.tasks.task",
    "covey.tasks.reasoning_gym",
    "covey.rewards.gym_scorer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGym(Reward):
    """The score that the dataset's own scorer gives, from 0 to 1.

    A score of 1 is a success. Some datasets give partial scores, such as 0.01 for any answer. The
    final answer is the last `<answer>` after the thinking or, without this tag, all text after the
    thinking.

    An answer scores 0 if the scorer times out or crashes. If the scorer evaluates answers as code,
    an answer that is neither plain data nor arithmetic scores 0.
    """

    unsafe: bool = False
    """Whether to run the scorer in an ordinary process of this user, without the sandbox."""

    quick: ClassVar[bool] = False
    version: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if not self.unsafe:
            require_isolation()

    @property
    def max_seconds(self) -> float:
        """The time limit for scoring two texts, in seconds.

        If an answer is correct, a nonsense answer is scored too, to detect a scorer that accepts
        every answer.
        """
        return 2 * LONGEST

    def __call__(self, prompt: Prompt, text: str) -> Score:
        # Imported here, because this module is slow to import and rarely used.
        from covey.tasks.reasoning_gym import entry_of

        dataset, entry = entry_of(prompt.info)
        answer, expected = extract_text(text), str(entry.get("answer"))
        name = prompt.info["reasoning_gym"]["dataset"]
        if name == "composite":  # the entry comes from one of its sub-datasets
            name = entry["metadata"]["source_dataset"]
            dataset = dataset.datasets[name]
        reward = 0.0
        if answer == expected or _may_be_scored(answer, expected, name):
            reward = self._score(prompt.info, name, dataset, entry, answer)
            if reward >= 1 - 1e-6 and answer != expected:
                everything = self._score(prompt.info, name, dataset, entry, NONSENSE) == 1.0
                only = _says_only(answer, expected, name, asked_nouns(prompt.text))
                reward = 0.0 if everything or not only else reward
        return Score(reward=reward, success=reward >= 1 - 1e-6, parts={"accuracy": reward})

    def _score(
        self,
        info: Mapping[str, Any],
        name: str,
        dataset: Any,
        entry: Mapping[str, Any],
        answer: str,
    ) -> float:
        from covey.rewards.gym_scorer import scored

        # An entry that is not in the prompt is not plain data.
        plain = "entry" in info["reasoning_gym"] and len(answer) <= MOST_CHARACTERS
        if plain and runs_here(name, type(dataset)):
            # A copy, because some scorers write to the entry.
            return scored(dataset, answer, pickle.loads(pickle.dumps(entry)))
        trusted = {"reasoning_gym": {**info["reasoning_gym"], "entry": entry}}
        return _sandboxed_score(pickle.dumps(trusted), answer, self.unsafe)


@cache
def installed_version() -> str:
    return metadata.version("reasoning-gym")


def runs_here(name: str, dataset: type) -> bool:
    """Return whether a dataset's scorer runs outside the sandbox.

    It does if the dataset uses the library's default comparison, or if its scorer is on the
    reviewed list and the installed version of reasoning_gym is the reviewed one.
    """
    common = sys.modules["reasoning_gym.dataset"].ProceduralDataset
    if dataset.score_answer is common.score_answer:  # type: ignore[attr-defined]
        return True
    return name in REVIEWED and installed_version() == REVIEWED_VERSION


@lru_cache(maxsize=4096)
def _sandboxed_score(trusted: bytes, answer: str, unsafe: bool) -> float:
    """Return the score of an answer. Scores are cached, because many answers in a group are
    equal."""
    return sandboxed(*_SCORER, unsafe=unsafe).score(pickle.loads(trusted), answer) or 0.0


def _says_only(answer: str, expected: str, name: str, nouns: frozenset[str]) -> bool:
    """Return whether an answer says nothing beside an answer of the expected form."""
    if name not in ONE_ANSWER | SEVERAL_ANSWERS:
        return True
    number = parse_number(answer, nouns)
    if number is not None and number == parse_number(expected, nouns):
        return True
    if not _signs(answer) <= _signs(expected) | {".", " "}:
        return False
    if name in ONE_ANSWER:
        return sorted(_WORD.findall(answer.lower())) == sorted(_WORD.findall(expected.lower()))
    return len(_NUMBER.findall(answer)) == len(_NUMBER.findall(expected))


def _signs(text: str) -> set[str]:
    """Return the kinds of letters in a text (a, A, 0), and its other signs."""
    return {
        "0" if c.isdecimal() else "A" if c.isupper() else "a" if c.isalpha() else c
        for c in " ".join(text.split())
    }


def _may_be_scored(answer: str, expected: str, name: str) -> bool:
    if name in BY_FIRST_DIGITS:
        given, target = parse_number(answer), parse_number(expected)
        if given is None or target is None or abs(given - target) > NEAR:
            return False
    return not _NOT_A_NUMBER.search(answer) or bool(_NOT_A_NUMBER.search(expected))
