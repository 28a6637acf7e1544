"""Facts about a run's data: lengths of its prompts and solutions, number of held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from heapq import nlargest

from covey.analysis.plan.model_shape import source_of
from covey.analysis.plan.prompt_lengths import UNREADABLE, Measure, first_line, measure
from covey.config import Config
from covey.errors import DataError
from covey.training.prompt_limit import longest_prompt
from covey.training.resolve import held_out_of, task_of, template_of
from covey.training.sft_data import write_solution
from covey.types import Prompt

SAMPLE = 64
"""Prompts that are measured, from the whole task."""
LONGEST = 32
"""Prompts that are measured beside them: those with the most characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """What is known of the data. Rules that need an unknown fact find nothing."""

    held_out: int | None = None
    """Held-out prompts of an evaluation."""
    solution_tokens: tuple[int, ...] = ()
    """Tokens of the solutions of some training prompts, each with its end token."""
    prompt_tokens: tuple[int, ...] = ()
    """Tokens of some prompts of the whole task, rendered by the chat template, shortest first."""
    long_prompts: tuple[int, ...] = ()
    """Tokens of the prompts with the most characters, where all prompts are in memory."""
    context: int | None = None
    """The model's context length."""
    longest_prompt: int | None = None
    """Tokens of the longest of all these prompts."""
    measured: int = 0
    """Number of prompts that were rendered, of all."""
    prompts: int = 0
    """Training prompts of the task."""
    problem: str = ""
    """Why prompts could not be measured."""


def task_facts(config: Config, measure: Measure = measure) -> TaskFacts:
    """Read the task and the tokenizer of a resolved configuration, as far as they can be read."""
    try:
        task = task_of(config)
        prompts, held_out = task.train(), len(held_out_of(config, task))
    except UNREADABLE as error:
        return TaskFacts(problem=first_line(error))
    some, long = _sample(prompts), _longest(prompts)
    try:
        source, options = source_of(config.model.path)
        job = {
            "path": config.model.path,
            "source": source,
            "options": options,
            "template": asdict(template_of(config)),
            "solutions": _solutions(config, some),
            "prompts": [prompt.messages for prompt in (*some, *long)],
        }
        found = measure(job)
    except UNREADABLE as error:
        return TaskFacts(held_out=held_out, problem=first_line(error))
    lengths = found.get("prompts", ())
    return TaskFacts(
        held_out=held_out,
        solution_tokens=_with_end(found.get("solutions", ())),
        prompt_tokens=tuple(sorted(lengths[: len(some)])),
        long_prompts=tuple(lengths[len(some) :]),
        context=found.get("context"),
        longest_prompt=max(lengths, default=None),
        measured=len(lengths),
        prompts=len(prompts),
        problem=found.get("problem", ""),
    )


def facts_of(
    config: Config, prompts: Sequence[Prompt], held_out: int, encode: Callable[..., Sequence[int]]
) -> TaskFacts:
    """Return the facts of prompts that are loaded already, by a tokenizer's `encode`."""
    texts = _solutions(config, _sample(prompts))
    lengths = _with_end(len(encode(text, add_special_tokens=False)) for text in texts)
    return TaskFacts(held_out=held_out, solution_tokens=lengths)


def usable_prompt(config: Config, facts: TaskFacts) -> int | None:
    """Return the tokens of the longest prompt that the run can use: longer ones are not trained."""
    if facts.longest_prompt is None or facts.context is None:
        return facts.longest_prompt
    return min(facts.longest_prompt, longest_prompt(config, facts.context))


def _with_end(lengths: Iterable[int]) -> tuple[int, ...]:
    return tuple(length + 1 for length in lengths)  # the end token is generated too


def _sample(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts from the whole task: a data file may be sorted by length."""
    stride = max(1, len(prompts) // SAMPLE)
    return [prompts[at] for at in range(0, len(prompts), stride)][:SAMPLE]


def _longest(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts with the most characters; none of a task that makes them on demand."""
    if not isinstance(prompts, list | tuple) or len(prompts) <= SAMPLE:
        return []
    return nlargest(LONGEST, prompts, key=lambda prompt: len(prompt.text))


def _solutions(config: Config, prompts: Sequence[Prompt]) -> list[str]:
    return [text for prompt in prompts if (text := _solution(prompt, config))]


def _solution(prompt: Prompt, config: Config) -> str:
    """Return a correct completion, with its reasoning where the task has one."""
    try:
        text = write_solution(prompt, config.sft.template)
    except DataError:
        return write_solution(prompt, "{solution}")
    return text.removeprefix(config.model.prefill)
