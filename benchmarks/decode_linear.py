"""Speed of the linear layers of a decode step, beside separate norms, products and activations.

    python benchmarks/decode_linear.py                   # three models
    python benchmarks/decode_linear.py --models 135M

Each kernel runs in a CUDA graph of at least 50 launches over different weights, more than the L2
cache holds. A table gives microseconds per kernel for the best tiles, the separate kernels and the
floor: weights read once at 4.3 TB/s, or 790 Tflop/s. `early` launches a kernel before the last one
has ended. A second table gives all linear layers of a decode step together, without attention.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from covey.accel.kernels.decode_linear import (
    Norm,
    Residual,
    Tile,
    add_linear,
    gated_linear,
    norm_linear,
    split_linear,
)
from covey.accel.kernels.rms_norm import add_norm_in_place
from covey.accel.kernels.swiglu import silu_mul

BYTES_PER_S, FLOPS = 4.3e12, 790e12
ROTATED = 160e6
"""Bytes of weights that a graph reads before it reads the first again."""


class Model(NamedTuple):
    """Sizes of one layer: hidden states, QKV product, attended heads and MLP."""

    hidden: int
    qkv: int
    attended: int
    mlp: int
    layers: int


MODELS = {
    "135M": Model(576, 960, 576, 1536, 30),
    "1.5B": Model(1536, 2048, 1536, 8960, 28),
    "7B": Model(3584, 4608, 3584, 18944, 28),
}
KINDS = ("qkv", "out", "gate_up", "down")
BY_NORM = {"135M": ("gate_up plain",), "1.5B": ("out split", "gate_up plain", "down split")}
BY_NORM["7B"] = BY_NORM["1.5B"]
"""The same layers with a separate norm, which also adds the addends of a product."""
CASES = {"135M": (128, 512, 1024), "1.5B": (128, 512), "7B": (128, 512)}
PROGRAMS = 132
SHARED_BYTES = 227 * 1024
SMALL = [(16, 16, 128, 2, 4), (16, 16, 256, 2, 3), (16, 32, 64, 4, 4), (16, 32, 64, 2, 5),
         (16, 32, 128, 4, 4), (16, 32, 128, 2, 3), (16, 32, 256, 4, 2), (16, 32, 256, 4, 3),
         (16, 64, 64, 4, 4), (16, 64, 128, 4, 3), (16, 64, 256, 4, 2), (32, 16, 128, 2, 4),
         (32, 32, 64, 4, 4), (32, 32, 64, 4, 6), (32, 32, 128, 4, 3), (32, 32, 128, 4, 4),
         (32, 32, 256, 4, 2), (32, 64, 64, 4, 4), (32, 64, 128, 4, 3), (64, 32, 64, 4, 4),
         (64, 16, 128, 4, 3), (64, 32, 128, 4, 3), (128, 16, 64, 4, 4)]  # fmt: skip
LARGE = [(32, 64, 128, 4, 3), (32, 32, 128, 4, 3), (64, 32, 64, 4, 4), (64, 32, 128, 4, 3),
         (64, 64, 64, 4, 3), (64, 64, 64, 4, 4), (64, 64, 128, 4, 3), (64, 128, 64, 4, 3),
         (64, 128, 64, 4, 4), (128, 32, 64, 4, 4), (128, 64, 64, 4, 3), (128, 64, 64, 4, 4),
         (128, 64, 64, 8, 4), (128, 128, 64, 8, 3), (128, 128, 64, 4, 3)]  # fmt: skip
WIDE = [(64, 32, 128, 4, 4), (64, 64, 64, 4, 5), (64, 64, 128, 4, 3), (64, 64, 128, 4, 4),
        (64, 128, 64, 4, 4), (64, 128, 128, 4, 3), (128, 32, 64, 4, 5), (128, 32, 128, 4, 4),
        (128, 64, 64, 4, 4), (128, 64, 128, 4, 3), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 3), (256, 64, 64, 8, 3)]  # fmt: skip


def shared_bytes(tile: Tile, kind: str) -> int:
    """Return the bytes of a program's inputs in shared memory."""
    number = 4 if kind in ("qkv", "gate_up") else 2
    columns = tile.columns * (2 if kind.startswith("gate_up") else 1)
    return tile.stages * tile.block * (number * tile.rows + 2 * columns)


def tiles(model: str, rows: int, kind: str) -> list[Tile]:
    """Return the tiles to try."""
    found = WIDE if model != "135M" else SMALL if rows <= 128 else LARGE
    result = []
    for sizes in found:
        tile = Tile(*sizes)
        if kind.startswith("gate_up") and tile.columns > 64:  # gate and up are two tiles
            tile = tile._replace(columns=tile.columns // 2)
        if shared_bytes(tile, kind) > SHARED_BYTES:
            tile = tile._replace(stages=max(2, tile.stages - 1))
        if kind.endswith("split"):
            width, _ = shape_of(MODELS[model], kind)
            programs = -(-width // tile.columns) * -(-rows // tile.rows)
            splits = {min(12, max(1, round(share * PROGRAMS / programs))) for share in (1, 2)}
            result += [tile._replace(splits=n) for n in splits]
        else:
            result.append(tile)
    return list(dict.fromkeys(result))


def shape_of(model: Model, kind: str) -> tuple[int, int]:
    """Return rows and columns of a weight."""
    if kind.startswith("gate_up"):
        return 2 * model.mlp, model.hidden
    return {
        "qkv": (model.qkv, model.hidden),
        "out": (model.hidden, model.attended),
        "down": (model.hidden, model.mlp),
    }[kind.split()[0]]


class Given(NamedTuple):
    residual: Residual
    norm: Norm
    values: torch.Tensor
    weights: list[torch.Tensor]


def given(model: Model, kind: str, rows: int, copies: int) -> Given:
    width, size = shape_of(model, kind)
    hidden = torch.randn(rows, model.hidden, device="cuda")
    squares = hidden.square().sum(1, keepdim=True)
    values = torch.randn(rows, size, device="cuda").bfloat16()
    weights = [
        torch.randn(width, size, device="cuda").mul_(size**-0.5).bfloat16() for _ in range(copies)
    ]
    norm = Norm(torch.ones(model.hidden, device="cuda", dtype=torch.bfloat16), 1e-5)
    return Given(Residual(hidden, squares), norm, values, weights)


def fused(kind: str, each: Given, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    if kind in ("out", "down"):
        return add_linear(each.residual.hidden, each.values, weight, None, tile).hidden
    if kind.endswith("split"):
        addends = split_linear(each.values, weight, tile)
        return add_norm_in_place(each.residual.hidden, addends, *each.norm)
    if kind == "gate_up plain":
        return gated_linear(each.values, weight, None, tile)
    return norm_linear(each.residual, each.norm, weight, None, tile, gated=kind == "gate_up")


def separate(kind: str, each: Given, weight: torch.Tensor) -> torch.Tensor:
    if kind in ("out", "down"):
        return linear(each.values, weight)
    if kind.endswith("split"):
        return add_norm_in_place(each.residual.hidden, linear(each.values, weight), *each.norm)
    plain = kind == "gate_up plain"
    values = each.values if plain else add_norm_in_place(each.residual.hidden, None, *each.norm)
    product = linear(values, weight)
    return silu_mul(*product.chunk(2, dim=1)) if kind.startswith("gate_up") else product


class Job(NamedTuple):
    """One kernel to compile and measure."""

    name: str
    rows: int
    kind: str
    tile: Tile
    mode: str

    def started(self) -> Tile:
        """Return the tile with its choice of programmatic dependent launch."""
        return self.tile._replace(early=MODES.index(self.mode))


def compile_one(job: Job) -> str | None:
    """Compile one kernel; the main process then finds it in Triton's cache."""
    try:
        each = given(MODELS[job.name], job.kind, job.rows, 1)
        fused(job.kind, each, each.weights[0], job.started())
        torch.cuda.synchronize()
    except Exception as error:  # a tile too large for shared memory, for example
        return f"{job}: {str(error).splitlines()[0][:100]}"
    return None


def seconds_per_call(calls: Sequence[Callable[[], Any]], replays: int = 8) -> float:
    """Return the median time per call of a CUDA graph of all calls."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times) / len(calls)


MODES = ("off", "late", "early", "fetch")
"""The values of `Tile.early`."""
Times = dict[Job, float]


def copies_of(model: Model, kind: str) -> int:
    """Return how many weights a graph rotates through."""
    size = 2 * math.prod(shape_of(model, kind))
    return int(min(200, max(50, ROTATED / size), 12e9 / size))


def measure(jobs: Iterable[Job], times: Times) -> None:
    """Measure kernels, grouped by their inputs."""
    for (name, rows, kind), group in itertools.groupby(jobs, key=lambda job: job[:3]):
        each = given(MODELS[name], kind, rows, copies_of(MODELS[name], kind))
        for job in group:
            tile = job.started()
            times[job] = seconds_per_call(
                [partial(fused, kind, each, weight, tile) for weight in each.weights]
            )
            check(job, each._replace(weights=each.weights[:1]))


def check(job: Job, each: Given) -> None:
    """Compare a kernel with float64."""
    weight, before = each.weights[0].double(), each.residual.hidden.double()
    squares = each.residual.squares if job.kind in ("qkv", "gate_up") else None
    got = fused(job.kind, each, each.weights[0], job.started()).double()
    if squares is not None:
        values = before * (squares.double() / before.shape[1] + 1e-5).rsqrt()
    else:
        values = each.values.double()
    expected = values @ weight.t()
    if job.kind.startswith("gate_up"):
        gate, up = expected.chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    elif job.kind != "qkv":
        expected = before + expected
    if job.kind.endswith("split"):
        expected = expected * (expected.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    error = float((got - expected).norm() / expected.norm())
    if not error < 1e-2:
        print(f"WRONG {job}: {error:.2e}", flush=True)


def reference(name: str, rows: int, kind: str) -> str:
    """Return the floor, the time of the product alone, and that of separate kernels."""
    width, size = shape_of(MODELS[name], kind)
    floor = max(2 * width * size / BYTES_PER_S, 2 * rows * width * size / FLOPS)
    each = given(MODELS[name], kind, rows, copies_of(MODELS[name], kind))
    only = seconds_per_call([lambda w=w: linear(each.values, w) for w in each.weights])
    apart = seconds_per_call([lambda w=w: separate(kind, each, w) for w in each.weights])
    same = seconds_per_call([lambda: linear(each.values, each.weights[0])] * 50)
    return (
        f"floor {floor * 1e6:6.1f} product {only * 1e6:6.1f} (cached {same * 1e6:.1f}) "
        f"separate {apart * 1e6:6.1f} "
    )


def whole(name: str, rows: int, best: dict[str, Tile]) -> str:  # noqa: C901
    """Time all linear layers of a decode step in order."""
    model = MODELS[name]
    given_each = {kind: given(model, kind, rows, model.layers) for kind in KINDS}
    layers = list(zip(*(given_each[kind].weights for kind in KINDS), strict=True))
    hidden, norm = given_each["qkv"].residual.hidden, given_each["qkv"].norm
    attended = given_each["out"].values

    def apart(mode: str) -> None:
        delta, early = None, mode != "off" and hidden.is_cuda
        for q, o, g, d in layers:
            linear(add_norm_in_place(hidden, delta, *norm, early=early), q)
            delta = linear(attended, o)
            both = linear(add_norm_in_place(hidden, delta, *norm, early=early), g)
            delta = linear(silu_mul(*both.chunk(2, dim=1), early=early), d)

    def tile(kind: str, mode: str) -> Tile:
        return Job(name, rows, kind, best[kind], mode).started()

    def together(mode: str) -> None:
        residual = given_each["qkv"].residual
        for q, o, g, d in layers:
            norm_linear(residual, norm, q, None, tile("qkv", mode))
            residual = add_linear(hidden, attended, o, None, tile("out", mode))
            values = norm_linear(residual, norm, g, None, tile("gate_up", mode), gated=True)
            residual = add_linear(hidden, values, d, None, tile("down", mode))

    def added(kind: str, values: torch.Tensor, weight: torch.Tensor, mode: str) -> torch.Tensor:
        if kind not in best:
            return linear(values, weight)
        return split_linear(values, weight, tile(kind, mode))

    def by_norm(mode: str) -> None:
        delta, early = None, mode != "off" and hidden.is_cuda
        for q, o, g, d in layers:
            linear(add_norm_in_place(hidden, delta, *norm, early=early), q)
            delta = added("out split", attended, o, mode)
            values = add_norm_in_place(hidden, delta, *norm, early=early)
            values = gated_linear(values, g, None, tile("gate_up plain", mode))
            delta = added("down split", values, d, mode)

    shown = []
    for how in (apart, together, by_norm):
        for mode in MODES:
            seconds = seconds_per_call([lambda m=mode, h=how: h(m)])
            shown.append(f"{how.__name__} {mode} {seconds * 1e6:.1f}")
    return f"{name} @{rows} all layers, us: " + ", ".join(shown)


def report(name: str, compiled: Callable[[Sequence[Job]], list[Job]]) -> list[Any]:
    """Measure one model, print its tables, and return the fastest of each kernel."""
    cases = [(name, rows, kind) for rows in CASES[name] for kind in (*KINDS, *BY_NORM[name])]
    times: Times = {}
    measure(compiled([Job(*c, tile, MODES[0]) for c in cases for tile in tiles(*c)]), times)
    ordered = {
        case: sorted((job for job in times if job[:3] == case), key=lambda job: times[job])
        for case in cases
    }
    others = [ordered[case][0]._replace(mode=mode) for case in cases for mode in MODES[1:]]
    measure(compiled(others), times)
    for case in cases:
        modes = [ordered[case][0]._replace(mode=mode) for mode in MODES]
        print(
            f"{case[0]:>5} @{case[1]:<5}{case[2]:14}", reference(*case), "fused",
            *(f"{job.mode} {times[job] * 1e6:6.1f}" for job in modes), " ",
            *(f"{','.join(map(str, j.tile[:6]))}={times[j] * 1e6:.1f}" for j in ordered[case][:4]),
            flush=True,
        )  # fmt: skip
    for rows in CASES[name]:
        best = {kind: ordered[name, rows, kind][0].tile for _, _, kind in cases}
        print(whole(name, rows, best), flush=True)
    torch.cuda.empty_cache()
    return [ordered[case][0] for case in cases]


def main() -> None:
    """Compile in parallel, measure, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--workers", type=int, default=min(15, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, help="where the fastest tiles go, as JSON")
    arguments = parser.parse_args()
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:

        def compiled(jobs: Sequence[Job]) -> list[Job]:
            problems = list(pool.map(compile_one, jobs))
            for problem in filter(None, problems):
                print(problem, file=sys.stderr, flush=True)
            seconds = time.perf_counter() - started
            print(f"compiled {len(jobs)} kernels after {seconds:.0f} s", flush=True)
            return [job for job, problem in zip(jobs, problems, strict=True) if problem is None]

        best = [job for name in arguments.models.split(",") for job in report(name, compiled)]
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(best))
    print(f"{time.perf_counter() - started:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
