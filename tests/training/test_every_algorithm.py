"""Every algorithm goes through the whole loop: generated, scored, trained, logged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from covey.config import load_config
from covey.config.resolve import resolve
from covey.loop import train
from covey.objective import ALGORITHMS
from covey.records.folder import RunFolder
from covey.records.metric_registry import meaning
from covey.run import Run
from covey.stopping import StopSignal
from tests.trackers import Notes

QUICK = [
    "train.steps=2", "rollout.prompts_per_step=6", "rollout.group_size=4", "evaluate.every=0", "save.every=0",
    "model.device=cpu",
]  # fmt: skip
# More than rewards: what else is needed is computed, and a run with everything at once is finite.
EVERYTHING = [
    "objective.beta=0.02", "objective.entropy_bonus=0.001", "objective.correction=token_truncate",
    "objective.veto=1e-4", "objective.off_policy_limit=0.5", "filter.mask_truncated=true",
    "filter.skip_zero_gradient=true", "length_penalty.name=group_relative", "train.old_logp=recompute",
    "train.steps=1",
]  # fmt: skip
# What an algorithm needs: a teacher that is not the policy itself, which would teach nothing.
NEEDED = {
    "opd": ["teacher.path=embedded", "teacher.temperature=0.8"],
    "sdpo": ["teacher.policy=frozen", "teacher.context={target = '{text}'}"],
}
OF_RATIOS = ("objective.correction", "objective.veto", "objective.off_policy_limit")
# What an algorithm refuses, and why.
REFUSED = {
    "scalerl": ("objective.correction", "objective.veto"),  # its ratio is to the engine already
    "bapo": ("objective.correction", "objective.veto"),
    "m2po": ("objective.correction", "objective.veto"),
    "dppo": ("objective.correction", "objective.veto"),
    "maxrl": ("length_penalty",),  # it makes rewards negative
    "dpo": OF_RATIOS,  # there is no ratio in a pair
    "ipo": OF_RATIOS,
}


@pytest.mark.parametrize("more", [[], EVERYTHING], ids=["defaults", "everything"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_trains(name: str, more: list[str], tmp_path: Path) -> None:
    more = [s for s in more if not s.startswith(REFUSED.get(name, ("?",)))]
    settings = [f"objective.name={name}", *QUICK, *NEEDED.get(name, []), *more]
    config = resolve(load_config("arithmetic", settings))
    parts = Run.build(config)
    before = [p.detach().clone() for p in parts.policy.model.model.parameters()]
    run = RunFolder.create(tmp_path / "run", "", {})
    train(parts, run, [Notes()], StopSignal())
    rows = run.steps()
    assert len(rows) == config.train.steps
    for row in rows:
        assert row.pop("reward_id").startswith("think_answer@1#")
        assert all(math.isfinite(value) for value in row.values())
        assert all(meaning(key) for key in row)
        assert row["optim/grad_norm"] > 0
        assert row["optim/skipped"] == 0
        objective = parts.objective
        assert ("objective/beta" in row) == (objective.beta > 0)
        assert ("objective/rlhf_reward" in row) == (objective.beta > 0 and not objective.pairs)
    assert parts.policy.version == config.train.steps * config.train.optimizer_steps
    moved = [
        float((a - b.detach()).abs().max())
        for a, b in zip(before, parts.policy.model.model.parameters(), strict=True)
    ]
    assert all(0 < distance < 0.01 for distance in moved)
    assert all(torch.isfinite(p).all() for p in parts.policy.model.model.parameters())
