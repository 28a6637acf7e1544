from __future__ import annotations

import pytest
import torch

from tests.accel.kernels.layer_caches import ACTIVE, KEY_HEADS, completion, random_layer

SHARED = 3
HEADS = KEY_HEADS * SHARED


@pytest.mark.parametrize(("size", "page"), [(32, 128), (24, 16)], ids=["even", "odd size"])
@pytest.mark.parametrize("window", [None, 1, 5, 75])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_windowed_attention_covers_prompt_and_completion(
    device: torch.device, size: int, page: int, window: int | None, softcap: float | None
) -> None:
    from covey.accel.kernels.shared_prompt_attention import shared_prompt_attention

    torch.manual_seed(1)
    # As in models: slices of one product.
    heads = torch.randn(4, HEADS + 2 * KEY_HEADS, size, device=device)
    new = heads.split([HEADS, KEY_HEADS, KEY_HEADS], dim=1)
    old, cache = random_layer(size, page, device), random_layer(size, page, device)
    got = shared_prompt_attention(*new, cache, scale=0.2, window=window, softcap=softcap)
    assert got.shape == (4, HEADS, size)
    for slot in range(4):
        mine, theirs = (completion(cache, t, slot) for t in (cache.keys, cache.values))
        if not ACTIVE[slot]:
            assert not got[slot].any()
            assert torch.equal(mine, completion(old, old.keys, slot))
            continue
        at, before, row = (int(t[slot]) for t in (old.place, old.prompt_length, old.prompt_row))
        query, key, value = (t[slot].double() for t in new)
        keys, values = (
            torch.cat([prompt[row, :, :before], completion(old, t, slot)[:, :at], fresh[:, None]], 1)
            for prompt, t, fresh in (
                (old.prompt_keys, old.keys, key), (old.prompt_values, old.values, value)
            )
        )  # fmt: skip
        scores = query.view(KEY_HEADS, SHARED, size) @ keys.transpose(1, 2) * 0.2
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        if window is not None:
            scores[..., : max(0, before + at + 1 - window)] = -torch.inf
        expected = (scores.softmax(dim=-1) @ values).flatten(0, 1)
        torch.testing.assert_close(got[slot].double(), expected, atol=2e-6, rtol=0)
        assert torch.equal(mine[:, at].double(), key)
        assert torch.equal(theirs[:, at].double(), value)
