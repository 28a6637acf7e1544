"""A look at the data of a run: how many prompts measure it, and how long right answers are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from covey.analysis.plan.finding import Seen
from covey.analysis.plan.shapes import source_of
from covey.config import Config
from covey.errors import CoveyError, DataError
from covey.models.from_pretrained import read_tokenizer
from covey.training.build import held_out_of, task_of
from covey.training.sft_data import write_solution
from covey.types import Prompt

SAMPLE = 64
"""Prompts that are looked at."""


def look(config: Config) -> Seen:
    """Look at the task of a resolved configuration; what cannot be read is not known."""
    try:
        task = task_of(config)
        prompts, held_out = task.train(), len(held_out_of(config, task))
    except (CoveyError, OSError, ValueError, ImportError):
        return Seen()
    try:
        source, more = source_of(config.model.path)
        tokenizer = read_tokenizer(source, **more)
    except (CoveyError, OSError, ValueError, KeyError, ImportError):
        return Seen(held_out=held_out)
    return seen_of(config, prompts, held_out, tokenizer.encode)


def seen_of(
    config: Config, prompts: Sequence[Prompt], held_out: int, encode: Callable[..., Sequence[int]]
) -> Seen:
    """Look at prompts that are there already, with a tokenizer's `encode`."""
    stride = max(1, len(prompts) // SAMPLE)
    some = [prompts[at] for at in range(0, len(prompts), stride)][:SAMPLE]
    texts = [_right_answer(prompt, config) for prompt in some]
    # The end token is sampled too.
    lengths = (len(encode(text, add_special_tokens=False)) + 1 for text in texts if text)
    return Seen(held_out=held_out, solutions=tuple(lengths))


def _right_answer(prompt: Prompt, config: Config) -> str:
    """Write a right answer: with the way to it where the task has one, else the bare answer."""
    try:
        text = write_solution(prompt, config.sft.template)
    except DataError:
        return write_solution(prompt, "{solution}")
    return text.removeprefix(config.model.prefill)
