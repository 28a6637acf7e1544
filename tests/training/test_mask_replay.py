"""Mask replay: training over the tokens that top-k, top-p and min-p kept."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covey.accel.head import Head, token_logp
from covey.api import train
from covey.collate import collate
from covey.config import load_config
from covey.config.resolve import resolve
from covey.engines.draw import Distribution, log_distribution
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Sampling
from covey.errors import ConfigError, ModelError
from covey.kept_sets import KeptSets, decode_kept, encode_kept
from covey.models.language_model import LanguageModel
from covey.models.logp import batch_logp
from covey.rollout.episode import EncodedPrompt
from covey.types import Group, Prompt, Rollout
from tests.conftest import build, rollouts_of
from tests.objective.worked import Worked

WORKED = Worked("worked_examples_2.json")
PROMPT = Prompt(id="p", task="t", messages=({"role": "user", "content": "1+2?"},), target="3")
TRUNCATIONS = [
    Distribution(top_p=0.9),
    Distribution(top_k=5, temperature=0.7),
    Distribution(min_p=0.1),
    Distribution(top_k=40, top_p=0.8, min_p=0.02, temperature=1.3),
]


def kept_ids(keep: torch.Tensor) -> KeptSets:
    """Return masks [B, T, V] as kept sets."""
    texts = [(encode_kept([np.flatnonzero(cell) for cell in row.numpy()]),) for row in keep]
    return KeptSets.of([([True] * keep.shape[1], text) for text in texts], keep.shape[1])


def logp_of(logits: torch.Tensor, tokens: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """Return the log-probabilities [B, T] of tokens [B, T] from logits [B, T, V]."""
    size = logits.shape[-1]
    linear = torch.nn.Linear(size, size, bias=False).double()
    linear.weight.data = torch.eye(size, dtype=torch.float64)
    kept = None if keep is None else kept_ids(keep).at(torch.arange(tokens.numel()))
    logp, _ = token_logp(
        Head(linear=linear), logits.reshape(-1, size), tokens.flatten(), temperature=1.0,
        megabytes=0.0, kept=kept,
    )  # fmt: skip
    return logp.view_as(tokens)


def test_the_worked_kept_set() -> None:
    given = WORKED.at("kept_set")
    logits = torch.tensor(given["logits"], dtype=torch.float64, requires_grad=True)
    old_logits = torch.tensor(given["old_logits"], dtype=torch.float64)
    tokens, keep = torch.tensor(given["token"]).long(), torch.tensor(given["keep"]).bool()
    logp = logp_of(logits, tokens, keep)
    old_logp = logp_of(old_logits, tokens, keep).detach()
    WORKED.close(logp.detach(), given["kept_logp"])
    WORKED.close(old_logp, given["old_kept_logp"])
    mass = (logp_of(logits, tokens, None) - logp).exp().detach()
    WORKED.close(mass, given["kept_mass"])
    ratio = (logp - old_logp).exp()
    loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()
    loss.backward()
    expected = given["cases"]["grpo on the kept set"]
    WORKED.close(loss.detach(), expected["loss"])
    WORKED.close(logits.grad, expected["grad_logits"])


@pytest.mark.parametrize("sizes", [[0], [1], [3, 1, 5], [1, 40, 2]])
def test_sets_come_back_as_they_were(sizes: list[int]) -> None:
    random = np.random.default_rng(0)
    sets = [np.sort(random.choice(50, size, replace=False)) for size in sizes]
    counts, ids = decode_kept(encode_kept(sets))
    assert counts.tolist() == sizes
    assert ids.tolist() == np.concatenate(sets).tolist()


def test_a_set_of_the_whole_vocabulary_is_smaller_than_a_bit_mask() -> None:
    assert len(encode_kept([np.arange(150_000)] * 2)) < 2 * 150_000 / 8 / 4


def truncated_gradients(keep_known: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the expected policy gradient by enumeration, and the exact gradient.

    Sequences of two tokens over a vocabulary of six; the logits of the second depend on the first.
    The policy gradient weighs every sequence with its probability under the sampler.
    """
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, 6, generator=generator, dtype=torch.float64)
    rewards = torch.rand(6, 6, generator=generator, dtype=torch.float64)
    # In float64: the float32 of the engine would show at 1e-7.
    keep = log_distribution(logits, Distribution(top_p=0.8)) > -torch.inf
    policy = logits.clone().requires_grad_()
    sampled = torch.log_softmax(policy.masked_fill(~keep, -torch.inf), dim=-1).exp()
    exact = (sampled[6, :, None] * sampled[:6] * rewards).sum()
    (exact_gradient,) = torch.autograd.grad(exact, policy)
    pairs = [
        (a, b) for a, b in itertools.product(range(6), repeat=2) if sampled[6, a] * sampled[a, b]
    ]
    first, second = (torch.tensor(values) for values in zip(*pairs, strict=True))
    rows = torch.stack([torch.full_like(first, 6), first], dim=1)
    tokens = torch.stack([first, second], dim=1)
    logp = logp_of(policy[rows], tokens, keep[rows] if keep_known else None)
    probability = (sampled[6, first] * sampled[first, second]).detach()
    gain = (probability * rewards[first, second] * logp.sum(dim=1)).sum()
    (gradient,) = torch.autograd.grad(gain, policy)
    return gradient, exact_gradient


def test_the_bias_of_truncated_sampling_is_gone() -> None:
    gradient, exact = truncated_gradients(keep_known=True)
    torch.testing.assert_close(gradient, exact, atol=1e-12, rtol=0)
    biased, exact = truncated_gradients(keep_known=False)
    assert (biased - exact).abs().max() > 0.1 * exact.abs().max()


@pytest.mark.parametrize("distribution", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_trainer_gets_the_log_probs_of_the_sampler(
    name: str, distribution: Distribution
) -> None:
    model = build(name)
    engine = NativeEngine(model)
    sampling = Sampling(
        group_size=4, distribution=distribution, max_tokens=7, max_concurrent=3, mask_replay=True
    )
    prompts = [
        EncodedPrompt(prompt=PROMPT, tokens=(10, 11, 12)),
        EncodedPrompt(prompt=PROMPT, tokens=(20, 21)),
    ]
    rollouts = rollouts_of(engine, prompts, step=1, sampling=sampling)
    batch = collate([Group(prompt=PROMPT, rollouts=tuple(rows)) for rows in rollouts])
    found = batch_logp(model, batch, temperature=distribution.temperature)
    torch.testing.assert_close(found.logp.detach(), batch.sampler_logp, atol=2e-5, rtol=0)
    order = torch.tensor([5, 0, 3])  # rows of a micro-batch take their sets with them
    part = batch_logp(model, batch.rows(order), temperature=distribution.temperature).logp
    width = part.shape[1]
    torch.testing.assert_close(part, found.logp[order, :width], atol=1e-5, rtol=0)


def test_a_set_without_its_token_is_refused() -> None:
    def rollout(kept: tuple[str, ...]) -> Rollout:
        return Rollout.single_turn(
            prompt_tokens=(1,), tokens=(2, 3), sampler_logp=(-1.0, -1.0), policy_version=0,
            kept=kept, prompt_id="p", sample=0, text="", finish="stop",
        )  # fmt: skip

    wrong = encode_kept([np.array([2, 5]), np.array([4])])
    few = encode_kept([np.array([2])])
    for kept, message in ((wrong, "not in its kept set"), (few, "1 kept sets for 2")):
        with pytest.raises(ModelError, match=message):
            collate([Group(prompt=PROMPT, rollouts=(rollout((kept,)),))])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.kind=vllm"], "engine.kind = 'vllm'"),
        (["reference.kind=server", "reference.url=http://127.0.0.1:1", "objective.beta=0.1"],
         "reference.kind = 'server'"),
    ],
)  # fmt: skip
def test_where_sets_do_not_arrive_the_switch_is_refused(overrides: list[str], message: str) -> None:
    settings = ["rollout.top_p=0.9", "rollout.mask_replay=true", *overrides]
    with pytest.raises(ConfigError, match=f"mask_replay = true does not work with {message}"):
        resolve(load_config("demo", settings))


def run_of(folder: Path, **overrides: Any) -> list[dict[str, Any]]:
    result = train(
        "demo", run=folder, quiet=True,
        **{
            "train.steps": 1, "rollout.prompts_per_step": 4, "rollout.group_size": 4,
            "rollout.top_p": 0.9, "evaluate.every": 0, "train.mini_batches": 2, **overrides,
        },
    )  # fmt: skip
    del result
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def test_the_ratio_of_the_first_optimizer_step_is_one(tmp_path: Path) -> None:
    (replayed,) = run_of(tmp_path / "replayed", **{"rollout.mask_replay": True})
    assert abs(replayed["debug/rho_mean"] - 1) < 1e-5
    assert replayed["debug/sampler_logp_diff_max"] < 1e-4
    assert 1 < replayed["debug/kept_tokens"] < 100
    (plain,) = run_of(tmp_path / "plain")
    assert plain["debug/rho_mean"] < 0.99


def test_greedy_completions_have_no_sets(embedded: LanguageModel) -> None:
    sampling = Sampling(max_tokens=3, distribution=Distribution(temperature=0.0), mask_replay=True)
    prompts = [EncodedPrompt(prompt=PROMPT, tokens=(10, 11, 12))]
    ((rollout,),) = rollouts_of(NativeEngine(embedded), prompts, step=1, sampling=sampling)
    assert rollout.segments[0].kept == ()
