"""Gradients do not depend on micro-batches or padding."""

import itertools
from dataclasses import replace

import pytest
import torch

from covey.accel.activation_offload import checkpoint_layers
from covey.models.language_model import LanguageModel
from covey.models.logp import batch_logp
from covey.objective import ALGORITHMS, Objective, policy_loss, with_advantage, with_weight
from covey.types import Batch
from tests.conftest import ARCHITECTURES, build, make_batch

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def gradients(
    model: LanguageModel,
    objective: Objective,
    batch: Batch,
    splits: list[list[int]],
) -> list[torch.Tensor]:
    model.model.zero_grad()
    for rows in splits:
        part = batch.rows(torch.tensor(rows))
        logp = batch_logp(model, part).logp
        policy_loss(objective, part, logp).loss.backward()
    return [p.grad.clone() for p in model.model.parameters()]


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *itertools.product(["llama", "qwen2", "gpt2"], TOLERANCE),
        ("mistral", torch.float64),  # windows; sharpened, its float32 rounding is just above 1e-6
    ],
)
def test_the_gradient_does_not_depend_on_micro_batches_or_padding(
    architecture: str, dtype: torch.dtype
) -> None:
    model = build(architecture, dtype)
    objective = ALGORITHMS["grpo"](beta=0.0)
    batch = make_batch(rows=7, longest=11, seed=8)
    batch = with_weight(objective, with_advantage(objective, batch))
    assert model.packs
    padded = replace(model, packs=False)
    whole = gradients(padded, objective, batch, [list(range(7))])
    scale = max(float(g.abs().max()) for g in whole)
    assert scale > 1e-3
    for splits in ([[0, 1, 2], [3, 4, 5, 6]], [[i] for i in range(7)], [[6, 0], [5, 3, 1], [2, 4]]):
        for each in (model, padded):
            for a, b in zip(gradients(each, objective, batch, splits), whole, strict=True):
                assert float((a - b).abs().max()) <= TOLERANCE[dtype] * max(1.0, scale)


@pytest.mark.parametrize("chunk", [0.001, 256.0])
def test_chunked_logits_give_the_models_own_probabilities(chunk: float) -> None:
    for architecture in sorted(ARCHITECTURES):
        model = build(architecture, torch.float64)
        batch = make_batch(rows=5, seed=9)
        out = batch_logp(model, batch, temperature=0.8, logits_megabytes=chunk)
        for row in range(5):
            p, n = int(batch.prompt_lengths[row]), int(batch.lengths[row])
            ids = torch.cat([batch.prompt_tokens[row, :p], batch.tokens[row, :n]])[None]
            with torch.no_grad():
                logp = torch.log_softmax(model.model(ids).logits[0, p - 1 : -1] / 0.8, dim=-1)
            entropy = -(logp.exp() * logp).sum(-1)
            token_logp = logp.gather(1, batch.tokens[row, :n, None]).squeeze(1)
            trained = batch.mask[row, :n]
            for got, expected in ((out.logp, token_logp), (out.entropy, entropy)):
                torch.testing.assert_close(
                    got[row, :n][trained], expected[trained], atol=1e-6, rtol=0
                )
        assert (out.logp[~batch.mask] == 0).all()


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_training_mode_equals_evaluation_mode(architecture: str) -> None:
    model, batch = build(architecture), make_batch()
    with torch.no_grad():
        evaluation = batch_logp(model, batch).logp
        model.model.train()
        assert torch.equal(batch_logp(model, batch).logp, evaluation)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_gradient_checkpointing_recomputes_and_changes_nothing(architecture: str) -> None:
    model, batch = build(architecture), make_batch()
    model.model.train()
    calls = []
    # From transformers 5.23 on, hooks of the layer itself stay outside of the recomputation.
    mlp = next(m for n, m in model.model.named_modules() if n.endswith(("layers.0.mlp", "h.0.mlp")))
    mlp.register_forward_pre_hook(lambda *_: calls.append(1))

    def gradients() -> list[torch.Tensor]:
        model.model.zero_grad()
        batch_logp(model, batch).logp.sum().backward()
        return [p.grad.clone() for p in model.model.parameters()]

    plain = gradients()
    assert len(calls) == 1
    checkpoint_layers(model.model, offload=False)
    again = gradients()
    assert len(calls) == 3
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
