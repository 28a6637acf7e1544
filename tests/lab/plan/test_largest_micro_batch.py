"""The largest micro-batch that a forecast computes is that of the trainer."""

from __future__ import annotations

import pytest
import torch

from covey.lab.plan.memory import largest_micro_batch
from covey.parallel.passes import balanced_parts
from tests.lab.plan.test_memory import equal_rows


@pytest.mark.parametrize("completion", [1, 2, 40])
@pytest.mark.parametrize("group_size", [1, 4, 6])
def test_micro_batches_are_those_of_balanced_parts(group_size: int, completion: int) -> None:
    batch = equal_rows(5, group_size, prompt=30, completion=completion)
    group = batch.group
    for budget in (1, 31, 100, 170, 300, 450, 1000, 100_000):
        parts = [(len(p), len(torch.unique(group[p]))) for p in balanced_parts(batch, budget)]
        expected = max(n * (completion - 1) + prompts * 30 for n, prompts in parts)
        rows, prompts = largest_micro_batch(len(batch), group_size, 30, completion, budget)
        assert rows * (completion - 1) + prompts * 30 == expected, budget
