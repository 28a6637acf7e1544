"""Computes the sizes of a model from its configuration, without reading weights.

For models of the common decoder families, config.json determines all sizes. Covey builds models of
less common families on torch's meta device, where tensors have shapes but no memory. Building a
model on the meta device takes a few seconds, mostly to import torch and the model code of
transformers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from covey.accel.sizes import SHORT, plain_positions
from covey.config import Config
from covey.embedded import MODELS
from covey.errors import ConfigError, CoveyError, ModelError
from covey.models.model_path import ADAPTER_CONFIG, adapter_base, check_model_path

FUSED_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Names of layers whose weights the engine concatenates in a small model."""
LLAMA_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
LLAMA_FAMILY = ("llama", "qwen2", "qwen3")
"""The model types (`model_type` in config.json) whose layers `_llama_modules` describes."""
REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "vocab_size")  # fmt: skip
"""Keys that config.json must have, because this module does not know transformers' defaults."""

Adapter = tuple[int, Sequence[str], Sequence[str]]
"""An adapter's LoRA rank, target modules, and modules that are trained in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model and of its adapter."""

    parameters: int
    """The number of parameters without the adapter; tied weights are counted once."""
    added: int
    trained: int
    """The number of trained parameters; with LoRA, only the adapter's parameters are trained."""
    head: int
    """The number of parameters of the output layer."""
    head_trained: bool
    adapted: int
    """The number of linear layers with LoRA weights in the whole model."""
    rank: int
    """LoRA rank; 0 means full fine-tuning."""
    fusable: int
    """The number of parameters in the projections that the engine may concatenate
    (`FUSED_PROJECTIONS`)."""
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    inner: int
    """Width of the MLP; for a mixture of experts, the total width of the experts that a token
    uses."""
    fused_attention: bool
    """Whether attention is one fused operation, which does not store attention scores and allows
    packed sequences.
    """
    fuses: bool
    """Whether the fused CUDA kernels support the model; they support only Llama layers."""
    head_norms: bool

    @property
    def query(self) -> int:
        return self.heads * self.head_size

    @property
    def key(self) -> int:
        """Width of all key heads together, which is also the width of all value heads."""
        return self.key_value_heads * self.head_size


class Module(NamedTuple):
    """Sizes of one module of a model."""

    parameters: int
    """The number of parameters of the module and its submodules; tied weights are counted once."""
    weight: tuple[int, ...] = ()
    """The shape of a linear layer's weight; empty for modules that are not linear layers."""


def source_of(path: str) -> tuple[str, dict[str, str]]:
    """Return the folder or hub name of a model, and keyword arguments for `from_pretrained`.

    The function reads only the header of a GGUF file, because converting the file takes as long as
    loading the weights.
    """
    path = adapter_base(path) or path
    if path in MODELS:
        return str(MODELS[path]), {}
    if not (Path(path) / "config.json").is_file():
        from covey.models.gguf import find_gguf  # imports transformers, which takes a second

        if (gguf := find_gguf(path)) is not None:
            return str(gguf.parent), {"gguf_file": gguf.name}
    check_model_path(path)
    return path, {}


def shape_of(config: Config) -> Shape:
    """Return the sizes of a configuration's model, without reading its weights."""
    source, more = source_of(config.model.path)
    adapter = _adapter(config)
    try:
        found = None if more else _llama_config(source)
        if found is not None:
            modules, fuses = _llama_modules(found), _fuses(found)
            return _shape(modules, "lm_head", found, adapter, fused_attention=True, fuses=fuses)
        return measure(_meta_model(source, more), *adapter)
    except CoveyError:
        raise
    except Exception as error:  # a wrong value in config.json may raise anything
        what = f"model: cannot read the configuration of {config.model.path!r}"
        raise ModelError(f"{what}: {first_line(error, 300)}") from None


def first_line(error: Exception, most: int) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def _meta_model(source: str, more: dict[str, str]) -> Any:
    import torch
    import transformers

    from covey.models.load_model import NO_CODE

    model_config = transformers.AutoConfig.from_pretrained(source, **more, **NO_CODE)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(model_config, **NO_CODE)


def _llama_config(source: str) -> Any:
    """Read config.json; return None for an architecture that this module does not know."""
    file = Path(source) / "config.json"
    if not file.is_file():
        from transformers.utils.hub import cached_file

        file = Path(cached_file(source, "config.json"))
    data = json.loads(file.read_text(encoding="utf-8"))
    kind, rope = data.get("model_type"), data.get("rope_scaling") or data.get("rope_parameters")
    rope = rope or {}
    known = kind in LLAMA_FAMILY and all(isinstance(data.get(key), int) for key in REQUIRED)
    unusual = data.get("use_sliding_window") or "quantization_config" in data
    if not known or unusual or (kind == "qwen3" and "head_dim" not in data):
        return None
    rope = {**rope, "rope_type": rope.get("rope_type") or rope.get("type", "default")}
    # Qwen's configurations have a sliding window even if it is not used.
    return SimpleNamespace(**{**data, "rope_parameters": rope, "sliding_window": None})


def _llama_modules(config: Any) -> dict[str, Module]:
    hidden, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    head_size = _head_size(config)
    query, key = config.num_attention_heads * head_size, config.num_key_value_heads * head_size
    attention_bias = getattr(config, "attention_bias", False)
    mlp_bias = getattr(config, "mlp_bias", False)
    qkv_bias = attention_bias or config.model_type == "qwen2"
    layer = {
        "input_layernorm": Module(hidden),
        "self_attn.q_proj": _linear(hidden, query, qkv_bias),
        "self_attn.k_proj": _linear(hidden, key, qkv_bias),
        "self_attn.v_proj": _linear(hidden, key, qkv_bias),
        "self_attn.o_proj": _linear(query, hidden, attention_bias),
        "post_attention_layernorm": Module(hidden),
        "mlp.gate_proj": _linear(hidden, inner, mlp_bias),
        "mlp.up_proj": _linear(hidden, inner, mlp_bias),
        "mlp.down_proj": _linear(inner, hidden, mlp_bias),
    }
    if config.model_type == "qwen3":
        layer |= {f"self_attn.{name}": Module(head_size) for name in ("q_norm", "k_norm")}
    leaves = {"model.embed_tokens": Module(vocabulary * hidden), "model.norm": Module(hidden)}
    for number in range(config.num_hidden_layers):
        leaves |= {f"model.layers.{number}.{name}": module for name, module in layer.items()}
    leaves["lm_head"] = _linear(hidden, vocabulary, False)
    sums: Counter[str] = Counter()
    for name, module in leaves.items():
        parts = name.split(".")
        for end in range(len(parts)):
            sums[".".join(parts[:end])] += module.parameters
    if getattr(config, "tie_word_embeddings", False):
        sums[""] -= leaves["lm_head"].parameters
    return {**{name: Module(count) for name, count in sums.items()}, **leaves}


def _linear(inputs: int, outputs: int, bias: bool) -> Module:
    return Module(outputs * inputs + outputs * bias, (outputs, inputs))


def _adapter(config: Config) -> Adapter:
    if adapter_base(config.model.path) is None:
        wanted = config.adapter
        return wanted.rank, wanted.targets, wanted.also_train
    found = json.loads((Path(config.model.path) / ADAPTER_CONFIG).read_text())
    targets = found.get("target_modules") or ["all-linear"]
    names = [targets] if isinstance(targets, str) else list(targets)
    return int(found.get("r", 0)), names, found.get("modules_to_save") or []


def measure(
    model: Any,
    rank: int = 0,
    targets: Sequence[str] = ("all-linear",),
    also_train: Sequence[str] = (),
) -> Shape:
    """Return the sizes of a transformers model and of its LoRA adapter; rank 0 means no adapter."""
    from torch import nn

    from covey.accel.attention import NAME
    from covey.models.adapter import CONV

    head = model.get_output_embeddings()
    if head is None:
        raise ModelError("model: this model has no output layer; choose a causal language model")
    layers: Any = getattr(model.base_model, "layers", ())
    names = [set(dict(layer.named_children())) for layer in layers]
    llama = bool(names) and all(found == LLAMA_LAYER for found in names)
    llama = llama and all(hasattr(layer.mlp, "gate_proj") for layer in layers)
    fused_attention = model.config._attn_implementation in ("sdpa", NAME)
    fused_attention &= getattr(model.config, "attn_logit_softcapping", None) is None
    modules = {}
    for name, module in model.named_modules():
        linear = module is head or isinstance(module, nn.Linear) or type(module).__name__ == CONV
        count = sum(parameter.numel() for parameter in module.parameters())
        modules[name] = Module(count, tuple(module.weight.shape) if linear else ())
    return _shape(
        modules,
        next(name for name, module in model.named_modules() if module is head),
        model.config.get_text_config(),
        (rank, targets, also_train),
        fused_attention=fused_attention,
        # On a GPU the fused pass is also compared with the model's own pass: see accel/parity.py.
        fuses=llama
        and hasattr(layers[0].input_layernorm, "variance_epsilon")
        and _fuses(model.config),
    )


def _fuses(config: Any) -> bool:
    return (
        getattr(config, "hidden_act", "") == "silu"
        and getattr(config, "residual_multiplier", 1.0) == 1.0
        and plain_positions(config)
    )


def _shape(
    modules: Mapping[str, Module],
    head: str,
    config: Any,
    adapter: Adapter,
    *,
    fused_attention: bool,
    fuses: bool,
) -> Shape:
    rank, targets, also_train = adapter
    everywhere = list(targets) == ["all-linear"]
    adapted = [
        module.weight
        for name, module in modules.items()
        if rank and module.weight and name != head
        if everywhere or _named(name, targets)
    ]
    if rank and not adapted:
        raise ConfigError(
            "config: adapter.targets: the model has no linear layer that matches "
            f"{list(targets)}; use 'all-linear' for all linear layers"
        )
    copied = {name for name in modules if rank and _named(name, also_train)}
    added = sum(rank * sum(weight) for weight in adapted)
    added += sum(modules[name].parameters for name in copied)
    parameters, heads = modules[""].parameters, int(config.num_attention_heads)
    vocabulary, hidden = modules[head].weight
    if experts := getattr(config, "num_experts_per_tok", None):
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        inner = experts * width
    else:
        width = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
        inner = width or 4 * config.hidden_size
    return Shape(
        parameters=parameters,
        added=added,
        trained=added if rank else parameters,
        head=vocabulary * hidden,
        head_trained=not rank or head in copied,
        adapted=len(adapted),
        rank=rank,
        fusable=sum(m.parameters for name, m in modules.items() if _named(name, FUSED_PROJECTIONS)),
        vocabulary=vocabulary,
        hidden=hidden,
        layers=int(config.num_hidden_layers),
        heads=heads,
        key_value_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_size=_head_size(config),
        inner=int(inner),
        fused_attention=fused_attention,
        fuses=fuses,
        head_norms=any(name.endswith(".q_norm") for name in modules),
    )


def _head_size(config: Any) -> int:
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def _named(name: str, endings: Sequence[str]) -> bool:
    return any(f".{name}".endswith(f".{ending}") for ending in endings)


# Estimates the memory of the activations that a model keeps for its backward pass.


FLOAT = 4
ON_DEVICE = 2
"""The number of layer inputs that stay on the device if layer inputs are offloaded: the input in
use, and the input that is being copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The numbers of tensors that a Llama layer keeps for its backward pass, by kind of tensor."""

    norm: int
    """The number of norm outputs, which are as wide as the hidden state and have the model's
    precision."""
    norm_frozen: int
    """The number of norm outputs with LoRA, where the weights of norms are not trained."""
    inner: int
    """The number of tensors as wide as the MLP, such as the gate, its activation, and the up
    projection."""
    output: int = 1
    """The number of tensors as wide as all query heads together, such as the input of the output
    projection."""
    projections: int = 7
    """The number of linear layers with LoRA; each keeps a tensor as wide as the LoRA rank."""
    fused: bool = False
    """Whether the model uses the fused layers of accel/fused_forward.py, with a float32 residual
    stream."""
    flash: bool = False
    """Whether the model uses flash attention, which pads keys and values, but not queries."""


EAGER = Saved(norm=4, norm_frozen=2, inner=4)
"""The tensors that an unfused layer of transformers saves."""
FUSED = Saved(norm=2, norm_frozen=2, inner=2, projections=0, fused=True)
"""The tensors that a fused layer saves. Fused layers keep the inputs and outputs of norms, and
recompute SwiGLU and LoRA products."""
FLASH = replace(FUSED, output=0, flash=True)
"""The tensors that a fused layer saves if it computes in 16 bits and uses flash attention. `output`
is 0 because flash attention already keeps the input of the output projection."""


def kernels_of(shape: Shape, size: int, device: str) -> Saved:
    if device == "cpu" or not shape.fuses:
        return EAGER
    return FLASH if size < FLOAT else FUSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The size of one forward pass, in sequences and tokens."""

    rows: int
    columns: int
    """The number of tokens of the longest sequence."""
    tokens: int
    """The number of tokens that the model processes, including padding if tokens are not packed."""
    chosen: int
    """The number of tokens whose logits are computed."""
    packed: bool

    @property
    def cells(self) -> int:
        """The number of positions if all sequences are padded to the longest sequence's length."""
        return self.rows * self.columns


def layer_bytes(shape: Shape, size: int, batch: Pass, kernels: Saved, device: str) -> int:
    """Return the bytes that a layer keeps for its backward pass (`size` bytes per number)."""
    norms = kernels.norm_frozen if shape.rank else kernels.norm
    # Both norms keep their inputs in float32.
    token = 2 * shape.hidden * FLOAT + norms * shape.hidden * size
    token += (kernels.output * shape.query + kernels.inner * shape.inner) * size
    if shape.rank:
        token += min(kernels.projections, shape.adapted // shape.layers) * shape.rank * size
    return batch.tokens * token + _attention_bytes(shape, size, batch, kernels, device)


def _attention_bytes(shape: Shape, size: int, batch: Pass, kernels: Saved, device: str) -> int:
    inputs = shape.query + 2 * shape.key
    if kernels.flash:
        queries = 2 * shape.query + (shape.query + shape.key if shape.head_norms else 0)
        packed = batch.tokens * (queries * size + shape.heads * FLOAT)
        return packed + batch.cells * 2 * shape.key * size
    if _keeps_scores(shape, batch, device):
        return batch.cells * inputs * size + _scores(shape, size, batch)
    return batch.cells * ((inputs + shape.query) * size + shape.heads * FLOAT)


def _keeps_scores(shape: Shape, batch: Pass, device: str) -> bool:
    return not shape.fused_attention or (device == "cpu" and batch.columns <= SHORT)


def _scores(shape: Shape, size: int, batch: Pass) -> int:
    copies = 1 if shape.fused_attention else 2  # unfused attention also keeps scores in float32
    return copies * batch.cells * shape.heads * batch.columns * size


def ends_bytes(shape: Shape, size: int, batch: Pass, kernels: Saved = EAGER) -> int:
    chosen = batch.chosen * shape.hidden * size
    if kernels.fused:  # the residual stream; chosen hidden states and their gradient
        return batch.tokens * shape.hidden * FLOAT + 2 * chosen
    norms = shape.hidden * (FLOAT + (0 if shape.rank else size))
    return batch.tokens * (norms + 2 * shape.hidden * size) + chosen


def passing_bytes(shape: Shape, size: int, batch: Pass, device: str) -> int:
    """Return the bytes that one layer's forward pass allocates temporarily."""
    if kernels_of(shape, size, device).fused:
        # The residual stream before and after attention, the outputs of attention and MLP, the norm
        # and the attention output; then gate, up and their product.
        streams = 2 * FLOAT * shape.hidden + 4 * shape.hidden * size
        return batch.tokens * (streams + (shape.query + 3 * shape.inner) * size)
    return max(_feed_forward(shape, size, batch), _attending(shape, size, batch, device))


def _feed_forward(shape: Shape, size: int, batch: Pass) -> int:
    return batch.tokens * (3 * shape.inner + 3 * shape.hidden) * size


def _attending(shape: Shape, size: int, batch: Pass, device: str) -> int:
    inputs = batch.cells * (2 * shape.query + 2 * shape.key) * size
    scores = 2 * _scores(shape, size, batch) if _keeps_scores(shape, batch, device) else 0
    return inputs + scores


def training_bytes(
    shape: Shape,
    size: int,
    batch: Pass,
    *,
    device: str,
    checkpointing: bool = False,
    offload: bool = False,
    head: int = 0,
) -> int:
    """Return the bytes of activations in a forward and backward pass.

    With gradient checkpointing, a layer keeps only its input and the result of flash attention. The
    backward pass recomputes one layer at a time. With `offload`, the layer inputs are in main
    memory, except the inputs that are in use or being copied. `head` is the number of bytes that
    the LM head frees before the backward pass of fused layers begins.
    """
    kernels = kernels_of(shape, size, device)
    inputs = min(ON_DEVICE, shape.layers) if offload and device != "cpu" else shape.layers
    layer = layer_bytes(shape, size, batch, kernels, device)
    ends = ends_bytes(shape, size, batch, kernels)
    if kernels.fused:
        stream = batch.tokens * shape.hidden * FLOAT
        # The first norm keeps the layer's input itself, and the result of attention is kept.
        attended = batch.tokens * (shape.query * size + shape.heads * FLOAT) * kernels.flash
        again = layer - stream - attended if checkpointing else 0
        # The temporary tensors in the backward pass of the last MLP.
        backward = batch.tokens * (3 * shape.inner * size + shape.hidden * (FLOAT + size))
        passing = max(0, again + backward - head)
        kept = inputs * stream + shape.layers * attended if checkpointing else shape.layers * layer
        return kept + ends + passing
    layers = shape.layers * layer
    if checkpointing:
        layers = layer + inputs * batch.tokens * shape.hidden * size
    # When the backward pass reaches a layer's attention, it has freed the tensors of the layer's
    # MLP.
    freed = batch.tokens * kernels.inner * shape.inner * size
    passing = max(_feed_forward(shape, size, batch), _attending(shape, size, batch, device) - freed)
    return layers + ends + passing
