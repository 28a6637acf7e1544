"""Trains on preference pairs from a file instead of sampled groups (offline DPO and IPO).

A row of the file has the fields `prompt` (text or messages), `chosen` and `rejected`. Each pair
becomes a group of two rollouts with rewards 1 and 0, which training treats like a sampled group.
Completions are generated only in evaluations on the task's held-out prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from covey.errors import DataError
from covey.rollout.collect import Collected
from covey.rollout.filter import Selected
from covey.rollout.prompts import step_prompts
from covey.rollout.source import StepRollouts, Ticket
from covey.tasks.jsonl import json_lines
from covey.tasks.rows import RowReader
from covey.training.sft_data import encode_example
from covey.types import Group, Prompt

if TYPE_CHECKING:
    from covey.engines.protocol import WeightSource
    from covey.training.build import Parts


def read_pairs(file: str) -> list[Prompt]:
    """Read a preference file as prompts, with `chosen` as the target and `rejected` in `info`."""
    reader = RowReader(target="chosen", name="preferences")
    prompts = reader.read("train", json_lines(Path(file)), file)
    for prompt in prompts:
        rejected = prompt.info.get("rejected")
        if not isinstance(rejected, str):
            number = prompt.id.rsplit("/", 1)[1]
            raise DataError(
                f"preferences: line {number} of {file} has no text in the field 'rejected'"
            )
    return prompts


@dataclass(slots=True)
class PairSource:
    """A rollout source that draws preference pairs from a file in a seeded order."""

    parts: Parts
    started: dict[int, Ticket] = field(init=False, default_factory=dict)

    def start(self, tickets: Sequence[Ticket], weights: WeightSource, version: int) -> None:
        """Store tickets until `take` is called; each ticket requests the pairs of one step."""
        self.started |= {ticket.step: ticket for ticket in tickets}

    def take(self, step: int) -> StepRollouts:
        """Return the pairs of a step, except pairs that are too long."""
        config, ticket = self.parts.config, self.started.pop(step)
        drawn = step_prompts(
            self.parts.train_prompts,
            seed=config.seed,
            step=step - 1,
            count=config.rollout.prompts_per_step,
        )
        groups = [self._group(prompt, ticket.version) for prompt in drawn]
        short = tuple(group for group in groups if self._fits(group))
        left_out = len(groups) - len(short)
        note = f"step {step}: {left_out} pairs are too long and left out (preferences.max_tokens)"
        return StepRollouts(
            ticket=ticket,
            collected=Collected(groups=short, errors=((),) * len(short)),
            selected=Selected(groups=short),
            rounds=1,
            notes=(note,) if left_out else (),
        )

    def pending(self, after: int) -> list[StepRollouts]:
        """Return an empty list, because a resumed run reads the pairs again."""
        return []

    def close(self) -> None:
        """Do nothing."""

    def _fits(self, group: Group) -> bool:
        config, context = self.parts.config, self.parts.policy.model.context
        most = config.preferences.max_tokens or config.rollout.max_tokens
        return all(
            len(r.tokens) <= most and len(r.prompt_tokens) + len(r.tokens) <= context
            for r in group.rollouts
        )

    def _group(self, prompt: Prompt, version: int) -> Group:
        """Return a pair as a group; the rewards are 1 (chosen) and 0 (rejected)."""
        rollouts = [
            encode_example(
                self.parts.policy.model,
                prompt.messages,
                text,
                prompt_id=prompt.id,
                sample=sample,
                policy_version=version,
                reward=1.0 - sample,
                success=not sample,
            )
            for sample, text in enumerate((prompt.target, str(prompt.info["rejected"])))
        ]
        return Group(prompt=prompt, rollouts=tuple(rollouts))
