"""The policy that is trained: a language model with its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from covey.accel.head import token_logp
from covey.accel.packing import PackedRows, host_rows
from covey.accel.train_graph import Passes, passes_for
from covey.models.language_model import LanguageModel, packed_forward
from covey.models.layout import Side, lay_out, pack, pack_for
from covey.training.optimizer import Optimizer, Stepped
from covey.types import Batch


class LogProbs(NamedTuple):
    """Per-token results [B, T], 0 where not trained."""

    logp: torch.Tensor
    entropy: torch.Tensor


def batch_logp(
    model: LanguageModel,
    batch: Batch,
    *,
    temperature: float = 1.0,
    logits_megabytes: float = 256.0,
    side: Side | Literal["packed", "auto"] = "auto",
    width: int = 0,
) -> LogProbs:
    """Run the model over a batch and return what it says of every trained token.

    The layout (packed, or the side and width of the padding) changes nothing but rounding; auto
    packs where the model can.
    """
    if side == "auto":
        side = "packed" if model.packs else "right"
    if side == "packed" and model.device.type != "cpu":
        return _device_logp(model, batch, temperature, logits_megabytes)
    if side == "packed":
        hidden, predictor = _packed_hidden(model, batch)
    else:
        hidden, predictor = padded_hidden(model, batch, side, width)
    chosen = hidden.index_select(0, predictor[batch.mask])
    logp, entropy = token_logp(
        model.head,
        chosen,
        batch.tokens[batch.mask],
        temperature=temperature,
        megabytes=logits_megabytes,
    )
    blank = logp.new_zeros(batch.mask.shape)
    return LogProbs(
        logp=blank.masked_scatter(batch.mask, logp),
        entropy=blank.masked_scatter(batch.mask, entropy),
    )


def _packed_hidden(model: LanguageModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states [N, D], and which of them predicts each completion token [B, T]."""
    packed = pack(batch)
    return packed_forward(model.backbone, packed), packed.predictor


def _device_logp(
    model: LanguageModel, batch: Batch, temperature: float, megabytes: float
) -> LogProbs:
    """Do the same on a device, without ever asking it for a number."""
    packed = pack_for(host_rows(batch), model.device, flash=model.flash)
    logp, entropy = token_logp(
        model.head,
        device_hidden(model, packed).index_select(0, packed.predictor),
        packed.chosen,
        temperature=temperature,
        megabytes=megabytes,
    )
    return in_places(batch, logp, entropy, packed.cells)


def in_places(
    batch: Batch, logp: torch.Tensor, entropy: torch.Tensor, cells: torch.Tensor
) -> LogProbs:
    """Put what is said of trained tokens [M] at their cells of [B, T], flattened."""
    blank = logp.new_zeros(batch.mask.numel())
    return LogProbs(
        logp=blank.index_copy(0, cells, logp).view_as(batch.mask),
        entropy=blank.index_copy(0, cells, entropy).view_as(batch.mask),
    )


def device_hidden(
    model: LanguageModel,
    packed: PackedRows,
    collect: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Run the model over packed tokens; return hidden states [N, D].

    A fused model gives `collect` the keys and values [N, K, D] of every layer.
    """
    if not model.fused:
        return packed_forward(model.backbone, packed)
    from covey.accel.fused_forward import fused_backbone  # needs Triton

    return fused_backbone(
        model.backbone, packed.input_ids, packed.position_ids, packed.packing, collect
    )


def padded_hidden(
    model: LanguageModel, batch: Batch, side: Side, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states [B * S, D], and which of them predicts each completion token [B, T]."""
    layout = lay_out(batch, side=side, width=width)
    hidden = model.backbone(
        input_ids=layout.input_ids,
        attention_mask=layout.attention_mask,
        position_ids=layout.position_ids,
        use_cache=False,
    ).last_hidden_state
    rows = torch.arange(len(batch), device=hidden.device)[:, None] * hidden.shape[1]
    return hidden.flatten(0, 1), layout.predictor + rows


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
    """Whether passes are recorded, where the model and its device allow it."""
    passes: Passes | None = None
    """Those that are."""

    def logp(self, batch: Batch) -> LogProbs:
        """Return log-probability and entropy of every trained token, with gradient if enabled.

        A gradient goes straight to where the optimizer finds it, and has to be asked for before
        this is called again: passes may be recorded, and share their memory (graph.py).
        """
        if self.graphs and self.passes is None:
            self.passes = passes_for(
                self.model, temperature=self.temperature, megabytes=self.logits_megabytes
            )
        taken = None if self.passes is None else self.passes.take(host_rows(batch))
        if taken is not None:
            return in_places(batch, *taken)
        try:
            return self.plain_logp(batch)
        except torch.OutOfMemoryError as error:
            if self.passes is None or self.passes.failed:
                raise
            self.passes.give_up(error)
        # By now nothing holds on to what the failed pass had, nor to the memory of graphs.
        torch.cuda.empty_cache()
        return self.plain_logp(batch)

    def plain_logp(self, batch: Batch) -> LogProbs:
        """Return the same as autograd knows it: to be differentiated at any time, by anything."""
        return batch_logp(
            self.model,
            batch,
            temperature=self.temperature,
            logits_megabytes=self.logits_megabytes,
        )

    def step(self, rate: float) -> Stepped:
        """Take an optimizer step on the gradients collected so far."""
        self.version += 1
        return self.optimizer.step(rate)
