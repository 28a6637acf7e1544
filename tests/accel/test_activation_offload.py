"""Offloaded layer inputs; test_gpu.py has the copies on a second stream."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from covey.accel import activation_offload
from covey.accel.activation_offload import ActivationOffload, checkpoint_layers
from covey.models.logp import batch_logp
from tests.conftest import build, make_batch

LAYERS = 6


@pytest.fixture(autouse=True)
def _all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST", 0)


def stack() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS))


def run(layers: nn.ModuleList, offload: ActivationOffload | None) -> list[torch.Tensor]:
    values = torch.linspace(-1, 1, 40).view(5, 8).requires_grad_()
    hidden = values
    for layer in layers:
        call = (
            layer
            if offload is None
            else lambda h, one=layer: offload.checkpoint(one, h, use_reentrant=False)
        )
        hidden = call(hidden)
    (hidden**2).sum().backward()
    assert values.grad is not None
    found = [values.grad, *(p.grad for p in layers.parameters())]
    layers.zero_grad()
    return found


def test_gradients_are_the_same_bits() -> None:
    layers, offload = stack(), ActivationOffload()
    plain = run(layers, None)
    for _ in range(2):  # the second pass uses the buffers again
        assert all(map(torch.equal, run(layers, offload), plain))
    assert len(offload._free) == LAYERS


def test_one_layer_input_is_on_the_device_beside_the_one_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    most = 0

    class Counted(activation_offload._Kept):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

        def __setattr__(self, name: str, value: Any) -> None:
            nonlocal most
            super().__setattr__(name, value)
            most = max(most, sum(getattr(one, "values", None) is not None for one in made))

    monkeypatch.setattr(activation_offload, "_Kept", Counted)
    run(stack(), ActivationOffload())
    assert (len(made), most) == (LAYERS, 1)


def test_inputs_are_restored_from_main_memory() -> None:
    """Damaged copies change all gradients but the last layer's, whose input is still there."""
    layers, offload = stack(), ActivationOffload()
    plain = run(layers, None)
    original = offload._copy

    def damaged(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> None:
        original(source, target, device)
        target.add_(1.0)

    offload._copy = damaged  # type: ignore[method-assign]
    same = [torch.equal(a, b) for a, b in zip(run(layers, offload), plain, strict=True)]
    assert same == [False] * (len(plain) - 2) + [True, True]


def test_small_tensors_and_integers_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST", 1000)
    offload = ActivationOffload()
    for stays in (torch.zeros(249), torch.zeros(1000, dtype=torch.int64)):
        assert offload._pack(stays) is stays
    assert offload._pack(torch.zeros(250)) is not None


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_models_own_layers_offload_their_inputs(architecture: str) -> None:
    model, batch = build(architecture), make_batch(rows=4, longest=5, seed=1)
    model.model.train()
    grads = []
    for offload in (False, True):
        checkpoint_layers(model.model, offload=offload)
        model.model.zero_grad()
        batch_logp(model, batch).logp.sum().backward()
        grads.append([p.grad.clone() for p in model.model.parameters()])
    assert all(map(torch.equal, *grads))
    offloaded = model.backbone.activation_offload
    assert isinstance(offloaded, ActivationOffload)
    assert len(offloaded._free) == model.model.config.num_hidden_layers
    other = copy.deepcopy(model.model).base_model.activation_offload
    assert other is not offloaded
    assert other._free == []
