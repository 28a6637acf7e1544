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
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from speed_device import copy_bandwidth, seconds_of

from covey.accel.kernels import decode_attention as kernels
from covey.accel.kernels.decode_attention import LayerCache, Tiling
from covey.engines.native.shared_prompt_cache import slots_by_prompt, slots_together
from covey.engines.native.sizes import page_for

Rope = tuple[torch.Tensor, torch.Tensor]
KIND = torch.bfloat16
COLD_BYTES = 400 * 2**20
"""Keys and values of the replayed layers, several times the size of the L2 cache."""
TOLERANCE = 0.01
"""Largest relative error."""
SCALE = 0.1
WORKERS = 16
"""Processes that compile."""


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
    "1.5B@64 16k": Shape(12, 2, 128, 64, written=8192, capacity=16384),
}


def layers_of(shape: Shape, layers: int, device: str) -> list[LayerCache]:
    """Return random caches that share everything but keys and values, with pages in any order."""
    torch.manual_seed(0)
    page = page_for(shape.capacity)
    table = -(-shape.capacity // page)
    prompts = shape.slots // shape.group
    slot = torch.arange(shape.slots, device=device)
    together = slots_together(shape.query_heads // shape.key_heads)
    groups = (slot // shape.group).cpu().numpy()
    sharing = torch.from_numpy(slots_by_prompt(groups, together)).to(device)
    order = torch.randperm(shape.slots * table, device=device).int().view(shape.slots, table)
    heads = (shape.key_heads, page, shape.size)

    random = partial(torch.randn, dtype=KIND, device=device)

    def one() -> LayerCache:
        keys, values = random(2, shape.slots * table, *heads)
        before = random(2, prompts, shape.key_heads, shape.prompt, shape.size)
        return LayerCache(
            before[0], before[1], slot // shape.group, torch.full_like(slot, shape.prompt),
            keys, values, order, torch.full_like(slot, shape.written),
            torch.ones(shape.slots, dtype=torch.bool, device=device),
            sharing,
            torch.zeros(shape.slots, shape.key_heads, dtype=torch.int32, device=device),
            torch.ones(2, shape.key_heads, device=device),
        )  # fmt: skip

    return [one() for _ in range(layers)]


def inputs(shape: Shape, device: str) -> tuple[torch.Tensor, Rope]:
    """Return queries, keys and values of the new tokens, and RoPE tables."""
    torch.manual_seed(1)
    width = (shape.query_heads + 2 * shape.key_heads) * shape.size
    angles = torch.randn(shape.prompt + shape.capacity, shape.size // 2, device=device)
    heads = torch.randn(shape.slots, width, dtype=KIND, device=device)
    return heads, (angles.cos(), angles.sin())


def compile_one(job: tuple[Shape, Tiling | None]) -> str:
    """Compile the kernel of a tiling for this machine's GPU; return an error, if any."""
    shape, tiling = job
    try:
        layer = layers_of(shape, 1, "cuda")[0]
        tiling = kernels.tiling_for(shape.slots, layer) if tiling is None else tiling
        heads, rope = inputs(shape, "cuda")
        _, grid, arguments, known = kernels.launch(
            heads, layer, rope=rope, scale=SCALE, norms=None, tiling=tiling
        )
        kernels._decode_attention.warmup(*arguments, grid=(grid,), **known)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:80]}"
    finally:
        torch.cuda.empty_cache()
    return ""


@torch.inference_mode()
def reference(
    shape: Shape, layer: LayerCache, heads: torch.Tensor, rope: Rope, slots: int
) -> torch.Tensor:
    """Return attention of the first slots in float32, from keys rounded as in the cache."""
    each = heads[:slots].float().view(slots, -1, shape.size)
    query, key, value = each.split([shape.query_heads, shape.key_heads, shape.key_heads], dim=1)
    cos, sin = (table[shape.prompt + shape.written] for table in rope)

    def turned(whole: torch.Tensor) -> torch.Tensor:
        first, second = whole.chunk(2, dim=-1)
        both = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return both.to(KIND).float()

    def all_of(prompts: torch.Tensor, pool: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        before = prompts[layer.prompt_row[:slots]].float()
        own = pool[layer.pages[:slots].long()].transpose(1, 2).flatten(2, 3)
        own = own[:, :, : shape.written].float()
        return torch.cat([before, own, new[:, :, None]], dim=2)

    keys = all_of(layer.prompt_keys, layer.keys, turned(key))
    values = all_of(layer.prompt_values, layer.values, value)
    grouped = turned(query).view(slots, shape.key_heads, -1, shape.size)
    weights = (grouped @ keys.transpose(2, 3) * SCALE).softmax(dim=-1)
    return (weights @ values).flatten(1)


def measure(call: Callable[[int], torch.Tensor], layers: int, repeat: int = 12) -> float:
    """Return the median seconds of one layer in a replayed graph of all layers."""
    for number in range(min(2, layers)):
        call(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(layers):
            call(number)
    return statistics.median(seconds_of(graph.replay, "cuda") / layers for _ in range(repeat))


def sweep(shape: Shape) -> list[Tiling | None]:
    """Return tilings to try: positions per iteration, warps, stages, sharing and splits."""
    splits: tuple[int, ...] = (1,)
    if shape.written > 1000:
        tiles, splits = [(64, 4, 2), (64, 4, 3), (128, 4, 2)], (2, 4, 8)
    elif shape.size <= 64:
        tiles = [
            (32, 1, 2),
            (32, 1, 3),
            (32, 1, 4),
            (32, 2, 3),
            (64, 2, 2),
            (64, 4, 3),
            (128, 4, 2),
        ]
    else:
        tiles = [(16, 1, 4), (32, 1, 3), (32, 2, 2), (32, 2, 3), (32, 4, 3), (64, 4, 2), (64, 4, 3)]
    return [Tiling(*tile, both, n, True) for tile, both, n in product(tiles, (True, False), splits)]


def run(name: str, tilings: list[Tiling | None], bandwidth: float) -> None:
    """Measure one shape, and print the rows and the fastest."""
    shape = SHAPES[name]
    floor, (heads, rope) = shape.floor_bytes / bandwidth, inputs(shape, "cuda")
    layers = layers_of(shape, max(2, min(30, COLD_BYTES // shape.floor_bytes + 1)), "cuda")
    found = []
    for tiling in tilings:

        def call(number: int, tiling: Tiling | None = tiling) -> torch.Tensor:
            return kernels.decode_attention(
                heads, layers[number], rope=rope, scale=SCALE, tiling=tiling
            )

        slots = min(16, shape.slots)
        expected = reference(shape, layers[0], heads, rope, slots)
        error = float((call(0)[:slots].float() - expected).norm() / expected.norm())
        seconds = measure(call, len(layers))
        used = kernels.tiling_for(shape.slots, layers[0]) if tiling is None else tiling
        text = " ".join(f"{key} {value}" for key, value in used._asdict().items())
        wrong = "" if error < TOLERANCE else "  WRONG"
        print(
            f"{name}: {1e6 * seconds:6.1f} us, {seconds / floor:.2f} times the floor; {text}; "
            f"error {error:.0e}{wrong}",
            flush=True,
        )
        found.append((seconds, text))
    seconds, text = min(found)
    print(
        f"== {name}: {1e6 * seconds:.1f} us, floor {1e6 * floor:.1f} us, {seconds / floor:.2f} "
        f"times; {text}",
        flush=True,
    )


def main() -> None:
    """Compile in parallel, then measure one tiling after the other."""
    about, *_ = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="names, with commas")
    parser.add_argument("--sweep", action="store_true", help="try many tilings")
    arguments = parser.parse_args()
    names = arguments.shapes.split(",")
    jobs = {name: sweep(SHAPES[name]) if arguments.sweep else [None] for name in names}
    started = time.perf_counter()
    flat = [(SHAPES[name], tiling) for name in names for tiling in jobs[name]]
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("fork")) as pool:
        errors = dict(zip(flat, pool.map(compile_one, flat), strict=True))
    print(f"compiled {len(flat)} in {time.perf_counter() - started:.1f} s", flush=True)
    for job, error in errors.items():
        if error:
            print(*job, error)
    bandwidth = copy_bandwidth("cuda", 4096)
    for name in names:
        run(name, [t for t in jobs[name] if not errors[SHAPES[name], t]], bandwidth)


if __name__ == "__main__":
    main()
