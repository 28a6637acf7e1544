"""A page for a person to read now and then: the best and the worst answers of a step.

A reward that is being gamed looks fine in every curve. It shows in the answers that it likes most.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from covey.escape import printable
from covey.types import Group, Prompt, Rollout

Judged = tuple[Prompt, Rollout]


def review(step: int, groups: Sequence[Group], count: int) -> str:
    """Return Markdown with the `count` highest and the `count` lowest scored answers.

    Among answers of the same reward the choice is by hash: any of them, but the same each time.
    """
    judged = [(g.prompt, r) for g in groups for r in g.rollouts if r.reward is not None]
    judged.sort(key=lambda pair: (pair[1].reward, _hash(pair[1])))
    unscored = sum(len(g.rollouts) for g in groups) - len(judged)
    lowest = judged[: min(count, len(judged) // 2)]
    highest = judged[len(judged) - min(count, len(judged) - len(lowest)) :][::-1]
    lines = [
        f"# Answers of step {step}",
        "",
        "Does the reward like what you like? Look for answers that score high and should not, and "
        "for good ones that score low.",
        "",
        f"{len(judged)} answers, {unscored} not scored. "
        f"Reward: {_code(judged[0][1].reward_id if judged else '')}",
    ]
    for title, some in (("Highest", highest), ("Lowest", lowest)):
        lines += ["", f"## {title}"]
        for number, (prompt, rollout) in enumerate(some, start=1):
            lines += _entry(number, prompt, rollout)
    return "\n".join(lines) + "\n"


def _entry(number: int, prompt: Prompt, rollout: Rollout) -> list[str]:
    parts = ", ".join(f"{name} {value:.3g}" for name, value in rollout.parts.items())
    right = "right" if rollout.success else "wrong"
    return [
        "",
        f"### {number}. {rollout.reward:.3g}, {right}, {len(rollout.tokens)} tokens, "
        f"{rollout.finish}",
        "",
        f"{_code(prompt.id)} sample {rollout.sample}; parts: {_code(parts)}; expected: "
        f"{_code(prompt.target)}",
        "",
        *_quoted(prompt.text),
        "",
        "Answer:",
        "",
        *_quoted(rollout.text),
    ]


def _quoted(text: str) -> list[str]:
    """Indent text as Markdown's verbatim blocks, which no text can close."""
    return [f"    {printable(line)}" for line in text.splitlines()] or ["    (nothing)"]


def _code(text: str) -> str:
    """Put text on one line, between more backticks than it has in a row."""
    line = printable(" ".join(text.split())) or "none"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line else f"`{line}`"


def _hash(rollout: Rollout) -> str:
    return hashlib.sha256(f"{rollout.prompt_id}/{rollout.sample}".encode()).hexdigest()
