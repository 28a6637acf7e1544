"""The policy's weights as a vLLM server loads them: output head untied, attention heads padded.

An output head that shares its weight with the embedding is sent as a separate weight. The CPU build
of vLLM packs the output head when it loads the model. Without a separate weight, vLLM would keep
the packed copy of old weights. Attention heads narrower than 32 dimensions, which vLLM rejects, are
padded with zeros. The padding does not change the results of a head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from covey.errors import ModelError

NARROWEST = 32
"""The smallest head size that vLLM supports."""
PADDABLE = ("llama", "mistral", "qwen2")
"""Model types whose heads can be padded: standard RoPE attention without a per-head norm."""
PROJECTION = re.compile(r"\.self_attn\.([qkvo])_proj\.(?:base_layer\.)?(weight|bias|lora_[AB])")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPadding:
    """Zero-padding of attention heads from `width` to `padded` dimensions.

    RoPE rotates dimensions i and i + width / 2 with the frequency base^(-2 i / width). A padded
    head is wider by the factor `times`, so its dimension times * i has the frequency of dimension i
    in the original head. Attention divides by the square root of the padded width, so queries are
    multiplied by the square root of `times`.
    """

    heads: int
    key_heads: int
    width: int
    padded: int

    @staticmethod
    def of(config: Any) -> HeadPadding | None:
        """Return the padding that a model needs, or None if it needs none."""
        heads = int(config.num_attention_heads)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        if width >= NARROWEST:
            return None
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if config.model_type not in PADDABLE or rope != "default":
            raise ModelError(
                f"engine: vLLM needs attention heads of at least {NARROWEST} dimensions, but this "
                f"{config.model_type} model has heads of {width}; set engine.kind = 'native'"
            )
        return HeadPadding(
            heads=heads,
            key_heads=int(config.num_key_value_heads),
            width=width,
            padded=width * math.ceil(NARROWEST / width),
        )

    @property
    def times(self) -> int:
        """The ratio of the padded head size to the original head size."""
        return self.padded // self.width

    def apply(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the padded version of a weight of the model."""
        match = PROJECTION.search(name)
        if match is None:
            return weight
        kind, part = match.groups()
        if kind == "o":  # this layer reads heads, so its columns are padded
            return self._spread(weight, 1, kind) if part in ("weight", "lora_A") else weight
        return weight if part == "lora_A" else self._spread(weight, 0, kind)

    def _spread(self, weight: torch.Tensor, dim: int, kind: str) -> torch.Tensor:
        heads = self.key_heads if kind in "kv" else self.heads
        shaped = weight.detach().unflatten(dim, (heads, self.width))
        before, after = shaped.shape[: dim + 1], shaped.shape[dim + 2 :]
        wide = shaped.new_zeros(*before, self.padded, *after)
        wide.index_copy_(dim + 1, self._places(kind, weight.device), shaped)
        scale = math.sqrt(self.times) if kind == "q" else 1.0
        padded: torch.Tensor = wide.flatten(dim, dim + 1) * scale
        return padded

    def _places(self, kind: str, device: torch.device) -> torch.Tensor:
        """Return, for each dimension of a head, its index in the padded head."""
        if kind in "vo":
            return torch.arange(self.width, device=device)
        half = torch.arange(self.width // 2, device=device) * self.times
        return torch.cat([half, half + self.padded // 2])


def served_config(config: Any) -> dict[str, Any]:
    """Return the configuration, as JSON, of the model that the server loads."""
    data: dict[str, Any] = config.to_dict()
    padding = HeadPadding.of(config)
    if padding is not None:
        data["head_dim"] = padding.padded
    return {**data, "tie_word_embeddings": False}


def served_weights(
    named: Iterable[tuple[str, torch.Tensor]], model: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a model under the names that the server loads.

    `named` are the trainer's weights. LoRA weights are left out, because adapters are served
    separately.
    """
    padding, tied = HeadPadding.of(model.config), bool(model.config.tie_word_embeddings)
    embedding = model.get_input_embeddings().weight
    shared = next((name for name, w in model.named_parameters() if w is embedding), "")
    for name, weight in named:
        if ".lora_" in name:
            continue
        plain = weight.detach()
        yield (
            name.replace(".base_layer.", "."),
            plain if padding is None else padding.apply(name, plain),
        )
        if tied and name == shared:
            yield "lm_head.weight", plain
