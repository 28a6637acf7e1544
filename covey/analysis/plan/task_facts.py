"""Facts about a run's data: lengths of its prompts and solutions, number of held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from covey.analysis.plan.model_shape import source_of
from covey.analysis.plan.prompt_lengths import UNREADABLE, Measure, first_line, measure
from covey.config import Config
from covey.errors import DataError
from covey.training.resolve import held_out_of, task_of, template_of
from covey.training.sft_data import write_solution
from covey.types import Prompt

SAMPLE = 64
"""Prompts that are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """What is known of the data. Rules that need an unknown fact find nothing."""

    held_out: int | None = None
    """Held-out prompts of an evaluation."""
    train: int | None = None
    """Training prompts."""
    solution_tokens: tuple[int, ...] = ()
    """Tokens of the solutions of some training prompts, each with its end token."""
    longest_prompt: int | None = None
    """Tokens of the longest of these prompts, rendered by the chat template."""
    measured: int = 0
    """Number of prompts that were rendered."""
    problem: str = ""
    """Why prompts could not be measured."""


def task_facts(config: Config, measure: Measure = measure) -> TaskFacts:
    """Read the task and the tokenizer of a resolved configuration, as far as they can be read."""
    try:
        task = task_of(config)
        prompts, held_out = task.train(), len(held_out_of(config, task))
    except UNREADABLE as error:
        return TaskFacts(problem=first_line(error))
    some = _sample(prompts)
    try:
        source, options = source_of(config.model.path)
        job = {
            "path": config.model.path,
            "source": source,
            "options": options,
            "template": asdict(template_of(config)),
            "solutions": _solutions(config, some),
            "prompts": [prompt.messages for prompt in some],
        }
        found = measure(job)
    except UNREADABLE as error:
        return TaskFacts(held_out=held_out, train=len(prompts), problem=first_line(error))
    return TaskFacts(
        held_out=held_out,
        train=len(prompts),
        solution_tokens=_with_end(found.get("solutions", ())),
        longest_prompt=max(found.get("prompts", ()), default=None),
        measured=len(found.get("prompts", ())),
        problem=found.get("problem", ""),
    )


def facts_of(
    config: Config, prompts: Sequence[Prompt], held_out: int, encode: Callable[..., Sequence[int]]
) -> TaskFacts:
    """Return the facts of prompts that are loaded already, by a tokenizer's `encode`."""
    texts = _solutions(config, _sample(prompts))
    lengths = _with_end(len(encode(text, add_special_tokens=False)) for text in texts)
    return TaskFacts(held_out=held_out, train=len(prompts), solution_tokens=lengths)


def _with_end(lengths: Iterable[int]) -> tuple[int, ...]:
    return tuple(length + 1 for length in lengths)  # the end token is generated too


def _sample(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts from the whole task: a data file may be sorted by length."""
    stride = max(1, len(prompts) // SAMPLE)
    return [prompts[at] for at in range(0, len(prompts), stride)][:SAMPLE]


def _solutions(config: Config, prompts: Sequence[Prompt]) -> list[str]:
    return [text for prompt in prompts if (text := _solution(prompt, config))]


def _solution(prompt: Prompt, config: Config) -> str:
    """Return a correct completion, with its reasoning where the task has one."""
    try:
        text = write_solution(prompt, config.sft.template)
    except DataError:
        return write_solution(prompt, "{solution}")
    return text.removeprefix(config.model.prefill)
