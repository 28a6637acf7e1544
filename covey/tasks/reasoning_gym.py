"""The `reasoning_gym` task: problems from the generated datasets of the package reasoning_gym.

A hash of the question decides whether a problem is held out, so training and held-out problems
never overlap, even if a dataset has few questions. If a generated problem does not belong to the
requested split, the task generates another problem with another seed.

The datasets in `HASH_DEPENDENT` iterate over sets of strings, whose order differs between processes
unless PYTHONHASHSEED is set. Covey refuses the datasets in `HASH_DEPENDENT` if PYTHONHASHSEED is
not set. Each prompt also stores its dataset entry, so every process computes the correct score.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from decimal import localcontext
from functools import lru_cache
from typing import Any

from covey.errors import ConfigError, DataError, nearest
from covey.tasks.task import (
    THINK_THEN_ANSWER,
    GeneratedTask,
    chat_messages,
    hashed_into,
    require_module,
    with_instruction,
)
from covey.types import Prompt

HELD_OUT_SHARE = 0.25
MAX_SIZE = 10_000_000
FIRST_SEED = {"train": 0, "held_out": 2_000_000_000}
ATTEMPTS = 100
"""Maximum number of seeds to try until a problem belongs to the requested split.

Entry i of a dataset uses the seed `seed + i`. Each attempt therefore adds `MAX_SIZE` to the seed.
All seeds are below 2**32.
"""

EXAMPLES = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}
"""Maps a dataset with several correct answers to the metadata field with one correct answer."""

HASH_DEPENDENT = frozenset(
    {
        "codeio",
        "isomorphic_strings",
        "knight_swap",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    }
)
"""Datasets whose questions or answers can depend on Python's hash seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The arguments that create a reasoning_gym dataset, used as the key of the dataset cache."""

    dataset: str
    seed: int
    size: int
    options: Mapping[str, Any] = field(compare=False)
    key: str
    """The dataset's options as text for the cache key, because a mapping is not hashable."""


@lru_cache(maxsize=64)
def _created(source: Source) -> Any:
    gym = require_module("reasoning_gym")
    options = dict(source.options)
    if source.dataset == "composite":
        spec = require_module("reasoning_gym.composite").DatasetSpec
        parts = options.get("datasets", ())
        options["datasets"] = [spec(**{"weight": 1.0, "config": {}, **part}) for part in parts]
    return gym.create_dataset(source.dataset, seed=source.seed, size=source.size, **options)


def create(dataset: str, options: Mapping[str, Any], seed: int, size: int) -> Any:
    """Return a reasoning_gym dataset: from the cache, or newly created."""
    key = repr(sorted(options.items()))
    return _created(Source(dataset=dataset, seed=seed, size=size, options=options, key=key))


def entry_of(info: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the dataset and the entry of a prompt; create the dataset if necessary."""
    origin = info.get("reasoning_gym")
    if origin is None:
        raise ValueError("the prompt has no info['reasoning_gym']: it comes from another task")
    dataset = create(origin["dataset"], origin["options"], origin["seed"], origin["size"])
    return dataset, origin.get("entry") or _generate(dataset, origin["seed"], origin["index"])


def _generate(dataset: Any, seed: int, index: int) -> Mapping[str, Any]:
    """Generate an entry of a dataset. Every call with the same arguments gives the same entry."""
    state = random.getstate()
    random.seed(f"{seed}/{index}")  # list_functions draws from the global generator
    try:
        # bf and codeio print while they generate; decimal_arithmetic changes the global precision.
        with redirect_stdout(sys.stderr), localcontext():
            entry: Mapping[str, Any] = dataset[index]
    finally:
        random.setstate(state)
    return entry


def plain(value: Any) -> Any:
    """Copy plain Python data; convert numpy's numbers and strings to Python types.

    Raises TypeError for types other than numbers, strings, bool, None, lists, tuples and dicts.
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
class ReasoningGym(GeneratedTask):
    """Problems of one dataset of reasoning_gym, such as `chain_sum`.

    `options` are the dataset's options, such as `{min_terms = 2, max_terms = 3}`. The text
    `instruction` is appended to each prompt. The target is the answer that the dataset gives. The
    target is empty if the dataset gives no answer, because several answers are correct. The reward
    `reasoning_gym` calls the dataset's scorer.
    """

    dataset: str
    options: Mapping[str, Any] | None = None
    train_size: int = 10_000
    system: str = ""
    instruction: str = THINK_THEN_ANSWER
    name: str = "reasoning_gym"

    def __post_init__(self) -> None:
        GeneratedTask.__post_init__(self)
        if max(self.train_size, self.held_out_size) > MAX_SIZE:
            raise ConfigError(f"task: train_size and held_out_size must be at most {MAX_SIZE}")
        self._check_options()
        for split, seed in FIRST_SEED.items():
            size = self._size(split)
            try:
                create(self.dataset, self.options or {}, seed, size)
            except ConfigError:
                raise
            except Exception as error:  # datasets raise assertions, type errors and others
                options, kind = dict(self.options or {}), type(error).__name__
                raise ConfigError(
                    f"task: the dataset {self.dataset} of reasoning_gym does not accept "
                    f"{split}_size = {size} and options = {options}: {kind}: {error}"
                ) from None
        self._check_hash_seed()

    def _check_hash_seed(self) -> None:
        parts = (self.options or {}).get("datasets", ()) if self.dataset == "composite" else ()
        dependent = HASH_DEPENDENT & {self.dataset, *(part["name"] for part in parts)}
        if dependent and not os.environ.get("PYTHONHASHSEED", "").isdecimal():
            datasets = ", ".join(sorted(dependent))
            raise ConfigError(
                f"task: reasoning_gym generates different prompts or targets for {datasets} in "
                "each process, so a run could not be resumed or compared; set the environment "
                "variable PYTHONHASHSEED=0"
            )

    def _check_options(self) -> None:
        registry = require_module("reasoning_gym.factory").DATASETS
        if self.dataset not in registry:
            hint = nearest(self.dataset, registry)
            raise ConfigError(f"task: reasoning_gym has no dataset {self.dataset!r}{hint}")
        fields = [f.name for f in dataclasses.fields(registry[self.dataset][1])]
        known = [name for name in fields if name not in ("seed", "size")]
        for option in self.options or {}:
            if option not in known:
                hint = nearest(option, known)
                raise ConfigError(
                    f"task: options.{option} is not an option of {self.dataset}{hint}"
                )

    def _prompt(self, split: str, index: int) -> Prompt:
        seed, entry = self._entry(split, index)
        text = str(entry["question"])
        target = "" if entry["answer"] is None else str(entry["answer"])
        origin = {
            "dataset": self.dataset,
            "options": dict(self.options or {}),
            "seed": seed,
            "size": self._size(split),
            "index": index,
        }
        # An entry that is not plain data cannot be pickled, so workers generate it again.
        with suppress(TypeError):
            origin["entry"] = plain(entry)
        solution = target or _example(self.dataset, entry)
        return Prompt(
            id=f"{self.name}/{self.dataset}/{split}/{index}",
            task=self.name,
            messages=chat_messages(with_instruction(text, self.instruction), self.system),
            target=target,
            info={"reasoning_gym": origin} | ({"solution": solution} if solution else {}),
        )

    def _entry(self, split: str, index: int) -> tuple[int, Mapping[str, Any]]:
        size = self._size(split)
        for attempt in range(ATTEMPTS):
            seed = FIRST_SEED[split] + attempt * MAX_SIZE
            dataset = create(self.dataset, self.options or {}, seed, size)
            try:
                entry = _generate(dataset, seed, index)
            except IndexError:
                # word_ladder sometimes finds no words, and then keeps a reduced size.
                dataset.size = size
                continue
            if hashed_into(split, str(entry["question"]), HELD_OUT_SHARE):
                return seed, entry
        options = dict(self.options or {})
        raise DataError(
            f"task: the dataset {self.dataset} of reasoning_gym has too few different prompts for "
            f"a {split} split with options = {options}"
        )


def _example(dataset: str, entry: Mapping[str, Any]) -> str:
    example = entry["metadata"].get(EXAMPLES.get(dataset, ""))
    if example is None or isinstance(example, str):
        return example or ""
    return json.dumps(plain(example))
