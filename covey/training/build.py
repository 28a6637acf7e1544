"""From a resolved configuration to the parts of a run: model, optimizer, engine, scorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from covey.config import Config
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Engine, Sampling
from covey.errors import ConfigError, DataError
from covey.models.adapter import adapter_base, add_adapter, load_adapter
from covey.models.deterministic import make_deterministic
from covey.models.language_model import LanguageModel, load_language_model
from covey.objective import Objective
from covey.reference import Reference
from covey.reference.build import make_reference
from covey.rewards import LENGTH_PENALTIES, LengthPenalty, Reward
from covey.scoring import Scorer, make_scorer
from covey.tasks import bad_rows_of
from covey.training.compact_adamw import CompactAdamW
from covey.training.optimizer import AdamWSettings, MasterAdamW, Optimizer, learning_rate
from covey.training.policy import Policy
from covey.training.resolve import (
    held_out_of,
    objective_of,
    resolve,
    reward_of,
    sampling_of,
    task_of,
    template_of,
    total_updates,
)
from covey.training.update import UpdateSettings
from covey.types import Prompt

__all__ = [
    "Parts",
    "assemble",
    "held_out_of",
    "load_model",
    "objective_of",
    "optimizer_of",
    "policy_of",
    "resolve",
    "reward_of",
    "sampling_of",
    "scorer_of",
    "task_of",
    "template_of",
    "total_updates",
    "update_settings_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of."""

    config: Config
    train_prompts: Sequence[Prompt]
    held_out_prompts: Sequence[Prompt]
    bad_rows: tuple[str, ...]
    """One line for every row of the data that was skipped."""
    scorer: Scorer
    judge: Scorer
    """Of evaluations. The scorer, but where several runs are to be measured alike."""
    length_penalty: LengthPenalty
    policy: Policy
    reference: Reference | None
    sampler: Engine
    sampling: Sampling
    objective: Objective
    update_settings: UpdateSettings


def scorer_of(config: Config, reward: Reward | None = None) -> Scorer:
    """Build the scorer, and start the processes that it needs."""
    return make_scorer(
        config.reward.name,
        reward_of(config) if reward is None else reward,
        workers=config.scoring.workers,
        timeout=config.scoring.timeout,
        gigabytes=config.scoring.gigabytes,
    )


def assemble(config: Config, reward: Reward | None = None) -> Parts:
    """Build everything that a resolved configuration names, or with a reward made in Python."""
    task = task_of(config)
    train_prompts, held_out = task.train(), held_out_of(config, task)
    if not train_prompts:
        raise DataError(f"task: {task.name} has no training prompts")
    objective = objective_of(config)
    model = load_model(config)
    reference = None
    if objective.needs_reference:
        reference = make_reference(config, policy=model, load=partial(load_model, config))
    sampling, scorer = sampling_of(config), scorer_of(config, reward)
    return Parts(
        config=config,
        train_prompts=train_prompts,
        held_out_prompts=held_out,
        bad_rows=tuple(bad_rows_of(task)),
        scorer=scorer,
        judge=scorer,
        length_penalty=LENGTH_PENALTIES[config.length_penalty.name](
            **config.length_penalty.options
        ),
        policy=policy_of(config, model),
        reference=reference,
        sampler=NativeEngine(model),
        sampling=sampling,
        objective=objective,
        update_settings=update_settings_of(config, model, sampling),
    )


def load_model(config: Config) -> LanguageModel:
    """Load the model. Checkpointing only acts in training mode, so references may have it too."""
    if config.model.deterministic:
        make_deterministic()
    path = config.model.path
    base = adapter_base(path)
    model = load_language_model(
        path if base is None else base,
        dtype=config.model.dtype,
        device=config.model.device,
        gradient_checkpointing=config.model.gradient_checkpointing,
        template=template_of(config),
    )
    return _with_adapter(config, model if base is None else load_adapter(model, Path(path)))


def _with_adapter(config: Config, model: LanguageModel) -> LanguageModel:
    """Give the model the adapter that is asked for, if it does not come with it."""
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
            "config: adapter.also_train needs adapter.rank; without it all is trained"
        )
    if wanted.rank == 0:
        return model
    return add_adapter(model, **wanted.model_dump(), seed=config.seed, base=config.model.path)


def policy_of(config: Config, model: LanguageModel) -> Policy:
    """Give a model its optimizer."""
    return Policy(
        model=model,
        optimizer=optimizer_of(config, model),
        temperature=config.rollout.temperature,
        logits_megabytes=config.train.logits_megabytes,
        graphs=config.records_passes,
    )


def optimizer_of(config: Config, model: LanguageModel) -> Optimizer:
    """Build the optimizer of a model's trained parameters."""
    settings, parameters = config.optimizer, model.model.named_parameters()
    options: AdamWSettings = {
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
    }
    if settings.state == "compact":
        return CompactAdamW(parameters, **options, seed=config.seed)
    return MasterAdamW(parameters, **options)


def update_settings_of(config: Config, model: LanguageModel, sampling: Sampling) -> UpdateSettings:
    """Say how a batch is turned into optimizer steps."""
    exact = model.head.linear.weight.dtype == torch.float32 and not sampling.distribution.truncates
    source = config.train.old_logp
    return UpdateSettings(
        mini_batches=config.train.mini_batches,
        epochs=config.train.epochs,
        micro_batch_tokens=config.train.micro_batch_tokens,
        old_logp_from_sampler=source == "sampler" or (source == "auto" and exact),
        learning_rate=partial(
            learning_rate,
            peak=config.optimizer.learning_rate,
            schedule=config.optimizer.schedule,
            warmup_steps=config.optimizer.warmup_steps,
            total_steps=total_updates(config.train),
        ),
        seed=config.seed,
        skip_zero_gradient=config.filter.skip_zero_gradient,
    )
