import math

import pytest
import torch

from covey.engines.draw import Distribution, log_distribution, pick_tokens

PROBABILITIES = torch.tensor([[0.5, 0.1, 0.25, 0.15]])
LOGITS = PROBABILITIES.log()


@pytest.mark.parametrize(
    ("distribution", "expected"),
    [
        (Distribution(), [0.5, 0.1, 0.25, 0.15]),
        (Distribution(top_k=2), [2 / 3, 0, 1 / 3, 0]),
        (Distribution(top_k=9), [0.5, 0.1, 0.25, 0.15]),
        (Distribution(top_p=0.5), [1, 0, 0, 0]),
        (Distribution(top_p=0.51), [2 / 3, 0, 1 / 3, 0]),
        (Distribution(top_p=0.8), [0.5 / 0.9, 0, 0.25 / 0.9, 0.15 / 0.9]),
        (Distribution(min_p=0.29), [0.5 / 0.9, 0, 0.25 / 0.9, 0.15 / 0.9]),
        (Distribution(min_p=0.31), [2 / 3, 0, 1 / 3, 0]),
        (Distribution(top_k=3, top_p=0.7), [2 / 3, 0, 1 / 3, 0]),
        (Distribution(temperature=0.5), [0.25 / 0.345, 0.01 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345]),
    ],
)  # fmt: skip
def test_truncations(distribution: Distribution, expected: list[float]) -> None:
    got = log_distribution(LOGITS, distribution).exp()[0].tolist()
    assert got == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "distribution", [Distribution(), Distribution(top_p=0.8), Distribution(temperature=1.7)]
)
def test_frequencies_are_those_of_the_distribution(distribution: Distribution) -> None:
    count = 100_000
    uniforms = (torch.arange(count) + 0.5) / count
    tokens, logp = pick_tokens(LOGITS.expand(count, 4), uniforms, distribution)
    target = log_distribution(LOGITS, distribution)[0]
    shares = torch.bincount(tokens, minlength=4) / count
    torch.testing.assert_close(shares, target.exp(), atol=2e-5, rtol=0)
    assert torch.equal(logp, target[tokens])


def test_extreme_uniforms_pick_tokens_that_have_mass() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]]).expand(2, 4)
    uniforms = torch.tensor([0.0, 1.0 - 2.0**-24])
    tokens, logp = pick_tokens(logits, uniforms, Distribution())
    assert tokens.tolist() == [1, 2]
    assert logp.tolist() == pytest.approx([math.log(0.5)] * 2)


def test_rounding_at_the_end_of_a_large_vocabulary_never_leaves_it() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 150_000, generator=generator)
    logits[:, -1] = -math.inf
    tokens, logp = pick_tokens(logits, torch.full((64,), 1.0 - 2.0**-24), Distribution())
    assert (tokens < 149_999).all()
    assert logp.isfinite().all()


@pytest.mark.parametrize(
    "distribution",
    [Distribution(), Distribution(temperature=0.0), Distribution(top_k=2, top_p=0.8, min_p=0.1)],
)
@pytest.mark.parametrize("wrong", [[0, 1, 2, 3], [1]])
def test_logits_that_are_nan_give_a_token_and_a_logp_of_nan(
    distribution: Distribution, wrong: list[int]
) -> None:
    logits = LOGITS.repeat(2, 1)
    logits[1, wrong] = math.nan
    tokens, logp = pick_tokens(logits, torch.tensor([0.5, 0.5]), distribution)
    assert ((tokens >= 0) & (tokens < 4)).all()
    assert logp.isnan().tolist() == [False, True]


def test_greedy_takes_the_largest_logit_with_logp_0() -> None:
    tokens, logp = pick_tokens(LOGITS, torch.tensor([0.99]), Distribution(temperature=0.0))
    assert tokens.tolist() == [0]
    assert logp.tolist() == [0.0]
