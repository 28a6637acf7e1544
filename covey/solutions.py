"""Worked solutions for supervised training, from the task or from a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.config import Config
from covey.errors import ConfigError, DataError, ModelError
from covey.tasks.rows import RowReader, json_lines
from covey.tasks.task import Task
from covey.types import Message, Prompt, Rollout

if TYPE_CHECKING:
    from covey.models.language_model import LanguageModel

_PLACE = re.compile(r"\{(worked|solution|answer)\}")
AS_IT_IS = "{answer}"
"""Template for solutions from `sft.file`, which uses each completion unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A prompt and the completion to train on."""

    prompt: Prompt
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Solutions:
    """A sequence of solutions; reading an item fills in the template for one prompt."""

    prompts: Sequence[Prompt]
    template: str

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Solution:
        prompt = self.prompts[index]
        return Solution(prompt=prompt, text=write_solution(prompt, self.template))


def write_solution(prompt: Prompt, template: str) -> str:
    """Fill in a template's fields {worked} (reasoning), {solution} and {answer} (target).

    {solution} is a correct answer from the dataset, or the target if the dataset has no such
    answer. A template with {worked} raises DataError if the dataset has no reasoning.
    """

    def filled(match: re.Match[str]) -> str:
        field = match.group(1)
        found = prompt.info.get(field, None if field == "worked" else prompt.target)
        if field == "answer":
            found = prompt.target
        if found is None:
            raise DataError(
                f"sft: prompt {prompt.id} has no worked solution; remove the field {{worked}} from "
                "sft.template, or set sft.file"
            )
        return str(found)

    return _PLACE.sub(filled, template)


def solutions_of(config: Config, task: Task) -> Solutions:
    """Return the solutions in `sft.file` if `sft.file` is set, else the task's solutions."""
    settings = config.sft
    if settings.file:
        reader = RowReader(target="completion", name="sft")
        prompts = reader.read("train", json_lines(Path(settings.file)), settings.file)
        return Solutions(prompts=prompts, template=AS_IT_IS)
    if not _PLACE.search(settings.template):
        raise ConfigError(
            f"config: sft.template = {settings.template!r} contains none of the fields {{worked}}, "
            "{solution} and {answer}, so all solutions would be the same"
        )
    train_prompts = task.train()
    if not train_prompts:
        raise DataError(f"task: {task.name} has no training prompts")
    return Solutions(prompts=train_prompts, template=settings.template)


def encode_example(
    model: LanguageModel, messages: Sequence[Message], text: str, **fields: Any
) -> Rollout:
    """Encode a written completion as a rollout, with the same tokens as a sampled completion.

    The rollout ends with an end token, so that the model learns to stop. `fields` are additional
    fields of the rollout, such as its reward.
    """
    assert model.renderer is not None
    text = model.renderer.template.without_prefill(text)
    tokens = (*model.tokenizer.encode(text, add_special_tokens=False), _end(model))
    return Rollout.single_turn(
        prompt_tokens=model.encode(messages),
        tokens=tokens,
        sampler_logp=(0.0,) * len(tokens),
        finish="stop",
        **{"prompt_id": "", "sample": 0, "text": text, "policy_version": 0, **fields},
    )


def _end(model: LanguageModel) -> int:
    """Return the chat template's end-of-turn token, or else the end-of-sequence token."""
    turn_end = None if model.renderer is None else model.renderer.turn_end
    end = model.tokenizer.eos_token_id if turn_end is None else turn_end
    if end is None:
        raise ModelError(
            "model: the tokenizer has no end-of-sequence token, but every solution must end with "
            "this token; use a model whose tokenizer has an end-of-sequence token"
        )
    return int(end)
