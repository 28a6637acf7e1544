"""Build an optimizer from the [optimizer] section of the configuration."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from covey.config import Config
from covey.models.language_model import LanguageModel
from covey.training.compact_adamw import CompactAdamW
from covey.training.optimizer import AdamWSettings, MasterAdamW, Optimizer


def optimizer_of(config: Config, model: LanguageModel) -> Optimizer:
    """Build the optimizer of a model's trained parameters."""
    return adamw_of(config, model.model.named_parameters())


def adamw_of(config: Config, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Build an AdamW optimizer for named parameters."""
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
