"""The trained policy: a language model with its optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from covey.accel.packing import host_rows
from covey.accel.train_graph import TrainGraphs, train_graphs_for
from covey.config import Config
from covey.config.resolve import template_of
from covey.errors import ConfigError
from covey.models.adapter import add_adapter, load_adapter, set_dropout
from covey.models.device import make_deterministic
from covey.models.gguf import find_gguf
from covey.models.language_model import LanguageModel
from covey.models.load_model import load_language_model
from covey.models.logp import LogProbs, batch_logp, scatter_logp
from covey.models.model_path import adapter_base
from covey.parallel.gradients import GradientSums, sums_of
from covey.parallel.shard import GatheredSteps, shard_model, whole_tensor
from covey.parallel.world import ALONE, Ranks, World
from covey.policy.optimizer import AdamWSettings, CompactAdamW, MasterAdamW, Optimizer, Stepped
from covey.rollout.prompt_limit import with_prompt_limit
from covey.types import Batch


@dataclass(slots=True, kw_only=True)
class Policy:
    """A model that computes log-probabilities, together with its optimizer."""

    model: LanguageModel
    optimizer: Optimizer
    temperature: float
    """The sampling temperature, by which training also divides the logits. Training therefore
    computes log-probs under the distribution from which the engine samples."""
    logits_megabytes: float
    version: int = 0
    """Number of optimizer steps taken so far."""
    graphs: bool = True
    """Whether to use CUDA graphs where the model and its device support them."""
    passes: TrainGraphs | None = None
    """The CUDA graphs of forward and backward passes."""
    dropout: int | None = None
    """Seed of the dropout in training passes; None without dropout."""
    whole: LanguageModel | None = None
    """An unsharded copy of a sharded model, for the engine and for checkpoints."""
    sums: GradientSums | GatheredSteps | None = None
    """Sums gradients over ranks; None with one rank, or if FSDP2 sums the gradients."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the trained weights by name, to update an engine's copy of the model.

        Sharded weights are gathered one by one, so all ranks must call this function.
        """
        named = self.model.model.named_parameters()
        return ((name, whole_tensor(w.detach())) for name, w in named if w.requires_grad)

    def logp(self, batch: Batch) -> LogProbs:
        """Return the log-prob and entropy of each trained token, with gradients if autograd is on.

        Call `backward` before the next `logp`, because the CUDA graphs share memory
        (train_graph.py). The backward pass writes gradients directly to the tensors that the
        optimizer reads.
        """
        if self.graphs and self.passes is None:
            self.passes = train_graphs_for(
                self.model, temperature=self.temperature, megabytes=self.logits_megabytes
            )
        # A CUDA graph needs fixed sizes, but kept sets have a different size in every batch.
        graphs = self.passes if batch.kept is None else None
        taken = None if graphs is None else graphs.run(host_rows(batch))
        if taken is not None:
            return scatter_logp(batch, *taken)
        try:
            return self.plain_logp(batch)
        except torch.OutOfMemoryError as error:
            if self.passes is None or self.passes.failed:
                raise
            self.passes.give_up(error)
        # At this point nothing refers to the memory of the failed pass or of the graphs any more.
        torch.cuda.empty_cache()
        return self.plain_logp(batch)

    def plain_logp(self, batch: Batch) -> LogProbs:
        """Compute `logp` without CUDA graphs, so that `backward` may be called at any time."""
        return batch_logp(
            self.model,
            batch,
            temperature=self.temperature,
            logits_megabytes=self.logits_megabytes,
        )

    def expect_last_pass(self) -> None:
        """Announce that the next backward pass is the last one before an optimizer step."""
        if self.sums is not None:
            self.sums.expect()

    def step(self, rate: float) -> Stepped:
        """Take an optimizer step with the accumulated gradients; all ranks must call `step`."""
        if self.sums is not None:
            self.sums.finish()
        self.version += 1
        return self.optimizer.step(rate)


# Builds a run's models, and the policy with its optimizer, from the configuration.


def load_model(config: Config, device: str = "") -> LanguageModel:
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
    wanted = config.adapter
    if model.adapter is not None and wanted.rank not in (0, model.adapter.r):
        raise ConfigError(
            f"config: adapter.rank = {wanted.rank}, but the adapter {path} has rank "
            f"{model.adapter.r}; leave adapter.rank out, or merge the adapter first"
        )
    if model.adapter is None and wanted.rank > 0:
        settings = wanted.model_dump(exclude={"load_in_4bit", "dropout"})
        # For a GGUF file or `smollm2`, the adapter names the imported folder, which peft can load.
        named = path if find_gguf(path) is None else ""
        model = add_adapter(model, **settings, seed=config.seed, base=named)
    if config.adapter.dropout:
        set_dropout(model, config.adapter.dropout)
    return model


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
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def policy_of(config: Config, model: LanguageModel, world: World = ALONE) -> Policy:
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
