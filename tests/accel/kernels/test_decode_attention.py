from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm

KEY_HEADS, SHARED, SIZE = 2, 3, 32
HEADS = KEY_HEADS * SHARED


def turned(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def test_attention_covers_prompt_and_completion(device: torch.device) -> None:
    from covey.accel.kernels.decode_attention import LayerCache, decode_attention

    torch.manual_seed(0)
    heads = torch.randn(4, (HEADS + 2 * KEY_HEADS) * SIZE, device=device)
    keys, values = torch.randn(2, 4, KEY_HEADS, 100, SIZE, device=device)
    prompts = tuple(torch.randn(2, 2, KEY_HEADS, 80, SIZE, device=device))
    angles = torch.randn(180, SIZE // 2, device=device)
    rope = angles.cos(), angles.sin()
    place = torch.tensor([0, 7, 64, 99], device=device)
    prompt_row = torch.tensor([0, 1, 1, 0], device=device)
    prompt_length = torch.tensor([1, 70, 70, 80], device=device)
    active = torch.tensor([True, False, True, True], device=device)
    norms = torch.rand(SIZE, device=device), torch.rand(SIZE, device=device), 1e-6
    for gains in (None, norms):
        new_keys, new_values = keys.clone(), values.clone()
        cache = LayerCache(*prompts, prompt_row, prompt_length, new_keys, new_values, place, active)
        got = decode_attention(heads, cache, rope=rope, scale=0.2, norms=gains)
        for slot in range(4):
            if not active[slot]:
                assert not got[slot].any()
                assert torch.equal(new_keys[slot], keys[slot])
                continue
            at, before, row = (int(t[slot]) for t in (place, prompt_length, prompt_row))
            mine = heads[slot].view(-1, SIZE).double()
            query, key, value = mine.split([HEADS, KEY_HEADS, KEY_HEADS])
            if gains is not None:
                query = rms_norm(query, (SIZE,), gains[0].double(), 1e-6)
                key = rms_norm(key, (SIZE,), gains[1].double(), 1e-6)
            query, key = (turned(t, *(r[before + at].double() for r in rope)) for t in (query, key))
            all_keys, all_values = (
                torch.cat([prompt[row, :, :before], old[slot, :, :at], new[:, None]], dim=1)
                for prompt, old, new in zip(prompts, (keys, values), (key, value), strict=True)
            )
            scores = query.view(KEY_HEADS, SHARED, SIZE) @ all_keys.transpose(1, 2) * 0.2
            expected = (scores.softmax(dim=-1) @ all_values).flatten()
            torch.testing.assert_close(got[slot].double(), expected, atol=2e-6, rtol=0)
            torch.testing.assert_close(new_keys[slot, :, at].double(), key, atol=2e-6, rtol=0)
            assert torch.equal(new_values[slot, :, at].double(), value)


@pytest.mark.parametrize(
    ("programs", "head", "kind", "block"),
    [
        (100, 64, torch.bfloat16, 128),
        (100, 128, torch.bfloat16, 128),
        (100, 256, torch.bfloat16, 64),
        (9000, 128, torch.bfloat16, 32),
        (9000, 1024, torch.bfloat16, 16),
        (100, 64, torch.float32, 16),
        (9000, 256, torch.float32, 16),
    ],
)
def test_large_heads_use_smaller_tiles(
    programs: int, head: int, kind: torch.dtype, block: int
) -> None:
    from covey.accel.kernels.decode_attention import tile_sizes

    found, _, _ = tile_sizes(programs, head, kind)
    assert found == block
    assert found * 2 * head * kind.itemsize <= 64 * 2**10
