"""Decode attention on a GPU: microseconds per layer beside the time to read keys and values once.

    python benchmarks/decode_attention.py                   # the tiling that the engine chooses
    python benchmarks/decode_attention.py --sweep           # many tilings, compiled in parallel
    python benchmarks/decode_attention.py --shapes 135M@1024

Each row is one layer of one decode step, replayed as a CUDA graph over several layers, so that the
L2 cache holds nothing of a layer when its turn comes. All completions have half of their length.
The floor is each completion's keys and values and each group's prompt, read once at the measured
copy bandwidth. Every result is compared with attention in float32.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product

import torch
from speed_device import copy_bandwidth

from covey.accel.kernels import decode_attention as kernels
from covey.accel.kernels.decode_attention import LayerCache, Tiling

COLD_BYTES = 400 * 2**20
"""Keys and values of the replayed layers, several times the size of the L2 cache."""
KIND = torch.bfloat16
TOLERANCE = 0.01
"""Largest relative error of bfloat16 results."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of a layer, slots, and lengths."""

    query_heads: int
    key_heads: int
    size: int
    slots: int
    prompt: int = 128
    written: int = 128
    capacity: int = 256
    group: int = 8

    @property
    def floor_bytes(self) -> int:
        """Keys and values of completions and prompts, in bfloat16."""
        positions = self.slots * self.written + self.slots // self.group * self.prompt
        return positions * self.key_heads * self.size * 2 * 2


SHAPES = {
    "135M@128": Shape(9, 3, 64, 128),
    "135M@512": Shape(9, 3, 64, 512),
    "135M@1024": Shape(9, 3, 64, 1024),
    "1.5B@128": Shape(12, 2, 128, 128),
    "1.5B@512": Shape(12, 2, 128, 512),
    "7B@128": Shape(28, 4, 128, 128),
    "7B@512": Shape(28, 4, 128, 512),
    "135M@1024 p16": Shape(9, 3, 64, 1024, prompt=16),
    "1.5B@512 p16": Shape(12, 2, 128, 512, prompt=16),
    "1.5B@64 16k": Shape(12, 2, 128, 64, written=8192, capacity=16384),
}


def layers_of(shape: Shape, layers: int, page: int, device: str) -> list[LayerCache]:
    """Return random caches that share everything but keys and values."""
    torch.manual_seed(0)
    kind = {"dtype": KIND, "device": device}
    table = -(-shape.capacity // page)
    prompts = shape.slots // shape.group
    slot = torch.arange(shape.slots, device=device)
    together = 1 << (16 // (shape.query_heads // shape.key_heads)).bit_length() - 1
    rows = slot.view(-1, together).int()
    sharing = torch.full((shape.slots, together), -1, dtype=torch.int32, device=device)
    sharing[: len(rows)] = rows
    order = torch.randperm(shape.slots * table, device=device).int().view(shape.slots, table)
    heads = (shape.key_heads, page, shape.size)

    def one() -> LayerCache:
        keys, values = torch.randn(2, shape.slots * table, *heads, **kind)
        before = torch.randn(2, prompts, shape.key_heads, shape.prompt, shape.size, **kind)
        return LayerCache(
            before[0], before[1], slot // shape.group, torch.full_like(slot, shape.prompt),
            keys, values, order, torch.full_like(slot, shape.written),
            torch.ones(shape.slots, dtype=torch.bool, device=device),
            sharing, torch.tensor([len(rows)], dtype=torch.int32, device=device),
            torch.zeros(shape.slots, shape.key_heads, dtype=torch.int32, device=device),
        )  # fmt: skip

    return [one() for _ in range(layers)]


def inputs(shape: Shape, device: str) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return queries, keys and values of the new tokens, and RoPE tables."""
    torch.manual_seed(1)
    width = (shape.query_heads + 2 * shape.key_heads) * shape.size
    angles = torch.randn(shape.prompt + shape.capacity, shape.size // 2, device=device)
    heads = torch.randn(shape.slots, width, dtype=KIND, device=device)
    return heads, (angles.cos(), angles.sin())


def compile_one(job: tuple[Shape, Tiling, int]) -> str:
    """Compile the kernels of a tiling for this machine's GPU; return an error, if any."""
    shape, tiling, page = job
    try:
        layer = layers_of(shape, 1, page, "cuda")[0]
        heads, rope = inputs(shape, "cuda")
        _, grid, arguments, known = kernels.launch(
            heads, layer, rope=rope, scale=0.1, tiling=tiling
        )
        kernels._decode_attention.warmup(*arguments, grid=(grid,), **known)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:80]}"
    finally:
        torch.cuda.empty_cache()
    return ""


@torch.inference_mode()
def reference(shape: Shape, layer: LayerCache, heads: torch.Tensor, rope, slots: int):
    """Return attention of the first slots in float32."""
    groups = shape.query_heads // shape.key_heads
    at = shape.prompt + shape.written
    each = heads[:slots].float().view(slots, -1, shape.size)
    query, key, value = each.split([shape.query_heads, shape.key_heads, shape.key_heads], dim=1)
    cos, sin = rope[0][at], rope[1][at]

    def turned(x):
        first, second = x.chunk(2, dim=-1)
        both = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return both.to(KIND).float()

    query, key = turned(query), turned(key)
    old = [
        t[layer.pages[:slots].long()].transpose(1, 2).flatten(2, 3)[:, :, : shape.written].float()
        for t in (layer.keys, layer.values)
    ]
    asked = [t[layer.prompt_row[:slots]].float() for t in (layer.prompt_keys, layer.prompt_values)]
    keys, values = (
        torch.cat([a, o, n[:, :, None]], dim=2)
        for a, o, n in zip(asked, old, (key, value), strict=True)
    )
    score = query.view(slots, shape.key_heads, groups, -1) @ keys.transpose(2, 3) * 0.1
    return (score.softmax(-1) @ values).flatten(1)


def measure(call, layers: int, repeat: int = 12) -> float:
    """Return the median seconds of one layer in a replayed graph of all layers."""
    for number in range(min(2, layers)):
        call(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(layers):
            call(number)
    times = []
    for _ in range(repeat):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / layers)
    return sorted(times)[len(times) // 2]


def sweep(shape: Shape) -> list[tuple[Tiling, int]]:
    """Return tilings and page sizes to try."""
    small = shape.size <= 64
    if shape.written > 1000:
        tiles = [(64, 4, 2), (64, 4, 3), (128, 4, 2), (32, 4, 4), (64, 2, 3)]
        return [
            (Tiling(*tile, together, splits, True), 128)
            for tile, together, splits in product(tiles, (False, True), (4, 8, 16))
        ]
    if small:
        tiles = [
            (32, 1, 2),
            (32, 1, 3),
            (32, 2, 2),
            (32, 2, 3),
            (64, 2, 2),
            (64, 2, 3),
            (64, 4, 2),
            (64, 4, 3),
            (128, 4, 2),
        ]
    else:
        tiles = [
            (16, 1, 3),
            (32, 1, 2),
            (32, 2, 2),
            (32, 2, 3),
            (32, 4, 2),
            (32, 4, 3),
            (64, 4, 2),
            (64, 4, 3),
            (128, 4, 2),
        ]
    found = [(Tiling(*tile, True, 1, True), 128) for tile in tiles]
    found += [(Tiling(*tile, False, 1, True), 128) for tile in tiles[2:]]
    found += [(Tiling(*tile, True, 1, True, 96), 128) for tile in tiles[5:]]
    found += [(Tiling(*tile, True, 1, True, 128), 128) for tile in tiles[:5]]
    found.append((Tiling(*tiles[6], True, 1, False), 128))
    if shape.slots <= 128:
        found += [
            (Tiling(*tile, together, 2, True), 128)
            for tile, together in product(tiles[4:8], (False, True))
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--page", type=int, default=128)
    arguments = parser.parse_args()
    names = arguments.shapes.split(",")
    started = time.time()
    jobs = {
        name: sweep(SHAPES[name]) if arguments.sweep else [(None, arguments.page)] for name in names
    }
    flat = [(SHAPES[name], *job) for name in names for job in jobs[name]]
    with ProcessPoolExecutor(16, mp_context=multiprocessing.get_context("fork")) as pool:
        failed = dict(zip(flat, pool.map(compile_one, flat), strict=True))
    print(f"compiled {len(flat)} in {time.time() - started:.1f} s", flush=True)
    bandwidth = copy_bandwidth("cuda", 4096)
    print(f"copy {bandwidth / 1e12:.2f} TB/s")
    for name in names:
        run(name, jobs[name], failed, bandwidth)


def run(name, jobs, failed, bandwidth) -> None:
    """Measure one shape and print its rows, fastest first."""
    shape = SHAPES[name]
    floor = shape.floor_bytes / bandwidth
    heads, rope = inputs(shape, "cuda")
    found = []
    caches = {}
    for tiling, page in sorted(jobs, key=lambda job: job[1]):
        if failed[shape, tiling, page]:
            print(name, tiling, page, failed[shape, tiling, page])
            continue
        count = max(2, min(30, COLD_BYTES // shape.floor_bytes + 1))
        if page not in caches:
            caches = {page: layers_of(shape, count, page, "cuda")}
        caches_now = caches[page]

        def call(number, tiling=tiling, caches_now=caches_now):
            return kernels.decode_attention(
                heads, caches_now[number], rope=rope, scale=0.1, tiling=tiling
            )

        try:
            got, slots = call(0), min(16, shape.slots)
            expected = reference(shape, caches_now[0], heads, rope, slots)
            error = float((got[:slots].float() - expected).norm() / expected.norm())
            seconds = measure(call, count)
        except Exception as problem:
            print(name, tiling, page, repr(problem)[:200])
            continue
        wrong = "" if error < TOLERANCE else "  WRONG"
        text = "" if tiling is None else " ".join(f"{k}={v}" for k, v in tiling._asdict().items())
        row = f"{seconds / floor:5.2f}x  page={page} {text}  {error:.1e}{wrong}"
        print(f"{name}: {1e6 * seconds:7.1f} us  {row}", flush=True)
        found.append((seconds, row))
    if found:
        seconds, row = min(found)
        print(f"== {name}: floor {1e6 * floor:.1f} us, best {1e6 * seconds:.1f} us {row}")


if __name__ == "__main__":
    main()
