"""Memory of a rank whose parameters are sharded (parallel.strategy = "fsdp").

A rank stores its shard of the float32 weights, moments and gradients. Every rank also stores the
engine's full copy of the weights. During a forward or backward pass, every rank has the complete
weights of the current and the next block, the embedding, the head and the last norm. With only one
rank, fused passes use weights that are gathered once per optimizer step.
"""

from __future__ import annotations

from covey.analysis.plan.activations import FLOAT
from covey.analysis.plan.forecast import ALWAYS, Part
from covey.analysis.plan.model_shape import Shape

BLOCKS = 2
"""The number of blocks gathered at once: the current block, and either the next block or the
gradients of the previous block.
"""


def sharded_parts(
    shape: Shape, size: int, shards: int, moments: int, *, stays_gathered: bool = False
) -> list[Part]:
    """Return the memory of weights and optimizer state on one rank.

    A weight takes `size` bytes in computations, and the moments of a trained parameter take
    `moments` bytes. With `stays_gathered`, all weights stay gathered during an optimizer step.
    """
    weights = shape.parameters + shape.added
    own = shape.trained * FLOAT + (weights - shape.trained) * size
    what = f"1 of {shards} parts"
    parts = [
        Part("weights", weights * size, ALWAYS, "the engine's whole copy"),
        Part("sharded weights", -(-own // shards), ALWAYS, f"{what}, trained ones in float32"),
        Part(
            "moments",
            -(-shape.trained * moments // shards),
            ALWAYS,
            f"{what} of AdamW's two moments of {shape.trained:,} trained parameters",
        ),
        Part(
            "gradients",
            -(-shape.trained * FLOAT // shards),
            ALWAYS if stays_gathered else ("update", "step"),
            f"{what}, float32" + ", kept until the next optimizer step" * stays_gathered,
        ),
    ]
    if stays_gathered:
        joined = 0 if shape.rank else shape.layers * shape.hidden * (
            shape.query + 2 * shape.key + 2 * shape.inner
        )  # fmt: skip
        return [
            *parts,
            Part("gathered", weights * size, ("prepare", "update"), "whole weights"),
            Part("fused weights", joined * size, ALWAYS, "gathered projections, concatenated"),
        ]
    gathered = BLOCKS * block_parameters(shape) + end_parameters(shape)
    return [
        *parts,
        Part(
            "gathered",
            gathered * size,
            ("prepare", "update"),
            f"whole weights of {BLOCKS} blocks, embedding and head",
        ),
        Part("gathered grad", _gradients(shape, size), ("update",), "of one block, whole"),
    ]


def block_parameters(shape: Shape) -> int:
    """Return the number of parameters of one block, including its adapter."""
    if not shape.fuses:
        return (shape.parameters + shape.added - shape.head) // shape.layers
    attention = 2 * shape.hidden * (shape.query + shape.key)
    return attention + shape.hidden * (3 * shape.inner + 2) + shape.added // shape.layers


def end_parameters(shape: Shape) -> int:
    """Return the number of parameters outside the blocks."""
    whole = shape.parameters + shape.added
    return max(shape.head, whole - shape.layers * block_parameters(shape))


def _gradients(shape: Shape, size: int) -> int:
    """Return the memory of the unsharded gradients of one block and of a trained output layer.

    The reduce-scatter needs a float32 copy of the block's gradients.
    """
    per_block = shape.trained // shape.layers if shape.rank else block_parameters(shape)
    sent = FLOAT if size < FLOAT else 0
    return per_block * (size + sent) + shape.head * size * shape.head_trained
