"""A small comparison with simple numbers, and a conclusion with recognizable ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from covey.evaluation.intervals import Estimate
from covey.lab.compare.arm_results import ArmResult, Collapse, TimeToAccuracy
from covey.lab.compare.comparison import Arm, Comparison, Point, RunResult
from covey.lab.compare.conclusion import CheckpointResult, Conclusion, PairResult

EVIL = (
    "</pre><script>alert('x')</script><img src=http://evil.test/x onerror=alert(2)> | `a` *b* @me"
)
PROMPTS = ("p/0", "p/1", "p/2", "p/3")


def point(step: int, solved: str) -> Point:
    correct = {name: digit == "1" for name, digit in zip(PROMPTS, solved, strict=True)}
    return Point(
        step=step, tokens=1000 * step, updates=4 * step, seconds=0.5 * step, correct=correct
    )


def run(arm: str, seed: int, *solved: str, state: str = "done", error: str = "") -> RunResult:
    points = tuple(point(10 * number, digits) for number, digits in enumerate(solved))
    return RunResult(
        arm=arm, seed=seed, state=state, error=error, points=points,
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
            "runs": (
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


def conclusion() -> Conclusion:
    """A conclusion whose invented numbers are easy to recognize in a report."""
    arm = ArmResult(
        arm="grpo", seeds=3, missing=(), initial=Estimate(0.0, 0.0, 0.1), final=Estimate(0.833, 0.5, 1.0),
        improvement=Estimate(0.8333, 0.4746, 1.0), best=Estimate(0.84, 0.5, 1.0), area=Estimate(0.4, 0.3, 0.5),
        time_to_accuracy=(TimeToAccuracy(accuracy=0.5, reached=3, budget=12_500.0, tokens=12_500.0, seconds=6.25),), collapsed=(),
    )  # fmt: skip
    other = ArmResult(
        arm="<b>", seeds=2, missing=("seed 3 failed",), initial=Estimate(0.0, 0.0, 0.1),
        final=Estimate(0.375, 0.0, 1.0), improvement=Estimate(0.375, -0.2, 0.95), best=Estimate(0.376, 0.0, 1.0),
        area=Estimate(0.12, 0.0, 0.5), time_to_accuracy=(TimeToAccuracy(accuracy=0.5, reached=1, budget=None, tokens=None, seconds=None),),
        finals=(0.25, 0.5), improvements=(0.25, 0.5), collapsed=(Collapse(seed=2, before=0.8, final=0.2, kind="lost half of its best"),),
    )  # fmt: skip
    checkpoints = CheckpointResult(
        seed=1, difference=0.5, gained=2, lost=0, p_value=0.5, p_holm=0.75
    )
    pair = PairResult(
        first="grpo", second="<b>", seeds=(1, 2), missing=("seed 3 failed",), differences=(0.5, 0.5),
        mean=0.5, difference=Estimate(0.5, -0.123, 0.987), difference_new_prompts=None, p_value=0.0421, p_corrected=0.0842,
        p_student=0.0123, p_sign=0.5, cancelling_share=0.4, decision="cannot tell", better=None, seeds_needed=7, detectable=0.6,
        checkpoints=(checkpoints,), summary="grpo and <b> do not differ; about 7 seeds would be needed",
        checkpoint_summary="seed 1: the checkpoints do not differ",
    )  # fmt: skip
    return Conclusion(
        headline="Cannot tell grpo and <b> apart", cautions=("<b>, seed 3: killed <by> signal 9",),
        complete=False, arms=(arm, other), pairs=(pair,),
    )  # fmt: skip


def fill(folder: Path, text: str = EVIL) -> Path:
    """Write the files of the runs: steps, and the completions of the last evaluation."""
    for result in comparison().runs:
        path = folder / result.folder
        (path / "evaluations").mkdir(parents=True)
        last = result.points[-1]
        rows = [
            {"prompt_id": name, "prompt": f"{name}: {text}", "target": f"<{name}>", "success": correct,
             "reward": 1.0, "tokens": 5, "finish": "length", "completion": text, "values": {}, "parts": {}, "samples": [], "info": {}}
            for name, correct in last.correct.items()
        ]  # fmt: skip
        _write(path / f"evaluations/{last.step:06d}.jsonl", rows)
        steps = [{"step": n, "objective/scores": n / 4, "optim/grad_norm": None} for n in (1, 2)]
        _write(path / "steps.jsonl", steps)
    return folder


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
