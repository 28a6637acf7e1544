"""A run: models, data and helpers of one training run, and everything that its checkpoint holds.

`Run.build` makes a run from a configuration, `Run.restore` continues it from a checkpoint,
`train` (loop.py) moves it forward, and `Run.save` is the only writer of checkpoints. Between two
steps, the counters of a run describe its last complete step.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from covey.baselines import Baselines, scorers_of
from covey.cluster.actors import ray_reference
from covey.config import Config
from covey.config.check import check_calls, check_start, checked_prompts
from covey.config.resolve import (
    objective_of,
    old_logp_from_sampler,
    over_epochs,
    reward_of,
    sampling_of,
    task_of,
)
from covey.config.schema import Adapter, Train
from covey.engines.make import check_engine, make_engine
from covey.engines.protocol import Engine, Sampling
from covey.environments import Factory, make_host
from covey.environments.calls import CALL_FORMATS, format_in
from covey.environments.registry import NONE, make_factory
from covey.errors import RunError
from covey.evaluation.evaluate import Evaluation, evaluate
from covey.models.chat import Conversations
from covey.models.language_model import LanguageModel
from covey.objective import Objective
from covey.parallel.join import check_alike
from covey.parallel.world import ALONE, World
from covey.policy.checkpoint import STATE_FILE, load_policy, save_policy, save_state
from covey.policy.critic import Critic, critic_of
from covey.policy.policy import Policy, load_frozen, load_model, policy_of, with_path
from covey.policy.schedule import Budget, Used, schedule_of
from covey.records.folder import RunFolder
from covey.records.resume import Start, offer, put_aside_after
from covey.records.samples import SamplePage, read_samples
from covey.records.trackers import Tracker
from covey.records.watch import best_step
from covey.reference import Reference
from covey.reference.build import make_reference, make_self_teacher, make_teacher
from covey.rewards import LENGTH_PENALTIES, LengthPenalty, Reward
from covey.rollout.collect import Collector, StepRollouts
from covey.rollout.episode import Interaction
from covey.rollout.privileged import Privileged, privileged_of
from covey.rollout.prompt_limit import fitting_prompts
from covey.rollout.prompts import PromptChoice
from covey.rollout.queue import RolloutQueue, read_in_flight, write_in_flight
from covey.rollout.replay import ReplayBuffer
from covey.scoring import Scorer
from covey.solutions import Solutions
from covey.step import StepSettings
from covey.tasks.task import Task, bad_rows_of, sampled_ids
from covey.types import Group, Prompt

COUNTERS = ("step", "episode", "tokens", "beta", "beta_setting", "evaluation_due")
"""The attributes of a run that covey.json of a checkpoint holds, beside the policy's version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a training step made, beside the changed models."""

    step: int
    before: Used
    """The run's progress before the step."""
    metrics: dict[str, Any]
    beta: float = 0.0
    """The KL weight of the next step."""
    rollouts: StepRollouts | None = None
    """None in supervised training."""
    recorded: Sequence[Group] = ()
    """The groups to record: those sampled, and `replayed` earlier ones at the end."""
    replayed: int = 0
    advantages: Sequence[Sequence[float | None]] = ()
    """The mean advantage of each recorded rollout, by group; None where a filter dropped it."""
    trained: Sequence[Sequence[bool]] = ()
    """Whether any token of each recorded rollout was trained."""


@dataclass(slots=True, kw_only=True)
class Run:
    """One training run. Below "progress" stands everything that changes during training."""

    config: Config = field(default_factory=Config)
    """Final: defaults are filled in, and epochs are steps."""
    budget: Budget = field(default_factory=lambda: Budget(settings=Train()))
    """The length of the run, in training steps, tokens or optimizer steps."""
    settings: StepSettings
    world: World = ALONE
    folder: RunFolder = field(default=cast(RunFolder, None))
    """Set when the folder is created or opened, which is after the run is built."""

    engine: Engine = field(default=cast(Engine, None))
    engine_lock: threading.Lock = field(default_factory=threading.Lock)
    """Keeps two threads from using the engine with different weights at the same time."""
    sampling: Sampling = field(default=cast(Sampling, None))
    interaction: Interaction | None = None
    """The environment and its limits; None without an environment."""
    scorer: Scorer = field(default=cast(Scorer, None))
    eval_scorer: Scorer = field(default=cast(Scorer, None))
    """The same object as `scorer`, unless `evaluate.reward` is set."""
    length_penalty: LengthPenalty = field(default=cast(LengthPenalty, None))
    privileged: Privileged | None = None
    """Writes the teacher's prompts; None without self-distillation."""
    prompts: Sequence[Prompt] = ()
    held_out: Sequence[Prompt] = ()
    solutions: Solutions | None = None
    """What supervised training (sft.py) learns; None in an RL run."""
    bad_rows: tuple[str, ...] = ()
    """One message for each row of the dataset that was skipped."""
    notes: tuple[str, ...] = ()
    """Notes for the user about the data, such as the number of prompts that are too long."""
    baselines: Baselines | None = None
    """Scores of simple baselines on the held-out prompts, such as a constant answer."""

    # Progress: a checkpoint holds what follows.

    policy: Policy
    objective: Objective
    """Its KL weight `beta` is that of the next step."""
    reference: Reference | None = None
    teacher: Reference | None = None
    critic: Critic | None = None
    rollouts: RolloutQueue = field(default=cast(RolloutQueue, None))
    """Rollouts that were sampled and not yet trained on."""
    choice: PromptChoice = field(default=cast(PromptChoice, None))
    """The curriculum's pass rates."""
    replay: ReplayBuffer = field(default=cast(ReplayBuffer, None))
    samples: SamplePage = field(default=cast(SamplePage, None))
    step: int = 0
    """Number of complete training steps."""
    episode: int = 0
    """Number of rollouts sampled."""
    tokens: int = 0
    """Number of tokens sampled."""
    beta_setting: float | None = None
    """objective.beta at the last start or resume; None in old checkpoints."""
    evaluation_due: bool = False
    """Whether an evaluation of this step is due and has not run yet."""
    saved: int = 0
    """The step of the newest checkpoint."""
    whole: bool = True
    """Whether the models are those after `step`; an error inside a step can leave them between."""

    # What follows from the fields.

    @property
    def beta(self) -> float:
        """The weight of the KL penalty, which an objective may adapt."""
        return self.objective.beta

    @beta.setter
    def beta(self, value: float) -> None:
        self.objective = replace(self.objective, beta=value)

    @property
    def evaluate_every(self) -> int:
        """Number of steps between evaluations; 0 means none."""
        sft = self.solutions is not None
        return self.config.sft.evaluate_every if sft else self.config.evaluate.every

    @property
    def rollouts_per_step(self) -> int:
        """Number of rollouts or solutions per step, without dynamic sampling's rounds."""
        rollout = self.config.rollout
        if self.solutions is not None:
            return self.config.sft.solutions
        return rollout.prompts_per_step * rollout.group_size

    @property
    def used(self) -> Used:
        """The training steps, tokens and optimizer steps so far."""
        return Used(steps=self.step, tokens=self.tokens, updates=self.policy.version)

    @property
    def updates(self) -> int:
        """A number that increases with every optimizer step of a trained model."""
        return self.policy.version + (0 if self.critic is None else self.critic.updates)

    @property
    def references(self) -> list[Reference]:
        """The reference and the teacher, where the objective has them."""
        return [other for other in (self.reference, self.teacher) if other is not None]

    @property
    def counters(self) -> dict[str, Any]:
        """The counters that covey.json holds."""
        return {name: getattr(self, name) for name in COUNTERS}

    @property
    def facts(self) -> Mapping[str, object]:
        """What environment.json records of the run."""
        if self.solutions is not None:
            return {"kind": "sft"}
        identity = self.reference.identity if self.reference else None
        return {"reference": identity, "exact_logp": self.engine.info.exact_logp}

    # Build, restore, save, evaluate, close.

    @staticmethod
    def build(
        config: Config,
        reward: Reward | None = None,
        task: Task | None = None,
        world: World = ALONE,
        environment: Factory | None = None,
    ) -> Run:
        """Build an RL run; `reward`, `task` and `environment` override the configuration."""
        check_start(config, world.size)
        check_engine(config)
        task = task_of(config) if task is None else task
        reward = reward_of(config) if reward is None else reward
        prompts, held_out = checked_prompts(config, task, reward)
        objective = objective_of(config)
        model = load_model(config, world.device(config.model.device))
        if world.size > 1:
            _check_ranks(world, model, prompts, held_out)
        prompts, notes = fitting_prompts(config, model, prompts, "training")
        held_out, more_notes = fitting_prompts(config, model, held_out, "held-out")
        config = over_epochs(config, len(prompts))
        policy = policy_of(config, model, world)
        reference = reference_of(config, policy.model, objective, world)
        engine = make_engine(config, policy)
        scorers = scorers_of(config, held_out, world.local_size, reward)
        interaction = interaction_of(config, model, environment)
        penalty = config.length_penalty
        return Run(
            config=config,
            world=world,
            budget=Budget(settings=config.train),
            policy=policy,
            objective=objective,
            settings=step_settings_of(config, objective, exact_logp=engine.info.exact_logp),
            reference=reference,
            teacher=teacher_of(config, policy.model, objective, world),
            critic=critic_of(config, policy.model, objective, world),
            engine=engine,
            sampling=with_stops(sampling_of(config), interaction),
            interaction=interaction,
            **scorers,
            length_penalty=LENGTH_PENALTIES[penalty.name](**penalty.options),
            privileged=privileged_of(config.teacher, model, objective, prompts),
            prompts=prompts,
            held_out=held_out,
            bad_rows=tuple(bad_rows_of(task)),
            notes=(*notes, *more_notes),
        )

    def restore(self, start: Start) -> None:
        """Load the checkpoint of `start` into models and counters; nothing to do without one.

        A setting that changed with the resume wins over the checkpoint's value.
        """
        beta = self.beta
        if start.checkpoint is not None:
            saved = load_policy(self.policy, start.checkpoint)
            if saved["step"] != start.step:
                raise RunError(
                    f"{start.checkpoint} contains the checkpoint of step {saved['step']}, not of "
                    f"step {start.step}"
                )
            for other in (*self.references, self.critic):
                if other is not None:
                    other.load(start.checkpoint)
            self.step = self.saved = start.step
            if saved.keys() != {"step", "version"}:  # all that old SFT runs saved
                self._read_counters(start.checkpoint, saved)
        # A run keeps an adapted beta, unless its objective no longer adapts it or the user set it.
        if not self.objective.kl_target or self.beta_setting not in (None, beta):
            self.beta = beta
        self.beta_setting = beta

    def _read_counters(self, folder: Path, saved: Mapping[str, Any]) -> None:
        try:
            self.episode, self.tokens = int(saved["episode"]), int(saved.get("tokens", 0))
            self.beta, self.beta_setting = float(saved["beta"]), saved.get("beta_setting")
            self.evaluation_due = bool(saved.get("evaluation_due", False))
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"checkpoint {folder} cannot be read, because {STATE_FILE} is invalid: {error!r}"
            ) from None

    def resume(self, start: Start, log: Tracker) -> None:
        """Restore the run, set aside the records of later steps, and prepare its rollouts."""
        try:
            self.restore(start)
        except RunError as error:
            raise RunError(f"{error}; {offer(self.folder, before=start.step)}") from None
        aside = self.world.from_main(lambda: put_aside_after(self.folder, start))
        if aside is not None:
            log.note(
                f"steps after {start.step} are computed again; their old records are in {aside}"
            )
        for note in self.notes:
            log.note(note)
        if self.solutions is not None:
            return
        config, folder = self.config, start.checkpoint
        self.choice = PromptChoice(
            settings=config.curriculum, prompts=self.prompts, seed=config.seed
        )
        self.replay = ReplayBuffer(settings=config.replay, seed=config.seed)
        self.samples = SamplePage(config.save.samples_shown)
        held = []
        if folder is not None:
            count = config.rollout.prompts_per_step
            held = read_in_flight(folder, self.prompts, seed=config.seed, count=count)
            self.choice.load(folder)
            self.replay.load(folder)
            self.samples = read_samples(folder, config.save.samples_shown)
        self.rollouts = RolloutQueue(self, log, held)

    def finish_step(self, made: Made) -> bool:
        """Count a step that was trained and recorded; return whether it is the last of the run."""
        self.step, self.whole = made.step, True
        if made.rollouts is not None:
            collected = made.rollouts.collected
            self.episode += len(collected.rollouts)
            self.tokens += collected.tokens
            self.beta = made.beta
            self.choice.add(collected.groups, made.rollouts.used_picks)
            self.replay.add(made.rollouts.selected.groups, self.policy.version)
        last, every = self.budget.over(self.used), self.evaluate_every
        passed = every and (last or self.budget.passed(every, made.before, self.used))
        self.evaluation_due = bool(passed)
        return last

    def save(self) -> None:
        """Write the checkpoint of the last complete step atomically, and delete old ones.

        Nothing is written if that step is saved already, or if the models have moved on. The newest
        `save.keep` checkpoints and the best one are kept. All ranks call this: rank 0 writes, and
        the other ranks write their shards into the same folder.
        """
        policy, world = self.policy, self.world
        if not self.whole or self.step <= self.saved:
            return
        with ExitStack() as stack:
            folder = world.from_main(
                lambda: stack.enter_context(self.folder.new_checkpoint(self.step))
            )
            if policy.whole is not None:
                save_state(policy.optimizer, folder)
            if world.is_main or policy.whole is not None:
                save_policy(policy, folder, self.counters, writes=world.is_main)
            for other in (*self.references, self.critic):
                if other is not None:
                    other.save(folder, writes=world.is_main)
            if self.rollouts is not None:
                in_flight = self.rollouts.in_flight(after=self.step)  # a rank may have to wait
                if world.is_main:
                    write_in_flight(folder, in_flight)
                    self.choice.save(folder)
                    self.replay.save(folder)
                    self.samples.save(folder)
            world.barrier()
        if world.is_main:
            self.folder.prune_checkpoints(self.config.save.keep, best_step(self.folder))
        world.barrier()
        self.saved = self.step

    def evaluate(self, log: Tracker) -> Evaluation:
        """Evaluate the policy on the held-out prompts, and log the results."""
        config = self.config
        with self.engine_lock:
            self.engine.load_weights(self.policy.weights, self.policy.version)
            found = evaluate(
                self.held_out,
                Collector(
                    engine=self.engine,
                    model=self.policy.model,
                    scorer=self.eval_scorer,
                    progress=log.sampled,
                    ranks=self.world,
                    interaction=self.interaction,
                    max_steps=config.train.total_optimizer_steps,
                ),
                sampling=self.sampling,
                samples=config.evaluate.samples,
                temperature=config.evaluate.temperature,
                baselines=self.baselines,
            )
        # Rows are written first, so that every line of eval.jsonl has its rows.
        log.table("evaluations", self.step, [item.row() for item in found.items])
        log.evaluation(self.step, found)
        return found

    def close(self) -> None:
        """Stop the worker processes of the scorers and of the environment."""
        self.scorer.close()
        if self.eval_scorer is not self.scorer:
            self.eval_scorer.close()
        if self.interaction is not None:
            self.interaction.host.close()


def _check_ranks(world: World, model: LanguageModel, *prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError if ranks differ in weights or data."""
    ids = hashlib.sha256(repr([sampled_ids(some) for some in prompts]).encode()).hexdigest()
    size = sum(float(p.detach().double().abs().sum()) for p in model.model.parameters())
    check_alike(world, "weights or data", f"{ids} {size!r}")


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
