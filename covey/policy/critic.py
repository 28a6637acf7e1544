"""The critic of PPO: a separate model with a value head, its optimizer, and its checkpoint.

The critic has its own backbone, which costs the memory and time of a second trained model.
`covey plan` includes the cost of the critic. A backbone shared with the policy would mix the
gradients of policy and critic, which have unrelated scales. A value head on the policy's detached
hidden states could use only information that the policy already represents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from covey.config import Config
from covey.errors import ConfigError, RunError
from covey.models.language_model import LanguageModel
from covey.models.logp import predicting_hidden
from covey.objective import Objective, value_loss
from covey.objective.algorithms.ppo import explained_variance
from covey.objective.diagnostics import Meter, observe_values
from covey.parallel.gradients import GradientSums
from covey.parallel.passes import rank_passes
from covey.parallel.world import ALONE, Ranks, World
from covey.policy.optimizer import Optimizer
from covey.policy.policy import adamw_of, load_model, with_path
from covey.reference.fingerprint import tokenizer_digest
from covey.types import Batch, Totals

if TYPE_CHECKING:
    from covey.run import Run

WEIGHTS_FILE = "critic.safetensors"
OPTIMIZER_FILE = "critic_optimizer.safetensors"
HEAD = "value_head"


@dataclass(slots=True, kw_only=True)
class Critic:
    """A language model whose value head predicts the final reward from the tokens so far."""

    model: LanguageModel
    head: nn.Linear
    optimizer: Optimizer
    learning_rate: float
    warmup_steps: int = 0
    sums: GradientSums | None = None
    """Sums the critic's gradients over ranks; None with a single rank. Every rank has a full copy
    of the critic."""
    updates: int = 0
    """Number of optimizer steps that the critic has taken in this process."""

    def warms_up(self, step: int) -> bool:
        """Whether training step number `step`, counted from 1, trains only the critic."""
        return step <= self.warmup_steps

    def values(self, batch: Batch) -> torch.Tensor:
        """Return values [B, T]: the predicted reward before each trained token, and 0 elsewhere."""
        hidden, _, cells = predicting_hidden(self.model, batch)
        values: torch.Tensor = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)
        blank = values.new_zeros(batch.mask.numel())
        return blank.index_copy(0, cells, values).view_as(batch.mask)

    def save(self, folder: Path, *, writes: bool = True) -> None:
        if not writes:
            return
        masters = {k: v.detach().contiguous() for k, v in self.optimizer.masters.items()}
        moments = {k: v.contiguous() for k, v in self.optimizer.state().items()}
        try:
            save_file(masters, folder / WEIGHTS_FILE)
            save_file(moments, folder / OPTIMIZER_FILE)
        except SafetensorError as error:  # a full disk
            raise OSError(str(error)) from None

    def load(self, folder: Path) -> None:
        try:
            weights, moments = load_file(folder / WEIGHTS_FILE), load_file(folder / OPTIMIZER_FILE)
            if weights.keys() != self.optimizer.masters.keys():
                raise ValueError("its critic has other weights than the [critic] section describes")
            self.optimizer.load(weights, moments)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise RunError(f"checkpoint {folder} cannot be read: {error}") from None


def critic_of(
    config: Config, policy: LanguageModel, objective: Objective, world: World = ALONE
) -> Critic | None:
    """Load the critic; return None if the objective needs no critic."""
    if "values" not in objective.needs:
        return None
    section = config.critic
    chosen = with_path(config, section.path or config.model.path)
    model = load_model(chosen, world.device(config.model.device))
    if section.path and tokenizer_digest(model) != tokenizer_digest(policy):
        raise ConfigError(
            f"config: critic.path = {section.path!r} has a different tokenizer than model.path = "
            f"{config.model.path!r}; the critic must use the same token ids as the policy"
        )
    output = model.head.linear.weight
    if model.model.get_input_embeddings().weight is not output:
        output.requires_grad_(False)  # a critic predicts no tokens
    head = nn.Linear(output.shape[1], 1).to(
        model.device, torch.promote_types(output.dtype, torch.float32)
    )
    nn.init.zeros_(head.weight)
    nn.init.constant_(head.bias, section.initial_value)
    named = ((f"{HEAD}.{name}", weight) for name, weight in head.named_parameters())
    optimizer = adamw_of(config, chain(model.model.named_parameters(), named))
    return Critic(
        model=model,
        head=head,
        optimizer=optimizer,
        learning_rate=section.learning_rate,
        warmup_steps=section.warmup_steps,
        sums=GradientSums(world, optimizer) if isinstance(world, Ranks) else None,
    )


def critic_step(run: Run, critic: Critic, mini: Batch, totals: Totals, meter: Meter) -> None:
    critic.model.model.train()
    world, losses = run.world, []
    for rows, counts in rank_passes(mini, run.settings.micro_batch_tokens, world):
        micro = mini.rows(rows)
        output = value_loss(run.objective, micro, critic.values(micro), totals)
        (output.loss * counts).backward()
        if counts:
            observe_values(meter, micro, output)
            losses.append(output.loss.detach())
    if critic.sums is not None:
        critic.sums.finish()
    critic.updates += 1
    stepped = critic.optimizer.step(critic.learning_rate)
    # Each rank has computed only its part of the loss.
    loss = float(torch.stack(losses).sum()) if losses else 0.0
    meter.add("loss/value", loss, count=float(world.is_main))
    if world.is_main:
        meter.add("critic/skipped", float(stepped.skipped))
    if world.is_main and not stepped.skipped:
        meter.add("critic/grad_norm", stepped.grad_norm)


def critic_metrics(batch: Batch) -> dict[str, float]:
    """Return metrics of the predictions that the critic made before it trained on the batch."""
    assert batch.values is not None
    assert batch.targets is not None
    explained = explained_variance(batch.values, batch.targets, batch.mask)
    return {"critic/explained_variance": explained} if math.isfinite(explained) else {}
