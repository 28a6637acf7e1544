"""The gradient of an optimizer step is the same on one rank and on several, whichever algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.config import Config, load_config
from covey.engines.native.engine import NativeEngine
from covey.models.load_model import load_language_model
from covey.objective import ALGORITHMS
from covey.rollout.episode import encode_prompts, generate
from covey.training.build import load_model, policy_of, reference_of, step_settings_of
from covey.training.optimizer import Stepped
from covey.training.parallel.join import joined_world
from covey.training.parallel.shard import whole_tensor
from covey.training.parallel.world import World
from covey.training.policy import Policy
from covey.training.resolve import objective_of, resolve, sampling_of, task_of
from covey.training.step import Learner, training_step
from covey.types import Group, Rollout
from tests.training.ranks import run_ranks

SMALL = [
    "model.device=cpu", "rollout.prompts_per_step=5", "rollout.group_size=4",
    "rollout.max_tokens=20", "train.mini_batches=2", "train.micro_batch_tokens=300",
    "train.old_logp=sampler",
]  # fmt: skip
EVERYTHING = [
    "objective.beta=0.02", "objective.entropy_bonus=0.001", "objective.correction=token_truncate",
    "objective.correction_mean_one=true", "objective.veto=1e-4", "objective.off_policy_limit=0.5",
    "filter.mask_truncated=true", "train.old_logp=recompute",
]  # fmt: skip
LORA = ["adapter.rank=4", "objective.beta=0.1"]
CASES = {
    **{name: [f"objective.name={name}"] for name in ALGORITHMS},
    **{f"{name} everything": [f"objective.name={name}", *EVERYTHING] for name in ALGORITHMS},
    "lora": LORA,
    "lora adapter off": [*LORA, "reference.kind=adapter_off"],
    "kl in the reward": ["objective.name=reinforce_pp", "objective.beta=0.05"],
    "skip rows": ["objective.name=grpo", "filter.skip_zero_gradient=true"],
    "offloaded": ["objective.beta=0.1", "reference.kind=offloaded"],
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Watched(Policy):
    """A policy that takes no optimizer step, but keeps the gradient it would have taken it on."""

    caught: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def step(self, rate: float) -> Stepped:
        if self.sums is not None:
            self.sums.finish()
        found = self.optimizer.gradients()
        self.caught.append({n: whole_tensor(g).clone() for n, g in found.items() if g is not None})
        self.optimizer.zero_grad()
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in self.caught[-1].values()))
        return Stepped(grad_norm=norm, skipped=False)


@dataclass(frozen=True)
class Outcome:
    gradients: list[dict[str, torch.Tensor]]
    metrics: dict[str, float]


def configured(*settings: str) -> Config:
    return resolve(load_config("arithmetic", [*SMALL, *settings]))


def sampled(config: Config) -> list[Group]:
    """Return groups of a policy that differs a little from the one that is trained."""
    model = load_model(config)
    with torch.no_grad():
        for parameter in model.model.parameters():
            wave = torch.sin(torch.arange(parameter.numel(), dtype=parameter.dtype))
            parameter.mul_(1 + 0.02 * wave.view_as(parameter))
    prompts = encode_prompts(model, task_of(config).train()[: config.rollout.prompts_per_step])
    groups = generate(
        prompts, engine=NativeEngine(model), model=model, sampling=sampling_of(config), step=1
    )
    return [replace(g, rollouts=tuple(map(scored, g.rollouts))) for g in groups]


def scored(rollout: Rollout) -> Rollout:
    """Give a rollout a reward that depends on its tokens, and one in eleven none."""
    value = sum(rollout.tokens)
    if value % 11 == 0:
        return rollout
    return replace(rollout, reward=float(value % 3), success=value % 3 > 0)


def outcome(config: Config, groups: Sequence[Group], world: World, dtype: str = "") -> Outcome:
    """Take one training step without optimizer steps."""
    model = load_model(config)
    if dtype:
        model = load_language_model("embedded", dtype=dtype, device="cpu")
    objective = objective_of(config)
    made = policy_of(config, model, world)
    policy = Watched(**{n: getattr(made, n) for n in Policy.__dataclass_fields__})
    learner = Learner(
        policy=policy,
        objective=objective,
        settings=step_settings_of(config, sampling_of(config), exact_logp=True),
        reference=reference_of(config, policy.model, objective, world),
        world=world,
    )
    learned = training_step(learner, groups, 1)
    return Outcome(policy.caught, learned.metrics)


def assert_close(found: Outcome, wanted: Outcome, most: float, what: str) -> None:
    assert len(found.gradients) == len(wanted.gradients) > 0, what
    for mine, theirs in zip(found.gradients, wanted.gradients, strict=True):
        assert mine.keys() == theirs.keys(), what
        size = max(float(g.abs().max()) for g in theirs.values())
        off = max(float((mine[n] - theirs[n]).abs().max()) for n in theirs)
        assert off <= most * size, (what, off / max(size, 1e-300))
    assert found.metrics.keys() == wanted.metrics.keys(), what
    for name, value in wanted.metrics.items():
        same = math.isclose(found.metrics[name], value, rel_tol=2e-5, abs_tol=2e-6)
        assert same, (what, name, value, found.metrics[name])


def stretched(groups: Sequence[Group], times: int) -> list[Group]:
    """Make the first completion very long."""
    first, *others = groups
    long, *rest = first.rollouts
    segment = long.segments[0]
    size = len(segment.tokens) * times
    segment = replace(
        segment,
        tokens=segment.tokens * times,
        sampler_logp=segment.sampler_logp * times,
        trained=(True,) * size,
    )
    return [replace(first, rollouts=(replace(long, segments=(segment,)), *rest)), *others]


def untrained(groups: Sequence[Group]) -> list[Group]:
    """Leave trained tokens in one completion only, so that other ranks have none."""
    first, *others = groups

    def blank(rollout: Rollout) -> Rollout:
        segment = rollout.segments[0]
        return replace(
            rollout, segments=(replace(segment, trained=(False,) * len(segment.tokens)),)
        )

    kept, *rest = first.rollouts
    return [
        replace(first, rollouts=(kept, *map(blank, rest))),
        *(replace(g, rollouts=tuple(map(blank, g.rollouts))) for g in others),
    ]


SHAPES: dict[str, Callable[[list[Group]], list[Group]]] = {
    "one group": lambda groups: groups[:1],
    "two rollouts": lambda groups: [replace(groups[0], rollouts=groups[0].rollouts[:2])],
    "very long": lambda groups: stretched(groups, 40),
    "no trained tokens on most ranks": untrained,
}


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_are_those_of_one_rank(size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    configs = {name: configured(*settings) for name, settings in CASES.items()}
    exact = configured("train.micro_batch_tokens=200")
    groups = sampled(exact)
    alone = {name: outcome(config, groups, World()) for name, config in configs.items()}
    shaped = {name: outcome(exact, change(groups), World()) for name, change in SHAPES.items()}
    double = outcome(exact, groups, World(), "float64")

    def work(rank: int) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for strategy in ("ddp", "fsdp"):
            with joined_world(with_strategy(exact, strategy)) as world:
                for name, config in configs.items():
                    if strategy == "fsdp" and size == 4 and "everything" in name:
                        continue  # two ranks have shown them
                    found = outcome(with_strategy(config, strategy), groups, world)
                    assert_close(found, alone[name], 1e-6, f"{strategy} {name}")
                for name, change in SHAPES.items():
                    found = outcome(with_strategy(exact, strategy), change(groups), world)
                    assert_close(found, shaped[name], 1e-6, f"{strategy} {name}")
                found = outcome(with_strategy(exact, strategy), groups, world, "float64")
                assert_close(found, double, 1e-12, f"{strategy} float64")
                seen[strategy] = [g.sum() for g in found.gradients[0].values()]
        return seen

    results = run_ranks(size, work, tmp_path)
    for other in results[1:]:
        assert other == results[0]


def with_strategy(config: Config, strategy: str) -> Config:
    parallel = config.parallel.model_copy(update={"strategy": strategy})
    return config.model_copy(update={"parallel": parallel})
