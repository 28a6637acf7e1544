"""Estimates the memory of the activations that a model keeps for its backward pass.

`EAGER`, `FUSED` and `FLASH` list the number and the width of the tensors that autograd saves in a
layer. `kernels_of` chooses `EAGER`, `FUSED` or `FLASH` for a model and a device. Tests count the
tensors that autograd saves, and benchmarks/memory.py measures whole runs.

In tensor shapes, N is the number of tokens in a forward pass, B is the number of padded rows, and S
is the number of positions in a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from covey.accel.sizes import SHORT
from covey.lab.plan.model_shape import Shape

FLOAT = 4
"""The number of bytes of a float32."""
ON_DEVICE = 2
"""The number of layer inputs that stay on the device if layer inputs are offloaded: the input in
use, and the input that is being copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The numbers of tensors that a Llama layer keeps for its backward pass, by kind of tensor."""

    norm: int
    """The number of norm outputs, which are as wide as the hidden state and have the model's
    precision."""
    norm_frozen: int
    """The number of norm outputs with LoRA, where the weights of norms are not trained."""
    inner: int
    """The number of tensors as wide as the MLP, such as the gate, its activation, and the up
    projection."""
    output: int = 1
    """The number of tensors as wide as all query heads together, such as the input of the output
    projection."""
    projections: int = 7
    """The number of linear layers with LoRA; each keeps a tensor as wide as the LoRA rank."""
    fused: bool = False
    """Whether the model uses the fused layers of accel/fused_forward.py, with a float32 residual
    stream."""
    flash: bool = False
    """Whether the model uses flash attention, which pads keys and values, but not queries."""


EAGER = Saved(norm=4, norm_frozen=2, inner=4)
"""The tensors that an unfused layer of transformers saves."""
FUSED = Saved(norm=2, norm_frozen=2, inner=2, projections=0, fused=True)
"""The tensors that a fused layer saves. Fused layers keep the inputs and outputs of norms, and
recompute SwiGLU and LoRA products."""
FLASH = replace(FUSED, output=0, flash=True)
"""The tensors that a fused layer saves if it computes in 16 bits and uses flash attention. `output`
is 0 because flash attention already keeps the input of the output projection."""


def kernels_of(shape: Shape, size: int, device: str) -> Saved:
    """Return `EAGER`, `FUSED` or `FLASH` for a model, its bytes per number, and a device."""
    if device == "cpu" or not shape.fuses:
        return EAGER
    return FLASH if size < FLOAT else FUSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The size of one forward pass, in sequences and tokens."""

    rows: int
    columns: int
    """The number of tokens of the longest sequence."""
    tokens: int
    """The number of tokens that the model processes, including padding if tokens are not packed."""
    chosen: int
    """The number of tokens whose logits are computed."""
    packed: bool

    @property
    def cells(self) -> int:
        """The number of positions if all sequences are padded to the longest sequence's length."""
        return self.rows * self.columns


def layer_bytes(shape: Shape, size: int, batch: Pass, kernels: Saved, device: str) -> int:
    """Return the bytes that a layer keeps for its backward pass (`size` bytes per number)."""
    norms = kernels.norm_frozen if shape.rank else kernels.norm
    # Both norms keep their inputs in float32.
    token = 2 * shape.hidden * FLOAT + norms * shape.hidden * size
    token += (kernels.output * shape.query + kernels.inner * shape.inner) * size
    if shape.rank:
        token += min(kernels.projections, shape.adapted // shape.layers) * shape.rank * size
    return batch.tokens * token + _attention_bytes(shape, size, batch, kernels, device)


def _attention_bytes(shape: Shape, size: int, batch: Pass, kernels: Saved, device: str) -> int:
    """Return the bytes of inputs, scores and outputs that attention keeps for its backward pass."""
    inputs = shape.query + 2 * shape.key
    if kernels.flash:
        queries = 2 * shape.query + (shape.query + shape.key if shape.head_norms else 0)
        packed = batch.tokens * (queries * size + shape.heads * FLOAT)
        return packed + batch.cells * 2 * shape.key * size
    if _keeps_scores(shape, batch, device):
        return batch.cells * inputs * size + _scores(shape, size, batch)
    return batch.cells * ((inputs + shape.query) * size + shape.heads * FLOAT)


def _keeps_scores(shape: Shape, batch: Pass, device: str) -> bool:
    return not shape.fused_attention or (device == "cpu" and batch.columns <= SHORT)


def _scores(shape: Shape, size: int, batch: Pass) -> int:
    copies = 1 if shape.fused_attention else 2  # unfused attention also keeps scores in float32
    return copies * batch.cells * shape.heads * batch.columns * size


def ends_bytes(shape: Shape, size: int, batch: Pass, kernels: Saved = EAGER) -> int:
    """Return the bytes that the last norm and the head keep for the backward pass."""
    chosen = batch.chosen * shape.hidden * size
    if kernels.fused:  # the residual stream; chosen hidden states and their gradient
        return batch.tokens * shape.hidden * FLOAT + 2 * chosen
    norms = shape.hidden * (FLOAT + (0 if shape.rank else size))
    return batch.tokens * (norms + 2 * shape.hidden * size) + chosen


def passing_bytes(shape: Shape, size: int, batch: Pass, device: str) -> int:
    """Return the bytes that one layer's forward pass allocates temporarily."""
    if kernels_of(shape, size, device).fused:
        # The residual stream before and after attention, the outputs of attention and MLP, the norm
        # and the attention output; then gate, up and their product.
        streams = 2 * FLOAT * shape.hidden + 4 * shape.hidden * size
        return batch.tokens * (streams + (shape.query + 3 * shape.inner) * size)
    return max(_feed_forward(shape, size, batch), _attending(shape, size, batch, device))


def _feed_forward(shape: Shape, size: int, batch: Pass) -> int:
    return batch.tokens * (3 * shape.inner + 3 * shape.hidden) * size


def _attending(shape: Shape, size: int, batch: Pass, device: str) -> int:
    inputs = batch.cells * (2 * shape.query + 2 * shape.key) * size
    scores = 2 * _scores(shape, size, batch) if _keeps_scores(shape, batch, device) else 0
    return inputs + scores


def training_bytes(
    shape: Shape,
    size: int,
    batch: Pass,
    *,
    device: str,
    checkpointing: bool = False,
    offload: bool = False,
    head: int = 0,
) -> int:
    """Return the bytes of activations in a forward and backward pass.

    With gradient checkpointing, a layer keeps only its input and the result of flash attention. The
    backward pass recomputes one layer at a time. With `offload`, the layer inputs are in main
    memory, except the inputs that are in use or being copied. `head` is the number of bytes that
    the LM head frees before the backward pass of fused layers begins.
    """
    kernels = kernels_of(shape, size, device)
    inputs = min(ON_DEVICE, shape.layers) if offload and device != "cpu" else shape.layers
    layer = layer_bytes(shape, size, batch, kernels, device)
    ends = ends_bytes(shape, size, batch, kernels)
    if kernels.fused:
        stream = batch.tokens * shape.hidden * FLOAT
        # The first norm keeps the layer's input itself, and the result of attention is kept.
        attended = batch.tokens * (shape.query * size + shape.heads * FLOAT) * kernels.flash
        again = layer - stream - attended if checkpointing else 0
        # The temporary tensors in the backward pass of the last MLP.
        backward = batch.tokens * (3 * shape.inner * size + shape.hidden * (FLOAT + size))
        passing = max(0, again + backward - head)
        kept = inputs * stream + shape.layers * attended if checkpointing else shape.layers * layer
        return kept + ends + passing
    layers = shape.layers * layer
    if checkpointing:
        layers = layer + inputs * batch.tokens * shape.hidden * size
    # When the backward pass reaches a layer's attention, it has freed the tensors of the layer's
    # MLP.
    freed = batch.tokens * kernels.inner * shape.inner * size
    passing = max(_feed_forward(shape, size, batch), _attending(shape, size, batch, device) - freed)
    return layers + ends + passing
