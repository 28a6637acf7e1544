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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import embedding, linear
from torch.utils.checkpoint import checkpoint

from covey.accel.activation_offload import ActivationOffload
from covey.accel.attention import PaddedRows, attention
from covey.accel.attention_kernels import Kept, KeyIndex, VarlenRows, flash_attention
from covey.accel.fused_parameters import GradSink, fused_view, sink_of
from covey.accel.kernels.launch import call
from covey.accel.kernels.rms_norm import add_norm, norm
from covey.accel.kernels.rope import apply_rope
from covey.accel.kernels.swiglu import silu_mul, silu_mul_backward
from covey.accel.parity import is_silu
from covey.accel.sizes import plain_positions

# Linear layers of the fused forward pass: one matrix product for several layers.


def plain(module: Any) -> nn.Linear:
    """Return a module's original linear layer, without LoRA or `modules_to_save` wrappers."""
    found = getattr(module, "base_layer", getattr(module, "original_module", module))
    assert isinstance(found, nn.Linear)
    return found


def fused_linear(modules: Sequence[Any], values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Apply linear layers to one input; return one fused output, or one output per layer."""
    weights = _fused_weights(modules)
    if weights is None and len(modules) > 1:
        return tuple(fused_linear([module], values)[0] for module in modules)
    if weights is None:
        return (modules[0](values),)
    result: torch.Tensor = call(_Product, values, weights, *weights.parameters)
    return (result,)


def swiglu_linear(
    gates: Sequence[torch.Tensor], activation: nn.Module, down: nn.Module
) -> torch.Tensor:
    """Return down(activation(gate) * up); `gates` contains one fused tensor, or gate and up."""
    result: torch.Tensor
    if not is_silu(activation):
        gate, up = gates[0].chunk(2, dim=1) if len(gates) == 1 else gates
        result = down(activation(gate) * up)
        return result
    weights = _fused_weights([down])
    if weights is None:
        result = down(call(_Gate, *gates))
        return result
    result = call(_GatedProduct, weights, len(gates), *gates, *weights.parameters)
    return result


_SKIPS: ContextVar[bool] = ContextVar("skips", default=False)


@contextmanager
def skip_swiglu_output() -> Iterator[None]:
    """Context manager in which SwiGLU layers save their inputs but compute no output.

    Checkpointed layers are recomputed in this context, because the backward pass never reads the
    recomputed output of a SwiGLU layer.
    """
    token = _SKIPS.set(True)
    try:
        yield
    finally:
        _SKIPS.reset(token)


class _Weights:
    """The fused weights of linear layers with the same input, and the layers' LoRA weights.

    The outputs of all layers are columns of one tensor.
    """

    def __init__(self, layers: Sequence[Adapted], weight: torch.Tensor) -> None:
        linears = [layer.linear for layer in layers]
        self.weights = [m.weight for m in linears]
        self.weight = weight
        self.biases: list[torch.Tensor] = [m.bias for m in linears if m.bias is not None]
        bias = fused_view(self.biases) if self.biases else None
        # Biases are small, so a copy is cheap if they are not fused.
        self.bias = torch.cat([b.detach() for b in self.biases]) if self.biases else None
        self.bias = self.bias if bias is None else bias
        self.low_rank: list[tuple[slice, LowRank]] = []
        """For each adapted layer: the slice of columns with the layer's outputs, and the layer's
        LoRA weights."""
        end = 0
        for layer, low_rank in layers:
            begin, end = end, end + layer.out_features
            if low_rank is not None:
                self.low_rank.append((slice(begin, end), low_rank))
        self.first = [part.first for _, part in self.low_rank]
        self.ranks = [len(a) for a in self.first]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Inputs of the autograd function: all weights, all biases, and the LoRA matrices.

        All LoRA matrices A come before all LoRA matrices B.
        """
        second = (part.second for _, part in self.low_rank)
        return [*self.weights, *self.biases, *self.first, *second]

    def product(self, values: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all layers as columns of one tensor."""
        result = linear(values, self.weight, self.bias)
        if self.low_rank:
            for (columns, part), reduced in zip(self.low_rank, self._reduced(values), strict=True):
                result[:, columns].addmm_(reduced, part.second.t())
        return result

    def _stacked(self) -> torch.Tensor:
        """Return all LoRA matrices A as one matrix: a view if they are fused, else a copy."""
        found = fused_view(self.first)
        return torch.cat([a.detach() for a in self.first]) if found is None else found

    def _scaled(self, columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            column if part.scale == 1.0 else column.mul_(part.scale)
            for column, (_, part) in zip(columns, self.low_rank, strict=True)
        ]

    def _reduced(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return a list with scale * A x [N, R] for each adapted layer."""
        return self._scaled((values @ self._stacked().t()).split(self.ranks, dim=1))

    def inner_grad(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Return the gradients of all products `A x` as one tensor [N, sum of ranks]; None without
        LoRA."""
        if not self.low_rank:
            return None
        inner = grad.new_empty(len(grad), sum(self.ranks))
        parts = inner.split(self.ranks, dim=1)
        for (columns, part), out in zip(self.low_rank, parts, strict=True):
            torch.mm(grad[:, columns], part.second, out=out)
        self._scaled(parts)
        return inner

    def input_grad(self, grad: torch.Tensor, inner: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient of the layers' input; `inner` is the result of `inner_grad`."""
        back = grad @ self.weight
        return back if inner is None else back.addmm_(inner, self._stacked())

    def grads(
        self,
        needed: Sequence[bool],
        grad: torch.Tensor,
        values: torch.Tensor,
        inner: torch.Tensor | None,
    ) -> list[torch.Tensor | None]:
        """Return the gradients of `parameters`.

        An entry of the returned list is None if the gradient is not needed or was added to a
        GradSink.
        """
        count, end = len(self.weights), len(self.weights) + len(self.biases)
        found: list[torch.Tensor | None] = [None] * len(needed)
        if any(needed[:count]):
            found[:count] = product_grads(self.weights, grad, values)
        if any(needed[count:end]):
            found[count:end] = _bias_grads(self.biases, grad.sum(dim=0, dtype=torch.float32))
        if inner is not None and any(needed[end:]):
            found[end:] = product_grads(self.first, inner, values)
            for (columns, part), reduced in zip(self.low_rank, self._reduced(values), strict=True):
                found += product_grads([part.second], grad[:, columns], reduced)
        return [part if wanted else None for part, wanted in zip(found, needed, strict=True)]


def _bias_grads(biases: Sequence[torch.Tensor], total: torch.Tensor) -> list[torch.Tensor | None]:
    sink: GradSink | None = sink_of(biases)
    if sink is None:
        return list(total.to(biases[0].dtype).split([len(b) for b in biases]))
    sink.add(total)
    return [None] * len(biases)


def _fused_weights(modules: Sequence[Any]) -> _Weights | None:
    """Return the fused weights of linear layers, or None if the weights are not fused."""
    layers = [layer for module in modules if (layer := adapted(module)) is not None]
    if len(layers) < len(modules):
        return None
    weight = fused_view([layer.linear.weight for layer in layers])
    alike = len({layer.linear.bias is None for layer in layers}) == 1
    return _Weights(layers, weight) if weight is not None and alike else None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, weights: _Weights, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(values)
        ctx.weights = weights
        return weights.product(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grads[0]
        (values,) = ctx.saved_tensors
        weights: _Weights = ctx.weights
        inner = weights.inner_grad(grad)
        back = weights.input_grad(grad, inner) if ctx.needs_input_grad[0] else None
        return back, None, *weights.grads(ctx.needs_input_grad[2:], grad, values, inner)


class _GatedProduct(torch.autograd.Function):
    """Autograd function for SwiGLU and the down projection.

    The forward pass saves only `gate` and `up`; the backward pass recomputes silu(gate) * up.
    """

    @staticmethod
    def forward(ctx: Any, weights: _Weights, count: int, *tensors: torch.Tensor) -> torch.Tensor:
        gates = tensors[:count]
        ctx.save_for_backward(*gates)
        ctx.weights = weights
        if _SKIPS.get():
            return gates[0].new_empty(len(gates[0]), len(weights.weight))
        return weights.product(silu_mul(*_apart(gates)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gates, weights = ctx.saved_tensors, ctx.weights
        grad = grads[0]
        inner = weights.inner_grad(grad)
        # The gradient of silu(gate) * up, which silu_mul_backward overwrites with silu(gate) * up.
        values = weights.input_grad(grad, inner)
        both = silu_mul_backward(values, *_apart(gates), values)
        needed = ctx.needs_input_grad[2 + len(gates) :]
        back = (both,) if len(gates) == 1 else both.chunk(2, dim=1)
        return None, None, *back, *weights.grads(needed, grad, values, inner)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *gates: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*gates)
        return silu_mul(*_apart(gates))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gates = ctx.saved_tensors
        both = silu_mul_backward(grads[0], *_apart(gates))
        return (both,) if len(gates) == 1 else both.chunk(2, dim=1)


def _apart(gates: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = gates[0].chunk(2, dim=1) if len(gates) == 1 else gates
    return gate, up


# LoRA adapters in the fused forward pass: low-rank products are added to the frozen product.
#
# An adapted layer computes `W x + scale * B A x`. For layers with the same input, one matrix
# product computes W x of all layers, and another matrix product computes A x of all layers. B A x
# is then added to W x in place. The backward pass computes gradients of A and B only, never of W.
#
# The dimensions in tensor shapes are N (tokens), I and O (inputs and outputs of a layer) and R
# (adapter rank).


class LowRank(NamedTuple):
    """The LoRA weights of one layer."""

    first: torch.Tensor
    """The LoRA matrix A [R, I]."""
    second: torch.Tensor
    """The LoRA matrix B [O, R]."""
    scale: float


class Adapted(NamedTuple):
    """A plain linear layer, and its LoRA weights if it has an active adapter."""

    linear: nn.Linear
    low_rank: LowRank | None


def adapted(module: Any) -> Adapted | None:
    """Return a linear layer with its LoRA weights.

    Return None if the fused forward pass does not support the layer, for example because of LoRA
    dropout.
    """
    if module._forward_hooks:
        return None
    if type(module) is nn.Linear:
        return Adapted(module, None)
    base = getattr(module, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(module, "lora_A") or module.merged:
        return None
    if module.disable_adapters:
        return Adapted(base, None)
    active = [name for name in module.active_adapters if name in module.lora_A]
    if len(active) != 1:
        return None
    (name,) = active
    first, second = module.lora_A[name], module.lora_B[name]
    plain = isinstance(module.lora_dropout[name], nn.Identity) and name not in module.lora_variant
    alike = first.weight.dtype == second.weight.dtype == base.weight.dtype
    if not (plain and alike and second.bias is None):
        return None
    return Adapted(base, LowRank(first.weight, second.weight, float(module.scaling[name])))


def product_grads(
    weights: Sequence[torch.Tensor], grad: torch.Tensor, values: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return the gradients of weights that are fused in one matrix product.

    Gradients that were added to a GradSink are returned as None.
    """
    sink = sink_of(weights)
    if sink is not None:
        sink.add_product(grad.t(), values)
        return [None] * len(weights)
    return list((grad.t() @ values).split([len(w) for w in weights]))


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
