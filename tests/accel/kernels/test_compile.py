"""The attention kernel compiles for other GPUs, and fits in their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

LEAST_SHARED_MEMORY = 99 * 2**10
"""Shared memory of a program on the smaller GPUs since Ampere: RTX 3090, A10, L4, RTX 4090."""

# In a separate process, because kernels may be interpreted in this one. All but numbers are
# pointers.
COMPILE = """
import json, sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from covey.accel.kernels.decode_attention import (
    _decode_attention as kernel, LayerCache, tiling_for
)

KINDS = {"cosine": "*fp32", "sine": "*fp32", "prompt_row": "*i64", "prompt_length": "*i64",
         "place": "*i64", "active": "*i1", "pages": "*i32", "sharing": "*i32", "arrived": "*i32",
         "parts": "*fp32", "scale": "fp32", "eps": "fp32"}
KINDS |= dict.fromkeys(["prompt_capacity", "slot_pages", "slots", "programs"], "i32")
found = {}
for size, slots in ((16, 50), (64, 50), (64, 1000), (128, 1000), (256, 50)):
    for kind, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        cache = LayerCache(*[torch.empty(1, 2, 128, size, dtype=dtype)] * 11)
        block, warps, stages, together, splits, _ = tiling_for(slots, cache)
        known = dict(key_heads=2, shared=6, size=size, rows=16, block=block, norms=False,
                     together=2 if together else 1, sequences=4 if together else 2, page=128,
                     splits=splits, early=False, precision="ieee" if kind == "fp32" else "tf32")
        signature = {name: "constexpr" if name in known else KINDS.get(name, "*" + kind)
                     for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=known)
        options = {"num_warps": warps, "num_stages": stages}
        made = triton.compile(source, target=GPUTarget("cuda", 89, 32), options=options)
        found[f"{size} {slots} {kind}"] = made.metadata.shared
print(json.dumps(found))
"""


def test_attention_fits_in_the_shared_memory_of_smaller_gpus() -> None:
    compiled = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", COMPILE]
    done = subprocess.run(words, env=compiled, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 10
    assert all(0 < bytes_ <= LEAST_SHARED_MEMORY for bytes_ in found.values()), found
