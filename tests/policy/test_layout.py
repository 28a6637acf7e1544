import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.policy.layout import _cut, lay_out, micro_batches
from tests.conftest import make_batch


def test_every_completion_token_is_predicted_by_the_column_before_it() -> None:
    batch = make_batch(rows=8, seed=1)
    for side in ("right", "left"):
        for width in (0, 40):
            layout = lay_out(batch, side=side, width=width)
            after = layout.input_ids.gather(
                1, (layout.predictor + 1).clamp(max=layout.input_ids.shape[1] - 1)
            )
            assert torch.equal(after[batch.mask], batch.tokens[batch.mask])


def test_left_padding_keeps_order_and_positions() -> None:
    batch = make_batch(rows=5, seed=2)
    right, left = lay_out(batch), lay_out(batch, side="left")
    for row in range(5):
        length = int(batch.prompt_lengths[row] + batch.lengths[row])
        assert left.input_ids[row, -length:].tolist() == right.input_ids[row, :length].tolist()
        assert left.position_ids[row, -length:].tolist() == list(range(length))
        assert left.attention_mask[row].sum() == length


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


@given(st.lists(st.integers(1, 6), min_size=1, max_size=7), st.integers(0, 9))
def test_cuts_cost_least_of_all_where_the_budget_does_not_bind(
    lengths: list[int], pass_tokens: int
) -> None:
    lengths = sorted(lengths, reverse=True)
    budget = 6 * 7

    def cheapest(start: int) -> int:
        if start == len(lengths):
            return 0
        room = max(1, budget // lengths[start])
        ends = range(start + 1, min(start + room, len(lengths)) + 1)
        return min(lengths[start] * (e - start) + pass_tokens + cheapest(e) for e in ends)

    cost, at = 0, 0
    for size in _cut(lengths, budget, pass_tokens):
        cost += lengths[at] * size + pass_tokens
        at += size
    assert at == len(lengths)
    assert cost == cheapest(0)
