from __future__ import annotations

import pytest
import torch

KEY_HEADS, SHARED = 2, 3
HEADS = KEY_HEADS * SHARED


@pytest.mark.parametrize("size", [32, 24], ids=["even", "odd size"])
@pytest.mark.parametrize("window", [None, 1, 5, 75])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_windowed_attention_covers_prompt_and_completion(
    device: torch.device, size: int, window: int | None, softcap: float | None
) -> None:
    from covey.accel.kernels.decode_attention import LayerCache
    from covey.accel.kernels.shared_prompt_attention import shared_prompt_attention

    torch.manual_seed(0)
    # As in models: slices of one product.
    heads = torch.randn(4, HEADS + 2 * KEY_HEADS, size, device=device)
    new = heads.split([HEADS, KEY_HEADS, KEY_HEADS], dim=1)
    keys, values = torch.randn(2, 4, KEY_HEADS, 100, size, device=device)
    prompts = torch.randn(2, 2, KEY_HEADS, 80, size, device=device)
    place = torch.tensor([0, 7, 64, 99], device=device)
    prompt_row = torch.tensor([0, 1, 1, 0], device=device)
    prompt_length = torch.tensor([1, 70, 70, 80], device=device)
    active = torch.tensor([True, False, True, True], device=device)
    mine, theirs = keys.clone(), values.clone()
    stored = LayerCache(
        prompts[0], prompts[1], prompt_row, prompt_length, mine, theirs, place, active
    )
    got = shared_prompt_attention(*new, stored, scale=0.2, window=window, softcap=softcap)
    assert got.shape == (4, HEADS, size)
    for slot in range(4):
        if not active[slot]:
            assert not got[slot].any()
            assert torch.equal(mine[slot], keys[slot])
            continue
        at, before, row = (int(t[slot]) for t in (place, prompt_length, prompt_row))
        query, key, value = (t[slot].double() for t in new)
        all_keys, all_values = (
            torch.cat([prompt[row, :, :before], old[slot, :, :at], fresh[:, None]], dim=1)
            for prompt, old, fresh in zip(prompts, (keys, values), (key, value), strict=True)
        )
        scores = query.view(KEY_HEADS, SHARED, size) @ all_keys.transpose(1, 2) * 0.2
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        if window is not None:
            scores[..., : max(0, before + at + 1 - window)] = -torch.inf
        expected = (scores.softmax(dim=-1) @ all_values).flatten(0, 1)
        torch.testing.assert_close(got[slot].double(), expected, atol=2e-6, rtol=0)
        assert torch.equal(mine[slot, :, at].double(), key)
        assert torch.equal(theirs[slot, :, at].double(), value)
