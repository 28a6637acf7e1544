"""Attention over packed rows: cuDNN's operators are replaced by exact ones; test_gpu.py has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from covey.accel import attention_kernels
from covey.accel import fused_forward as fused
from covey.accel.activation_offload import checkpoint_layers
from covey.accel.attention_kernels import (
    CUDNN,
    FLASH,
    FLASH3,
    KERNELS,
    TRITON,
    Inputs,
    Kept,
    Kernel,
    ShapeClass,
    VarlenRows,
    attend,
    has_long_rows,
)
from covey.accel.packing import pack
from covey.types import HostRows
from tests.accel.test_fused_forward import (
    CPU,
    assert_same_gradients,
    both_ways,
    gradients,
    per_row,
    shared_batch,
)
from tests.conftest import build

SHAPE = ShapeClass(CPU, torch.float64, 4, 2, 8, 64)


def weights(query: Any, key: Any, scale: float) -> torch.Tensor:
    """Causal attention weights [1, heads, S, S], aligned at the start of rows."""
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    return (query @ key.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf).softmax(-1)


def cudnn_forward(query, key, value, *options, scale):
    assert options == (None, True, 0.0, True)  # bias, log-sum-exp, dropout, causal
    number, empty = torch.zeros((), dtype=torch.int64), query.new_zeros(0)
    shared, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (t.repeat_interleave(shared, 1) for t in (key, value))
    attended = weights(query, key, scale) @ value
    return attended, empty, empty, empty, length, length, number, number, empty


def cudnn_backward(grad, query, key, value, attended, *others, scale):
    assert others[-4:] == (query.shape[2], query.shape[2], 0.0, True)
    shared = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(shared, 1) for t in (key, value))
    share = weights(query, keys, scale)
    inner = grad @ values.transpose(2, 3)
    scores = share * (inner - (grad * attended).sum(-1, keepdim=True)) * scale
    back = scores.transpose(2, 3) @ query, share.transpose(2, 3) @ grad
    return scores @ keys, *(t.unflatten(1, (-1, shared)).sum(2) for t in back)


@pytest.fixture
def _operators() -> Iterator[None]:
    """Give cuDNN's operators an implementation on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", cudnn_forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward, "CPU")
    yield
    library._destroy()


def reference(calls: list[str]) -> Kernel:
    """Return attention whose passes are noted."""

    def forward(tensors: Any, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        calls.append("forward")
        return (per_row(*tensors, inputs.spans, inputs.scale or 0.3),)

    def backward(grad: Any, tensors: Any, found: Any, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        calls.append("backward")
        with torch.enable_grad():
            own = [t.detach().requires_grad_() for t in tensors]
            again = per_row(*own, inputs.spans, inputs.scale or 0.3)
        assert torch.equal(again, found[0])
        return torch.autograd.grad(again, own, grad)

    return Kernel(forward, backward, captured=True)


def rows_and_tensors() -> tuple[VarlenRows, list[torch.Tensor]]:
    spans = pack(HostRows.of(shared_batch()), CPU, varlen=True).packing
    assert isinstance(spans, VarlenRows)
    assert spans.shared is not None
    torch.manual_seed(0)
    places = len(spans.shared.tokens)
    shapes = [(len(spans.shared.position), 4, 8), (places, 2, 8), (places, 2, 8)]
    return spans, [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.usefixtures("_operators")
@pytest.mark.parametrize("step", [1, 4, 64])
def test_cudnns_rows_give_the_same_attention(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "STEP", step)
    spans, tensors = rows_and_tensors()
    expected = per_row(*tensors, spans, 0.3)
    found = attend(KERNELS[CUDNN], *tensors, Inputs(spans, 0.3))
    torch.testing.assert_close(found, expected)
    pull = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, tensors, pull), torch.autograd.grad(expected, tensors, pull)
    )


@pytest.mark.parametrize("inputs", [{"window": 3}, {"bounds": None}])
def test_cudnn_refuses_rows_that_it_cannot_compute(inputs: dict[str, Any]) -> None:
    spans, tensors = rows_and_tensors()
    if "bounds" in inputs:
        spans = VarlenRows(
            query_starts=spans.query_starts,
            key_starts=spans.key_starts,
            longest_query=spans.longest_query,
            longest_key=spans.longest_key,
        )
    with pytest.raises(NotImplementedError):
        attend(KERNELS[CUDNN], *tensors, Inputs(spans, 0.3, inputs.get("window")))


def test_a_recomputed_layer_takes_the_kept_result() -> None:
    calls: list[str] = []
    kernel = reference(calls)
    spans, tensors = rows_and_tensors()

    def layer(scaled: torch.Tensor, kept: Kept | None) -> torch.Tensor:
        attended = attend(kernel, tensors[0] * scaled, *tensors[1:], Inputs(spans, 0.3), kept)
        return (attended**2).sum()

    scaled = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(layer(scaled, None), [scaled, *tensors])
    assert calls == ["forward", "backward"]
    kept: Kept = []
    total = checkpoint(layer, scaled, kept, use_reentrant=False)
    assert len(kept) == 1
    found = torch.autograd.grad(total, [scaled, *tensors])
    assert all(map(torch.equal, found, expected))
    assert calls[2:] == ["forward", "backward"]  # not a third forward pass
    assert kept == []


def test_checkpointing_does_not_compute_attention_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    kernel = reference(calls)

    def attention(query, key, value, spans, scale, kept=None):
        return attend(kernel, query, key, value, Inputs(spans, scale), kept)

    monkeypatch.setattr(fused, "flash_attention", attention)
    model, batch = build("llama"), shared_batch()
    model.model.train()
    plain = gradients(model, both_ways(model, batch, flash=True)[0])
    layers = len(model.backbone.layers)
    assert sorted(calls) == ["backward"] * layers + ["forward"] * layers
    checkpoint_layers(model.model, offload=False)
    again = gradients(model, both_ways(model, batch, flash=True)[0])
    assert sorted(calls) == ["backward"] * 2 * layers + ["forward"] * 2 * layers
    assert_same_gradients(again, plain, tolerance=1e-6)


def test_rows_are_long_on_average() -> None:
    assert has_long_rows([0, 100, 2 * attention_kernels.LONG])
    assert not has_long_rows([0, 100, 2 * attention_kernels.LONG - 1])


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Measure on the CPU, with exact kernels and these times."""
    found = {FLASH: 3.0, CUDNN: 1.0, TRITON: 2.0}
    kernel = reference([])
    kernels = {FLASH: kernel, CUDNN: kernel._replace(captured=False), TRITON: kernel}
    monkeypatch.setattr(attention_kernels, "KERNELS", kernels)
    monkeypatch.setattr(attention_kernels, "NUMBERS", 64 * 4 * 8)

    def seconds(call: Any) -> float:
        call()
        (name,) = call.args
        return found[name]

    monkeypatch.setattr(attention_kernels, "_seconds", seconds)
    return found


def test_the_fastest_kernel_is_chosen(times: dict[str, float]) -> None:
    choice = attention_kernels.measured(SHAPE)
    assert choice == (CUDNN, times)
    times[CUDNN] = times[TRITON] = 4.0
    assert attention_kernels.measured(SHAPE).name == FLASH


def test_kernels_are_measured_with_gradients_in_inference_mode(times: dict[str, float]) -> None:
    with torch.inference_mode():
        assert attention_kernels.measured(SHAPE) == (CUDNN, times)


def test_rows_of_a_cuda_graph_use_kernels_that_it_can_contain(times: dict[str, float]) -> None:
    choice = attention_kernels.measured(SHAPE._replace(captured=True))
    assert choice == (TRITON, {FLASH: 3.0, TRITON: 2.0})


@pytest.mark.parametrize("wrong", ["result", "gradient", "error"])
def test_a_kernel_that_differs_or_fails_is_not_chosen(
    wrong: str, times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = reference([])

    def forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
        if wrong == "error":
            raise RuntimeError("no execution plan")
        (found,) = right.forward(*arguments)
        return (found * (1.1 if wrong == "result" else 1.0),)

    def backward(grad: Any, tensors: Any, found: Any, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        back = right.backward(grad, tensors, right.forward(tensors, inputs), inputs)
        return back[0], back[1] * (1.1 if wrong == "gradient" else 1.0), back[2]

    kernels = {FLASH: right, CUDNN: Kernel(forward, backward, captured=False)}
    monkeypatch.setattr(attention_kernels, "KERNELS", kernels)
    assert attention_kernels.measured(SHAPE) == (FLASH, {FLASH: 3.0})


@pytest.mark.parametrize(("time", "name"), [(2.0, CUDNN), (0.5, FLASH), (9.0, CUDNN)])
def test_flash_attention_3_replaces_2_where_it_is_faster(
    time: float, name: str, times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: list[int] = []

    def activate() -> bool:
        times[FLASH] = time
        return True

    monkeypatch.setattr(attention_kernels, "_activate_flash3", activate)
    monkeypatch.setattr(attention_kernels, "_restore_flash2", lambda: restored.append(1))
    choice = attention_kernels.measured(SHAPE)
    assert choice.name == name
    assert choice.seconds[FLASH3] == time
    assert bool(restored) == (time > 3.0)


@pytest.mark.usefixtures("times")
def test_flash_attention_3_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[int] = []

    def fails(rows: Any, name: str) -> list[torch.Tensor]:
        raise RuntimeError("no kernel for this head size")

    def activate() -> bool:
        monkeypatch.setattr(attention_kernels._Rows, "results", fails)
        return True

    monkeypatch.setattr(attention_kernels, "_activate_flash3", activate)
    monkeypatch.setattr(attention_kernels, "_restore_flash2", lambda: restored.append(1))
    assert attention_kernels.measured(SHAPE).name == CUDNN
    assert restored


def test_a_class_is_measured_once_and_never_with_deterministic_algorithms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measurements: list[ShapeClass] = []

    def measured(shape: ShapeClass) -> attention_kernels.Choice:
        measurements.append(shape)
        return attention_kernels.Choice(CUDNN, {FLASH: 3.0, CUDNN: 1.0})

    monkeypatch.setattr(attention_kernels, "measured", measured)
    monkeypatch.setattr(attention_kernels, "CHOICES", {})
    device = torch.device("cuda", 0)
    shape = ShapeClass(device, torch.bfloat16, 12, 2, 128, 8192)
    lengths = [shape._replace(length=n) for n in (4097, 8192, 8193)]
    assert [attention_kernels.chosen(each) for each in lengths] == [CUDNN] * 3
    assert [s.length for s in measurements] == [8192, 16384]
    # A CUDA graph pads a row of 3 tokens to 128, so both are one class.
    short = [shape._replace(length=n, captured=True) for n in (3, 128)]
    assert {attention_kernels.chosen(each) for each in short} == {CUDNN}
    assert measurements[2:] == [short[1]]
    torch.use_deterministic_algorithms(True)
    try:
        assert attention_kernels.chosen(shape) == FLASH
    finally:
        torch.use_deterministic_algorithms(False)


class Config:
    num_attention_heads, num_key_value_heads, hidden_size = 12, 2, 1536


def test_a_run_says_which_kernels_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ShapeClass(torch.device("cuda", 0), torch.bfloat16, 12, 2, 128, 8192)
    choice = attention_kernels.Choice(CUDNN, {FLASH: 0.003, CUDNN: 0.001})
    graph = attention_kernels.Choice(TRITON, {FLASH: 0.003, TRITON: 0.002})
    choices = {shape: choice, shape._replace(length=512, captured=True): graph}
    monkeypatch.setattr(attention_kernels, "CHOICES", choices)
    found = attention_kernels.description(Config(), shape.device, shape.dtype, 6000)
    assert found == "cuDNN for long rows (measured: flash attention 3.0 ms, cuDNN 1.0 ms)"
    found = attention_kernels.description(Config(), shape.device, shape.dtype, 500)
    assert found == "Triton for short rows (measured: flash attention 3.0 ms, Triton 2.0 ms)"
    assert attention_kernels.description(Config(), CPU, torch.float32, 6000).startswith(FLASH)
