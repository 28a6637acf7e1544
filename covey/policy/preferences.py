"""Trains on preference pairs from a file instead of sampled groups (offline DPO and IPO).

A row of the file has the fields `prompt` (text or messages), `chosen` and `rejected`. Each pair
becomes a group of two rollouts with rewards 1 and 0, which training treats like a sampled group.
Completions are generated only in evaluations on the task's held-out prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from covey.errors import DataError
from covey.rollout.collect import Collected, StepRollouts, Ticket
from covey.rollout.filter import Selected
from covey.rollout.prompts import step_prompts
from covey.solutions import encode_example
from covey.tasks.rows import RowReader, json_lines
from covey.types import Group, Prompt

if TYPE_CHECKING:
    from covey.records.trackers import Tracker
    from covey.run import Run


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


def collect_pairs(run: Run, log: Tracker, tickets: Sequence[Ticket]) -> list[StepRollouts]:
    """Return the pairs of steps in a seeded order, without pairs that are too long."""
    config, model = run.config, run.policy.model
    most = config.preferences.max_tokens or config.rollout.max_tokens
    found = []
    for ticket in tickets:
        drawn = step_prompts(
            run.prompts,
            seed=config.seed,
            step=ticket.step - 1,
            count=config.rollout.prompts_per_step,
        )
        short = []
        for prompt in drawn:
            rollouts = [
                encode_example(
                    model,
                    prompt.messages,
                    text,
                    prompt_id=prompt.id,
                    sample=sample,
                    policy_version=ticket.version,
                    reward=1.0 - sample,
                    success=not sample,
                )
                for sample, text in enumerate((prompt.target, str(prompt.info["rejected"])))
            ]
            if all(
                len(r.tokens) <= most and len(r.prompt_tokens) + len(r.tokens) <= model.context
                for r in rollouts
            ):
                short.append(Group(prompt=prompt, rollouts=tuple(rollouts)))
        left_out = len(drawn) - len(short)
        note = (
            f"step {ticket.step}: {left_out} pairs are too long and left out "
            "(preferences.max_tokens)"
        )
        found.append(
            StepRollouts(
                ticket=ticket,
                collected=Collected(groups=tuple(short), errors=((),) * len(short)),
                selected=Selected(groups=tuple(short)),
                rounds=1,
                notes=(note,) if left_out else (),
            )
        )
    return found
