"""Runs with a critic and with pairs: whole steps, resuming, warm-up, files, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from covey import step as training
from covey.config import Config, load_config
from covey.config.resolve import resolve
from covey.errors import ConfigError, DataError, RunError
from covey.loop import train
from covey.objective import build as build_objective
from covey.objective import with_advantage
from covey.policy.critic import OPTIMIZER_FILE, WEIGHTS_FILE, critic_of
from covey.policy.preferences import read_pairs
from covey.records.folder import RunFolder
from covey.reference import FrozenReference
from covey.run import Run
from covey.step import Observer, RowFacts, Seen, optimize, prepare, skips_rows
from covey.stopping import StopSignal
from tests.conftest import build, make_batch
from tests.trackers import Notes
from tests.training.test_step import learner, make_policy, settings

QUICK = [
    "model.device=cpu", "train.mini_batches=2", "rollout.prompts_per_step=4",
    "rollout.group_size=4", "rollout.max_tokens=24", "evaluate.every=0", "save.every=2",
]  # fmt: skip
PPO = [
    "objective.name=ppo", "objective.beta=0.02", "critic.learning_rate=1e-3",
    "optimizer.schedule=constant", "rollout.max_tokens=48",
]  # fmt: skip


def config_of(*given: str) -> Config:
    return resolve(load_config("arithmetic", [*QUICK, *given]))


def run_of(folder: Path, *given: str) -> tuple[Any, RunFolder]:
    parts = Run.build(config_of(*given))
    run = RunFolder(folder) if folder.exists() else RunFolder.create(folder, "", {})
    train(parts, run, [Notes()], StopSignal())
    return parts, run


def numbers(run: RunFolder) -> list[dict[str, float]]:
    left_out = ("time/", "memory/", "reward_id")
    return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in run.steps()]


def test_a_resumed_run_has_the_same_critic_to_the_bit(tmp_path: Path) -> None:
    whole, at_once = run_of(tmp_path / "whole", *PPO, "train.steps=4")
    run_of(tmp_path / "parts", *PPO, "train.steps=4", "train.stop_after={steps=2}")
    again, resumed = run_of(tmp_path / "parts", *PPO, "train.steps=4")
    assert numbers(resumed) == numbers(at_once)
    for one, other in zip(whole.critic.optimizer.masters.values(), again.critic.optimizer.masters.values(), strict=True):  # fmt: skip
        assert torch.equal(one, other)
    moments = whole.critic.optimizer.state()
    assert moments.keys() == again.critic.optimizer.state().keys()
    assert all(torch.equal(moments[k], v) for k, v in again.critic.optimizer.state().items())
    for row in numbers(at_once):
        assert row["loss/value"] > 0
        assert row["critic/grad_norm"] > 0
    folder = at_once.checkpoints()[-1][1]
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(RunError, match="cannot be read"):
        again.critic.load(folder)
    assert (folder / OPTIMIZER_FILE).exists()


@pytest.mark.parametrize(("place", "call"), [("critic_step", 6), ("_train_policy", 3)])
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_checkpoint_never_has_half_a_step_of_the_critic(
    warmup: int, place: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [*PPO, "train.steps=4", "save.every=100", f"critic.warmup_steps={warmup}"]
    _, whole = run_of(tmp_path / "whole", *given)
    real, calls = getattr(training, place), itertools.count(1)

    def fails(*arguments: Any) -> Any:
        if next(calls) == call:
            raise ZeroDivisionError
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training, place, fails)
        with pytest.raises(ZeroDivisionError):
            run_of(tmp_path / "run", *given)
    _, resumed = run_of(tmp_path / "run", *given)
    assert numbers(resumed) == numbers(whole)


def test_the_policy_stays_as_it_is_while_the_critic_warms_up(tmp_path: Path) -> None:
    settings_ = [*PPO, "critic.warmup_steps=2", "train.steps=3", "critic.initial_value=0.25"]
    parts = Run.build(config_of(*settings_))
    before = [p.detach().clone() for p in parts.policy.model.model.parameters()]
    head = parts.critic.head.bias.item()
    run = RunFolder.create(tmp_path / "run", "", {})
    train(parts, run, [Notes()], StopSignal())
    rows = run.steps()
    assert head == 0.25
    assert rows[0]["critic/value_mean"] == pytest.approx(0.25)
    assert [row["updates"] for row in rows] == [0, 0, 2]
    assert ["optim/grad_norm" in row for row in rows] == [False, False, True]
    assert parts.policy.version == 2
    moved = zip(before, parts.policy.model.model.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in moved)


def test_a_critic_learns_what_to_expect() -> None:
    """Rewards that depend on the prompt alone: values come to explain their variance."""
    config = config_of(*PPO, "critic.learning_rate=3e-3", "model.path=embedded")
    policy, objective = make_policy(), build_objective("ppo", beta=0.0, value_clip=0.0)
    critic = critic_of(config, Run.build(config).policy.model, objective)
    assert critic is not None
    batch = make_batch(rows=8, groups=2, seed=1)
    learns = learner(policy, objective, old_logp_from_sampler=True)
    losses = []
    from dataclasses import replace

    for step in range(1, 9):
        filled = prepare(replace(learns, critic=critic), batch)
        filled = with_advantage(objective, filled)
        metrics = optimize(replace(learns, critic=critic), filled, step)
        losses.append(metrics["loss/value"])
    assert losses[-1] < 0.7 * losses[0]
    assert math.isfinite(metrics["critic/explained_variance"])


def test_only_the_pair_of_a_group_passes_through_the_models() -> None:
    policy, objective = make_policy(), build_objective("dpo")
    batch = make_batch(rows=8, groups=2, seed=2)
    rewards = torch.tensor([0.1, 0.5, 0.9, 0.2, 0.3, 0.3, 0.3, 0.3], dtype=torch.float64)
    from dataclasses import replace

    batch = replace(batch, rewards=rewards, group=torch.tensor([0] * 4 + [1] * 4))
    seen: list[int] = []
    reference = FrozenReference(model=build("llama"), temperature=1.0, logits_megabytes=64.0)
    learns = replace(learner(policy, objective), reference=reference)
    assert skips_rows(learns)
    filled = prepare(learns, with_advantage(objective, batch))
    assert filled.ref_logp is not None
    computed = (filled.ref_logp != batch.sampler_logp).any(dim=1)
    assert computed.tolist() == [True, False, True] + [False] * 5

    class Watching(Observer):
        def seen(self, one: Seen) -> None:
            seen.extend(one.rows.tolist())

    metrics = optimize(learns, filled, 1, observer=Watching())
    assert sorted(seen) == [0, 2]
    assert (metrics["pairs/count"], metrics["pairs/ties"]) == (1, 1)
    assert metrics["loss/policy_avg"] == pytest.approx(math.log(2), abs=0.2)


def test_an_optimizer_step_takes_whole_groups_where_they_are_compared() -> None:
    objective, batch = build_objective("dpo"), make_batch(rows=12, groups=3, seed=4)
    facts = RowFacts.of(with_advantage(objective, batch), skip=True, whole_groups=True)
    for count in (2, 3, 5):
        taken = list(facts.mini_batches(settings(mini_batches=count), 1))
        groups = [set(batch.group[rows].tolist()) for rows in taken]
        assert sum(map(len, groups)) == 3
        assert sorted(int(r) for rows in taken for r in rows) == list(range(12))


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def pairs(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"{n}+{n + 1}?",
            "chosen": f"<answer>{2 * n + 1}</answer>",
            "rejected": f"<answer>{n}</answer>",
        }
        for n in range(count)
    ]


@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_pairs_of_a_file_are_learned_without_sampling(name: str, tmp_path: Path) -> None:
    file = write(tmp_path / "pairs.jsonl", pairs(8))
    given = [f"objective.name={name}", f"preferences.file={file}", "train.steps=12"]
    parts, run = run_of(tmp_path / "run", *given, "optimizer.learning_rate=3e-4")
    rows = run.steps()
    assert rows[-1]["pairs/margin"] > rows[0]["pairs/margin"]
    assert rows[-1]["pairs/accuracy"] > 0.9
    assert {row["pairs/ties"] for row in rows} == {0}
    assert not any(key.startswith("debug/sampler") for row in rows for key in row)
    # The policy did not sample the pairs, and the beta of a pair is not the weight of a KL.
    unknown = {"objective/kl", "objective/non_score_reward", "objective/rlhf_reward"}
    assert not any(unknown & row.keys() for row in rows)
    assert parts.policy.version == 24


def test_a_file_with_errors_is_refused_with_the_line(tmp_path: Path) -> None:
    rows = pairs(3)
    del rows[1]["rejected"]
    with pytest.raises(
        DataError, match=r"line 2 of .*x\.jsonl has no text in the field 'rejected'"
    ):
        read_pairs(write(tmp_path / "x.jsonl", rows))
    with pytest.raises(DataError, match=r"y\.jsonl:1 has no 'chosen'"):
        read_pairs(write(tmp_path / "y.jsonl", [{"prompt": "?", "rejected": "a"}]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["objective.name=grpo", "preferences.file=x"], "needs an objective on preference pairs"),
        (["objective.name=dpo", "preferences.max_tokens=9"], "set preferences.file"),
        (["objective.name=dpo", "preferences.file=x", "overlap.staleness=1"], "staleness"),
        (
            ["objective.name=dpo", "preferences.file=x", "curriculum.sampling=hard"],
            "same pass rate",
        ),
        (["objective.name=dpo", "train.mini_batches=8"], "needs whole groups"),
    ],
)
def test_what_cannot_work_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(*given)
