"""How long a run's prompts are: a sample of them, put to the tokenizer as the run will put them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from covey.analysis.plan.shapes import source_of
from covey.config import Config
from covey.errors import CoveyError
from covey.models.chat_template import make_renderer
from covey.models.from_pretrained import read_tokenizer
from covey.training.build import held_out_of, task_of, template_of
from covey.types import Prompt

SAMPLE = 64
"""Prompts that are measured."""
ASSUMED = 256
"""Tokens of a prompt where none can be measured."""
ASSUMED_HELD_OUT = 256
"""Held-out prompts where they cannot be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of the prompts, and how many there are."""

    longest: int
    held_out: int
    """Prompts that an evaluation asks."""
    why: str
    """Where the numbers come from."""


def prompt_lengths(config: Config) -> Lengths:
    """Measure some prompts of the task, or say what is assumed where that cannot be done."""
    source, more = source_of(config.model.path)
    try:
        tokenizer = read_tokenizer(source, **more)
        task = task_of(config)
        prompts, held_out = _sample(task.train()), len(held_out_of(config, task))
        asking = make_renderer(tokenizer, template_of(config), config.model.path)
        longest = max(len(asking.tokens(prompt.messages)) for prompt in prompts)
    except (CoveyError, OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = f"prompts of {ASSUMED} tokens, for they cannot be measured ({reason[:120]})"
        return Lengths(longest=ASSUMED, held_out=ASSUMED_HELD_OUT, why=why)
    why = f"prompts of {longest} tokens, the longest of {len(prompts)}"
    return Lengths(longest=longest, held_out=held_out, why=why)


def _sample(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts from all over the task: a data file may be sorted by length."""
    stride = max(1, len(prompts) // SAMPLE)
    return [prompts[at] for at in range(0, len(prompts), stride)][:SAMPLE]
