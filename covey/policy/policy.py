"""The trained policy: a language model with its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from covey.accel.packing import host_rows
from covey.accel.train_graph import TrainGraphs, train_graphs_for
from covey.models.language_model import LanguageModel
from covey.models.logp import LogProbs, batch_logp, scatter_logp
from covey.parallel.gradients import GradientSums
from covey.parallel.shard import GatheredSteps, whole_tensor
from covey.policy.optimizer import Optimizer, Stepped
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
