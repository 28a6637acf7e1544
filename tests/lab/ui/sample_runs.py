"""Run folders for tests of the page, written by the code that training writes them with."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.records.folder import RunFolder
from covey.types import Group, Prompt, Rollout

CONFIG = """[model]
path = "embedded"
[task]
name = "arithmetic"
[objective]
name = {name}
clip_low = {clip}
[train]
steps = 20
"""
HOSTILE = (
    '<script>window.hacked=1</script><img src=x onerror="window.hacked=1"><b>bold</b>'
    "\x1b]0;title\x07\x1b[31mred\u202egnp.exe\u2066\x00{{7*7}}${7*7}</pre></textarea>"
)


def step_row(step: int, level: float = 0.0) -> dict[str, Any]:
    reward = level + 0.5 * (1 - math.exp(-step / 5))
    return {
            "step": step, "tokens": 100 * step, "objective/scores": reward, "objective/verifiable_correct_rate": reward,
            "objective/parts/format": 1.0, "policy/entropy_avg": 1 / step, "val/sequence_lengths": 20.0 + step,
            "policy/clipfrac_avg": 0.01, "optim/grad_norm": 1.0, "time/total": 0.1, "time/from_scratch": 0.1 * step,
    }  # fmt: skip


def group(number: int, rewards: Sequence[float | None], text: str = "") -> Group:
    prompt = Prompt(
        id=f"arithmetic/{number}", task="arithmetic", messages=[{"role": "user", "content": f"{number}+{number}?{text}"}],
        target=str(2 * number),
    )  # fmt: skip
    rollouts = tuple(
        Rollout.single_turn(
            prompt_id=prompt.id, sample=sample, prompt_tokens=(25,), tokens=(2, 25, 28, 16, 1),
            trained=(True, True, False, True, True), sampler_logp=(-0.1, -1.0, 0.0, -0.2, -2.0), policy_version=3,
            text=f"<answer>{number}</answer>{text}", finish="stop", reward=reward,
            success=None if reward is None else reward > 0.5, parts={"correct": reward or 0.0},
        )
        for sample, reward in enumerate(rewards)
    )  # fmt: skip
    return Group(prompt=prompt, rollouts=rollouts)


def make_run(
    path: Path, *, steps: int = 4, name: str = "grpo", level: float = 0.0, text: str = ""
) -> RunFolder:
    environment = {
        "started": "2026-01-01T00:00:00+00:00",
        "command": ["covey", "train", text[:500]],
        "seed": 0,
        "packages": {},
    }
    run = RunFolder.create(
        path, CONFIG.format(name=json.dumps(name), clip=0.2 + level), environment
    )
    for step in range(1, steps + 1):
        add_step(run, step, level, text)
    estimate = {"value": 0.4 + level, "low": 0.3, "high": 0.9}
    for step in (0, steps):
        run.log_evaluation(
            {
                "step": step,
                "prompts": 10,
                "greedy": estimate,
                "parts": {},
                "best_constant": 0.125,
                "distinct_answers": 7,
            }
        )
    return run


def add_step(run: RunFolder, step: int, level: float = 0.0, text: str = "") -> None:
    groups = [
        group(1, (1.0, 0.0, 0.0, 1.0), text),
        group(2, (0.0,) * 4, text),
        group(3, (1.0, 1.0, 1.0, None), text),
    ]
    advantages = [[1.0, -1.0, -1.0, 1.0], [0.0] * 4, [None] * 4]
    run.write_table("rollouts", step, RunFolder.rollout_rows(groups, advantages))
    run.log_step(step_row(step, level))
