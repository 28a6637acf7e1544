"""The section [engine]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from covey.config.cluster_sections import Vllm
from covey.config.section import Device, Section


class Engine(Section):
    """[engine]"""

    kind: Literal["native", "process", "vllm"] = "native"
    """The engine: native (in the trainer's process, with the trainer's weights), process (the
    native engine in another process, with a copy of the weights) or vllm (vLLM servers)."""
    vllm: Vllm = Vllm()
    """Settings of engine.kind = "vllm"."""
    device: Device = "auto"
    """Device of the engine if engine.kind = "process"; auto: the trainer's device."""
    dtype: Literal["model", "float8"] = "model"
    """Dtype of the matrix products in the native engine's layers. With float8, weights and
    activations have 8 bits, which is faster for models of several billion parameters on Ada, Hopper
    and newer GPUs. A float8 engine needs objective.correction, which is then token_truncate by
    default."""
    kv_dtype: Literal["model", "float8"] = "model"
    """Dtype of the KV cache in the native engine. With float8, the KV cache takes half the memory,
    and attention to long completions is faster. A float8 KV cache has the same requirements as
    engine.dtype = "float8"."""
    max_concurrent: Annotated[int, Field(ge=1, le=10**6)] = 256
    """Maximum number of completions generated at the same time."""
    cache_gigabytes: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """GiB for keys and values of completions on a GPU. If completions need more memory, the
    native engine pauses the completions with the fewest tokens and continues them later. With 0,
    the engine reserves memory for all completions at rollout.max_tokens, if so much is free."""

    @property
    def rounds(self) -> str:
        """The setting that makes the engine use float8; empty if no setting does."""
        return next((name for name in ("dtype", "kv_dtype") if getattr(self, name) == "float8"), "")
