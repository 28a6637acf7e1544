"""Computes variants of log-probs: different batch shapes, float32, and truncated sampling."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import torch

from covey.accel.sizes import chunk_rows
from covey.engines.draw import Distribution, log_distribution
from covey.models.device import skip_determinism_check
from covey.models.language_model import LanguageModel
from covey.models.logp import LogProbs, batch_logp, padded_hidden
from covey.parallel.passes import whole_batch
from covey.policy.policy import Policy
from covey.types import Batch, Group, Rollout

SORTED_COPIES = 4
"""The number of tensors that truncated sampling needs: sorted values, indices, cumulative sums, and
a mask."""


@torch.no_grad()
def trainer_logp(policy: Policy, batch: Batch, micro_batch_tokens: int) -> torch.Tensor:
    """Return the trainer's log-probs of a batch, computed in the trainer's micro-batches.

    CUDA graphs are off, because the padding of a graph depends on earlier batches.
    """
    return whole_batch(batch, micro_batch_tokens, policy.plain_logp).logp


@torch.no_grad()
def alone_logp(policy: Policy, batch: Batch) -> torch.Tensor:
    """Return the trainer's log-probs, with each completion in a separate batch."""
    # A limit of one token puts each row into a separate micro-batch.
    return whole_batch(batch, 1, policy.plain_logp).logp


@torch.no_grad()
def wide_logp(policy: Policy, batch: Batch, micro_batch_tokens: int) -> torch.Tensor:
    """Return the log-probs of a batch, computed in float32 from the model's weights."""
    wide = upcast(policy.model)

    def logp(rows: Batch) -> LogProbs:
        return batch_logp(
            wide, rows, temperature=policy.temperature, logits_megabytes=policy.logits_megabytes
        )

    return whole_batch(batch, micro_batch_tokens, logp).logp


def upcast(model: LanguageModel) -> LanguageModel:
    """Return a float32 copy of a model, with the same values of the weights."""
    names = {id(module): name for name, module in model.model.named_modules()}
    copied = copy.deepcopy(model.model).float()
    head = replace(model.head, linear=copied.get_submodule(names[id(model.head.linear)]))
    # Flash kernels need half precision, so the copy uses the model's own forward pass.
    return replace(model, model=copied, head=head, flash=False, fused=False)


@torch.no_grad()
@skip_determinism_check()
def log_kept(
    policy: Policy, batch: Batch, distribution: Distribution, micro_batch_tokens: int
) -> torch.Tensor:
    """Return the log of the probability mass that truncation keeps at each position, as [B, T].

    The engine's `sampler_logp` is the log-prob of the token without truncation minus the log of the
    kept mass. The kept mass does not depend on which token was sampled, so its log is finite even
    if rounding errors make truncation remove the sampled token.
    """
    if not distribution.truncates:
        return torch.zeros_like(batch.sampler_logp)
    whole = replace(distribution, top_k=0, top_p=1.0, min_p=0.0)
    chunk = chunk_rows(
        len(policy.model.head.linear.weight), policy.logits_megabytes / SORTED_COPIES
    )

    def kept(rows: Batch) -> LogProbs:
        hidden, predictor = padded_hidden(policy.model, rows)
        chosen, mass = predictor[rows.mask], []
        for at in range(0, len(chosen), chunk):
            logits = policy.model.head.logits(hidden.index_select(0, chosen[at : at + chunk]))
            stays = log_distribution(logits, distribution) > -torch.inf
            mass.append(log_distribution(logits, whole).exp().where(stays, 0.0).sum(dim=-1))
        blank = torch.zeros_like(rows.sampler_logp)
        found = blank.masked_scatter(rows.mask, torch.cat(mass).log().clamp(max=0.0))
        return LogProbs(logp=found, entropy=blank)

    return whole_batch(batch, micro_batch_tokens, kept).logp


def paired(one: Sequence[Group], other: Sequence[Group]) -> list[tuple[Rollout, Rollout]]:
    """Return pairs of rollouts from two batches, paired by prompt and sample index."""
    groups = zip(one, other, strict=True)
    return [pair for a, b in groups for pair in zip(a.rollouts, b.rollouts, strict=True)]


def common_prefix(one: Sequence[Group], other: Sequence[Group], like: Batch) -> torch.Tensor:
    """Return a mask [B, T] of the tokens before the point where the rollouts of a pair differ."""
    mask = torch.zeros_like(like.mask)
    for row, (a, b) in enumerate(paired(one, other)):
        tokens = zip(a.tokens, b.tokens, strict=False)
        mask[row, : sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], tokens))] = True
    return mask
