"""Building the parts of a run from its configuration. Every name and option is checked here."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from torch import nn

from covey.config import Config
from covey.config.schema import Adapter
from covey.engines.protocol import Engine, Sampling
from covey.environments import Factory
from covey.errors import ConfigError, DataError
from covey.models.adapter import adapter_base, add_adapter, load_adapter
from covey.models.deterministic import make_deterministic
from covey.models.language_model import LanguageModel
from covey.models.load_model import load_language_model
from covey.objective import Objective
from covey.reference import Reference
from covey.reference.build import make_reference, make_teacher
from covey.rewards import LENGTH_PENALTIES, LengthPenalty, Reward
from covey.rewards.identity import identity
from covey.rollout.multi_turn import Interaction
from covey.scoring import Scorer, make_scorer
from covey.scoring.build import check_timeout
from covey.tasks import Task, bad_rows_of
from covey.training.budget import Used
from covey.training.checkpoint import State
from covey.training.compact_adamw import CompactAdamW
from covey.training.critic import Critic, make_critic
from covey.training.interaction import interaction_of, with_stops
from covey.training.make_engine import check_engine, make_engine, ray_reference, ray_scorer
from covey.training.optimizer import AdamWSettings, MasterAdamW, Optimizer
from covey.training.parallel.gradients import GradientSums
from covey.training.parallel.join import check_alike
from covey.training.parallel.ranks import Ranks
from covey.training.parallel.shard import shard_model
from covey.training.parallel.world import World
from covey.training.policy import Policy
from covey.training.preferences import read_pairs
from covey.training.resolve import (
    held_out_of,
    objective_of,
    reward_of,
    sampling_of,
    task_of,
    template_of,
)
from covey.training.schedule import schedule_of
from covey.training.step import Learner, StepSettings
from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """What every run is made of, whatever it is trained by."""

    config: Config
    held_out_prompts: Sequence[Prompt]
    bad_rows: tuple[str, ...]
    """One line for every row of the data that was skipped."""
    scorer: Scorer
    eval_scorer: Scorer
    """Scores evaluations. The scorer itself, unless several runs must be measured alike."""
    policy: Policy
    reference: Reference | None = None
    engine: Engine
    engine_lock: threading.Lock = field(default_factory=threading.Lock)
    """Held from loading weights into the engine until it has generated with them."""
    sampling: Sampling
    interaction: Interaction | None = None
    """With an environment. None: every rollout is one completion."""
    world: World = field(default_factory=World)

    def close(self) -> None:
        """End the processes of the scorer and of the environment."""
        self.scorer.close()
        if self.interaction is not None:
            self.interaction.host.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(Components):
    """What a run of reinforcement learning is made of."""

    train_prompts: Sequence[Prompt]
    length_penalty: LengthPenalty
    objective: Objective
    step_settings: StepSettings
    teacher: Reference | None = None
    critic: Critic | None = None

    def learner_at(self, state: State) -> Learner:
        """Return what the training step that begins at `state` works with."""
        base = Learner(
            policy=self.policy,
            objective=self.objective,
            settings=self.step_settings,
            reference=self.reference,
            teacher=self.teacher,
            critic=self.critic,
            world=self.world,
        )
        return learner_at(base, self.config, state)


def scorer_of(config: Config, reward: Reward | None = None, ranks: int = 1) -> Scorer:
    """Build the scorer, and start the processes that it needs: a share if a machine has ranks."""
    reward = reward_of(config) if reward is None else reward
    if config.cluster.address and config.cluster.scoring_actors and not reward.quick:
        check_timeout(config.reward.name, reward, config.scoring.timeout)
        return ray_scorer(config, reward, identity(config.reward.name, reward))
    return make_scorer(
        config.reward.name,
        reward,
        workers=config.scoring.workers or max(1, (os.cpu_count() or 1) // ranks),
        timeout=config.scoring.timeout,
        gigabytes=config.scoring.gigabytes,
    )


def assemble(
    config: Config,
    reward: Reward | None = None,
    task: Task | None = None,
    world: World = World(),  # noqa: B008 - without state
    environment: Factory | None = None,
) -> Parts:
    """Build everything that a resolved configuration names; objects from Python replace theirs."""
    check_engine(config)
    task = task_of(config) if task is None else task
    file = config.preferences.file
    train_prompts = read_pairs(file) if file else task.train()
    held_out = held_out_of(config, task)
    if not train_prompts:
        raise DataError(f"task: {task.name} has no training prompts")
    objective = objective_of(config)
    model = load_model(config, world.device(config.model.device))
    if world.size > 1:
        check_ranks(config, world, _digest(model, train_prompts, held_out))
    policy = policy_of(config, model, world)
    reference = reference_of(config, policy.model, objective, world)
    engine, sampling = make_engine(config, policy, load_model), sampling_of(config)
    scorer = scorer_of(config, reward, world.local_size)
    interaction = interaction_of(config, model, environment)
    return Parts(
        config=config,
        train_prompts=train_prompts,
        held_out_prompts=held_out,
        bad_rows=tuple(bad_rows_of(task)),
        scorer=scorer,
        eval_scorer=scorer,
        length_penalty=LENGTH_PENALTIES[config.length_penalty.name](
            **config.length_penalty.options
        ),
        policy=policy,
        reference=reference,
        teacher=teacher_of(config, policy.model, objective, world),
        critic=critic_of(config, policy.model, objective, world),
        engine=engine,
        world=world,
        sampling=with_stops(sampling, interaction),
        interaction=interaction,
        objective=objective,
        step_settings=step_settings_of(
            config, objective, sampling, exact_logp=engine.info.exact_logp
        ),
    )


def check_ranks(config: Config, world: World, digest: str) -> None:
    """Refuse ranks that differ in weights or data, and settings that several ranks do not have."""
    if config.overlap.staleness and config.overlap.mode == "copy":
        raise ConfigError(
            "config: overlap.mode = 'copy' works on one rank; set it to 'ahead', or "
            "overlap.staleness = 0"
        )
    check_alike(world, "weights or data", digest)


def _digest(model: LanguageModel, *prompts: Sequence[Prompt]) -> str:
    """Return a text in which ranks with other weights, or other prompts, would differ."""
    ids = hashlib.sha256(repr([[p.id for p in some] for some in prompts]).encode()).hexdigest()
    size = sum(float(p.detach().double().abs().sum()) for p in model.model.parameters())
    return f"{ids} {size!r}"


def reference_of(
    config: Config,
    model: LanguageModel,
    objective: Objective,
    world: World = World(),  # noqa: B008 - without state
) -> Reference | None:
    """Build the reference policy, if the objective needs one."""
    if "reference" not in objective.needs:
        return None
    if config.cluster.address and config.cluster.reference_actor:
        return ray_reference(config, load_model)
    offload = config.reference.kind == "offloaded"
    load = partial(_load_frozen, config, model, world, offload=offload)
    return make_reference(config, policy=model, load=load)


def teacher_of(
    config: Config,
    model: LanguageModel,
    objective: Objective,
    world: World = World(),  # noqa: B008 - without state
) -> Reference | None:
    """Load the teacher, if the objective learns from one."""
    if "teacher" not in objective.needs:
        return None

    def load(path: str) -> LanguageModel:
        # [adapter] is the policy's; a teacher has the adapter at its path, if any.
        section = config.model.model_copy(update={"path": path})
        alone = config.model_copy(update={"model": section, "adapter": Adapter()})
        return _load_frozen(alone, model, world, offload=config.teacher.offload)

    return make_teacher(config, policy=model, load=load)


def critic_of(
    config: Config,
    model: LanguageModel,
    objective: Objective,
    world: World = World(),  # noqa: B008 - without state
) -> Critic | None:
    """Load the critic, if the objective trains one."""
    if "values" not in objective.needs:
        return None
    if world.size > 1:
        raise ConfigError(
            f"config: {config.objective.name} trains a critic, which works on one rank; start one "
            "process, or take an algorithm without a critic"
        )

    def load(path: str) -> LanguageModel:
        section = config.model.model_copy(update={"path": path})
        return load_model(config.model_copy(update={"model": section}))

    return make_critic(
        config, policy=model, load=load, optimizer=partial(_adamw, config, sharded=False)
    )


def _load_frozen(
    config: Config, policy: LanguageModel, world: World, *, offload: bool
) -> LanguageModel:
    """Load a model beside the policy, divided among the ranks if the policy is."""
    found = load_model(config, world.device(config.model.device))
    if not policy.sharded:
        return found
    found.model.requires_grad_(False)
    offload = offload and found.device.type != "cpu"
    return shard_model(found, config.parallel, world, offload=offload)


def load_model(config: Config, device: str = "") -> LanguageModel:
    """Load the model. Checkpointing only acts in training mode, so references may have it too."""
    if config.model.deterministic:
        make_deterministic()
    path = config.model.path
    base = adapter_base(path)
    model = load_language_model(
        path if base is None else base,
        dtype=config.model.dtype,
        device=device or config.model.device,
        gradient_checkpointing=config.model.gradient_checkpointing,
        template=template_of(config),
    )
    return _with_adapter(config, model if base is None else load_adapter(model, Path(path)))


def _with_adapter(config: Config, model: LanguageModel) -> LanguageModel:
    """Give the model the adapter of the configuration, unless it has one already."""
    wanted = config.adapter
    if model.adapter is not None:
        if wanted.rank not in (0, model.adapter.r):
            raise ConfigError(
                f"config: adapter.rank = {wanted.rank}, but the adapter {config.model.path} has "
                f"rank {model.adapter.r}: leave the rank out, or merge it into a model first"
            )
        return model
    if getattr(model.model, "peft_config", None):  # transformers follows such names by itself
        raise ConfigError(
            f"config: model.path = {config.model.path!r} is an adapter; give a folder that holds "
            "adapter_config.json and adapter_model.safetensors alone"
        )
    if wanted.rank == 0 and wanted.also_train:
        raise ConfigError(
            "config: adapter.also_train needs adapter.rank; without a rank all weights are trained"
        )
    if wanted.rank == 0:
        return model
    return add_adapter(model, **wanted.model_dump(), seed=config.seed, base=config.model.path)


def policy_of(
    config: Config,
    model: LanguageModel,
    world: World = World(),  # noqa: B008 - without state
) -> Policy:
    """Give a model its optimizer; on several ranks, divide it among them or sum its gradients."""
    sharded = config.parallel.strategy == "fsdp" and isinstance(world, Ranks)
    whole, model = model, shard_model(model, config.parallel, world) if sharded else model
    optimizer = optimizer_of(config, model)
    return Policy(
        model=model,
        optimizer=optimizer,
        temperature=config.rollout.temperature,
        logits_megabytes=config.train.logits_megabytes,
        graphs=config.records_passes and not sharded,
        whole=whole if sharded else None,
        sums=GradientSums(world, optimizer) if isinstance(world, Ranks) and not sharded else None,
    )


def optimizer_of(config: Config, model: LanguageModel) -> Optimizer:
    """Build the optimizer of a model's trained parameters."""
    return _adamw(config, model.model.named_parameters(), sharded=model.sharded)


def _adamw(
    config: Config, parameters: Iterable[tuple[str, nn.Parameter]], *, sharded: bool
) -> Optimizer:
    settings = config.optimizer
    options: AdamWSettings = {
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
    }
    if settings.state == "compact" and sharded:
        raise ConfigError(
            "config: optimizer.state = 'compact' does not work with parallel.strategy = 'fsdp', "
            "which divides the state among ranks; set it to 'float32'"
        )
    if settings.state == "compact":
        return CompactAdamW(parameters, **options, seed=config.seed)
    return MasterAdamW(parameters, **options)


def step_settings_of(
    config: Config, objective: Objective, sampling: Sampling, *, exact_logp: bool
) -> StepSettings:
    """Return how a batch is turned into optimizer steps, with the learning rate of the first.

    `exact_logp` is what the engine declares: whether its log-probs may serve as old_logp. Where
    rollouts may be older than that, they may if the ratio itself has to correct for it.
    """
    source, stale = config.train.old_logp, config.overlap.staleness > 0
    sampled = not config.preferences.file
    exact = exact_logp and not sampling.distribution.truncates
    if stale:
        exact = not objective.corrects
    return StepSettings(
        mini_batches=config.train.mini_batches,
        epochs=config.train.epochs,
        micro_batch_tokens=config.train.micro_batch_tokens,
        old_logp_from_sampler=sampled and (source == "sampler" or (source == "auto" and exact)),
        sampled=sampled,
        learning_rate=schedule_of(config, Used()),
        seed=config.seed,
        skip_zero_gradient=config.filter.skip_zero_gradient,
        mask_truncated=config.filter.mask_truncated,
        stale=stale,
    )


def learner_at(base: Learner, config: Config, state: State) -> Learner:
    """Return a learner with the beta and the learning rate of the step that begins at `state`."""
    rate = schedule_of(config, state.used(base.policy))
    return replace(
        base,
        objective=replace(base.objective, beta=state.beta),
        settings=replace(base.settings, learning_rate=rate),
    )
