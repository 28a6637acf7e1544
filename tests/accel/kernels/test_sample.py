from __future__ import annotations

from typing import Any

import pytest
import torch

from covey.engines.draw import Distribution, pick_tokens

SLOTS, ROOM, VOCABULARY = 24, 5, 4500


def written(device: torch.device, uniforms: torch.Tensor) -> Any:
    from covey.accel.kernels.sample import SlotState

    def full(value: int) -> torch.Tensor:
        return torch.full((SLOTS,), value, device=device)

    return SlotState(
        tokens=torch.zeros(SLOTS, ROOM, dtype=torch.long, device=device),
        logps=torch.zeros(SLOTS, ROOM, device=device),
        uniforms=uniforms,
        last=full(0),
        counts=full(2),
        place=full(9),
        active=full(1).bool(),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_the_kernel_samples_the_same_tokens_as_torch(
    device: torch.device, temperature: float
) -> None:
    from covey.accel.kernels.sample import sample_tokens

    torch.manual_seed(0)
    logits = 3 * torch.randn(SLOTS, VOCABULARY, device=device)
    state = written(device, torch.rand(SLOTS, ROOM, device=device))
    state.active[3] = False
    expected, logps = pick_tokens(
        logits, state.uniforms[:, 2], Distribution(temperature=temperature)
    )
    stops = torch.tensor([-1, int(expected[5])], device=device)
    sample_tokens(logits, state, temperature=temperature, stop_ids=stops)
    rest = torch.arange(SLOTS, device=device) != 3
    assert torch.equal(state.tokens[rest, 2], expected[rest])
    assert torch.equal(state.last[rest], expected[rest])
    torch.testing.assert_close(state.logps[rest, 2], logps[rest], atol=5e-6, rtol=0)
    assert state.counts.tolist() == [2 if slot == 3 else 3 for slot in range(SLOTS)]
    assert state.place.tolist() == [9 if slot == 3 else 10 for slot in range(SLOTS)]
    assert not state.tokens[3].any()
    ended = {3} | {slot for slot in range(SLOTS) if expected[slot] == expected[5]}
    assert state.active.tolist() == [slot not in ended for slot in range(SLOTS)]


def test_a_completion_ends_when_its_slot_is_full(device: torch.device) -> None:
    from covey.accel.kernels.sample import sample_tokens

    state = written(device, torch.rand(SLOTS, ROOM, device=device))
    state.counts[:] = ROOM - 1
    sample_tokens(
        torch.randn(SLOTS, 50, device=device),
        state,
        temperature=1.0,
        stop_ids=torch.tensor([-1], device=device),
    )
    assert not state.active.any()


def test_extreme_uniforms_select_tokens_with_mass(device: torch.device) -> None:
    from covey.accel.kernels.sample import sample_tokens

    uniforms = torch.full((SLOTS, ROOM), 1 - 2**-24, device=device)
    uniforms[:12] = 0.0
    state = written(device, uniforms)
    logits = torch.full((SLOTS, VOCABULARY), -torch.inf, device=device)
    logits[:, 2100:2110] = torch.randn(SLOTS, 10, device=device)
    sample_tokens(logits, state, temperature=1.0, stop_ids=torch.tensor([-1], device=device))
    assert state.tokens[:12, 2].tolist() == [2100] * 12
    assert state.tokens[12:, 2].tolist() == [2109] * 12
    assert torch.isfinite(state.logps).all()


def test_rounding_at_block_borders_selects_no_token_without_mass(device: torch.device) -> None:
    """Every block begins with tokens without mass; uniforms fall on the borders of blocks."""
    from covey.accel.kernels.sample import sample_tokens
    from covey.accel.sizes import VOCABULARY_BLOCK

    torch.manual_seed(2)
    logits = torch.full((40, VOCABULARY_BLOCK), -torch.inf, device=device)
    logits[:, 1000:1003] = torch.randn(40, 3).to(device)
    tops = logits.amax(dim=1)
    sums = (logits - tops[:, None]).exp().sum(dim=1) * (tops - tops.max()).exp()
    begins = (sums.cumsum(dim=0) / sums.sum())[-SLOTS - 1 : -1]
    for ulps in (-1, 0):
        uniforms = (begins.view(torch.int32) + ulps).view(torch.float32)
        state = written(device, uniforms[:, None].repeat(1, ROOM))
        stops = torch.tensor([-1], device=device)
        sample_tokens(logits.flatten().repeat(SLOTS, 1), state, temperature=1.0, stop_ids=stops)
        assert torch.isfinite(state.logps).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("wrong", [slice(None), slice(2100, 2101)], ids=["all", "one"])
def test_nan_logits_give_a_valid_token_with_nan_logp(
    device: torch.device, temperature: float, wrong: slice
) -> None:
    from covey.accel.kernels.sample import sample_tokens

    state = written(device, torch.rand(SLOTS, ROOM, device=device))
    logits = torch.randn(SLOTS, VOCABULARY, device=device)
    logits[7, wrong] = torch.nan
    sample_tokens(
        logits, state, temperature=temperature, stop_ids=torch.tensor([-1], device=device)
    )
    assert ((state.tokens >= 0) & (state.tokens < VOCABULARY)).all()
    assert state.logps[:, 2].isnan().nonzero().flatten().tolist() == [7]
