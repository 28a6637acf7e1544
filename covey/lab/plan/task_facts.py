"""Measures a run's data: lengths of prompts and solutions, and the number of held-out prompts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from heapq import nlargest
from pathlib import Path
from typing import Any

from covey.baselines import Baselines, baselines, constant_by_targets, may_probe
from covey.config import Config
from covey.config.check import checked_prompts
from covey.config.resolve import (
    evaluation_config,
    reward_of,
    task_of,
    template_of,
)
from covey.environments.registry import NONE
from covey.errors import CoveyError, DataError
from covey.lab.plan.model_shape import first_line, source_of
from covey.models.chat import Template, make_renderer
from covey.models.template_worker import RENDERER
from covey.rollout.prompt_limit import longest_prompt
from covey.scoring import InlineScorer
from covey.solutions import write_solution
from covey.subprocesses import module_command
from covey.tasks.task import shared_prompts
from covey.types import Prompt

# Token counts of prompts and solutions.
#
# Only the tokenizer needs transformers, which takes a second to import. `covey plan` therefore
# counts tokens in a separate process while it reads the task, and this module does not import
# torch.

UNREADABLE = (CoveyError, OSError, ValueError, KeyError, ImportError)
"""Errors in reading data or a tokenizer, after which `covey plan` continues without counts of
tokens."""

LINE = 120

Job = Mapping[str, Any]
"""A request to count the tokens of `solutions` (texts) and of `prompts` (lists of messages). Each
request also contains the model's `path`, the tokenizer's `source` and `options`, and the chat
`template`."""
Measure = Callable[[Job], Mapping[str, Any]]


def measure(job: Job) -> Mapping[str, Any]:
    """Count the tokens of a request's solutions and prompts.

    If an error occurs, return its message under the key `problem`.
    """
    from transformers.utils.hub import cached_file

    plain, found = {"_raise_exceptions_for_missing_entries": False}, dict[str, Any]()
    try:
        source, options = job["source"], job["options"]
        if options or not cached_file(source, "tokenizer.json", **plain):
            from covey.models.load_model import read_tokenizer

            tokenizer = read_tokenizer(source, **options)
        else:
            # AutoTokenizer imports transformers' model code, which takes two seconds.
            from transformers import TokenizersBackend

            tokenizer = TokenizersBackend.from_pretrained(source, trust_remote_code=False)
        found["solutions"] = [
            len(tokenizer.encode(text, add_special_tokens=False)) for text in job["solutions"]
        ]
        renderer = make_renderer(tokenizer, Template(**job["template"]), job["path"])
        found["prompts"] = [len(renderer.tokens(messages)) for messages in job["prompts"]]
        file = cached_file(source, "config.json", **plain)
        sizes = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
        found["context"] = sizes.get("max_position_embeddings") or sizes.get("n_positions")
    except UNREADABLE as error:
        found["problem"] = first_line(error, LINE)
    return found


def measuring() -> AbstractContextManager[Measure]:
    return nullcontext(measure) if "transformers" in sys.modules else measuring_elsewhere()


@contextmanager
def measuring_elsewhere() -> Iterator[Measure]:
    """Yield a function that calls `measure` in a new process, which imports transformers."""
    process = subprocess.Popen(
        module_command("covey.lab.plan.task_facts"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )

    def ask(job: Job) -> Mapping[str, Any]:
        reply, _ = process.communicate(json.dumps(job, default=str).encode())
        return json.loads(reply) if reply else {"problem": "the process that measures it failed"}

    try:
        yield ask
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    """Read a token-counting request from stdin, and write the token counts to stdout."""
    RENDERER.start()
    import transformers.utils.chat_template_utils

    transformers.utils.logging.set_verbosity_error()  # the plan itself reports long prompts
    job = json.loads(sys.stdin.buffer.read())
    sys.stdout.write(json.dumps(measure(job)))


if __name__ == "__main__":
    main()


SAMPLE = 64
"""The number of prompts whose tokens are counted, evenly spaced in the task's data."""
LONGEST = 32
"""The number of long prompts whose tokens are counted; long prompts are the prompts with the most
characters."""
BASELINE_PROMPTS = 256
"""The largest number of held-out prompts on which trivial answers are scored."""
ASSUMED_PROMPT = 256
"""The assumed prompt length in tokens if the tokens of prompts cannot be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """Properties of a task's data.

    The rules of `covey plan` skip unknown properties.
    """

    held_out: int | None = None
    """The number of held-out prompts in an evaluation."""
    solution_tokens: tuple[int, ...] = ()
    """Token counts of the solutions of some training prompts; each count includes the end token."""
    prompt_tokens: tuple[int, ...] = ()
    """Token counts of a sample of the task's prompts, with the chat template, in ascending
    order."""
    long_prompts: tuple[int, ...] = ()
    """The token counts of the prompts with the most characters, if all prompts are in memory."""
    context: int | None = None
    longest_prompt: int | None = None
    """The token count of the longest prompt that was tokenized."""
    measured: int = 0
    prompts: int = 0
    problem: str = ""
    """The reason why the tokens of prompts could not be counted; otherwise empty."""
    unreadable: str = ""
    """The error message if the task's data cannot be read; otherwise empty."""
    overlap: int = 0
    """The number of held-out prompts that are also training prompts; 0 if the task generates its
    prompts."""
    baselines: Baselines | None = None
    """Scores of trivial answers (constant, empty, copied prompt) on the held-out prompts."""


def task_facts(config: Config, measure: Measure = measure) -> TaskFacts:
    try:
        prompts, measured = checked_prompts(config, task_of(config), reward_of(config))
        reward, some = reward_of(evaluation_config(config)), _sample(measured, BASELINE_PROMPTS)
        if reward.quick and may_probe(reward) and config.environment.name == NONE:
            known = baselines(some, InlineScorer(reward))
        else:  # scoring is not cheap
            known = Baselines(constant=constant_by_targets(some))
        overlap = _overlap(prompts, measured)
    except UNREADABLE as error:
        return TaskFacts(problem=first_line(error, LINE), unreadable=str(error))
    some, held_out, long = _sample(prompts), len(measured), list[Prompt]()
    if isinstance(prompts, list | tuple) and len(prompts) > SAMPLE:  # else the task makes them
        long = nlargest(LONGEST, prompts, key=lambda prompt: len(prompt.text))
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
            held_out=held_out,
            prompts=len(prompts),
            problem=first_line(error, LINE),
            baselines=known,
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


def _overlap(prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> int:
    return len(shared_prompts(prompts, held_out)) if isinstance(prompts, list | tuple) else 0


def facts_of(
    config: Config,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    encode: Callable[..., Sequence[int]],
) -> TaskFacts:
    """Compute `TaskFacts` from loaded prompts; `encode` returns the token ids of a text."""
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
    """Return evenly spaced prompts, because a data file may be sorted by length."""
    stride = max(1, len(prompts) // most)
    return [prompts[at] for at in range(0, len(prompts), stride)][:most]


def _solutions(config: Config, prompts: Sequence[Prompt]) -> list[str]:
    texts, template = [], template_of(config)
    for prompt in prompts:
        try:
            text = template.without_prefill(write_solution(prompt, config.sft.template))
        except DataError:
            text = write_solution(prompt, "{solution}")
        texts.append(text)
    return [text for text in texts if text]
