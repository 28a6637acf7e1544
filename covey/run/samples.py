"""Writes a Markdown page with the highest-reward and lowest-reward completions of a step.

Training curves do not show reward hacking, but the completions with the highest rewards do.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from covey.escape import printable
from covey.types import Group, Prompt, Rollout


def samples_page(step: int, groups: Sequence[Group], count: int) -> str:
    """Return a Markdown page with the `count` best and `count` worst completions by reward.

    Completions with the same reward are ordered by a hash, so the order is arbitrary but fixed.
    """
    scored = [(g.prompt, r) for g in groups for r in g.rollouts if r.reward is not None]
    scored.sort(key=lambda pair: (pair[1].reward, _hash(pair[1])))
    unscored = sum(len(g.rollouts) for g in groups) - len(scored)
    lowest = scored[: min(count, len(scored) // 2)]
    highest = scored[len(scored) - min(count, len(scored) - len(lowest)) :][::-1]
    lines = [
        f"# Completions of step {step}",
        "",
        "Look for bad completions with a high reward, and for good completions with a low reward.",
        "",
        f"{len(scored)} completions, {unscored} not scored. "
        f"Reward: {_code(scored[0][1].reward_id if scored else '')}",
    ]
    for title, some in (("Highest", highest), ("Lowest", lowest)):
        lines += ["", f"## {title}"]
        for number, (prompt, rollout) in enumerate(some, start=1):
            lines += _entry(number, prompt, rollout)
    return "\n".join(lines) + "\n"


def _entry(number: int, prompt: Prompt, rollout: Rollout) -> list[str]:
    parts = ", ".join(f"{name} {value:.3g}" for name, value in rollout.parts.items())
    correct = "correct" if rollout.success else "incorrect"
    return [
        "",
        f"### {number}. {rollout.reward:.3g}, {correct}, {len(rollout.tokens)} tokens, "
        f"{rollout.finish}",
        "",
        f"{_code(prompt.id)} sample {rollout.sample}; parts: {_code(parts)}; target: "
        f"{_code(prompt.target)}",
        "",
        *quoted(prompt.text),
        "",
        "Completion:",
        "",
        *quoted(rollout.text),
    ]


def quoted(text: str) -> list[str]:
    """Return text as an indented Markdown block, so that Markdown in the text has no effect."""
    return [f"    {printable(line)}" for line in text.splitlines()] or ["    (nothing)"]


def _code(text: str) -> str:
    """Return text as one line of Markdown code, quoted with as many backticks as needed."""
    line = printable(" ".join(text.split())) or "none"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line else f"`{line}`"


def _hash(rollout: Rollout) -> str:
    return hashlib.sha256(f"{rollout.prompt_id}/{rollout.sample}".encode()).hexdigest()
