"""The procedural data sets of the reasoning_gym package, each with a scorer of its own.

A hash of the question says on which side a problem is, so that train and held-out problems never
ask the same, however few questions a data set has. Where problem i falls on the wrong side it is
drawn again with another seed.

Some data sets walk over sets of strings, whose order changes from process to process unless
PYTHONHASHSEED is set: `UNSTEADY`. They are refused without it. The entry itself goes with the
prompt as well, and scores are right in every process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from decimal import localcontext
from functools import lru_cache, partial
from typing import Any

from covey.errors import ConfigError, DataError, nearest
from covey.tasks.optional import optional_module
from covey.tasks.task import (
    THINK_THEN_ANSWER,
    Generated,
    asked,
    check_sizes,
    hash_share,
    with_instruction,
)
from covey.types import Prompt

HELD_OUT_SHARE = 0.25
MAX_SIZE = 10_000_000
FIRST_SEED = {"train": 0, "held_out": 2_000_000_000}
ATTEMPTS = 100
"""So many seeds, MAX_SIZE apart, stay below the 2**32 that numpy takes: entry i has seed + i."""

EXAMPLES = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}
"""Data sets whose entries have no answer, because many are right, but name one among these."""

UNSTEADY = frozenset(
    {
        "codeio",
        "isomorphic_strings",
        "knight_swap",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    }
)
"""Data sets whose questions or answers depend on Python's hash seed, some of them now and then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A data set as it was created."""

    dataset: str
    seed: int
    size: int
    options: Mapping[str, Any] = field(compare=False)
    key: str
    """The options as text, because they cannot be hashed."""


@lru_cache(maxsize=64)
def _created(source: Source) -> Any:
    gym = optional_module("reasoning_gym", "reasoning_gym")
    options = dict(source.options)
    if source.dataset == "composite":
        spec = optional_module("reasoning_gym.composite", "reasoning_gym").DatasetSpec
        parts = options.get("datasets", ())
        options["datasets"] = [spec(**{"weight": 1.0, "config": {}, **part}) for part in parts]
    return gym.create_dataset(source.dataset, seed=source.seed, size=source.size, **options)


def create(dataset: str, options: Mapping[str, Any], seed: int, size: int) -> Any:
    """Create a data set of reasoning_gym, or return the one that was created before."""
    key = repr(sorted(options.items()))
    return _created(Source(dataset=dataset, seed=seed, size=size, options=options, key=key))


def entry_of(info: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the data set and the entry behind a prompt, in whatever process."""
    origin = info.get("reasoning_gym")
    if origin is None:
        raise ValueError("the prompt has no info['reasoning_gym']: it is of another task")
    dataset = create(origin["dataset"], origin["options"], origin["seed"], origin["size"])
    return dataset, origin.get("entry") or _made(dataset, origin["seed"], origin["index"])


def _made(dataset: Any, seed: int, index: int) -> Mapping[str, Any]:
    """Generate an entry, the same one every time."""
    state = random.getstate()
    random.seed(f"{seed}/{index}")  # list_functions draws from the random numbers of all
    try:
        # bf and codeio print while they generate; decimal_arithmetic sets the precision of all.
        with redirect_stdout(sys.stderr), localcontext():
            entry: Mapping[str, Any] = dataset[index]
    finally:
        random.setstate(state)
    return entry


def plain(value: Any) -> Any:
    """Copy data that consists of plain Python; numbers and text of numpy become plain as well.

    Raises TypeError for anything else.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is not plain data")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGym:
    """Problems of one data set of reasoning_gym, such as chain_sum.

    `options` are those of the data set: `{min_terms = 2, max_terms = 3}`. `instruction` comes after
    each question. The answer is the data set's, or nothing where many are right; the reward
    of this name has its scorer.
    """

    dataset: str
    options: Mapping[str, Any] | None = None
    train_size: int = 10_000
    held_out_size: int = 256
    system: str = ""
    instruction: str = THINK_THEN_ANSWER
    name: str = "reasoning_gym"

    def __post_init__(self) -> None:
        check_sizes(self.train_size, self.held_out_size)
        if max(self.train_size, self.held_out_size) > MAX_SIZE:
            raise ConfigError(f"task: train_size and held_out_size must be at most {MAX_SIZE}")
        self._check_options()
        for split, size in (("train", self.train_size), ("held_out", self.held_out_size)):
            try:
                create(self.dataset, self.options or {}, FIRST_SEED[split], size)
            except ConfigError:
                raise
            except Exception as error:  # assertions, type errors: each data set has its own way
                raise ConfigError(
                    f"task: reasoning_gym's {self.dataset} does not take {split}_size = {size} "
                    f"and options = {dict(self.options or {})}: {type(error).__name__}: {error}"
                ) from None
        self._check_hash_seed()

    def _check_hash_seed(self) -> None:
        parts = (self.options or {}).get("datasets", ()) if self.dataset == "composite" else ()
        unsteady = UNSTEADY & {self.dataset, *(part["name"] for part in parts)}
        if unsteady and not os.environ.get("PYTHONHASHSEED", "").isdecimal():
            raise ConfigError(
                f"task: reasoning_gym's {', '.join(sorted(unsteady))} would ask or expect "
                "something else in every process, so that no run could be resumed or compared: "
                "run with PYTHONHASHSEED=0"
            )

    def _check_options(self) -> None:
        registry = optional_module("reasoning_gym.factory", "reasoning_gym").DATASETS
        if self.dataset not in registry:
            hint = nearest(self.dataset, registry)
            raise ConfigError(f"task: reasoning_gym has no data set {self.dataset!r}{hint}")
        fields = [f.name for f in dataclasses.fields(registry[self.dataset][1])]
        known = [name for name in fields if name not in ("seed", "size")]
        for option in self.options or {}:
            if option not in known:
                what = f"task: options.{option} is not an option of {self.dataset}"
                raise ConfigError(f"{what}{nearest(option, known)}")

    def train(self) -> Sequence[Prompt]:
        """The training problems."""
        return Generated(self.train_size, partial(self._prompt, "train"))

    def held_out(self) -> Sequence[Prompt]:
        """The held-out problems."""
        return Generated(self.held_out_size, partial(self._prompt, "held_out"))

    def _prompt(self, split: str, index: int) -> Prompt:
        size = self.train_size if split == "train" else self.held_out_size
        options = dict(self.options or {})
        seed, entry = self._entry(split, index, size)
        question, answer = str(entry["question"]), _text_of(entry["answer"])
        origin = {
            "dataset": self.dataset,
            "options": options,
            "seed": seed,
            "size": size,
            "index": index,
        }
        # What is not plain data cannot travel, and is generated again where it is needed.
        with suppress(TypeError):
            origin["entry"] = plain(entry)
        solution = answer or _example(self.dataset, entry)
        return Prompt(
            id=f"{self.name}/{self.dataset}/{split}/{index}",
            task=self.name,
            messages=asked(with_instruction(question, self.instruction), self.system),
            target=answer,
            info={"reasoning_gym": origin} | ({"solution": solution} if solution else {}),
        )

    def _entry(self, split: str, index: int, size: int) -> tuple[int, Mapping[str, Any]]:
        for attempt in range(ATTEMPTS):
            seed = FIRST_SEED[split] + attempt * MAX_SIZE
            dataset = create(self.dataset, self.options or {}, seed, size)
            try:
                entry = _made(dataset, seed, index)
            except IndexError:
                # word_ladder finds no words now and then, and takes that for its end ever after.
                dataset.size = size
                continue
            if (hash_share(str(entry["question"])) < HELD_OUT_SHARE) == (split == "held_out"):
                return seed, entry
        raise DataError(
            f"task: reasoning_gym's {self.dataset} with options = {dict(self.options or {})} has "
            f"too few different questions for a {split} split"
        )


def _text_of(answer: Any) -> str:
    return "" if answer is None else str(answer)


def _example(dataset: str, entry: Mapping[str, Any]) -> str:
    example = entry["metadata"].get(EXAMPLES.get(dataset, ""))
    if example is None or isinstance(example, str):
        return example or ""
    return json.dumps(plain(example))
