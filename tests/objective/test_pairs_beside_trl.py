"""The same pairs through TRL's own DPO trainer and through covey: the same loss and gradient.

Written beside TRL 1.16. What it calls differently, or does not have:

- `loss_type` "sigmoid" is `dpo`; "sigmoid_norm" is `dpo` with `average`; "ipo" is `ipo`, of means.
  Its IPO counts tokens before it shifts them by one: the same number.
- TRL pairs the two generations of its online DPO also where their rewards are equal; we make no pair
  of them, and count them.
- PPO with a critic is no longer part of TRL. Its last trainer took the same lambda for advantages and
  targets (`value_lam = lam`), whitened on each rank by itself, and added 0.1 of the critic's loss to
  the policy's. Our estimates are tested against worked numbers and against the sum by definition.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import covey.functional
from covey.embedded import CHECKPOINT
from covey.objective.algorithms.ppo import gae

trl = pytest.importorskip("trl")
PAIRS = [
    {"prompt": f"{a}+{b}?", "chosen": f"<answer>{a + b}</answer>", "rejected": rejected}
    for a, b, rejected in [(3, 4, "8"), (12, 5, "<answer>16</answer>"), (7, 7, "no"), (20, 1, "2")]
]
BETA = 0.3


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any, Any]:
    """Return the embedded model, one that has moved away from it, and the tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference, policy = (AutoModelForCausalLM.from_pretrained(CHECKPOINT) for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return policy, reference, AutoTokenizer.from_pretrained(CHECKPOINT)


def token_logp(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probability of each token but the first."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    picked = batch["input_ids"][:, 1:, None]
    return logits[:, :-1].log_softmax(dim=-1).gather(2, picked).squeeze(2)


@pytest.mark.parametrize(
    ("loss_type", "name", "options"),
    [
        ("sigmoid", "dpo", {}),
        ("sigmoid_norm", "dpo", {"average": True}),
        ("ipo", "ipo", {}),
    ],
)
def test_loss_and_gradient_are_those_of_trl(
    loss_type: str, name: str, options: dict[str, Any], models: Any, tmp_path: Path
) -> None:
    from datasets import Dataset

    policy, reference, tokenizer = models
    trainer = trl.DPOTrainer(
        model=policy, ref_model=reference, processing_class=tokenizer,
        train_dataset=Dataset.from_list(PAIRS),
        args=trl.DPOConfig(
            output_dir=str(tmp_path), loss_type=[loss_type], beta=BETA, report_to=[],
            per_device_train_batch_size=len(PAIRS), use_cpu=True, bf16=False,
            gradient_checkpointing=False, disable_dropout=True,
        ),
    )  # fmt: skip
    batch = next(iter(trainer.get_train_dataloader()))
    policy.zero_grad()
    theirs = trainer.compute_loss(trainer.model, dict(batch))
    theirs.backward()
    expected = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    logp = token_logp(policy, batch)
    with torch.no_grad():
        ref_logp = token_logp(reference, batch)
    count = len(PAIRS)
    ours = covey.functional.loss(
        name, logp=logp, old_logp=logp.detach(), ref_logp=ref_logp, beta=BETA,
        mask=batch["completion_mask"][:, 1:], group=torch.arange(count).repeat(2),
        rewards=torch.tensor([1.0] * count + [0.0] * count), **options,
    )  # fmt: skip
    ours.loss.backward()
    torch.testing.assert_close(ours.loss, theirs, rtol=1e-5, atol=1e-5)
    assert abs(ours.metrics["pairs/margin"]) > 0.01
    assert expected
    for key, gradient in expected.items():
        found = dict(policy.named_parameters())[key].grad
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found, gradient, rtol=1e-3, atol=1e-4 * max(scale, 1e-3))


def test_estimates_are_sums_of_temporal_differences() -> None:
    """A_t = sum_k (gamma lam)^k delta_{t+k}, the definition; tokens outside the mask are left out."""
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.rand(2, 3, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 6, generator=generator) < 0.7
    found = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    for row in range(3):
        places = mask[row].nonzero().squeeze(1).tolist()
        reward, value = rewards[row, places], values[row, places]
        after = torch.cat([value[1:], value.new_zeros(1)])[: len(places)]
        delta = reward + 0.9 * after - value
        for k, place in enumerate(places):
            powers = (0.9 * 0.8) ** torch.arange(len(places) - k, dtype=torch.float64)
            assert float(found[row, place]) == pytest.approx(float((powers * delta[k:]).sum()))
    assert not found[~mask].any()
