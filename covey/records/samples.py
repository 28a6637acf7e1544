"""Writes Markdown pages of the completions with the highest and the lowest rewards.

Training curves do not show reward hacking, but the completions with the highest rewards do.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from covey.errors import RunError
from covey.escape import printable
from covey.records.records import MOST_DATA, read_text
from covey.types import Group, Prompt, Rollout

FILE = "samples.json"


@dataclass(frozen=True, slots=True)
class Sample:
    """A scored completion on a sample page."""

    reward: float
    order: str
    """A hash of the completion, which fixes the order of completions with equal rewards."""
    step: int
    prompt_id: str
    sample: int
    prompt: str
    target: str
    text: str
    tokens: int
    finish: str
    success: bool
    parts: dict[str, float]
    reward_id: str


@dataclass(slots=True)
class SamplePage:
    """The completions with the highest and the lowest rewards since the last sample page."""

    count: int
    """A page shows at most `count` completions with the highest rewards, and at most `count`
    completions with the lowest rewards."""
    samples: Sequence[Sample] = ()
    """At most `2 * count` completions, sorted by reward."""
    first: int = 0
    """The first step that the page covers; 0 if the page covers no step yet."""
    scored: int = 0
    unscored: int = 0

    def add(self, step: int, groups: Sequence[Group]) -> None:
        """Add a step's completions, and drop completions whose rewards are no longer extreme."""
        self.first = self.first or step
        found = [_sample(step, g.prompt, r) for g in groups for r in g.rollouts]
        scored = [sample for sample in found if sample is not None]
        self.scored += len(scored)
        self.unscored += len(found) - len(scored)
        every = sorted((*self.samples, *scored), key=lambda sample: (sample.reward, sample.order))
        middle = len(every) > 2 * self.count
        self.samples = (*every[: self.count], *every[-self.count :]) if middle else every

    def text(self, step: int) -> str:
        """Return the page as Markdown. `step` is the last step that the page covers."""
        lowest = self.samples[: len(self.samples) // 2]
        highest = self.samples[len(lowest) :][::-1]
        several = self.first < step
        name = self.samples[-1].reward_id if self.samples else ""
        lines = [
            f"# Completions of step{'s' if several else ''} "
            f"{f'{self.first} to ' if several else ''}{step}",
            "",
            "Look for bad completions with a high reward, and for good completions with a low "
            "reward.",
            "",
            f"{self.scored} completions, {self.unscored} not scored. Reward: {_code(name)}",
        ]
        for title, some in (("Highest", highest), ("Lowest", lowest)):
            lines += ["", f"## {title}"]
            for number, sample in enumerate(some, start=1):
                lines += _entry(number, sample)
        return "\n".join(lines) + "\n"

    def save(self, folder: Path) -> None:
        if self.first:
            (folder / FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_samples(checkpoint: Path, count: int) -> SamplePage:
    """Read the unfinished sample page from a checkpoint."""
    file = checkpoint / FILE
    if not file.exists():
        return SamplePage(count)
    try:
        page = _PAGE.validate_python(json.loads(read_text(file, MOST_DATA)))
    except (RunError, ValueError, ValidationError, RecursionError) as error:
        raise RunError(
            f"checkpoint {checkpoint} cannot be read, because {FILE} is invalid: {error}"
        ) from None
    page.count = count
    return page


_PAGE = TypeAdapter(SamplePage)


def _sample(step: int, prompt: Prompt, rollout: Rollout) -> Sample | None:
    if rollout.reward is None:
        return None
    address = f"{rollout.prompt_id}/{rollout.sample}"
    return Sample(
        reward=rollout.reward,
        order=hashlib.sha256(address.encode()).hexdigest(),
        step=step,
        prompt_id=prompt.id,
        sample=rollout.sample,
        prompt=prompt.text,
        target=prompt.target,
        text=rollout.text,
        tokens=len(rollout.tokens),
        finish=rollout.finish,
        success=bool(rollout.success),
        parts=dict(rollout.parts),
        reward_id=rollout.reward_id,
    )


def _entry(number: int, sample: Sample) -> list[str]:
    parts = ", ".join(f"{name} {value:.3g}" for name, value in sample.parts.items())
    correct = "correct" if sample.success else "incorrect"
    return [
        "",
        f"### {number}. {sample.reward:.3g}, {correct}, {sample.tokens} tokens, {sample.finish}",
        "",
        f"Step {sample.step}, {_code(sample.prompt_id)} sample {sample.sample}; parts: "
        f"{_code(parts)}; target: {_code(sample.target)}",
        "",
        *quoted(sample.prompt),
        "",
        "Completion:",
        "",
        *quoted(sample.text),
    ]


def quoted(text: str) -> list[str]:
    """Return text as an indented Markdown block, so that Markdown in the text has no effect."""
    return [f"    {printable(line)}" for line in text.splitlines()] or ["    (nothing)"]


def _code(text: str) -> str:
    """Return text as one line of Markdown code, quoted with as many backticks as needed."""
    line = printable(" ".join(text.split())) or "none"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line else f"`{line}`"
