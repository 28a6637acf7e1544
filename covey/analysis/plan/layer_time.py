"""Seconds of a training step on a CPU, from one decoder layer with random weights.

The layer has the sizes of the model. It decodes one token for every completion, and it is trained
on a few tokens. The times of a layer and of a part of the output layer are then multiplied by their
numbers. No weights are loaded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from covey.analysis.plan.cost_model import Workload
from covey.analysis.plan.model_shape import Shape
from covey.config import Config

TRAIN_FLOPS = 1e10
"""Operations of the measured update: a fraction of a second on any CPU."""
FEWEST_TOKENS, MOST_TOKENS = 16, 512
"""Limits for the tokens of the measured update."""
DECODE_FLOPS, FEWEST_ROWS = 2e9, 16
"""Limit of the operations of a measured decode step, unless it has few rows."""
KEY_NUMBERS = 2e7
"""Most numbers in the keys of a measured decode step."""
HEAD_ROWS = 2048
"""Tokens of the vocabulary in the measured part of the output layer."""
REPEATS = 3
"""Measurements, of which the shortest counts."""


class _Layer(nn.Module):
    """A decoder layer: attention and a gated MLP, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, hidden = shape, shape.hidden
        self.norms = nn.ModuleList(_filled(nn.RMSNorm, hidden) for _ in range(2))
        self.qkv = _filled(nn.Linear, hidden, shape.query + 2 * shape.key, bias=False)
        self.out = _filled(nn.Linear, shape.query, hidden, bias=False)
        self.up = _filled(nn.Linear, hidden, 2 * shape.inner, bias=False)
        self.down = _filled(nn.Linear, shape.inner, hidden, bias=False)

    def forward(self, x: torch.Tensor, past: torch.Tensor | None = None) -> torch.Tensor:
        """Return the hidden states [B, T, hidden]; `past` has the keys to attend to, if given."""
        shape, size = self.shape, self.shape.head_size
        parts = self.qkv(self.norms[0](x)).split([shape.query, shape.key, shape.key], dim=-1)
        query, key, value = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts)
        if past is not None:
            key = value = past  # an engine writes the new key into its cache, without a copy
        seen = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=past is None, enable_gqa=True
        )
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        changed: torch.Tensor = x + self.down(nn.functional.silu(gate) * up)
        return changed


def cpu_seconds(
    config: Config, shape: Shape, work: Workload, evaluated: int, ranks: int = 1
) -> tuple[float, float, float]:
    """Return the seconds of a step's rollout, of its update, and of one evaluation."""
    layer = _Layer(shape)
    head = _filled(nn.Linear, shape.hidden, min(HEAD_ROWS, shape.vocabulary), bias=False)
    parts = shape.vocabulary / head.out_features

    def rollout(rows: int) -> float:
        at_once = min(rows, config.engine.max_concurrent)
        decode = _decode(layer, head, parts, at_once, work)
        return math.ceil(rows / at_once) * work.completion * decode

    token = _train_token(layer, head, parts, work)
    passes = work.updates + work.forwards / 3  # without a gradient, a pass takes a third
    return rollout(work.rows), work.tokens * passes * token, rollout(evaluated)


@torch.no_grad()
def _decode(layer: _Layer, head: nn.Module, parts: float, rows: int, work: Workload) -> float:
    """Return the seconds of a decode step: one token for each row. Some rows are measured."""
    shape, context = layer.shape, work.prompt + work.completion // 2
    few = max(FEWEST_ROWS, int(DECODE_FLOPS / (2 * _numbers(layer))))
    some = max(1, min(rows, few, int(KEY_NUMBERS / (context * shape.key))))
    x = torch.randn(some, 1, shape.hidden)
    past = torch.randn(some, shape.key_value_heads, context, shape.head_size)

    def choose() -> Any:
        return torch.log_softmax(head(x).float(), dim=-1).exp().cumsum(-1)

    step = shape.layers * _shortest(lambda: layer(x, past)) + parts * _shortest(choose)
    return step * rows / some


def _train_token(layer: _Layer, head: nn.Module, parts: float, work: Workload) -> float:
    """Return the seconds of a forward and a backward pass, for each token."""
    most = min(MOST_TOKENS, int(TRAIN_FLOPS / (6 * _numbers(layer))))
    length = min(work.context, max(FEWEST_TOKENS, most))
    rows = max(1, most // length)
    x = torch.randn(rows, length, layer.shape.hidden, requires_grad=True)
    whole = layer.shape.layers * _shortest(lambda: torch.autograd.backward(layer(x).sum()))
    logits = parts * _shortest(
        lambda: torch.autograd.backward(torch.log_softmax(head(x), dim=-1).sum())
    )
    return (whole + logits) / (rows * length)


def _numbers(layer: nn.Module) -> int:
    return sum(weight.numel() for weight in layer.parameters())


def _shortest(work: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of several calls, after one that warms up."""
    work()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _filled(kind: Callable[..., nn.Module], *sizes: int, **options: Any) -> Any:
    """Return a module with the same number in all weights: random ones take longer to draw."""
    with torch.device("meta"):
        module = kind(*sizes, **options)
    module = module.to_empty(device="cpu")
    for weight in module.parameters():
        nn.init.constant_(weight, 0.01)
    return module
