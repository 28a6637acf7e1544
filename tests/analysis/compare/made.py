"""A comparison made by hand, with numbers that can be checked by eye, and a verdict on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from covey.analysis.compare.outcome import Arm, Comparison, Outcome, Point
from covey.analysis.compare.verdict import (
    ArmVerdict,
    Checkpoints,
    Collapse,
    PairVerdict,
    Reach,
    Verdict,
)
from covey.evaluate.intervals import Estimate

EVIL = (
    "</pre><script>alert('x')</script><img src=http://evil.test/x onerror=alert(2)> | `a` *b* @me"
)
PROMPTS = ("p/0", "p/1", "p/2", "p/3")


def point(step: int, right: str) -> Point:
    answers = {name: digit == "1" for name, digit in zip(PROMPTS, right, strict=True)}
    return Point(step=step, tokens=1000 * step, updates=4 * step, seconds=0.5 * step, right=answers)


def run(arm: str, seed: int, *right: str, state: str = "done", error: str = "") -> Outcome:
    points = tuple(point(10 * number, digits) for number, digits in enumerate(right))
    return Outcome(
        arm=arm, seed=seed, state=state, error=error, points=points, first_answers=f"first-{seed}",
        folder=f"runs/{arm}/seed-{seed}", weights="" if error else f"{arm}{seed}".ljust(64, "0"),
    )  # fmt: skip


def comparison(**changes: Any) -> Comparison:
    """Two arms, three seeds; one run failed."""
    return Comparison(
        **{
            "name": "small",
            "command": "covey compare small --algorithms grpo,<b>",
            "arms": (
                Arm(name="grpo", differences={}),
                Arm(name="<b>", differences={"objective.name": "gspo", "objective.clip_low": 0.0003, "objective.dual": None}),
            ),
            "seeds": (1, 2, 3),
            "budget": "tokens",
            "amount": 20_000,
            "outcomes": (
                run("grpo", 1, "0000", "1000", "1110"),
                run("grpo", 2, "0000", "1100", "1111"),
                run("grpo", 3, "0000", "1100", "1110"),
                run("<b>", 1, "0000", "0001", "0010"),
                run("<b>", 2, "0000", "1000", "1010"),
                run("<b>", 3, "0000", state="failed", error="killed <by> signal 9"),
            ),
            "findings": (
                {"kind": "same", "title": "<b> is the same as grpo", "why": "the ratio is 1",
                 "remedy": "train.mini_batches = 4", "docs": "docs/plan.md", "arms": "grpo, <b>"},
            ),
            "environment": {"python": "3.11", "note": EVIL},
            "config_toml": 'name = "<common>"\n',
            **changes,
        }
    )  # fmt: skip


def verdict() -> Verdict:
    """What might be said of it: the numbers are made up to be recognised in a report."""
    arm = ArmVerdict(
        arm="grpo", seeds=3, missing=(), initial=Estimate(0.0, 0.0, 0.1), final=Estimate(0.833, 0.5, 1.0),
        improvement=Estimate(0.8333, 0.4746, 1.0), best=Estimate(0.84, 0.5, 1.0), area=Estimate(0.4, 0.3, 0.5),
        reach=(Reach(accuracy=0.5, reached=3, budget=12_500.0, tokens=12_500.0, seconds=6.25),), collapsed=(),
    )  # fmt: skip
    other = ArmVerdict(
        arm="<b>", seeds=2, missing=("seed 3 failed",), initial=Estimate(0.0, 0.0, 0.1),
        final=Estimate(0.375, 0.0, 1.0), improvement=Estimate(0.375, -0.2, 0.95), best=Estimate(0.376, 0.0, 1.0),
        area=Estimate(0.12, 0.0, 0.5), reach=(Reach(accuracy=0.5, reached=1, budget=None, tokens=None, seconds=None),),
        collapsed=(Collapse(seed=2, before=0.8, final=0.2, kind="half of its best lost"),),
    )  # fmt: skip
    checkpoints = Checkpoints(
        seed=1, difference=Estimate(0.5, 0.0, 1.0), gained=2, lost=0, p_value=0.5, p_holm=0.75
    )
    pair = PairVerdict(
        first="grpo", second="<b>", seeds=(1, 2), missing=("seed 3 failed",), differences=(0.5, 0.5),
        mean=0.5, difference=Estimate(0.5, -0.123, 0.987), other_problems=None, p_value=0.0421, p_holm=0.0842,
        sign_flip_p=None, decision="cannot tell", better=None, seeds_needed=7, detectable=0.6,
        checkpoints=(checkpoints,), words="grpo and <b> cannot be told apart; about 7 seeds would be needed",
        checkpoint_words="seed 1: the checkpoints cannot be told apart",
    )  # fmt: skip
    return Verdict(
        headline="Cannot tell grpo and <b> apart", cautions=("<b>, seed 3: killed <by> signal 9",),
        complete=False, arms=(arm, other), pairs=(pair,),
    )  # fmt: skip


def fill(folder: Path, answer: str = EVIL) -> Path:
    """Write what the runs leave on disk: steps, and the answers of the last evaluation."""
    for outcome in comparison().outcomes:
        path = folder / outcome.folder
        (path / "evaluations").mkdir(parents=True)
        last = outcome.points[-1]
        rows = [
            {"prompt_id": name, "prompt": f"{name}: {answer}", "expected": f"<{name}>", "right": right,
             "reward": 1.0, "tokens": 5, "finish": "length", "answer": answer, "values": {}, "samples": [], "info": {}}
            for name, right in last.right.items()
        ]  # fmt: skip
        _write(path / f"evaluations/{last.step:06d}.jsonl", rows)
        steps = [{"step": n, "objective/scores": n / 4, "optim/grad_norm": None} for n in (1, 2)]
        _write(path / "steps.jsonl", steps)
    return folder


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
