import os
from pathlib import Path

import pytest
import torch
from torch import nn

from covey.accel.head import Head, token_logp
from covey.accel.sizes import chunk_rows
from tests.processes import forked


def direct(head: Head, hidden: torch.Tensor, tokens: torch.Tensor, temperature: float):
    logp = torch.log_softmax(head.logits(hidden) / temperature, dim=-1)
    return logp.gather(-1, tokens[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 100])
def test_values_and_gradients_equal_the_plain_computation(
    bias: bool, softcap: float | None, tokens_per_chunk: int
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(5, 11, bias=bias, dtype=torch.float64)
    head = Head(linear=linear, scale=1.5, softcap=softcap)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 11, (7,))
    wanted = [hidden, *linear.parameters()]
    weigh = torch.randn(2, 7, dtype=torch.float64)
    megabytes = tokens_per_chunk * 11 * 8 * 3 / 2**20
    assert chunk_rows(11, megabytes * 1.0001, 8) == tokens_per_chunk

    ours = token_logp(head, hidden, tokens, temperature=0.7, megabytes=megabytes * 1.0001)
    plain = direct(head, hidden, tokens, 0.7)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    for picks in ((1, 0), (0, 1), (1, 1)):
        ours_grad, plain_grad = (
            torch.autograd.grad(
                sum((p * w * v).sum() for p, w, v in zip(picks, weigh, pair, strict=True)),
                wanted,
                retain_graph=True,
            )
            for pair in (ours, plain)
        )
        for a, b in zip(ours_grad, plain_grad, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def status_megabytes(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def measure(tokens: int, vocabulary: int, megabytes: float) -> int:
    torch.manual_seed(0)
    linear = nn.Linear(16, vocabulary, bias=False)
    h = torch.randn(tokens, 16, requires_grad=True)
    ids = torch.randint(0, vocabulary, (tokens,))
    small = token_logp(Head(linear=linear), h[:2], ids[:2], temperature=1.0, megabytes=0.001)
    small[0].sum().backward()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status_megabytes("VmRSS")
    logp, _ = token_logp(Head(linear=linear), h, ids, temperature=1.0, megabytes=megabytes)
    logp.sum().backward()
    print(status_megabytes("VmHWM") - before)
    return 0


def peak_megabytes(output: Path, *arguments: float) -> float:
    """Return the peak of a process of its own."""
    child = forked(lambda: measure(*arguments), output)
    assert os.waitpid(child, 0)[1] == 0
    return float(output.read_text())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_peak_memory_depends_on_the_chunk_and_not_on_the_vocabulary(tmp_path: Path) -> None:
    # All logits at once would be 300 x 150,000 x 4 bytes = 172 MB, several times over.
    small_chunk = peak_megabytes(tmp_path / "small_chunk", 300, 150_000, 20)
    large_chunk = peak_megabytes(tmp_path / "large_chunk", 300, 150_000, 80)
    small_vocabulary = peak_megabytes(tmp_path / "small_vocabulary", 300, 15_000, 20)
    assert small_chunk < 20 + 25
    assert large_chunk < 80 + 25
    assert large_chunk > small_chunk + 15  # the fork may reuse memory that was freed before
    assert abs(small_chunk - small_vocabulary) < 25
