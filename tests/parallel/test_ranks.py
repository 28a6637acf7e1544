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
from covey.config.algorithm_names import PAIRED
from covey.config.resolve import objective_of, resolve, sampling_of, task_of
from covey.config.schema import Parallel
from covey.engines.native.engine import NativeEngine
from covey.models.language_model import LanguageModel
from covey.objective import ALGORITHMS
from covey.parallel.join import joined_world
from covey.parallel.shard import local_part, placed_like, total_norm, whole_tensor
from covey.parallel.world import World
from covey.policy.critic import critic_of
from covey.policy.optimizer import Optimizer, Stepped
from covey.policy.policy import Policy, load_model, policy_of
from covey.reference import Reference
from covey.reference.frozen import FrozenReference
from covey.rollout.episode import encode_prompts, generate
from covey.run import Run, reference_of, step_settings_of, teacher_of
from covey.step import train_on
from covey.types import Group, Rollout
from tests.conftest import build
from tests.parallel.ranks import run_ranks

SMALL = [
    "model.device=cpu", "rollout.prompts_per_step=4", "rollout.group_size=4",
    "rollout.max_tokens=16", "train.mini_batches=2", "train.micro_batch_tokens=300",
    "train.old_logp=sampler",
]  # fmt: skip
EVERYTHING = [
    "objective.beta=0.02", "objective.entropy_bonus=0.001", "objective.correction=token_truncate",
    "objective.correction_mean_one=true", "objective.veto=1e-4", "objective.off_policy_limit=0.5",
    "filter.mask_truncated=true", "train.old_logp=recompute",
]  # fmt: skip
LORA = ["adapter.rank=4", "objective.beta=0.1"]
SPECIAL = {
    "lora": LORA,
    "lora adapter off": [*LORA, "reference.kind=adapter_off"],
    "kl in the reward": ["objective.name=reinforce_pp", "objective.beta=0.05"],
    "skip rows": ["objective.name=grpo", "filter.skip_zero_gradient=true"],
    "offloaded": ["objective.beta=0.1", "reference.kind=offloaded"],
}
HERE = [name for name in ALGORITHMS if name != "gigpo"]
"""Those that need no turns."""
TO_THE_ENGINE = ("scalerl", "bapo", "m2po", "dppo")
"""They take ratios to the engine, and refuse corrections."""


def everything(name: str) -> list[str]:
    refused = CORRECTS if name in TO_THE_ENGINE else OF_RATIOS if name in PAIRED else ("?",)
    some = (s for s in EVERYTHING if not s.startswith(refused))
    return [f"objective.name={name}", *NEEDED.get(name, []), *some]


NEEDED = {
    "sdpo": ["teacher.policy=current"],
    "opd": ["teacher.path=embedded"],
    "gdpo": ["objective.parts=['third', 'half']"],
}
OLD = {"decoupled_ppo": ["train.old_logp=recompute"], **NEEDED}
CORRECTS = ("objective.correction", "objective.veto")
OF_RATIOS = (*CORRECTS, "objective.off_policy_limit")


def plainly(name: str) -> list[str]:
    """Return the settings of an algorithm and of one optimizer step, without any option."""
    return [f"objective.name={name}", "train.mini_batches=1", *OLD.get(name, [])]


CASES = {
    1: {name: everything(name) for name in ("grpo", "ppo", "dpo")} | SPECIAL,
    2: {name: everything(name) for name in HERE}
    | {f"{name}, adapter": [*plainly(name), "adapter.rank=4"] for name in HERE}
    | SPECIAL,
    4: {name: plainly(name) for name in HERE} | SPECIAL,
}
"""By the number of ranks."""
ROUNDED = {"ppo, adapter": 1.3e-6, "sdpo, adapter": 1.3e-6}
"""The terms of these gradients nearly cancel out."""
BOTH = {"ddp": Parallel(strategy="ddp"), "fsdp": Parallel(strategy="fsdp")}
STRATEGIES = {
    1: {"fsdp": BOTH["fsdp"]},
    2: BOTH,
    4: {**BOTH, "hybrid": Parallel(strategy="fsdp", shard_ranks=2)},
}


Weights = dict[str, torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Watched(Policy):
    """A policy that takes no optimizer step, but keeps the gradient it would have taken it on."""

    caught: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def step(self, rate: float) -> Stepped:
        if self.sums is not None:
            self.sums.finish()
        found = self.optimizer.gradients()
        self.caught.append({n: g.clone() for n, g in found.items() if g is not None})
        self.optimizer.zero_grad()
        return Stepped(grad_norm=float(total_norm([*self.caught[-1].values()])), skipped=False)


@dataclass(slots=True)
class Caught:
    """A critic's optimizer that takes no step, but keeps the gradient it would have taken it on."""

    optimizer: Optimizer
    caught: list[dict[str, torch.Tensor]]

    def step(self, rate: float) -> Stepped:
        found = self.optimizer.gradients()
        self.caught.append({f"critic {n}": g.clone() for n, g in found.items() if g is not None})
        self.optimizer.zero_grad()
        return Stepped(grad_norm=0.0, skipped=False)


@dataclass(frozen=True)
class Outcome:
    metrics: dict[str, float]
    gradients: list[dict[str, torch.Tensor]]


def configured(*settings: str) -> Config:
    return resolve(load_config("arithmetic", [*SMALL, *settings]))


def sampled(config: Config) -> list[Group]:
    """Return groups of a policy that differs a little from the one that is trained."""
    model = changed(load_model(config), 0.02)
    prompts = encode_prompts(model, task_of(config).train()[: config.rollout.prompts_per_step])
    groups = generate(
        prompts, engine=NativeEngine(model), model=model, sampling=sampling_of(config), step=1
    )
    groups = [replace(g, rollouts=tuple(map(scored, g.rollouts))) for g in groups]
    assert {r.finish for g in groups for r in g.rollouts} == {"length", "stop"}
    first = next(g for g in groups if g.rollouts[0].reward != g.rollouts[1].reward)
    return [first, *(g for g in groups if g is not first)]  # the first alone has a gradient


def changed(model: LanguageModel, share: float) -> LanguageModel:
    """Change the trained weights a little; those of a new adapter are 0."""
    with torch.no_grad():
        for parameter in model.model.parameters():
            if parameter.requires_grad:
                size = max(float(parameter.square().mean().sqrt()), 0.1)
                wave = torch.sin(torch.arange(parameter.numel(), dtype=parameter.dtype))
                parameter.add_(share * size * wave.view_as(parameter))
    return model


def scored(rollout: Rollout) -> Rollout:
    """Give a rollout a reward that depends on its tokens, and one in eleven none.

    All completions have the same length here, but only some count as truncated.
    """
    value = sum(rollout.tokens)
    rollout = replace(rollout, finish="length" if value % 4 == 1 else "stop")
    if value % 11 == 0:
        return rollout
    if value % 5:  # a self-teacher reads more than the prompt
        told = (*rollout.prompt_tokens, *rollout.tokens[: value % 7 + 1])
        rollout = replace(rollout, teacher_prompt=told)
    parts = {"third": float(value % 3), "half": float(value % 2)}
    return replace(rollout, reward=float(value % 3), success=value % 3 > 0, parts=parts)


class Trainer:
    """Policies of one world, each made once: no test step changes their weights."""

    def __init__(self, world: World, parallel: Parallel = Parallel()) -> None:  # noqa: B008
        self.world, self.parallel = world, parallel
        self.policies: dict[tuple[int, bool], Watched] = {}
        self.references: dict[tuple[int, str], Reference | None] = {}

    def policy(self, config: Config, exact: bool) -> Watched:
        key = (config.adapter.rank, exact)
        if key not in self.policies:
            # Not the reference's weights, so that there is a penalty.
            model = build("gpt2", torch.float64) if exact else changed(load_model(config), 0.01)
            made = policy_of(config, model, self.world)
            fields = {name: getattr(made, name) for name in Policy.__dataclass_fields__}
            self.policies[key] = Watched(**fields)
        return self.policies[key]

    def outcome(self, config: Config, groups: Sequence[Group], *, exact: bool = False) -> Outcome:
        """Take one training step without optimizer steps."""
        config = config.model_copy(update={"parallel": self.parallel})
        objective, policy = objective_of(config), self.policy(config, exact)
        kind = (config.adapter.rank, config.reference.kind if objective.beta else "none")
        if kind not in self.references:
            self.references[kind] = reference_of(config, policy.model, objective, self.world)
        learner = Run(
            policy=policy,
            objective=objective,
            settings=step_settings_of(config, objective, exact_logp=True),
            reference=self.references[kind],
            teacher=teacher_of(config, policy.model, objective, self.world),
            world=self.world,
        )
        policy.caught = []
        critic = critic_of(config, policy.model, objective, self.world)
        if critic is not None:
            watched: Any = Caught(critic.optimizer, policy.caught)
            learner = replace(learner, critic=replace(critic, optimizer=watched))
        return Outcome(*train_on(groups, learner, 1)[1:2], policy.caught)


def size_of(gradients: dict[str, torch.Tensor]) -> float:
    return max(float(gradient.abs().max()) for gradient in gradients.values())


def apart(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference in the rows that this rank has."""
    off = local_part(mine) - local_part(placed_like(theirs, mine))
    return float(off.abs().max()) if off.numel() else 0.0


def assert_close(found: Outcome, wanted: Outcome, most: float, what: str) -> None:
    assert len(found.gradients) == len(wanted.gradients) > 0, what
    assert max(map(size_of, wanted.gradients)) > 1e-4, what
    for mine, theirs in zip(found.gradients, wanted.gradients, strict=True):
        assert mine.keys() == theirs.keys(), what
        size = size_of(theirs)
        off, name = max((apart(mine[n], theirs[n]), n) for n in theirs)
        assert off <= most * size, (what, name, off, size)
    assert found.metrics.keys() == wanted.metrics.keys(), what
    for name, value in wanted.metrics.items():
        if name == "other/packed_ratio":  # of micro-batches, which each rank cuts for itself
            continue
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


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradients_are_those_of_one_rank(size: int, tmp_path: Path) -> None:
    configs = {name: configured(*settings) for name, settings in CASES[size].items()}
    plain = configured("train.micro_batch_tokens=200")
    groups, alone = sampled(plain), Trainer(World())
    wanted = {name: alone.outcome(config, groups) for name, config in configs.items()}
    for name, config in configs.items():
        if config.objective.beta:
            assert abs(wanted[name].metrics["objective/kl"]) > 1e-3, name
    shaped = {name: alone.outcome(plain, change(groups)) for name, change in SHAPES.items()}
    exact = alone.outcome(plain, groups, exact=True)

    def work(strategy: str, parallel: Parallel) -> Callable[[int], list[float]]:
        def as_rank(rank: int) -> list[float]:
            with joined_world(plain.model_copy(update={"parallel": parallel})) as world:
                ours = Trainer(world, parallel)
                for name in configs:
                    found = ours.outcome(configs[name], groups)
                    most = ROUNDED.get(name, 1e-6)
                    assert_close(found, wanted[name], most, f"{strategy} {name}")
                for name, change in SHAPES.items():
                    assert_close(ours.outcome(plain, change(groups)), shaped[name], 1e-6, name)
                found = ours.outcome(plain, groups, exact=True)
                assert_close(found, exact, 1e-12, "float64")
                return [float(whole_tensor(g).sum()) for g in found.gradients[0].values()]

        return as_rank

    for strategy, parallel in STRATEGIES[size].items():
        first, *others = run_ranks(size, work(strategy, parallel), tmp_path / strategy)
        assert all(other == first for other in others)


def updated(world: World, config: Config, groups: Sequence[Group], dtype: torch.dtype) -> Weights:
    """Take twenty optimizer steps with every option; return the weights."""
    policy, objective = policy_of(config, build("gpt2", dtype), world), objective_of(config)
    settings = step_settings_of(config, objective, exact_logp=True)
    reference = FrozenReference(
        model=changed(build("gpt2", dtype), 0.01), temperature=1.0, logits_megabytes=8.0
    )
    learner = Run(
        policy=policy, objective=objective, reference=reference, world=world,
        settings=replace(settings, learning_rate=lambda *_: 1e-3),
    )  # fmt: skip
    while policy.version < 20:
        train_on(groups, learner, 1)
    return {name: whole_tensor(w.detach()).clone() for name, w in policy.optimizer.masters.items()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_after_twenty_updates_only_weights_without_gradient_have_drifted(
    strategy: str, tmp_path: Path
) -> None:
    """A bias of keys changes no attention, so AdamW scales the rounding of its gradient to steps."""
    config = configured(*everything("grpo"))
    groups = sampled(config)
    both = (torch.float32, torch.float64)
    one = [updated(World(), config, groups, dtype) for dtype in both]

    def work(rank: int) -> list[Weights]:
        own = config.model_copy(update={"parallel": BOTH[strategy]})
        with joined_world(own) as world:
            return [updated(world, own, groups, dtype) for dtype in both]

    start = {name: p.detach() for name, p in build("gpt2").model.named_parameters()}
    for two in run_ranks(2, work, tmp_path):
        for mine, theirs, most in zip(two, one, (1e-6, 1e-12), strict=True):
            for name, weight in theirs.items():
                off = (mine[name] - weight).abs()
                if most == 1e-6 and name.endswith("c_attn.bias"):
                    query, key, value = off.chunk(3)
                    assert float(key.max()) < 20 * 1e-3
                    off = torch.cat([query, value])
                assert float(off.max()) < most, name
                assert float((weight - start[name]).abs().max()) > 1e-3
