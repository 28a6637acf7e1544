"""The fused head with kernels interpreted on the CPU; test_gpu.py uses a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from covey.accel import head as module
from covey.accel.head import Head, token_logp

TOKENS, HIDDEN, VOCABULARY = 11, 8, 50


def megabytes(rows: int) -> float:
    """Return the memory of float32 logits for this many tokens."""
    return (rows + 0.5) * VOCABULARY * 4 / 2**20


@pytest.mark.parametrize(("rows", "recomputed"), [(3, 3), (6, 1), (11, 0), (100, 0)])
def test_all_logits_but_the_last_chunks_are_computed_again(
    rows: int, recomputed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(HIDDEN, VOCABULARY)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    tokens, pulls = torch.randint(VOCABULARY, (TOKENS,)), torch.randn(2, TOKENS)
    leaves = [hidden, *linear.parameters()]
    calls = []
    original = module._compute_logits

    def counted(*arguments):
        calls.append(1)
        return original(*arguments)

    monkeypatch.setattr(module, "_compute_logits", counted)
    monkeypatch.setattr(module, "uses_kernels", lambda weight: True)
    head = Head(linear=linear, scale=1.3)
    logp, entropy = token_logp(head, hidden, tokens, temperature=1.0, megabytes=megabytes(rows))
    chunks = len(calls)
    assert chunks == -(-TOKENS // rows)
    total = (logp * pulls[0] + entropy * pulls[1]).sum()
    found = torch.autograd.grad(total, leaves, retain_graph=True)
    assert len(calls) - chunks == recomputed
    again = torch.autograd.grad(total, leaves)
    whole = (linear(hidden) * 1.3).log_softmax(-1)
    expected = (whole.gather(1, tokens[:, None])[:, 0] * pulls[0]).sum()
    expected = expected - ((whole.exp() * whole).sum(-1) * pulls[1]).sum()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaves), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(again, found)
