"""With one optimizer step per training step, GRPO and GSPO end in bit-equal weights."""

from __future__ import annotations

import pytest
import torch

from tests.lab.plan.runs import Ran, ran

PUBLISHED = (
    "rollout.prompts_per_step=2", "rollout.group_size=8", "objective.beta=0.04", "objective.clip_low=0.1",
    "objective.clip_high=0.1", "optimizer.max_grad_norm=0.1",
)  # fmt: skip


def of(name: str, *settings: str) -> Ran:
    return ran(f"objective.name={name}", *PUBLISHED, *settings, steps=3)


def test_grpo_and_gspo_are_bit_equal() -> None:
    grpo, gspo = of("grpo", "train.mini_batches=1"), of("gspo", "train.mini_batches=1")
    assert torch.equal(grpo.weights, gspo.weights)
    assert grpo.steps == gspo.steps  # every metric
    assert grpo["objective/kl_avg"] > 0
    assert all(step["optim/grad_norm"] > 0 for step in grpo.steps)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("gspo", ["train.mini_batches=2"]), ("dr_grpo", ["train.mini_batches=1"])],
)
def test_two_updates_or_another_advantage_differ(name: str, settings: list[str]) -> None:
    assert not torch.equal(of("grpo", *settings).weights, of(name, *settings).weights)
