"""Replay: training again on recent groups with both correct and incorrect completions.

A replayed group keeps the log-probs and the weight versions with which it was sampled. Training
treats a replayed group like any other stale group. The log-probs `old_logp` are computed with the
policy's weights at the start of the step. The objective's importance-sampling correction multiplies
the weight of each token by `exp(old_logp - sampler_logp)`. The mean reward of a replayed group
includes only the rollouts of this group.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from covey.errors import RunError
from covey.records.records import MOST_DATA, read_text
from covey.rng import replay_order
from covey.rollout.filter import age, is_mixed
from covey.types import Group

if TYPE_CHECKING:
    from covey.config.schema import Replay

FILE = "replay.jsonl"
_GROUP: TypeAdapter[Group] = TypeAdapter(Group)


@dataclass(slots=True, kw_only=True)
class ReplayBuffer:
    """A buffer of the newest groups with both correct and incorrect completions."""

    settings: Replay
    seed: int
    groups: list[Group] = field(default_factory=list)
    """The groups in the buffer, oldest first."""

    def draw(self, *, step: int, version: int, without: Collection[str]) -> list[Group]:
        """Draw groups to train on again, except groups older than `replay.max_age` optimizer steps.

        `without` are the ids of the step's own prompts, which are excluded because a step may
        contain a prompt only once.
        """
        order = replay_order(seed=self.seed, step=step, size=len(self.groups))
        found: dict[str, Group] = {}
        for place in order:
            group = self.groups[place]
            fresh = age(group, version) <= self.settings.max_age
            if fresh and group.prompt.id not in without and group.prompt.id not in found:
                found[group.prompt.id] = group
        return list(found.values())[: self.settings.groups]

    def add(self, groups: Sequence[Group], version: int) -> None:
        """Add groups that have both correct and incorrect completions; drop the oldest groups."""
        if not self.settings.groups:
            return
        mixed = [group for group in groups if is_mixed(group)]
        ids = {group.prompt.id for group in mixed}
        kept = [
            group
            for group in self.groups
            if group.prompt.id not in ids and age(group, version) <= self.settings.max_age
        ]
        self.groups = [*kept, *mixed][-self.settings.size :]

    def metrics(self, drawn: Sequence[Group], version: int) -> dict[str, float]:
        """Return the number and age of replayed groups as metrics; {} without replay."""
        if not self.settings.groups:
            return {}
        ages = [age(group, version) for group in drawn]
        found = {"data/replayed_groups": float(len(drawn)), "data/replay_size": len(self.groups)}
        return found | ({"data/replay_age": sum(ages) / len(ages)} if ages else {})

    def save(self, folder: Path) -> None:
        """Write the buffer's groups into a checkpoint; without replay, write no file."""
        if self.settings.groups:
            text = "".join(json.dumps(_row(group)) + "\n" for group in self.groups)
            (folder / FILE).write_text(text, encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Read the buffer's groups from a checkpoint."""
        if not self.settings.groups:
            return
        try:
            lines = read_text(folder / FILE, MOST_DATA).splitlines()
            self.groups = [_GROUP.validate_python(json.loads(line)) for line in lines]
        except (RunError, ValueError, ValidationError, RecursionError) as error:
            raise RunError(
                f"checkpoint {folder} cannot be read, because {FILE} is invalid: {error}"
            ) from None


def _row(group: Group) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "prompt": {
            "id": prompt.id,
            "task": prompt.task,
            "messages": [dict(message) for message in prompt.messages],
            "target": prompt.target,
            "info": dict(prompt.info),
        },
        "rollouts": [asdict(rollout) for rollout in group.rollouts],
    }
