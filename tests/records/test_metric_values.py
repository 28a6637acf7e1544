"""The metrics of a recorded step, against their definitions, under open-instruct's names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any

import pytest

from covey.cli.main import run as covey
from covey.records.folder import RunFolder
from covey.records.metric_registry import FORMER, METRICS, current_name, metric

OPEN_INSTRUCT_PAGE = (
    "episode", "lr", "epoch", "objective/kl", "objective/scores", "objective/rlhf_reward",
    "objective/non_score_reward", "objective/entropy", "objective/loss", "objective/kl2",
    "objective/kl3", "objective/scores_mean", "objective/reward_std",
    "objective/verifiable_correct_rate", "loss/policy_avg", "policy/approxkl_avg",
    "policy/clipfrac_avg", "policy/entropy_avg", "time/from_scratch", "time/training",
    "val/sequence_lengths", "val/num_stop_token_ids", "val/ratio", "val/ratio_var",
    "val/stop_token_rate", "val/format_scores", "other/real_batch_size_ratio", "other/packed_ratio",
)  # fmt: skip
"""Every name on open-instruct's page of metrics."""
PROMPTS, GROUP, END = 4, 4, 1
"""END is the embedded model's stop token."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("metrics") / "run"
    settings = {
        "train.steps": 2, "rollout.prompts_per_step": PROMPTS, "rollout.group_size": GROUP,
        "rollout.max_tokens": 24, "evaluate.every": 0, "objective.beta": 0.05,
        "train.mini_batches": 1, "train.epochs": 1, "optimizer.learning_rate": 1e-3,
        "task.train_size": 50,
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    assert covey(["train", "arithmetic", "--run", str(path), *words]) == 0
    return path


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_page_has_28_names_and_each_is_a_metric() -> None:
    assert len(set(OPEN_INSTRUCT_PAGE)) == 28
    assert [name for name in OPEN_INSTRUCT_PAGE if metric(current_name(name)) is None] == []


def test_a_step_is_logged_under_every_name_of_the_page(run: Path) -> None:
    for row in lines(run / "steps.jsonl"):
        found = [row[current_name(name)] for name in OPEN_INSTRUCT_PAGE]
        assert all(math.isfinite(value) for value in found)
        assert set(OPEN_INSTRUCT_PAGE) - set(row) == {
            "objective/scores_mean", "objective/entropy", "objective/loss", "val/format_scores",
        }  # fmt: skip


def test_no_number_is_logged_twice(run: Path) -> None:
    for row in lines(run / "steps.jsonl"):
        assert set(FORMER) & set(row) == set()


def test_a_run_folder_with_former_names_is_read_under_the_names_of_today(tmp_path: Path) -> None:
    row = {
        "step": 1,
        "objective/success": 0.5,
        "objective/verifiable_correct_rate": 0.5,
        "policy/ratio": 1.0,
    }
    folder = RunFolder.create(tmp_path / "run", "", {})
    folder.log_step(row)
    assert folder.steps() == [
        {"step": 1, "objective/verifiable_correct_rate": 0.5, "val/ratio": 1.0}
    ]


def test_values_follow_their_definitions(run: Path) -> None:
    first, row = lines(run / "steps.jsonl")
    rollouts = lines(run / "rollouts/000002.jsonl")
    rewards = [r["reward"] for r in rollouts]
    groups = [rewards[n : n + GROUP] for n in range(0, len(rewards), GROUP)]
    differ = [len(set(group)) > 1 for group in groups]
    stops = [r["tokens"].count(END) for r in rollouts]
    expected = {
        "episode": 2 * PROMPTS * GROUP,
        "epoch": 2 * PROMPTS / 50,
        "objective/scores": fmean(rewards),
        "objective/reward_std": pstdev(rewards),
        "objective/group_std": fmean(stdev(group) for group in groups),
        "objective/verifiable_correct_rate": fmean(r["success"] for r in rollouts),
        "objective/non_score_reward": 0.05 * row["objective/kl"],
        "objective/rlhf_reward": fmean(rewards) - 0.05 * row["objective/kl"],
        "val/sequence_lengths": fmean(len(r["tokens"]) for r in rollouts),
        "val/num_stop_token_ids": sum(stops),
        "val/stop_token_rate": fmean(count > 0 for count in stops),
        "objective/parts/format": fmean(r["parts"]["format"] for r in rollouts),
        "other/real_batch_size_ratio": fmean(differ),
        "rollout/zero_variance_groups": 1 - fmean(differ),
        "time/from_scratch": first["time/total"] + row["time/total"],
        # One optimizer step: the policy is still the old one, and nothing is clipped.
        "val/ratio": 1.0,
        "val/ratio_var": 0.0,
        "policy/approxkl_avg": 0.0,
        "policy/clipfrac_avg": 0.0,
    }
    found = {name: row[name] for name in expected}
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    # The step's passes are one micro-batch, which a model that packs reads as one row.
    assert row["other/packed_ratio"] in (1 / len(rollouts), 1.0)


def test_the_kl_estimates_agree_with_the_log_probabilities(run: Path) -> None:
    first, row = lines(run / "steps.jsonl")
    # Step 1 starts at the reference itself.
    assert [first[f"objective/{name}"] for name in ("kl", "kl2", "kl3")] == [0.0, 0.0, 0.0]
    # k3 is the estimate in use: its mean over tokens times tokens per completion is its sum.
    tokens = fmean(len(r["tokens"]) for r in lines(run / "rollouts/000002.jsonl"))
    assert row["objective/kl3"] == pytest.approx(row["objective/kl_avg"] * tokens, rel=1e-6)
    assert row["objective/kl2"] > 0
    assert row["objective/kl3"] > 0


def test_every_alias_belongs_to_one_metric_and_is_no_other_metric() -> None:
    others = [
        name for entry in METRICS.values() for name in (entry.open_instruct, entry.trl) if name
    ]
    assert len(others) == len(set(others))
    assert set(FORMER) & set(METRICS) == set()
    assert METRICS["rollout/zero_variance_groups"].trl == "frac_reward_zero_std"
    assert [name for name in FORMER.values() if metric(name) is None] == []
