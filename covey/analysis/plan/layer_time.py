"""Seconds of a training step on a CPU, estimated from one decoder layer with arbitrary weights.

The layer is as large as a layer of the model. Two times are measured: for decoding one token of
each completion, and for a forward pass over a few tokens. A backward pass takes about twice as long
as a forward pass. The time of the layer is multiplied by the number of layers. One slice of
the output layer is timed in the same way as the decoder layer. The layers are computed with numpy,
so that a plan does not import torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from covey.analysis.plan.cost_model import Workload
from covey.analysis.plan.model_shape import Shape
from covey.config import Config

TRAIN_FLOPS = 1e10
"""Number of operations in the measured update, which takes a fraction of a second on any CPU."""
FEWEST_TOKENS, MOST_TOKENS = 16, 512
"""Smallest and largest number of tokens in the measured update."""
DECODE_FLOPS, FEWEST_ROWS = 2e9, 16
"""Maximum number of operations in the measured decode step. With FEWEST_ROWS completions, more
operations are allowed.
"""
KEY_NUMBERS = 2e7
"""The attention keys in the measured decode step have at most this many elements."""
HEAD_ROWS = 2048
"""Number of vocabulary tokens in the measured part of the output layer."""
REPEATS = 3
"""Number of measurements, of which the fastest is used."""
WITH_BACKWARD = 3
"""Time of a forward and a backward pass, divided by the time of a forward pass."""
Array = np.ndarray[Any, np.dtype[np.float32]]


class _Layer:
    """A decoder layer: attention and a gated MLP, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        self.shape, hidden = shape, shape.hidden
        self.qkv = _weights(hidden, shape.query + 2 * shape.key)
        self.out = _weights(shape.query, hidden)
        self.up = _weights(hidden, 2 * shape.inner)
        self.down = _weights(shape.inner, hidden)

    @property
    def numbers(self) -> int:
        """Number of weights."""
        return sum(weight.size for weight in (self.qkv, self.out, self.up, self.down))

    def __call__(self, x: Array, past: Array | None = None) -> Array:
        """Return the hidden states [B, T, hidden].

        If `past` is given, tokens attend to the keys and values in `past`.
        """
        shape = self.shape
        query, key, value = np.split(
            _norm(x) @ self.qkv, [shape.query, shape.query + shape.key], axis=-1
        )
        if past is None:
            keys, values = _heads(key, shape), _heads(value, shape)
        else:
            keys = values = past  # an engine writes the new key into its cache, without a copy
        asked = _heads(query, shape)
        asked = asked.reshape(len(x), shape.key_value_heads, -1, shape.head_size)
        scores = np.exp(asked @ keys.swapaxes(-1, -2))
        seen = (scores / scores.sum(-1, keepdims=True)) @ values
        x = x + seen.reshape(*x.shape[:2], shape.query) @ self.out
        gate, up = np.split(_norm(x) @ self.up, 2, axis=-1)
        changed: Array = x + (gate / (1 + np.exp(-gate)) * up) @ self.down
        return changed


def _norm(x: Array) -> Array:
    normed: Array = x / np.sqrt(np.square(x).mean(-1, keepdims=True))
    return normed


def _heads(x: Array, shape: Shape) -> Array:
    """Reshape [B, T, heads * head size] to [B, heads, T, head size]."""
    return x.reshape(*x.shape[:2], -1, shape.head_size).swapaxes(1, 2)


def cpu_seconds(
    config: Config, shape: Shape, work: Workload, evaluated: int, ranks: int = 1
) -> tuple[float, float, float]:
    """Return the seconds of a step's rollout, of its update, and of one evaluation."""
    layer = _Layer(shape)
    head = _filled(shape.hidden, min(HEAD_ROWS, shape.vocabulary))
    parts = shape.vocabulary / head.shape[1]

    def rollout(rows: int) -> float:
        at_once = min(rows, config.engine.max_concurrent)
        decode = _decode(layer, head, parts, at_once, work)
        return math.ceil(rows / at_once) * work.completion * decode

    token = _train_token(layer, head, parts, work)
    passes = work.updates + work.forwards / WITH_BACKWARD
    return rollout(work.rows), work.tokens * passes * token, rollout(evaluated)


def _decode(layer: _Layer, head: Array, parts: float, rows: int, work: Workload) -> float:
    """Return the seconds to decode one token for each of `rows` completions.

    To save time, the measured decode step has fewer completions.
    """
    shape, context = layer.shape, work.prompt + work.completion // 2
    few = max(FEWEST_ROWS, int(DECODE_FLOPS / (2 * layer.numbers)))
    some = max(1, min(rows, few, int(KEY_NUMBERS / (context * shape.key))))
    x = _filled(some, 1, shape.hidden)
    past = _filled(some, shape.key_value_heads, context, shape.head_size)

    def choose() -> Any:
        return np.exp(x @ head).cumsum(-1)

    step = shape.layers * _shortest(lambda: layer(x, past)) + parts * _shortest(choose)
    return step * rows / some


def _train_token(layer: _Layer, head: Array, parts: float, work: Workload) -> float:
    """Return the seconds of a forward and a backward pass, for each token."""
    most = min(MOST_TOKENS, int(TRAIN_FLOPS / (6 * layer.numbers)))
    length = min(work.context, max(FEWEST_TOKENS, most))
    rows = max(1, most // length)
    x = _filled(rows, length, layer.shape.hidden)
    whole = layer.shape.layers * _shortest(lambda: layer(x))
    logits = parts * _shortest(lambda: np.log(np.exp(x @ head).sum(-1)))
    return WITH_BACKWARD * (whole + logits) / (rows * length)


def _shortest(work: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of several calls, after a first call for warm-up."""
    work()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _weights(inputs: int, outputs: int) -> Array:
    """Return a constant weight matrix.

    Each output is a tenth of the mean of the inputs, and stays small.
    """
    return np.full((inputs, outputs), 0.1 / inputs, dtype=np.float32)


def _filled(*sizes: int) -> Array:
    """Return an array filled with one number, because random numbers take longer to draw."""
    return np.full(sizes, 0.01, dtype=np.float32)
