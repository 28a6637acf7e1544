from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.functional import rms_norm

from tests.accel.kernels.layer_caches import ACTIVE, KEY_HEADS, completion, random_layer

if TYPE_CHECKING:
    from covey.accel.kernels.decode_attention import LayerCache

SHARED, SIZE = 3, 32
HEADS = KEY_HEADS * SHARED
PAGES = [16, 32, 128]


def turned(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def inputs(device: torch.device) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    heads = torch.randn(4, (HEADS + 2 * KEY_HEADS) * SIZE, device=device)
    angles = torch.randn(180, SIZE // 2, device=device)
    return heads, (angles.cos(), angles.sin())


def one_slot(
    cache: LayerCache, slot: int, heads: torch.Tensor, rope: tuple[torch.Tensor, ...],
    gains: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return attention, new key and new value of a slot in float64."""
    at, before, row = (int(t[slot]) for t in (cache.place, cache.prompt_length, cache.prompt_row))
    query, key, value = heads[slot].view(-1, SIZE).double().split([HEADS, KEY_HEADS, KEY_HEADS])
    if gains is not None:
        query = rms_norm(query, (SIZE,), gains[0].double(), 1e-6)
        key = rms_norm(key, (SIZE,), gains[1].double(), 1e-6)
    query, key = (turned(t, *(r[before + at].double() for r in rope)) for t in (query, key))
    keys, values = (
        torch.cat([prompt[row, :, :before], completion(cache, old, slot)[:, :at], new[:, None]], 1)
        for prompt, old, new in (
            (cache.prompt_keys, cache.keys, key), (cache.prompt_values, cache.values, value)
        )
    )  # fmt: skip
    scores = query.view(KEY_HEADS, SHARED, SIZE) @ keys.transpose(1, 2) * 0.2
    return (scores.softmax(dim=-1) @ values).flatten(), key, value


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("normed", [False, True])
def test_attention_covers_prompt_and_completion(
    device: torch.device, page: int, normed: bool
) -> None:
    from covey.accel.kernels.decode_attention import decode_attention

    heads, rope = inputs(device)
    gains = (torch.rand(SIZE, device=device), torch.rand(SIZE, device=device), 1e-6)
    norms = gains if normed else None
    before, cache = random_layer(SIZE, page, device), random_layer(SIZE, page, device)
    got = decode_attention(heads, cache, rope=rope, scale=0.2, norms=norms)
    assert not cache.arrived.any()
    for slot in range(4):
        mine, theirs = (completion(cache, t, slot) for t in (cache.keys, cache.values))
        if not ACTIVE[slot]:
            assert not got[slot].any()
            assert torch.equal(mine, completion(before, before.keys, slot))
            continue
        expected, key, value = one_slot(before, slot, heads, rope, norms)
        torch.testing.assert_close(got[slot].double(), expected, atol=2e-6, rtol=0)
        at = int(cache.place[slot])
        torch.testing.assert_close(mine[:, at].double(), key, atol=2e-6, rtol=0)
        assert torch.equal(theirs[:, at].double(), value)


@pytest.mark.parametrize("splits", [1, 2])
def test_keys_and_values_may_be_float8_numbers(device: torch.device, splits: int) -> None:
    from covey.accel.kernels.decode_attention import Tiling, decode_attention

    heads, rope = inputs(device)
    exact = random_layer(SIZE, 32, device)
    units = torch.tensor([[0.01, 0.02], [0.015, 0.03]], device=device)
    names = ("keys", "prompt_keys", "values", "prompt_values")
    rounded, dense = {}, {}
    for number, name in enumerate(names):
        unit = units[number // 2][:, None, None]
        rounded[name] = (getattr(exact, name).nan_to_num() / unit).to(torch.float8_e4m3fn)
        dense[name] = rounded[name].float() * unit
    before, cache = exact._replace(**dense), exact._replace(**rounded, units=units)
    tiling = Tiling(16, 4, 2, together=True, splits=splits)
    got = decode_attention(heads, cache, rope=rope, scale=0.2, tiling=tiling)
    for slot in (slot for slot in range(4) if ACTIVE[slot]):
        expected, key, value = one_slot(before, slot, heads, rope, None)
        torch.testing.assert_close(got[slot].double(), expected, atol=1e-5, rtol=0)
        at = int(cache.place[slot])
        for stored, unit, new in zip((cache.keys, cache.values), units, (key, value), strict=True):
            mine = completion(cache, stored.float(), slot)[:, at] * unit[:, None]
            torch.testing.assert_close(mine.double(), new, rtol=1 / 16, atol=float(unit.max()))


def test_results_do_not_depend_on_pages(device: torch.device) -> None:
    from covey.accel.kernels.decode_attention import decode_attention

    heads, rope = inputs(device)
    found = [
        decode_attention(heads, random_layer(SIZE, page, device), rope=rope, scale=0.2)
        for page in PAGES
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("splits", [3, 8])
@pytest.mark.parametrize("together", [1, 2, 4])
def test_parts_add_up_to_the_whole(device: torch.device, splits: int, together: int) -> None:
    from covey.accel.kernels import decode_attention as kernels

    heads, rope = inputs(device)
    cache = random_layer(SIZE, 16, device, together)
    whole = kernels.decode_attention(heads, cache, rope=rope, scale=0.2)
    tiling = kernels.Tiling(*kernels.EXACT, together=together > 1, splits=splits)
    got = kernels.decode_attention(heads, cache, rope=rope, scale=0.2, tiling=tiling)
    torch.testing.assert_close(got, whole, atol=1e-6, rtol=0)
    assert not torch.equal(got, whole)
    assert not cache.arrived.any()


def test_results_do_not_depend_on_other_slots(device: torch.device) -> None:
    from covey.accel.kernels.decode_attention import decode_attention

    heads, rope = inputs(device)
    found = [
        decode_attention(heads, random_layer(SIZE, 32, device, n), rope=rope, scale=0.2)
        for n in (1, 2, 4)
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])
