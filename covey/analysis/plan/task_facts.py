"""Facts about a run's data: lengths of its prompts and solutions, number of held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey.config import Config
from covey.errors import CoveyError, DataError
from covey.training.resolve import held_out_of, task_of, template_of
from covey.training.sft_data import write_solution
from covey.types import Prompt

SAMPLE = 64
"""Prompts that are measured."""
UNREADABLE = (CoveyError, OSError, ValueError, KeyError, ImportError)
"""What reading data or a tokenizer may raise. A plan goes on without the facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """What is known of the data. Rules that need an unknown fact find nothing."""

    held_out: int | None = None
    """Held-out prompts of an evaluation."""
    solution_tokens: tuple[int, ...] = ()
    """Tokens of the solutions of some training prompts, each with its end token."""
    longest_prompt: int | None = None
    """Tokens of the longest of these prompts, rendered by the chat template."""
    measured: int = 0
    """Number of prompts that were rendered."""
    problem: str = ""
    """Why prompts could not be measured."""


def task_facts(config: Config) -> TaskFacts:
    """Read the task and the tokenizer of a resolved configuration, as far as they can be read."""
    try:
        task = task_of(config)
        prompts, held_out = task.train(), len(held_out_of(config, task))
    except UNREADABLE as error:
        return TaskFacts(problem=_first_line(error))
    try:
        tokenizer = _tokenizer(config)
    except UNREADABLE as error:
        return TaskFacts(held_out=held_out, problem=_first_line(error))
    facts = facts_of(config, prompts, held_out, tokenizer.encode)
    try:
        from covey.models.chat_template import make_renderer

        rendering = make_renderer(tokenizer, template_of(config), config.model.path)
        lengths = [len(rendering.tokens(prompt.messages)) for prompt in _sample(prompts)]
    except UNREADABLE as error:
        return replace(facts, problem=_first_line(error))
    return replace(facts, longest_prompt=max(lengths), measured=len(lengths))


def facts_of(
    config: Config, prompts: Sequence[Prompt], held_out: int, encode: Callable[..., Sequence[int]]
) -> TaskFacts:
    """Return the facts of prompts that are loaded already, by a tokenizer's `encode`."""
    texts = [_solution(prompt, config) for prompt in _sample(prompts)]
    # The end token is generated too.
    lengths = (len(encode(text, add_special_tokens=False)) + 1 for text in texts if text)
    return TaskFacts(held_out=held_out, solution_tokens=tuple(lengths))


def _tokenizer(config: Config) -> Any:
    from transformers.utils.hub import cached_file

    from covey.analysis.plan.model_shape import source_of
    from covey.models.from_pretrained import NO_CODE, read_tokenizer

    source, more = source_of(config.model.path)
    plain = {"_raise_exceptions_for_missing_entries": False}
    if more or not cached_file(source, "tokenizer.json", **plain):
        return read_tokenizer(source, **more)
    # AutoTokenizer imports transformers' model code, which takes two seconds.
    from transformers import TokenizersBackend

    return TokenizersBackend.from_pretrained(source, **NO_CODE)


def _sample(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts from the whole task: a data file may be sorted by length."""
    stride = max(1, len(prompts) // SAMPLE)
    return [prompts[at] for at in range(0, len(prompts), stride)][:SAMPLE]


def _solution(prompt: Prompt, config: Config) -> str:
    """Return a correct completion, with its reasoning where the task has one."""
    try:
        text = write_solution(prompt, config.sft.template)
    except DataError:
        return write_solution(prompt, "{solution}")
    return text.removeprefix(config.model.prefill)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
