"""Kernels with large tiles compile for other GPUs, and fit in their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

LEAST_SHARED_MEMORY, HOPPER_SHARED_MEMORY = 99 * 2**10, 227 * 2**10
"""Shared memory of a program: on the smaller GPUs since Ampere (RTX 3090, A10, L4, RTX 4090), and on
H100 and H200."""

# In a separate process, because kernels may be interpreted in this one. All but numbers are
# pointers.
COMPILE = """
import json, sys, torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from covey.accel.kernels.decode_attention import (
    _decode_attention as kernel, LayerCache, tiling_for
)

KINDS = {"cosine": "*fp32", "sine": "*fp32", "prompt_row": "*i64", "prompt_length": "*i64",
         "place": "*i64", "active": "*i1", "pages": "*i32", "sharing": "*i32", "arrived": "*i32",
         "units": "*fp32", "parts": "*fp32", "scale": "fp32", "eps": "fp32"}
KINDS |= dict.fromkeys(["prompt_capacity", "slot_pages", "slots", "programs"], "i32")
hopper = CAPABILITY >= 90
found = {}
for size, slots in ((16, 50), (64, 50), (64, 1000), (128, 1000), (256, 50)):
    for kind, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        cache = LayerCache(*[torch.empty(1, 2, 128, size, dtype=dtype)] * len(LayerCache._fields))
        block, warps, stages, together, splits, _ = tiling_for(slots, cache, hopper=hopper)
        known = dict(key_heads=2, shared=6, size=size, rows=16, block=block, norms=False,
                     together=2 if together else 1, sequences=4 if together else 2, page=128,
                     splits=splits, early=hopper, rounds=False,
                     kind=tl.float32 if kind == "fp32" else tl.bfloat16,
                     precision="ieee" if kind == "fp32" else "tf32")
        signature = {name: "constexpr" if name in known else KINDS.get(name, "*" + kind)
                     for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=known)
        options = {"num_warps": warps, "num_stages": stages}
        made = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
        found[f"{size} {slots} {kind}"] = made.metadata.shared
print(json.dumps(found))
"""


GATED = """
import json, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from covey.accel.kernels.gated_linear import _gated_linear as kernel, tile_for

found = {}
for tokens, kind, dtype in ((128, "bf16", torch.bfloat16), (1024, "bf16", torch.bfloat16),
                            (8, "fp32", torch.float32)):
    tile = tile_for(tokens, dtype)
    for capability in (89, 90):
        known = dict(size=576, rows=tile.rows, columns=tile.columns, block=tile.block,
                     biased=True, early=capability >= 90,
                     precision="ieee" if kind == "fp32" else "tf32")
        signature = {name: "constexpr" if name in known else
                     "i32" if name in ("count", "width") else "*" + kind
                     for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=known)
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        found[f"{tokens} {kind} {capability}"] = made.metadata.shared
print(json.dumps(found))
"""


PACKED = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from covey.accel.kernels import packed_attention as module

NUMBERS = ("tokens", "places", "query_stride", "query_head", "key_stride", "key_head",
           "value_stride", "value_head")
KINDS = dict.fromkeys(("norm", "inner"), "*fp32") | dict.fromkeys(("factor", "scale"), "fp32")
KINDS |= dict.fromkeys(("query_starts", "key_starts"), "*i32") | dict.fromkeys(NUMBERS, "i32")
found = {}
for size in (16, 64, 128):
    tiles = module.tiles_for(size, large=CAPABILITY == 90)
    for name in ("forward", "query_grad", "key_grad"):
        kernel, tile = getattr(module, "_" + name), getattr(tiles, name)
        known = dict(heads=12, shared=6, size=size, queries=tile.queries, keys=tile.keys,
                     precision="tf32")
        known |= {"parts": 2} if name == "key_grad" else {}
        signature = {n: "constexpr" if n in known else KINDS.get(n, "*bf16")
                     for n in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=known)
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        made = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
        found[f"{name} {size}"] = made.metadata.shared
print(json.dumps(found))
"""


PROGRAMS = {
    "attention on small GPUs": (COMPILE.replace("CAPABILITY", "89"), 10, LEAST_SHARED_MEMORY),
    "attention on Hopper": (COMPILE.replace("CAPABILITY", "90"), 10, HOPPER_SHARED_MEMORY),
    "SwiGLU": (GATED, 6, LEAST_SHARED_MEMORY),
    "training attention on small GPUs": (
        PACKED.replace("CAPABILITY", "89"), 9, LEAST_SHARED_MEMORY
    ),
    "training attention on Hopper": (PACKED.replace("CAPABILITY", "90"), 9, HOPPER_SHARED_MEMORY),
}  # fmt: skip
"""By what they compile: a program, how many kernels that is, and the shared memory they may use."""


@pytest.fixture(scope="module")
def shared_memory() -> dict[str, dict[str, int]]:
    """The shared memory of each kernel of each program. One process runs them all."""
    compiled = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", "\n".join(program for program, _, _ in PROGRAMS.values())]
    done = subprocess.run(words, env=compiled, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = done.stdout.splitlines()
    return dict(zip(PROGRAMS, map(json.loads, printed), strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_fit_in_shared_memory(name: str, shared_memory: dict[str, dict[str, int]]) -> None:
    _, kernels, limit = PROGRAMS[name]
    found = shared_memory[name]
    assert len(found) == kernels
    assert all(0 < bytes_ <= limit for bytes_ in found.values()), found
