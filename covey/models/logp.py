"""Compute log-probabilities and entropies of a batch's tokens under a language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from covey.accel.head import token_logp
from covey.accel.packing import PackedBatch, host_rows, pack
from covey.models.language_model import LanguageModel, packed_forward
from covey.types import Batch


class LogProbs(NamedTuple):
    """Log-prob and entropy of each token [B, T]; 0 for tokens that are not trained."""

    logp: torch.Tensor
    entropy: torch.Tensor


ENTRY = "covey_logp"
"""Name of the method that is added to the root module of a sharded model. Every forward pass of a
sharded model calls this method, so that FSDP2 also gathers the weights of the head."""


def entry_method(
    root: Any, model: LanguageModel, batch: Batch, options: Mapping[str, Any]
) -> LogProbs:
    """Compute `batch_logp` as a method of the root module, and return copies instead of views."""
    found = batch_logp(replace(model, sharded=False), batch, **options)
    return LogProbs(*(values.clone() for values in found))


def batch_logp(
    model: LanguageModel,
    batch: Batch,
    *,
    temperature: float = 1.0,
    logits_megabytes: float = 256.0,
) -> LogProbs:
    """Run the model over a batch; return log-probability and entropy of every trained token.

    The batch is packed if the model supports packing, and padded otherwise. The results of a packed
    and a padded batch differ only by rounding.
    """
    if model.sharded:
        options = {"temperature": temperature, "logits_megabytes": logits_megabytes}
        found: LogProbs = getattr(model.model, ENTRY)(model, batch, options)
        return found
    hidden, chosen, cells = predicting_hidden(model, batch)
    logp, entropy = token_logp(
        model.head, hidden, chosen, temperature=temperature, megabytes=logits_megabytes,
        kept=None if batch.kept is None else batch.kept.at(cells),
    )  # fmt: skip
    return scatter_logp(batch, logp, entropy, cells)


class Predicting(NamedTuple):
    """The hidden states that predict the trained tokens of a batch."""

    hidden: torch.Tensor
    """[M, D]."""
    chosen: torch.Tensor
    """The ids of the trained tokens, int64 [M]."""
    cells: torch.Tensor
    """The indices of the trained tokens in a flattened [B, T] tensor, int64 [M]."""


def predicting_hidden(model: LanguageModel, batch: Batch) -> Predicting:
    """Run the backbone over a batch; return the hidden state that predicts each trained token."""
    if not model.packs:
        hidden, predictor = padded_hidden(model, batch)
        cells = batch.mask.flatten().nonzero().squeeze(1)
        chosen = batch.tokens[batch.mask]
        return Predicting(hidden.index_select(0, predictor[batch.mask]), chosen, cells)
    # Pack the CPU's copy of the batch, so that packing does not wait for the device.
    packed = pack(host_rows(batch), model.device, varlen=model.flash)
    hidden = packed_hidden(model, packed).index_select(0, packed.predictor)
    return Predicting(hidden, packed.chosen, packed.cells)


def scatter_logp(
    batch: Batch, logp: torch.Tensor, entropy: torch.Tensor, cells: torch.Tensor
) -> LogProbs:
    """Return tensors [B, T] with the values [M] of trained tokens, and 0 for other tokens."""
    blank = logp.new_zeros(batch.mask.numel())
    return LogProbs(
        logp=blank.index_copy(0, cells, logp).view_as(batch.mask),
        entropy=blank.index_copy(0, cells, entropy).view_as(batch.mask),
    )


def packed_hidden(
    model: LanguageModel,
    packed: PackedBatch,
    collect: Callable[[tuple[torch.Tensor, torch.Tensor]], None] | None = None,
) -> torch.Tensor:
    """Run the model over packed tokens; return hidden states [N, D].

    The fused forward pass calls `collect` with the keys and values [N, K, D] of each layer.
    """
    if not model.fused:
        return packed_forward(model.backbone, packed)
    from covey.accel.fused_forward import fused_backbone  # needs Triton

    return fused_backbone(
        model.backbone, packed.input_ids, packed.position_ids, packed.packing, collect
    )


def padded_hidden(model: LanguageModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states [B * S, D], and indices [B, T] of the states that predict the tokens."""
    ids, predictor = pad_batch(batch)
    # Padding is on the right, where causal attention ignores it, so there is no attention mask.
    hidden = model.backbone(input_ids=ids, use_cache=False).last_hidden_state
    rows = torch.arange(len(batch), device=hidden.device)[:, None] * hidden.shape[1]
    return hidden.flatten(0, 1), predictor + rows


def pad_batch(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay out each prompt and its completion in a row, with padding on the right.

    Return the token ids [B, S], and the column [B, T] that predicts each completion token.
    """
    rows, prompt_width = batch.prompt_tokens.shape
    completion_width = batch.tokens.shape[1]
    columns = int((batch.prompt_lengths + batch.lengths).max())
    ids = batch.tokens.new_zeros(rows, prompt_width + completion_width)
    ids[:, :prompt_width] = batch.prompt_tokens
    behind = torch.arange(completion_width, device=batch.tokens.device)
    place = batch.prompt_lengths[:, None] + behind
    ids = ids.scatter(1, place, batch.tokens)[:, :columns]
    # Tokens past the end of a completion are masked, so any valid column index will do.
    return ids, (place - 1).clamp(max=columns - 1)
