"""How the rows of a batch are divided among ranks."""

from __future__ import annotations

import pytest
import torch

from covey.parallel.passes import micro_batches, rank_passes, without_weight
from covey.parallel.world import RankInfo, Ranks, World
from covey.types import Batch
from tests.conftest import make_batch


def divided(batch: Batch, tokens: int, size: int) -> list[list[tuple[list[int], bool]]]:
    worlds = [Ranks(RankInfo(rank=rank, size=size), None, 1.0) for rank in range(size)]
    return [
        [(rows.tolist(), counts) for rows, counts in rank_passes(batch, tokens, world)]
        for world in worlds
    ]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [1, 30, 60, 10_000])
@pytest.mark.parametrize("rows", [1, 2, 7, 24])
def test_every_row_has_one_rank_and_all_take_as_many_passes(
    rows: int, tokens: int, size: int
) -> None:
    batch = make_batch(rows=rows, longest=20)
    ranks = divided(batch, tokens, size)
    counted = [row for passes in ranks for part, counts in passes if counts for row in part]
    assert sorted(counted) == list(range(rows))
    assert len({len(passes) for passes in ranks}) == 1
    # No more passes than one rank would need for its share.
    alone = len(list(micro_batches(batch, tokens)))
    assert len(ranks[0]) == -(-alone // size)


def test_passes_are_about_as_large() -> None:
    batch = make_batch(rows=64, longest=60)
    lengths = batch.prompt_lengths + batch.lengths
    for size in (2, 4):
        work = []
        for passes in divided(batch, 10_000, size):
            parts = [lengths[torch.tensor(part)] for part, counts in passes if counts]
            work.append(sum(len(part) * int(part.max()) for part in parts))  # padded tokens
        assert max(work) < 1.2 * sum(work) / size


def test_one_rank_takes_the_micro_batches_of_old() -> None:
    batch = make_batch(rows=9, longest=20)
    passes = rank_passes(batch, 50, World())
    assert all(counts for _, counts in passes)
    for (rows, _), wanted in zip(passes, micro_batches(batch, 50), strict=True):
        assert rows.equal(wanted)


def test_rows_that_stand_in_weigh_nothing() -> None:
    batch = make_batch(rows=1)
    weight = torch.ones_like(batch.sampler_logp)
    without = without_weight(Batch(**{**fields(batch), "weight": weight}))
    assert without.weight is not None
    assert float(without.weight.abs().sum()) == 0.0


def fields(batch: Batch) -> dict[str, object]:
    return {name: getattr(batch, name) for name in batch.__slots__}
