"""Facts about a run's data: lengths of prompts and solutions, and the count of held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from heapq import nlargest

from covey.analysis.plan.model_shape import source_of
from covey.analysis.plan.prompt_lengths import UNREADABLE, Measure, first_line, measure
from covey.config import Config
from covey.environments.registry import NONE
from covey.errors import DataError
from covey.scoring import InlineScorer
from covey.scoring.baselines import Baselines, baselines, constant_by_targets, may_probe
from covey.tasks.overlap import shared_prompts
from covey.training.prompt_limit import longest_prompt
from covey.training.resolve import (
    evaluation_config,
    held_out_of,
    reward_of,
    task_of,
    template_of,
)
from covey.training.sft_data import write_solution
from covey.types import Prompt

SAMPLE = 64
"""The number of prompts whose tokens are counted, spread over the whole task."""
LONGEST = 32
"""The number of longest prompts (by characters) whose tokens are counted as well."""
BASELINE_PROMPTS = 256
"""The number of held-out prompts on which baselines are scored."""
ASSUMED_PROMPT = 256
"""The assumed prompt length in tokens if the tokens of prompts cannot be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """Known facts about the data. A rule that needs an unknown fact yields no finding."""

    held_out: int | None = None
    """The number of held-out prompts in an evaluation."""
    solution_tokens: tuple[int, ...] = ()
    """Token counts of some training prompts' solutions, each including its end token."""
    prompt_tokens: tuple[int, ...] = ()
    """Token counts of a sample of the task's prompts, with the chat template; shortest first."""
    long_prompts: tuple[int, ...] = ()
    """The token counts of the prompts with the most characters, if all prompts are in memory."""
    context: int | None = None
    """The model's context length."""
    longest_prompt: int | None = None
    """The token count of the longest prompt that was tokenized."""
    measured: int = 0
    """The number of prompts whose tokens were counted."""
    prompts: int = 0
    """The number of training prompts of the task."""
    problem: str = ""
    """The reason why the tokens of prompts could not be counted."""
    unreadable: str = ""
    """The error of a task that cannot be read."""
    overlap: int = 0
    """The number of held-out prompts that are also training prompts; 0 if prompts are generated."""
    baselines: Baselines | None = None
    """Scores of trivial answers (constant, empty, copied prompt) on the held-out prompts."""


def task_facts(config: Config, measure: Measure = measure) -> TaskFacts:
    """Collect facts from the task and the tokenizer of a resolved configuration."""
    try:
        task = task_of(config)
        prompts, measured = task.train(), held_out_of(config, task)
        known, overlap = _baselines(config, measured), _overlap(prompts, measured)
    except UNREADABLE as error:
        return TaskFacts(problem=first_line(error), unreadable=str(error))
    some, long, held_out = _sample(prompts), _longest(prompts), len(measured)
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
        return TaskFacts(
            held_out=held_out, prompts=len(prompts), problem=first_line(error), baselines=known
        )
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
        overlap=overlap,
        baselines=known,
    )


def _baselines(config: Config, held_out: Sequence[Prompt]) -> Baselines:
    """Score trivial answers (constant, empty, copied prompt), but only if the reward is quick."""
    reward = reward_of(evaluation_config(config))
    some = _sample(held_out, most=BASELINE_PROMPTS)
    if not reward.quick or not may_probe(reward) or config.environment.name != NONE:
        return Baselines(constant=constant_by_targets(some))
    return baselines(some, InlineScorer(reward))


def _overlap(prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> int:
    """Count the held-out prompts that are also in the training data."""
    return len(shared_prompts(prompts, held_out)) if isinstance(prompts, list | tuple) else 0


def facts_of(
    config: Config,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    encode: Callable[..., Sequence[int]],
) -> TaskFacts:
    """Return facts about prompts that are already loaded; `encode` returns token ids of a text."""
    texts = _solutions(config, _sample(prompts))
    lengths = _with_end(len(encode(text, add_special_tokens=False)) for text in texts)
    return TaskFacts(
        held_out=len(held_out),
        prompts=len(prompts),
        solution_tokens=lengths,
        overlap=_overlap(prompts, held_out),
    )


def usable_prompt(config: Config, facts: TaskFacts) -> int | None:
    """Return the token count of the longest prompt that the run can use."""
    if facts.longest_prompt is None or facts.context is None:
        return facts.longest_prompt
    return min(facts.longest_prompt, longest_prompt(config, facts.context))


def _with_end(lengths: Iterable[int]) -> tuple[int, ...]:
    return tuple(length + 1 for length in lengths)  # the end token is generated too


def _sample(prompts: Sequence[Prompt], most: int = SAMPLE) -> list[Prompt]:
    """Return prompts from all parts of the task, because a data file may be sorted by length."""
    stride = max(1, len(prompts) // most)
    return [prompts[at] for at in range(0, len(prompts), stride)][:most]


def _longest(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts with the most characters; empty if the task generates its prompts."""
    if not isinstance(prompts, list | tuple) or len(prompts) <= SAMPLE:
        return []
    return nlargest(LONGEST, prompts, key=lambda prompt: len(prompt.text))


def _solutions(config: Config, prompts: Sequence[Prompt]) -> list[str]:
    return [text for prompt in prompts if (text := _solution(prompt, config))]


def _solution(prompt: Prompt, config: Config) -> str:
    """Return a correct completion, including the reasoning if the task provides it."""
    try:
        text = write_solution(prompt, config.sft.template)
    except DataError:
        return write_solution(prompt, "{solution}")
    return text.removeprefix(config.model.prefill)
