"""Log-probabilities and entropies of a batch under a language model."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from covey.accel.head import token_logp
from covey.accel.packing import PackedRows, host_rows
from covey.models.language_model import LanguageModel, packed_forward
from covey.models.layout import Side, lay_out, pack, pack_for
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
