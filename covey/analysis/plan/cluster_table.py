"""The best split of a cluster's GPUs between trainers and engines, as a table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from covey.analysis.plan.cost_model import (
    COUNTS,
    PUBLISHED,
    ModelSize,
    Split,
    Workload,
    splits,
)
from covey.analysis.plan.model_shape import Shape
from covey.config import Config

PROMPT_TOKENS = 256
"""The prompt length that is assumed if the tokens of prompts cannot be counted."""
STALENESS = 1
"""The assumed staleness if engines and trainers work at the same time."""


def workload(config: Config, longest_prompt: int | None, *, reference: bool) -> Workload:
    """Return the workload of one training step with this configuration."""
    rollout, train = config.rollout, config.train
    recomputed = train.old_logp != "sampler" and train.updates > 1
    return Workload(
        rows=rollout.prompts_per_step * rollout.group_size,
        group=rollout.group_size,
        prompt=longest_prompt or PROMPT_TOKENS,
        completion=rollout.max_tokens,
        updates=train.epochs,
        forwards=int(reference) + int(recomputed),
        micro_batch=train.micro_batch_tokens,
        checkpointing=config.model.gradient_checkpointing,
    )


def size_of(shape: Shape) -> ModelSize:
    """Return the sizes of a model for the cost model."""
    return ModelSize(
        parameters=float(shape.parameters),
        layers=shape.layers,
        hidden=shape.hidden,
        key_numbers=2 * shape.layers * shape.key_value_heads * shape.head_size,
    )


def table(work: Workload, own: tuple[str, ModelSize] | None = None) -> list[dict[str, Any]]:
    """Return a row for each model and number of GPUs, with the fastest division of the GPUs.

    A model that does not fit has no row. `own` is the name and size of the configuration's model,
    which is listed first.
    """
    models = ([own] if own is not None else []) + list(PUBLISHED.items())
    rows = []
    for name, model in models:
        for gpus in COUNTS:
            found = splits(model, work, gpus, staleness=STALENESS)
            in_turn = splits(model, work, gpus, staleness=0)
            if found:
                rows.append(_row(name, found[0], in_turn[0].seconds))
    return rows


def _row(name: str, best: Split, in_turn: float) -> dict[str, Any]:
    return {
        "model": name,
        **asdict(best),
        "shared": best.shared,
        "seconds": best.seconds,
        "seconds_in_turn": in_turn,
    }
