"""How large a model is, from its configuration alone: no weight is read.

The model is built on torch's meta device, where tensors have shapes and no memory, so that any
architecture counts its own parameters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from covey.accel.attention import NAME
from covey.accel.parity import plain_positions
from covey.config import Config
from covey.embedded import CHECKPOINT
from covey.errors import ConfigError, ModelError
from covey.models.adapter import CONFIG_FILE, CONV, adapter_base
from covey.models.from_pretrained import NO_CODE
from covey.models.gguf import find_gguf
from covey.models.model_path import check_model_path

JOINED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Layers whose weights the sampler puts side by side in a small model."""
LLAMA_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
"""The parts of a layer of Llama's shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model, and of the adapter that it is given."""

    parameters: int
    """Of the model without adapter; a weight that is used twice counts once."""
    added: int
    """Parameters that an adapter adds."""
    trained: int
    """Parameters with a gradient: the adapter's, or all."""
    head: int
    """Of the output layer."""
    head_trained: bool
    adapted: int
    """Layers with low-rank neighbours, in the whole model."""
    rank: int
    """Of the adapter; 0: all weights are trained."""
    joined: int
    """In layers that the sampler may put side by side."""
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    inner: int
    """Width inside of the feed-forward part; of experts, those that a token visits."""
    fused_attention: bool
    """Whether attention is a single operation, which keeps no scores and can be packed."""
    fuses: bool
    """Whether the kernels for a GPU understand it: whether a layer is one of Llama's."""
    head_norms: bool
    """Whether each head of queries and keys has a norm."""

    @property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_size

    @property
    def key(self) -> int:
        """Width of all key heads together; values have the same."""
        return self.key_value_heads * self.head_size


def source_of(path: str) -> tuple[str, dict[str, str]]:
    """Return the folder or hub name of a model, and what transformers needs to know beside it.

    Of a GGUF file only the header is read: importing it would take as long as loading the weights.
    """
    path = adapter_base(path) or path
    if path == "embedded":
        return str(CHECKPOINT), {}
    gguf = find_gguf(path)
    if gguf is not None:
        return str(gguf.parent), {"gguf_file": gguf.name}
    check_model_path(path)
    return path, {}


def shape_of(config: Config) -> Shape:
    """Build the model of a configuration without memory, and measure it."""
    source, more = source_of(config.model.path)
    try:
        model_config = transformers.AutoConfig.from_pretrained(source, **more, **NO_CODE)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(model_config, **NO_CODE)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"model: cannot read the configuration of {config.model.path!r}"
        raise ModelError(f"{what}: {reason[:300]}") from None
    return measure(model, *_adapter(config))


def _adapter(config: Config) -> tuple[int, Sequence[str], Sequence[str]]:
    """Return rank, targets and modules trained in full, of the adapter asked for or found."""
    if adapter_base(config.model.path) is None:
        wanted = config.adapter
        return wanted.rank, wanted.targets, wanted.also_train
    found = json.loads((Path(config.model.path) / CONFIG_FILE).read_text())
    targets = found.get("target_modules") or ["all-linear"]
    names = [targets] if isinstance(targets, str) else list(targets)
    return int(found.get("r", 0)), names, found.get("modules_to_save") or []


def measure(
    model: Any,
    rank: int = 0,
    targets: Sequence[str] = ("all-linear",),
    also_train: Sequence[str] = (),
) -> Shape:
    """Return the sizes of a transformers model, with an adapter that it need not have yet."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError("model: there is no output layer, which covey needs")
    modules = dict(model.named_modules())
    everywhere = list(targets) == ["all-linear"]
    adapted = [
        _ends(module)
        for name, module in modules.items()
        if rank and _is_linear(module) and module is not head
        if everywhere or _named(name, targets)
    ]
    if rank and not adapted:
        raise ConfigError(f"config: adapter.targets: the model has none of {list(targets)}")
    copied = {name for name in modules if rank and _named(name, also_train)}
    added = sum(rank * (inputs + outputs) for inputs, outputs in adapted)
    added += sum(_count(modules[name]) for name in copied)
    parameters, heads = _count(model), int(config.num_attention_heads)
    return Shape(
        parameters=parameters,
        added=added,
        trained=added if rank else parameters,
        head=head.weight.numel(),
        head_trained=not rank or any(modules[name] is head for name in copied),
        adapted=len(adapted),
        rank=rank,
        joined=sum(_count(m) for name, m in modules.items() if _named(name, JOINED)),
        vocabulary=head.weight.shape[0],
        hidden=head.weight.shape[1],
        layers=int(config.num_hidden_layers),
        heads=heads,
        key_value_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_size=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        inner=_inner(config),
        fused_attention=model.config._attn_implementation in ("sdpa", NAME)
        and getattr(model.config, "attn_logit_softcapping", None) is None,
        fuses=_fuses(model),
        head_norms=any(name.endswith(".q_norm") for name in modules),
    )


def _fuses(model: Any) -> bool:
    """Tell whether the fused forward pass fits, as far as a model without weights can show it.

    On a GPU both are tried, and compared; here the names of a layer's parts must do.
    """
    config, backbone = model.config, model.base_model
    parts = [set(dict(layer.named_children())) for layer in getattr(backbone, "layers", ())]
    return (
        bool(parts)
        and all(names == LLAMA_LAYER for names in parts)
        and all(hasattr(layer.mlp, "gate_proj") for layer in backbone.layers)
        and hasattr(backbone.layers[0].input_layernorm, "variance_epsilon")
        and getattr(config, "hidden_act", "") == "silu"
        and getattr(config, "residual_multiplier", 1.0) == 1.0
        and plain_positions(config)
    )


def _inner(config: Any) -> int:
    experts = getattr(config, "num_experts_per_tok", None)
    if experts:
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        return int(experts * width)
    width = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return int(width or 4 * config.hidden_size)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _named(name: str, endings: Sequence[str]) -> bool:
    return any(f".{name}".endswith(f".{ending}") for ending in endings)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == CONV


def _ends(layer: Any) -> tuple[int, int]:
    rows, columns = layer.weight.shape
    return rows, columns
