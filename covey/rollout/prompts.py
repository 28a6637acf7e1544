"""The prompts of a training step and of its refill rounds."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from covey.errors import DataError
from covey.models.language_model import LanguageModel
from covey.rng import prompt_indices, refill_order
from covey.types import Prompt


def step_prompts(prompts: Sequence[Prompt], *, seed: int, step: int, count: int) -> list[Prompt]:
    """Return the prompts of a step, which depend only on the seed and the step number."""
    # In a smaller task a step would contain a prompt twice, with the same random numbers.
    if len(prompts) < count:
        raise DataError(
            f"task: a step needs {count} different prompts, but there are only {len(prompts)} "
            f"training prompts; lower rollout.prompts_per_step to at most {len(prompts)}"
        )
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
    """Return up to `count` more prompts for a step, without those that it has used."""
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

    A task may generate its prompts on demand, so a search through all prompts would take minutes.
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
