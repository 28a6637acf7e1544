"""Builds the components of a run from its configuration: policy, objective, engine and scorer."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from covey.config import Config
from covey.config.schema import Adapter
from covey.engines.protocol import Engine, Sampling
from covey.environments import Factory, make_factory, make_host
from covey.environments.calls import CALL_FORMATS, format_in
from covey.environments.registry import NONE
from covey.models.conversation import Conversations
from covey.models.language_model import LanguageModel
from covey.objective import Objective
from covey.reference import Reference
from covey.reference.build import make_reference, make_self_teacher, make_teacher
from covey.rewards import LENGTH_PENALTIES, LengthPenalty, Reward
from covey.rollout.episode import Interaction
from covey.rollout.privileged import Privileged, privileged_of
from covey.scoring import Scorer
from covey.scoring.baselines import Baselines
from covey.tasks import Task, bad_rows_of
from covey.tasks.task import sampled_ids
from covey.training.checkpoint import Saved
from covey.training.critic import critic_of
from covey.training.make_engine import check_engine, make_engine
from covey.training.models import load_frozen, load_model, policy_of, with_path
from covey.training.parallel.join import check_alike
from covey.training.policy import Policy
from covey.training.prompt_limit import fitting_prompts
from covey.training.ray_actors import ray_reference
from covey.training.resolve import (
    objective_of,
    old_logp_from_sampler,
    over_epochs,
    reward_of,
    sampling_of,
    task_of,
)
from covey.training.schedule import schedule_of
from covey.training.scorers import scorers_of
from covey.training.start_checks import check_calls, check_start, checked_prompts
from covey.training.step import Learner, StepSettings
from covey.types import Prompt
from covey.world import ALONE, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """The components that RL runs and SFT runs have in common."""

    config: Config
    held_out_prompts: Sequence[Prompt]
    bad_rows: tuple[str, ...]
    """One message for each skipped row of the dataset."""
    notes: tuple[str, ...] = ()
    """Notes for the user about the data, such as the number of prompts that are too long."""
    scorer: Scorer
    eval_scorer: Scorer
    """Scores the completions of evaluations. `eval_scorer` is the same object as `scorer`, unless
    `evaluate.reward` is set or a comparison evaluates all its runs with one reward.
    """
    baselines: Baselines | None = None
    """Scores of simple baselines, such as a constant answer, on the held-out prompts."""
    policy: Policy
    engine: Engine
    engine_lock: threading.Lock = field(default_factory=threading.Lock)
    """Prevents two threads from using the engine with different weights at the same time."""
    sampling: Sampling
    interaction: Interaction | None = None
    """The environment and its limits; None for single-turn rollouts without an environment."""
    others: Sequence[Saved] = ()
    """The models that a checkpoint saves in addition to the policy: reference, teacher, critic."""
    world: World = ALONE

    @property
    def facts(self) -> Mapping[str, object]:
        """Facts about the run that are recorded in environment.json in the run folder."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the worker processes of the scorers and of the environment."""
        self.scorer.close()
        if self.eval_scorer is not self.scorer:
            self.eval_scorer.close()
        if self.interaction is not None:
            self.interaction.host.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(Components):
    """The components of a reinforcement learning run."""

    train_prompts: Sequence[Prompt]
    length_penalty: LengthPenalty
    learner: Learner
    """The policy, objective, settings, reference, teacher and critic of a training step."""
    privileged: Privileged | None = None
    """Builds the teacher prompts for self-distillation; None without self-distillation."""

    @property
    def facts(self) -> Mapping[str, object]:
        """The identity of the reference, and whether the engine's log-probs are exact."""
        reference = self.learner.reference
        return {
            "reference": reference.identity if reference else None,
            "exact_logp": self.engine.info.exact_logp,
        }


def assemble(
    config: Config,
    reward: Reward | None = None,
    task: Task | None = None,
    world: World = ALONE,
    environment: Factory | None = None,
) -> Parts:
    """Build all components of an RL run; `reward`, `task` and `environment` override `config`."""
    check_start(config, world.size)
    check_engine(config)
    task = task_of(config) if task is None else task
    reward = reward_of(config) if reward is None else reward
    train_prompts, held_out = checked_prompts(config, task, reward)
    objective = objective_of(config)
    model = load_model(config, world.device(config.model.device))
    if world.size > 1:
        _check_ranks(world, model, train_prompts, held_out)
    train_prompts, notes = fitting_prompts(config, model, train_prompts, "training")
    held_out, more_notes = fitting_prompts(config, model, held_out, "held-out")
    config = over_epochs(config, len(train_prompts))
    policy = policy_of(config, model, world)
    reference = reference_of(config, policy.model, objective, world)
    engine = make_engine(config, policy)
    scorers = scorers_of(config, held_out, world.local_size, reward)
    interaction = interaction_of(config, model, environment)
    exact, penalty = engine.info.exact_logp, config.length_penalty
    learner = learner_of(config, policy, objective, reference, exact_logp=exact, world=world)
    return Parts(
        config=config,
        train_prompts=train_prompts,
        held_out_prompts=held_out,
        bad_rows=tuple(bad_rows_of(task)),
        notes=(*notes, *more_notes),
        **scorers,
        length_penalty=LENGTH_PENALTIES[penalty.name](**penalty.options),
        policy=policy,
        learner=learner,
        others=learner.others,
        privileged=privileged_of(config.teacher, model, objective, train_prompts),
        engine=engine,
        world=world,
        sampling=with_stops(sampling_of(config), interaction),
        interaction=interaction,
    )


def _check_ranks(world: World, model: LanguageModel, *prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError if ranks differ in weights or data."""
    ids = hashlib.sha256(repr([sampled_ids(some) for some in prompts]).encode()).hexdigest()
    size = sum(float(p.detach().double().abs().sum()) for p in model.model.parameters())
    check_alike(world, "weights or data", f"{ids} {size!r}")


def learner_of(
    config: Config,
    policy: Policy,
    objective: Objective,
    reference: Reference | None,
    *,
    exact_logp: bool,
    world: World = ALONE,
) -> Learner:
    """Build the learner of a training step, and load its teacher and its critic.

    `exact_logp` says whether the engine's log-probs are exact enough to serve as old_logp.
    """
    return Learner(
        policy=policy,
        objective=objective,
        settings=step_settings_of(config, objective, exact_logp=exact_logp),
        reference=reference,
        teacher=teacher_of(config, policy.model, objective, world),
        critic=critic_of(config, policy.model, objective, world),
        world=world,
    )


def reference_of(
    config: Config, model: LanguageModel, objective: Objective, world: World = ALONE
) -> Reference | None:
    """Build the reference policy; return None if the objective needs no reference."""
    if "reference" not in objective.needs:
        return None
    if config.cluster.address and config.cluster.reference_actor:
        return ray_reference(config)
    offload = config.reference.kind == "offloaded"
    load = partial(load_frozen, config, model, world, offload=offload)
    return make_reference(config, policy=model, load=load)


def teacher_of(
    config: Config, model: LanguageModel, objective: Objective, world: World = ALONE
) -> Reference | None:
    """Load the teacher model; return None if the objective needs no teacher."""
    if "teacher" not in objective.needs:
        return None
    offload = config.teacher.offload
    if "privileged" in objective.needs:
        own = partial(load_frozen, config, model, world, offload=offload)
        return make_self_teacher(config, policy=model, load=own)

    def load(path: str) -> LanguageModel:
        # [adapter] describes the policy's adapter; a teacher has an adapter only if its own path
        # contains one.
        alone = with_path(config, path).model_copy(update={"adapter": Adapter()})
        return load_frozen(alone, model, world, offload=offload)

    return make_teacher(config, policy=model, load=load)


def step_settings_of(config: Config, objective: Objective, *, exact_logp: bool) -> StepSettings:
    """Return the settings of a training step, such as the number of mini-batches."""
    from_sampler = old_logp_from_sampler(config, objective, exact_logp=exact_logp)
    once = config.train.mini_batches * config.train.epochs == 1 and not config.adapter.dropout
    free = config.train.old_logp == "auto" and not from_sampler
    return StepSettings(
        mini_batches=config.train.mini_batches,
        epochs=config.train.epochs,
        micro_batch_tokens=config.train.micro_batch_tokens,
        old_logp_from_sampler=from_sampler,
        old_logp_in_pass=once and free and objective.corrects_by_row,
        sampled=not config.preferences.file,
        learning_rate=schedule_of(config),
        seed=config.seed,
        skip_zero_gradient=config.filter.skip_zero_gradient,
        mask_truncated=config.filter.mask_truncated,
        stale=config.stale,
    )


# Build the interaction of rollouts with an environment from the configuration.


def interaction_of(
    config: Config, model: LanguageModel, factory: Factory | None = None
) -> Interaction | None:
    """Build the environment host and the limits of episodes; return None without an environment.

    `factory` replaces the environment that the configuration names.
    """
    section = config.environment
    if factory is None:
        if section.name == NONE:
            return None
        factory = make_factory(section.name, section.options)
    given = section.call_format
    name, refusal = call_format_of(model) if given == "auto" else (given, "")
    check_calls(config, name)
    form = CALL_FORMATS[name]
    stops: list[str] = []
    if name == "tags" or not (section.parallel_calls or form.one_per_turn):
        tools = getattr(factory(), "tools", None) if name == "tags" else None
        stops = form.stops(tools() if callable(tools) else {})
    return Interaction(
        host=make_host(
            section.name,
            factory,
            workers=section.workers,
            timeout=section.timeout,
            gigabytes=section.gigabytes,
        ),
        call_format=form,
        stops=tuple(stops),
        max_turns=section.max_turns,
        max_calls=section.max_calls,
        max_tokens=section.max_tokens,
        refusal=refusal,
    )


def with_stops(sampling: Sampling, interaction: Interaction | None) -> Sampling:
    """Add the stop strings of the tool-call format to the sampling settings."""
    if interaction is None:
        return sampling
    stops = dict.fromkeys([*sampling.stop_strings, *interaction.stops])
    return replace(sampling, stop_strings=tuple(stops))


def call_format_of(model: LanguageModel) -> tuple[str, str]:
    """Return the tool-call format that the chat template describes, and why tools are refused.

    A template that does not support tools gets Covey's own description, whose format is hermes. A
    template that describes tools in a format that Covey cannot read refuses tools.
    """
    renderer = model.renderer
    if renderer is None or not renderer.chat:
        return "hermes", ""
    if found := format_in(renderer.tokenizer.get_chat_template()):
        return found, ""
    if not Conversations(renderer=renderer, instruction="").takes_tools:
        return "hermes", ""
    return "hermes", (
        "config: environment.call_format = 'auto': the model's chat template describes tools, but "
        "in none of the tool-call formats that Covey reads; set environment.call_format to the "
        f"format that the model writes ({', '.join(CALL_FORMATS)}), or set model.template to "
        "'plain'"
    )
