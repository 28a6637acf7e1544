"""Supervised steps: raising the probability of answers that somebody else wrote.

The loss is the mean cross-entropy over all tokens of an optimizer step. As everywhere, the mean is
a weight that is computed once per step, and the loss a plain sum; so it does not depend on how the
step is split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from covey.errors import ModelError
from covey.models.language_model import LanguageModel
from covey.models.micro_batches import micro_batches
from covey.objective.weights import token_mean
from covey.training.collate import collate
from covey.training.policy import Policy
from covey.types import Batch, Group, Message, Prompt, Rollout, Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question and its solution, in tokens."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    """They end with the end-of-sequence token: when to stop is learned as well."""


def encode_example(model: LanguageModel, messages: Sequence[Message], text: str) -> Example:
    """Turn a question and its solution into tokens, where the sampler would have put them."""
    told = model.tokenizer.encode(text, add_special_tokens=False)
    return Example(prompt_tokens=model.encode(messages), tokens=(*told, _end(model)))


def _end(model: LanguageModel) -> int:
    """Return the token that ends an answer: that of a turn, or else of the sequence."""
    turn_end = None if model.renderer is None else model.renderer.turn_end
    end = model.tokenizer.eos_token_id if turn_end is None else turn_end
    if end is None:
        raise ModelError("model: the tokenizer has no end-of-sequence token to end a solution with")
    return int(end)


def stack(examples: Sequence[Example], device: torch.device | str = "cpu") -> Batch:
    """Make a batch of them, each an answer that all of is trained."""
    nobody = Prompt(id="", task="", messages=(), target="")
    rollouts = [
        Rollout.single_turn(
            prompt_id="",
            sample=0,
            prompt_tokens=example.prompt_tokens,
            tokens=example.tokens,
            sampler_logp=(0.0,) * len(example.tokens),
            text="",
            finish="stop",
            policy_version=0,
        )
        for example in examples
    ]
    return collate([Group(prompt=nobody, rollouts=(rollout,)) for rollout in rollouts], device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What an optimizer step reports."""

    loss: float
    """Mean cross-entropy of the step's tokens, before the step."""
    entropy: float
    """Mean entropy of the predictions, likewise."""
    tokens: int
    grad_norm: float
    skipped: bool


def with_token_mean(batch: Batch) -> Batch:
    """Fill in the weights of one optimizer step."""
    return replace(batch, weight=token_mean(batch.mask, batch.group, Totals.of(batch)))


def cross_entropy(batch: Batch, logp: torch.Tensor) -> torch.Tensor:
    """Return the loss of these rows: their share of the mean over the whole step."""
    assert batch.weight is not None, "weights come from the whole step"
    return -(logp * batch.weight.to(logp.dtype)).sum()


def _backward(policy: Policy, micro: Batch) -> torch.Tensor:
    """Add the gradient of some rows; return their shares [2] of loss and entropy."""
    now = policy.logp(micro)
    part = cross_entropy(micro, now.logp)
    part.backward()
    return torch.stack([part.detach(), -cross_entropy(micro, now.entropy.detach())])


def learn(policy: Policy, batch: Batch, *, rate: float, micro_batch_tokens: int) -> Learned:
    """Take one optimizer step on a batch."""
    policy.model.model.train()
    batch = with_token_mean(batch)
    parts = [
        _backward(policy, batch.rows(rows)) for rows in micro_batches(batch, micro_batch_tokens)
    ]
    stepped = policy.step(rate)
    # Asked for when the device has done its work anyway.
    loss, entropy = (sum(column) for column in zip(*torch.stack(parts).tolist(), strict=True))
    return Learned(
        loss=loss,
        entropy=entropy,
        tokens=int(batch.mask.sum()),
        grad_norm=stepped.grad_norm,
        skipped=stepped.skipped,
    )
