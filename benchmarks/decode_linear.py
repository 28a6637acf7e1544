"""Speed of the linear layers of a decode step on a GPU: tiles, fused SwiGLU, early start.

    python benchmarks/decode_linear.py
    python benchmarks/decode_linear.py --models 135M

A kernel runs in a CUDA graph of at least 50 launches over different weights, more than the L2 cache
holds. The first table gives microseconds per layer of gate, up and SwiGLU: the fused kernel with
its fastest tiles, the product and SwiGLU apart, and the floor (weights read once at 4.3 TB/s, or
790 Tflop/s). The second table gives all norms, products and SwiGLUs of a decode step, without
attention: SwiGLU apart or fused, with kernels that start after or before the end of the last one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from speed_device import event_seconds
from torch.nn.functional import linear

from covey.accel.kernels import gated_linear as kernel
from covey.accel.kernels import rms_norm, swiglu
from covey.accel.kernels.gated_linear import Tile, gated_linear
from covey.accel.kernels.rms_norm import add_norm_in_place
from covey.accel.kernels.swiglu import silu_mul

BYTES_PER_S, FLOPS = 4.3e12, 790e12
ROTATED = 160e6
"""Bytes of weights that a graph reads before it reads the first again."""


class Model(NamedTuple):
    """Sizes of one layer, and the numbers of tokens to measure."""

    hidden: int
    qkv: int
    attended: int
    mlp: int
    layers: int
    tokens: tuple[int, ...]

    def weights(self) -> list[torch.Tensor]:
        """Return random weights of one layer: QKV, output, gate with up, down."""
        shapes = [(self.qkv, self.hidden), (self.hidden, self.attended)]
        shapes += [(2 * self.mlp, self.hidden), (self.hidden, self.mlp)]
        return [random(*shape).mul_(shape[1] ** -0.5) for shape in shapes]


MODELS = {
    "135M": Model(576, 960, 576, 1536, 30, (128, 512, 1024)),
    "1.5B": Model(1536, 2048, 1536, 8960, 28, (128, 512)),
    "7B": Model(3584, 4608, 3584, 18944, 28, (128, 512)),
}
TILES = [
    Tile(*sizes)
    for sizes in (
        (16, 32, 64, 4, 4), (32, 64, 64, 4, 4), (64, 32, 64, 4, 4), (64, 32, 128, 4, 3),
        (64, 64, 64, 4, 3), (64, 64, 64, 4, 4), (64, 64, 64, 4, 5), (128, 64, 64, 4, 4),
        (128, 64, 64, 8, 4), (128, 128, 64, 8, 3),
    )
]  # fmt: skip


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def seconds_per_call(calls: Sequence[Callable[[], Any]], replays: int = 8) -> float:
    """Return the median time per call of a CUDA graph of all calls."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return statistics.median(event_seconds(graph.replay) for _ in range(replays)) / len(calls)


def with_tile(tile: Tile) -> Any:
    """Let the fused kernel use a tile."""
    return mock.patch.object(kernel, "tile_for", return_value=tile)


def compile_one(job: tuple[str, Tile]) -> bool:
    """Compile a kernel, which the main process then finds in Triton's cache."""
    model = MODELS[job[0]]
    try:
        with with_tile(job[1]):
            gated_linear(random(128, model.hidden), random(2 * model.mlp, model.hidden))
            torch.cuda.synchronize()
    except Exception:  # a tile too large for shared memory, for example
        return False
    return True


def apart(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return silu_mul(*linear(values, weight).chunk(2, dim=1))


def gate_and_up(name: str, tokens: int, tiles: Sequence[Tile]) -> str:
    """Time gate, up and SwiGLU of one layer."""
    model = MODELS[name]
    shape = 2 * model.mlp, model.hidden
    size = 2 * shape[0] * shape[1]
    values = random(tokens, model.hidden)
    copies = int(min(200, max(50, ROTATED / size), 12e9 / size))
    weights = [random(*shape).mul_(model.hidden**-0.5) for _ in range(copies)]
    floor = max(size / BYTES_PER_S, tokens * size / FLOPS)
    alone = seconds_per_call([partial(linear, values, weight) for weight in weights])
    both = seconds_per_call([partial(apart, values, weight) for weight in weights])
    found, expected = {}, apart(values, weights[0])
    for tile in tiles:
        with with_tile(tile):
            found[tile] = seconds_per_call([partial(gated_linear, values, w) for w in weights])
            torch.testing.assert_close(
                gated_linear(values, weights[0]), expected, rtol=2e-2, atol=2e-2
            )
    best = sorted(found, key=lambda tile: found[tile])[:3]
    return (
        f"{name:>5} @{tokens:<5} floor {floor * 1e6:.1f} product {alone * 1e6:.1f} "
        f"and SwiGLU {both * 1e6:.1f} fused "
        + " ".join(f"{','.join(map(str, tile))}={found[tile] * 1e6:.1f}" for tile in best)
    )


def without_early_start() -> ExitStack:
    """Let kernels start after the end of the kernel before them."""
    stack = ExitStack()
    for module in (kernel, rms_norm, swiglu):
        stack.enter_context(mock.patch.object(module, "early_start", return_value={"early": False}))
    return stack


def whole_step(name: str, tokens: int) -> str:
    """Time all norms, products and SwiGLUs of a decode step."""
    model = MODELS[name]
    layers = [model.weights() for _ in range(model.layers)]
    hidden, attended = random(tokens, model.hidden).float(), random(tokens, model.attended)
    # One gain for each norm, as in a model: a gain that all norms share would stay in the L2 cache.
    gains = torch.ones(2 * model.layers, model.hidden, device="cuda", dtype=torch.bfloat16)

    def step(gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        delta = None
        for number, (qkv, output, gate_up, down) in enumerate(layers):
            linear(add_norm_in_place(hidden, delta, gains[2 * number], 1e-5), qkv)
            delta = linear(attended, output)
            normed = add_norm_in_place(hidden, delta, gains[2 * number + 1], 1e-5)
            delta = linear(gated(normed, gate_up), down)

    times = []
    for label, gated in (("apart", apart), ("fused", gated_linear)):
        with without_early_start():
            times.append(f"{label} {seconds_per_call([partial(step, gated)]) * 1e6:.0f}")
        times.append(f"{label}, early {seconds_per_call([partial(step, gated)]) * 1e6:.0f}")
    return f"{name:>5} @{tokens:<5} a step without attention, us: " + ", ".join(times)


def main() -> None:
    """Compile in parallel, measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    names = parser.parse_args().models.split(",")
    jobs = [(name, tile) for name in names for tile in TILES]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=context) as pool:
        works = dict(zip(jobs, pool.map(compile_one, jobs), strict=True))
    for name in names:
        tiles = [tile for tile in TILES if works[name, tile]]
        for tokens in MODELS[name].tokens:
            print(gate_and_up(name, tokens, tiles), flush=True)
    for name in names:
        for tokens in MODELS[name].tokens:
            print(whole_step(name, tokens), flush=True)


if __name__ == "__main__":
    main()
