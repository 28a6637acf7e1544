"""The policy that is trained: a language model with its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from covey.accel.packing import host_rows
from covey.accel.train_graph import TrainGraphs, train_graphs_for
from covey.models.language_model import LanguageModel
from covey.models.logp import LogProbs, batch_logp, scatter_logp
from covey.training.optimizer import Optimizer, Stepped
from covey.training.parallel.gradients import GradientSums
from covey.training.parallel.shard import whole_tensor
from covey.types import Batch


@dataclass(slots=True, kw_only=True)
class Policy:
    """The weights, how log-probabilities are taken of them, and how they change."""

    model: LanguageModel
    optimizer: Optimizer
    temperature: float
    """The sampling temperature: training sees the distribution that was sampled."""
    logits_megabytes: float
    version: int = 0
    """Optimizer steps taken."""
    graphs: bool = True
    """Whether CUDA graphs are used, where the model and its device allow it."""
    passes: TrainGraphs | None = None
    """The CUDA graphs of forward and backward passes."""
    whole: LanguageModel | None = None
    """Of a sharded model the whole copy that the engine has, which checkpoints are written from."""
    sums: GradientSums | None = None
    """Sums gradients over ranks. None: they are whole already."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that training changes, by name: what an engine's copy needs.

        Sharded ones are gathered one by one, which all ranks must do together.
        """
        named = self.model.model.named_parameters()
        return ((name, whole_tensor(w.detach())) for name, w in named if w.requires_grad)

    def logp(self, batch: Batch) -> LogProbs:
        """Return log-probability and entropy of every trained token, with gradient if enabled.

        Call backward before the next call: the passes may be CUDA graphs, which share their memory
        (accel/train_graph.py). The gradient goes straight to where the optimizer reads it.
        """
        if self.graphs and self.passes is None:
            self.passes = train_graphs_for(
                self.model, temperature=self.temperature, megabytes=self.logits_megabytes
            )
        # Kept sets have another size in every batch, and a graph has one.
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
        # By now nothing refers to the memory of the failed pass, or of the graphs.
        torch.cuda.empty_cache()
        return self.plain_logp(batch)

    def plain_logp(self, batch: Batch) -> LogProbs:
        """Return the same without CUDA graphs: differentiable at any time, by any caller."""
        return batch_logp(
            self.model,
            batch,
            temperature=self.temperature,
            logits_megabytes=self.logits_megabytes,
        )

    def expect_last_pass(self) -> None:
        """Note that the next backward pass is the last before an optimizer step."""
        if self.sums is not None:
            self.sums.expect()

    def step(self, rate: float) -> Stepped:
        """Take an optimizer step on the gradients collected so far, on all ranks."""
        if self.sums is not None:
            self.sums.finish()
        self.version += 1
        return self.optimizer.step(rate)
