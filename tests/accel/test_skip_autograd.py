from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from covey.accel import fused_forward as fused
from covey.accel.fused_forward import fused_backbone
from covey.accel.fused_parameters import fuse_parameters
from covey.accel.kernels.launch import call
from covey.accel.packing import pack_prompts
from tests.conftest import build


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        ctx.save_for_backward(values)
        ctx.set_materialize_grads(False)
        return values * values

    @staticmethod
    def backward(ctx, *grads):
        return 2 * ctx.saved_tensors[0] * grads[0]


def test_a_function_is_recorded_only_where_gradients_are() -> None:
    values = torch.tensor([3.0], requires_grad=True)
    call(Square, values).backward()
    assert values.grad == 6.0
    with torch.no_grad():
        result = call(Square, values)
    assert result == 9.0
    assert result.grad_fn is None


def test_a_pass_without_gradients_gives_exactly_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused, "flash_attention", lambda query, *_, **__: query)
    model = build("qwen2")
    fuse_parameters(model.backbone)
    packed = pack_prompts([(5, 6, 7, 8), (9, 10)], torch.device("cpu"))
    given = (model.backbone, packed.input_ids, packed.position_ids, packed.packing)
    recorded = fused_backbone(*given)
    assert recorded.requires_grad
    with torch.inference_mode():
        assert torch.equal(fused_backbone(*given), recorded)
