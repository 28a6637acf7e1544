"""Fused forward pass of Llama-like models for training on a GPU.

The fused forward pass uses the model's own weights. The fused forward pass differs from the model's
own code in the operations between matrix products, and in the order of the products with LoRA
matrices. One matrix product computes all linear layers that have the same input, if their weights
are fused. The residual stream is float32, as in the engine's fused decoder. The outputs of norms,
attention and MLP have the dtype of the weights. If the optimizer attached a GradSink to a weight,
the backward pass adds the weight's gradient to a float32 buffer.

The dimensions in tensor shapes are N (packed tokens), H (heads), K (key-value heads) and D (head
size).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from covey.accel.activation_offload import ActivationOffload
from covey.accel.attention import PaddedRows, attention
from covey.accel.attention_kernels import Kept, flash_attention
from covey.accel.fused_linear import fused_linear, plain, skip_swiglu_output, swiglu_linear
from covey.accel.fused_parameters import GradSink, sink_of
from covey.accel.kernels.rms_norm import add_norm, norm
from covey.accel.kernels.rope import apply_rope
from covey.accel.positions import plain_positions
from covey.accel.varlen_attention import KeyIndex, VarlenRows

Collect = Callable[[tuple[torch.Tensor, torch.Tensor]], None]
"""Callback that gets the keys (after RoPE) and the values of each layer, both [N, K, D], in the
order of the layers."""

LAYER_ENTRY = "covey_layer"
"""Name of a method that Covey adds to every layer of a model sharded with FSDP. The method gathers
the layer's weights, runs `fused_layer` and frees the gathered weights."""


class _Place(NamedTuple):
    """RoPE tables and row indices of the packed tokens, which every layer needs."""

    rope: tuple[torch.Tensor, torch.Tensor]
    packing: PaddedRows | VarlenRows
    shared: KeyIndex | None
    collect: Collect | None


def fused_backbone(
    backbone: nn.Module,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    packing: PaddedRows | VarlenRows,
    collect: Collect | None = None,
) -> torch.Tensor:
    """Run a backbone over packed tokens [N]; return hidden states [N, hidden size]."""
    model: Any = backbone
    module = _active(model.embed_tokens)
    hidden: torch.Tensor = _Embedding.apply(
        input_ids, module.weight, module.padding_idx, sink_of([module.weight])
    )
    rope = rope_table(model.rotary_emb, hidden[None, :1], position_ids)
    shared = packing.shared if isinstance(packing, VarlenRows) else None
    place = _Place(rope, packing, shared, collect)
    delta: torch.Tensor | None = None
    for layer in model.layers:
        run = getattr(layer, LAYER_ENTRY, None) or partial(fused_layer, layer)
        hidden, delta = run(hidden, delta, place)
    if (offload := getattr(model, "activation_offload", None)) is not None:
        offload.join()
    assert delta is not None, "a model has layers"
    return add_norm(hidden, delta, *gain(model.norm))[1]


def is_llama_like(model: Any) -> bool:
    """Return whether a model has the modules that the fused forward pass uses."""
    backbone = model.base_model
    return (
        hasattr(backbone, "layers")
        and type(getattr(backbone, "embed_tokens", None)) is nn.Embedding
        and plain_positions(model.config)
        and backbone.embed_tokens.weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


def fused_layer(
    layer: Any, hidden: torch.Tensor, delta: torch.Tensor | None, place: _Place
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a layer, with gradient checkpointing if it is turned on for the layer."""
    checkpointed = getattr(layer, "gradient_checkpointing", False)
    if not (layer.training and torch.is_grad_enabled() and checkpointed):
        return _layer(layer, hidden, delta, place)
    options: dict[str, Any] = {
        "use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none",
        "context_fn": lambda: (nullcontext(), skip_swiglu_output()),  # first pass, recomputation
    }  # fmt: skip
    offload: ActivationOffload | None = getattr(layer, "activation_offload", None)
    found: tuple[torch.Tensor, torch.Tensor]
    if offload is None:
        source = _Source(hidden, delta)
        found = checkpoint(_layer_from, source, layer, place, [], **options)
    else:  # offloading moves the tensor arguments to CPU memory
        hidden = hidden if delta is None else hidden + delta
        found = offload.checkpoint(_layer, layer, hidden, None, place, [], **options)
    return found


class _Source:
    """The input of a checkpointed layer: first `hidden` and `delta`, later only their sum."""

    def __init__(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> None:
        self.hidden, self.delta = hidden, delta

    def keep(self, total: torch.Tensor) -> None:
        """Replace `hidden` and `delta` by their sum `total`, from which the layer is recomputed."""
        self.hidden, self.delta = total.detach().requires_grad_(total.requires_grad), None


def _layer_from(
    source: _Source, layer: Any, place: _Place, kept: Kept
) -> tuple[torch.Tensor, torch.Tensor]:
    return _layer(layer, source.hidden, source.delta, place, kept, source.keep)


def _layer(
    layer: Any,
    hidden: torch.Tensor,
    delta: torch.Tensor | None,
    place: _Place,
    kept: Kept | None = None,
    keep: Callable[[torch.Tensor], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the residual stream after attention, and the output of the MLP.

    A checkpointed layer stores its attention output in `kept`, so that recomputing the layer skips
    attention. The attention output takes longer to compute than any other tensor of the same size.
    `keep` is called with the layer's input, from which the backward pass recomputes the layer.
    """
    hidden, normed = add_norm(hidden, delta, *gain(layer.input_layernorm))
    if keep is not None:
        keep(hidden)
    attended = _attend(layer.self_attn, normed, place, kept)
    delta = fused_linear([layer.self_attn.o_proj], attended)[0]
    hidden, normed = add_norm(hidden, delta, *gain(layer.post_attention_layernorm))
    mlp = layer.mlp
    gates = fused_linear([mlp.gate_proj, mlp.up_proj], normed)
    return hidden, swiglu_linear(gates, mlp.act_fn, mlp.down_proj)


def _attend(module: Any, normed: torch.Tensor, place: _Place, kept: Kept | None) -> torch.Tensor:
    products = fused_linear([module.q_proj, module.k_proj, module.v_proj], normed)
    size = module.head_dim
    heads, key_heads = (plain(m).out_features // size for m in (module.q_proj, module.k_proj))
    shape = (heads, key_heads, size)
    if getattr(module, "q_norm", None) is not None:
        products = _normed_heads(module, products, shape)
    query, key, value = apply_rope(*products, rope=place.rope, shared=place.shared, shape=shape)
    if place.collect is not None:
        collected = key, value
        if place.shared is not None:  # one key and value per token, even if rows share the token
            first = place.shared.first()
            collected = key.index_select(0, first), value.index_select(0, first)
        place.collect(collected)
    if isinstance(place.packing, VarlenRows):
        attended = flash_attention(query, key, value, place.packing, module.scaling, kept=kept)
    else:
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
        options = {"scaling": module.scaling, "dropout": 0.0}
        attended = attention(module, query, key, value, None, place.packing, **options)[0][0]
    return attended.flatten(1)


def _normed_heads(
    module: Any, products: Sequence[torch.Tensor], shape: tuple[int, int, int]
) -> tuple[torch.Tensor, ...]:
    """Apply the norms of query and key heads; the normed heads stay float32 until RoPE."""
    heads, key_heads, size = shape
    if len(products) == 1:
        widths = [heads * size, key_heads * size, key_heads * size]
        products = products[0].split(widths, dim=1)
    query, key, value = products
    query, key = (
        norm(part.reshape(-1, size), *gain(m), dtype=torch.float32).view(len(part), -1)
        for part, m in ((query, module.q_norm), (key, module.k_norm))
    )
    return query, key, value


def rope_table(
    rotary: nn.Module, like: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine [N, D / 2] of positions [N], with the dtype and device of `like`."""
    cosine, sine = rotary(like, position_ids[None])
    half = cosine.shape[-1] // 2
    return cosine[0, :, :half].contiguous(), sine[0, :, :half].contiguous()


def _active(module: Any) -> Any:
    """Return the module, or the active adapter's copy of the module (`modules_to_save`)."""
    if not hasattr(module, "modules_to_save"):
        return module
    if module.disable_adapters:
        return module.original_module
    return module.modules_to_save[module.active_adapters[0]]


def gain(module: Any) -> tuple[torch.Tensor, float]:
    """Return the weight and epsilon of a norm."""
    module = _active(module)
    return module.weight, module.variance_epsilon


class _Embedding(torch.autograd.Function):
    """Embedding lookup with float32 output; gradients are also summed in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        input_ids: torch.Tensor,
        weight: torch.Tensor,
        padding: int | None,
        sink: GradSink | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_ids)
        ctx.shape, ctx.dtype, ctx.padding, ctx.sink = weight.shape, weight.dtype, padding, sink
        return embedding(input_ids, weight).float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (input_ids,) = ctx.saved_tensors
        grad = grads[0]
        if ctx.padding is not None:  # as in nn.Embedding, which does not train its padding token
            grad = grad.masked_fill((input_ids == ctx.padding)[:, None], 0.0)
        sink: GradSink | None = ctx.sink
        if sink is None:
            total = grad.new_zeros(ctx.shape)
        else:
            found = sink.total
            total = sink.start().zero_() if found is None else found
        total.index_add_(0, input_ids, grad)
        return None, total.to(ctx.dtype) if sink is None else None, None, None
