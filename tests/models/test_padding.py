from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.accel.packing import pack
from covey.models.logp import pad_batch
from covey.parallel.passes import micro_batches
from covey.types import HostRows
from tests.conftest import make_batch


def test_every_completion_token_is_predicted_by_the_column_before_it() -> None:
    batch = make_batch(rows=8, seed=1)
    ids, predictor = pad_batch(batch)
    assert ids.shape[1] == int((batch.prompt_lengths + batch.lengths).max())
    after = ids.gather(1, (predictor + 1).clamp(max=ids.shape[1] - 1))
    assert torch.equal(after[batch.mask], batch.tokens[batch.mask])
    for row, (p, n) in enumerate(zip(batch.prompt_lengths, batch.lengths, strict=True)):
        whole = torch.cat([batch.prompt_tokens[row, :p], batch.tokens[row, :n]])
        assert torch.equal(ids[row, : p + n], whole)


@given(st.integers(1, 12), st.integers(1, 400), st.integers(0, 999))
def test_micro_batches_hold_every_row_once_within_the_budget(
    rows: int, budget: int, seed: int
) -> None:
    batch = make_batch(rows=rows, seed=seed)
    lengths = batch.prompt_lengths + batch.lengths
    parts = list(micro_batches(batch, budget))
    assert sorted(torch.cat(parts).tolist()) == list(range(rows))
    for part in parts:
        assert len(part) == 1 or len(part) * int(lengths[part].max()) <= budget


def test_packing_holds_every_prompt_once_and_all_input_tokens() -> None:
    batch = make_batch(rows=8, seed=3)
    batch = replace(
        batch,
        prompt_tokens=batch.prompt_tokens[[0, 0, 0, 3, 3, 5, 5, 5]],
        prompt_lengths=batch.prompt_lengths[[0, 0, 0, 3, 3, 5, 5, 5]],
    )
    packed = pack(HostRows.of(batch), torch.device("cpu"), varlen=False)
    prompts = int(batch.prompt_lengths[[0, 3, 5]].sum())
    assert len(packed.input_ids) == prompts + int((batch.lengths - 1).sum())
    predictor = torch.zeros_like(batch.tokens).masked_scatter(batch.mask, packed.predictor)
    for row in range(8):
        p, n = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        cells = packed.packing.rows[row, : p + n - 1]
        whole = torch.cat([batch.prompt_tokens[row, :p], batch.tokens[row, : n - 1]])
        trained = batch.mask[row, :n]
        assert torch.equal(packed.input_ids[cells], whole)
        assert packed.position_ids[cells].tolist() == list(range(p + n - 1))
        expected = packed.packing.rows[row, p - 1 : p - 1 + n]
        assert torch.equal(predictor[row, :n][trained], expected[trained])
    assert torch.equal(packed.chosen, batch.tokens[batch.mask])
    assert torch.equal(packed.cells, batch.mask.flatten().nonzero().squeeze(1))
