"""Builds a run's models, and the policy with its optimizer, from the configuration."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import nn

from covey.config import Config
from covey.errors import ConfigError
from covey.models.adapter import add_adapter, load_adapter, set_dropout
from covey.models.device import make_deterministic
from covey.models.gguf import find_gguf
from covey.models.language_model import LanguageModel
from covey.models.load_model import load_language_model
from covey.models.model_path import adapter_base
from covey.parallel.gradients import sums_of
from covey.parallel.ranks import Ranks
from covey.parallel.shard import shard_model
from covey.parallel.world import ALONE, World
from covey.policy.optimizer import AdamWSettings, CompactAdamW, MasterAdamW, Optimizer
from covey.policy.policy import Policy
from covey.training.prompt_limit import with_prompt_limit
from covey.training.resolve import template_of


def load_model(config: Config, device: str = "") -> LanguageModel:
    """Load the model that the config sections [model] and [adapter] describe."""
    if config.model.deterministic:
        make_deterministic()
    path = config.model.path
    base = adapter_base(path)
    model = load_language_model(
        path if base is None else base,
        dtype=config.model.dtype,
        device=device or config.model.device,
        gradient_checkpointing=config.model.gradient_checkpointing,
        offload_activations=config.model.offload_activations,
        template=template_of(config),
        four_bit=config.adapter.load_in_4bit,
    )
    model = with_prompt_limit(config, model)
    if base is not None:
        model = load_adapter(model, Path(path))
    model = _with_adapter(config, model)
    if config.adapter.dropout:
        set_dropout(model, config.adapter.dropout)
    return model


def _with_adapter(config: Config, model: LanguageModel) -> LanguageModel:
    """Add the adapter that [adapter] describes, unless the model already has one."""
    wanted = config.adapter
    if model.adapter is not None:
        if wanted.rank not in (0, model.adapter.r):
            raise ConfigError(
                f"config: adapter.rank = {wanted.rank}, but the adapter {config.model.path} has "
                f"rank {model.adapter.r}; leave adapter.rank out, or merge the adapter first"
            )
        return model
    if wanted.rank == 0:
        return model
    settings = wanted.model_dump(exclude={"load_in_4bit", "dropout"})
    # For a GGUF file or `smollm2`, the adapter names the imported folder, which peft can load.
    base = config.model.path if find_gguf(config.model.path) is None else ""
    return add_adapter(model, **settings, seed=config.seed, base=base)


def load_frozen(
    config: Config, policy: LanguageModel, world: World, *, offload: bool
) -> LanguageModel:
    """Load a frozen model such as a reference; shard it if the policy is sharded."""
    found = load_model(config, world.device(config.model.device))
    if not policy.sharded:
        return found
    found.model.requires_grad_(False)
    offload = offload and found.device.type != "cpu"
    return shard_model(found, config.parallel, world, offload=offload)


def with_path(config: Config, path: str) -> Config:
    """Return the configuration with `path` as `model.path`."""
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def policy_of(config: Config, model: LanguageModel, world: World = ALONE) -> Policy:
    """Build the policy: the model with its optimizer, sharded (FSDP) or replicated (DDP)."""
    sharded = config.parallel.strategy == "fsdp" and isinstance(world, Ranks)
    whole, model = model, shard_model(model, config.parallel, world) if sharded else model
    optimizer = adamw_of(config, model.model.named_parameters())
    return Policy(
        model=model,
        optimizer=optimizer,
        temperature=config.rollout.temperature,
        logits_megabytes=config.train.logits_megabytes,
        # A CUDA graph would replay the random numbers (dropout) that were drawn at capture time.
        graphs=config.records_passes and not sharded and not config.adapter.dropout,
        dropout=config.seed if config.adapter.dropout else None,
        whole=whole if sharded else None,
        sums=sums_of(model, optimizer, world),
    )


def adamw_of(config: Config, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Build the AdamW optimizer that the config section [optimizer] describes."""
    settings = config.optimizer
    options: AdamWSettings = {
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
    }
    if settings.state == "compact":
        return CompactAdamW(parameters, **options, seed=config.seed)
    return MasterAdamW(parameters, **options)
