"""Draws the prompts of a training step and of the step's refill rounds, at random or by a
curriculum.

The random numbers that draw prompts depend only on the seed and the step, so a resumed run draws
the same prompts as an uninterrupted run.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.errors import ConfigError, DataError, RunError
from covey.records.records import MOST_DATA, read_text
from covey.rng import prompt_indices, refill_order, weighted_order
from covey.types import Group, Prompt

if TYPE_CHECKING:
    from covey.config.schema import Curriculum
    from covey.models.language_model import LanguageModel


def check_enough(prompts: Sequence[Prompt], count: int) -> None:
    """Raise DataError if there are fewer prompts than a step needs."""
    # In a smaller task a step would contain a prompt twice, with the same random numbers.
    if len(prompts) < count:
        raise DataError(
            f"task: a step needs {count} different prompts, but there are only {len(prompts)} "
            f"training prompts; lower rollout.prompts_per_step to at most {len(prompts)}"
        )


def step_prompts(prompts: Sequence[Prompt], *, seed: int, step: int, count: int) -> list[Prompt]:
    """Return the prompts of a step, which depend only on the seed and the step number."""
    check_enough(prompts, count)
    picks = prompt_indices(seed=seed, step=step, count=count, size=len(prompts))
    return [prompts[i] for i in picks]


def refill_prompts(
    prompts: Sequence[Prompt],
    *,
    used: Collection[str],
    seed: int,
    step: int,
    round_number: int,
    count: int,
) -> list[Prompt]:
    """Return up to `count` more prompts for a step, except prompts whose ids are in `used`."""
    order = refill_order(seed=seed, step=step, round_number=round_number, size=len(prompts))
    fresh = (prompts[i] for i in order if prompts[i].id not in used)
    return list(itertools.islice(fresh, count))


def prompts_by_id(
    prompts: Sequence[Prompt],
    ids: Collection[str],
    *,
    seed: int,
    step: int,
    count: int,
    rounds: int,
) -> dict[str, Prompt]:
    """Find prompts by id; search only the prompts of a step and of its refill rounds.

    If a task generates its prompts on demand, a search through all its prompts may take minutes.
    """
    size, wanted, found = len(prompts), set(ids), dict[str, Prompt]()
    orders = [prompt_indices(seed=seed, step=step - 1, count=count, size=size)] + [
        refill_order(seed=seed, step=step, round_number=number, size=size)
        for number in range(1, rounds)
    ]
    for index in itertools.chain.from_iterable(orders):
        if len(found) == len(wanted):
            break
        if (prompt := prompts[index]).id in wanted:
            found[prompt.id] = prompt
    return found


def prompt_notes(model: LanguageModel, prompts: Sequence[Prompt]) -> list[str]:
    """Return notes for the user about how the chat template renders these prompts."""
    first = prompts[0].messages[0]["role"]
    if first == "system" and model.renderer is not None and model.renderer.folds_system:
        return [
            "the model's chat template does not support a system message, so its text is put "
            "before the first user message"
        ]
    return []


# Curriculum: choose each step's prompts by the results of earlier steps. The statistics of each
# prompt's results are updated after every training step, and saved in every checkpoint.

FILE = "prompts.json"
NEW = 0.5
"""The assumed pass rate of a prompt that has no scored completions."""
SLOWER = 5
"""A task has a fast and a slow running mean of its pass rate. The slow mean averages over `SLOWER`
times as many groups as the fast mean."""
MOST_PROMPTS = 10**7


@dataclass(slots=True)
class PromptRecord:
    """Statistics of one prompt's completions so far."""

    number: int
    """Index of the prompt in the training data."""
    completions: int = 0
    """Number of scored completions."""
    successes: int = 0
    rate: float = NEW
    """Running pass rate, in which newer groups count more."""

    @property
    def pass_rate(self) -> float:
        """The fraction of the prompt's scored completions that are correct."""
        return self.successes / self.completions if self.completions else NEW


@dataclass(slots=True)
class PartRecord:
    """Running pass rates of one task in a mixture of tasks."""

    fast: float
    """Running pass rate."""
    slow: float
    """Running pass rate over `SLOWER` times as many groups as `fast`."""

    @property
    def progress(self) -> float:
        """The absolute difference between the fast and the slow running mean of the pass rate."""
        return abs(self.fast - self.slow)


@dataclass(slots=True, kw_only=True)
class PromptChoice:
    """Chooses the prompts of each step by the results of earlier steps."""

    settings: Curriculum
    prompts: Sequence[Prompt]
    seed: int
    records: dict[str, PromptRecord] = field(default_factory=dict)
    """Statistics of every prompt that has scored completions, by prompt id."""
    parts: dict[str, PartRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.prompts) > MOST_PROMPTS:
            raise ConfigError(
                f"config: [curriculum] supports at most {MOST_PROMPTS} prompts, but the task has "
                f"{len(self.prompts)}; use a task with fewer prompts"
            )
        if self.settings.mixture == "progress" and not self.block:
            raise ConfigError(
                "config: curriculum.mixture = 'progress' needs task.name = 'mixed', because "
                "curriculum.mixture sets the share of prompts from each part of a mixed task"
            )

    @property
    def block(self) -> tuple[str, ...]:
        """The repeating pattern of task names in a mixture's prompts; empty without a mixture."""
        return tuple(getattr(self.prompts, "block", ()))

    def weights(self) -> np.ndarray:
        """Return the sampling weight of each prompt; the weight of a dropped prompt is 0."""
        settings = self.settings
        found = np.full(len(self.prompts), _weight(settings, NEW))
        for record in self.records.values():
            found[record.number] = 0.0 if self._dropped(record) else _weight(settings, record.rate)
        if settings.mixture == "progress":
            shares, labels = self.shares(), np.array(self.block)
            names = labels[np.arange(len(found)) % len(labels)]
            for part, share in shares.items():
                here = names == part
                found[here] *= share / max(found[here].sum(), 1e-300)
        return found

    def shares(self) -> dict[str, float]:
        """Return the fraction of a step's prompts that is drawn from each task of a mixture."""
        names = dict.fromkeys(self.block)
        if self.settings.mixture == "fixed":
            return {name: self.block.count(name) / len(self.block) for name in names}
        # A part without results is drawn as often as a part whose pass rate changes by 0.1.
        moves = {n: self.parts[n].progress if n in self.parts else 0.1 for n in names}
        found = {name: max(move, self.settings.floor) for name, move in moves.items()}
        return {name: value / sum(found.values()) for name, value in found.items()}

    def _dropped(self, record: PromptRecord) -> bool:
        limit = self.settings.drop_above
        return limit > 0 and record.completions > 0 and record.pass_rate >= limit

    def picks(self, step: int, count: int) -> tuple[int, ...]:
        """Return the indices of a step's prompts, in order and without duplicates.

        The returned tuple is empty if the curriculum is off. If the curriculum has dropped too many
        prompts, the hardest dropped prompts are drawn again to fill the step.
        """
        if not self.settings.active:
            return ()
        weights = self.weights()
        count = min(count, len(weights))
        drawn = weighted_order(weights, seed=self.seed, step=step)[:count]
        if len(drawn) < count:
            dropped = (r for r in self.records.values() if self._dropped(r))
            back = sorted(dropped, key=lambda record: (record.pass_rate, record.number))
            drawn += [record.number for record in back[: count - len(drawn)]]
        return tuple(drawn)

    def add(self, groups: Sequence[Group], picks: Sequence[int]) -> None:
        """Add the results of a step, whose prompts have the indices `picks`.

        Completions without a score are ignored.
        """
        if not self.settings.active:
            return
        numbers = {self.prompts[pick].id: pick for pick in picks}
        for group in groups:
            results = [bool(r.success) for r in group.rollouts if r.reward is not None]
            if not results:
                continue
            share, memory = sum(results) / len(results), self.settings.memory
            number = numbers[group.prompt.id]
            record = self.records.setdefault(group.prompt.id, PromptRecord(number))
            first = not record.completions
            record.completions += len(results)
            record.successes += sum(results)
            record.rate = share if first else _moved(record.rate, share, memory)
            if self.block:
                name = self.block[number % len(self.block)]
                part = self.parts.setdefault(name, PartRecord(share, share))
                part.fast = _moved(part.fast, share, memory)
                part.slow = _moved(part.slow, share, memory / SLOWER)

    def metrics(self, picks: Sequence[int]) -> dict[str, float]:
        """Return metrics about the choice of a step's prompts; {} without a curriculum."""
        if not self.settings.active:
            return {}
        records = list(self.records.values())
        rates = {record.number: record.rate for record in records}
        dropped = {record.number for record in records if self._dropped(record)}
        found = {
            "data/seen_prompts": len(records),
            "data/pass_rate": float(np.mean(list(rates.values()))) if records else NEW,
            "data/drawn_pass_rate": float(np.mean([rates.get(pick, NEW) for pick in picks])),
            "data/dropped_prompts": len(dropped),
            "data/drawn_again": len(dropped & set(picks)),
        }
        return found | {f"data/parts/{name}": share for name, share in self.shares().items()}

    def save(self, folder: Path) -> None:
        """Write the prompts' statistics into a checkpoint; without a curriculum, write no file."""
        if self.settings.active:
            rows = {name: asdict(record) for name, record in self.records.items()}
            parts = {name: asdict(part) for name, part in self.parts.items()}
            text = json.dumps({"prompts": rows, "parts": parts})
            (folder / FILE).write_text(text, encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Read the prompts' statistics from a checkpoint."""
        if not self.settings.active:
            return
        try:
            data: Mapping[str, Any] = json.loads(read_text(folder / FILE, MOST_DATA))
            self.records = {name: PromptRecord(**row) for name, row in data["prompts"].items()}
            self.parts = {name: PartRecord(**row) for name, row in data["parts"].items()}
            same = all(self.prompts[r.number].id == name for name, r in self.records.items())
        except (
            RunError,
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            AttributeError,
            RecursionError,
        ) as error:
            raise RunError(
                f"checkpoint {folder} cannot be read, because {FILE} is invalid: {error!r}"
            ) from None
        if not same:
            raise RunError(
                f"checkpoint {folder} has curriculum statistics for other prompts, because the "
                "data has changed; resume with the original data"
            )


def _weight(settings: Curriculum, rate: float) -> float:
    """Return the sampling weight of a prompt, given its running pass rate."""
    weights = {"uniform": 1.0, "hard": 1 - rate, "uncertain": rate * (1 - rate)}
    return max(weights[settings.sampling], settings.floor)


def _moved(mean: float, value: float, memory: float) -> float:
    return (1 - memory) * mean + memory * value
