"""What a model keeps in memory while it computes.

How many tensors autograd saves in a layer, and of which width, is written down once, in `EAGER`,
`FUSED` and `FLASH`; `kernels_of` says which of them a model takes on a device. Tests count what
autograd really saves, and benchmarks/memory.py measures whole runs: a kernel that keeps less is a
line here.

Shapes: N tokens in a forward pass, B rows of S columns each, which are B * S cells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from covey.accel.attention import SHORT
from covey.analysis.plan.shapes import Shape

FLOAT = 4
"""Bytes of a float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Tensors that one layer of Llama's shape keeps for its backward pass, a token each."""

    norm_float: int
    """As wide as the hidden state, float32 whatever the model computes in: inputs of norms."""
    norm: int
    """As wide as the hidden state: what norms give, before and after their weights."""
    norm_frozen: int
    """The same when norms are not trained, as under an adapter."""
    inner: int
    """As wide as the feed-forward part: gate, its activation, up, and the product."""
    inner_adapted: int
    """The same under an adapter, whose layers keep what they read."""
    output: int = 1
    """As wide as the queries: what the output projection reads, if attention does not keep it."""
    projections: int = 7
    """Linear layers, each of which keeps a tensor as wide as an adapter's rank."""
    fused: bool = False
    """Whether the residual stream is float32, and the forward pass that of policy/fused.py."""
    flash: bool = False
    """Whether queries stay packed, and keys and values alone are gathered into rows."""


EAGER = Saved(norm_float=2, norm=4, norm_frozen=2, inner=4, inner_adapted=4)
"""transformers' own layers, one operation after the other."""
FUSED = Saved(norm_float=2, norm=2, norm_frozen=2, inner=2, inner_adapted=3, fused=True)
"""Norms that keep the residual stream and what they give; a gate whose product is made again."""
FLASH = replace(FUSED, output=0, flash=True)
"""The same in bfloat16, with flash kernels: the output projection reads what attention keeps."""


def kernels_of(shape: Shape, size: int, device: str) -> Saved:
    """Return the layers that a model runs, computing with `size` bytes a number."""
    if device == "cpu" or not shape.fuses:
        return EAGER
    return FLASH if size < FLOAT else FUSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The tokens of one forward pass."""

    rows: int
    columns: int
    """Of the longest row."""
    tokens: int
    """Those that the model reads: packed, or with padding."""
    chosen: int
    """Those whose logits are taken."""
    packed: bool

    @property
    def cells(self) -> int:
        """Places that attention is over: packed tokens are gathered into rows for it."""
        return self.rows * self.columns


def layer_bytes(shape: Shape, size: int, batch: Pass, kernels: Saved, device: str) -> int:
    """Return what one layer saves for its backward pass, computing with `size` bytes a number."""
    norms = kernels.norm_frozen if shape.rank else kernels.norm
    inner = kernels.inner_adapted if shape.rank else kernels.inner
    token = kernels.norm_float * shape.hidden * FLOAT + norms * shape.hidden * size
    token += (kernels.output * shape.query + inner * shape.inner) * size
    if shape.rank:
        token += min(kernels.projections, shape.adapted // shape.layers) * shape.rank * size
    return batch.tokens * token + _attention_bytes(shape, size, batch, kernels, device)


def _attention_bytes(shape: Shape, size: int, batch: Pass, kernels: Saved, device: str) -> int:
    """Return what attention saves: scores where it is made of products, else its own in and out."""
    inputs = shape.query + 2 * shape.key
    if kernels.flash:
        queries = 2 * shape.query + (shape.query + shape.key if shape.head_norms else 0)
        questions = batch.tokens * (queries * size + shape.heads * FLOAT)
        return questions + batch.cells * 2 * shape.key * size
    if _keeps_scores(shape, batch, device):
        return batch.cells * inputs * size + _scores(shape, size, batch)
    return batch.cells * ((inputs + shape.query) * size + shape.heads * FLOAT)


def _keeps_scores(shape: Shape, batch: Pass, device: str) -> bool:
    return not shape.fused_attention or (device == "cpu" and batch.columns <= SHORT)


def _scores(shape: Shape, size: int, batch: Pass) -> int:
    copies = 1 if shape.fused_attention else 2  # plain attention keeps them in float32 as well
    return copies * batch.cells * shape.heads * batch.columns * size


def ends_bytes(shape: Shape, size: int, batch: Pass, kernels: Saved = EAGER) -> int:
    """Return what is saved outside of the layers: the last norm, and hidden states for the head."""
    chosen = batch.chosen * shape.hidden * size
    if kernels.fused:  # the residual stream; chosen hidden states, and their gradient beside them
        return batch.tokens * shape.hidden * FLOAT + 2 * chosen
    norms = shape.hidden * (FLOAT + (0 if shape.rank else size))
    return batch.tokens * (norms + 2 * shape.hidden * size) + chosen


def passing_bytes(shape: Shape, size: int, batch: Pass, device: str) -> int:
    """Return what one layer needs while it computes, and frees again."""
    if kernels_of(shape, size, device).fused:
        # The residual stream before and after attention, what either half adds to it, norm and
        # attended; then gate, up and their product.
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
    head: int = 0,
) -> int:
    """Return the activations of a forward and backward pass.

    With checkpointing every layer keeps its input only, and one at a time is computed again. `head`
    is what the head takes for itself: it is through when a fused layer's backward pass begins.
    """
    kernels = kernels_of(shape, size, device)
    layer = layer_bytes(shape, size, batch, kernels, device)
    ends = ends_bytes(shape, size, batch, kernels)
    if kernels.fused:
        stream = batch.tokens * shape.hidden * FLOAT
        again = layer - stream if checkpointing else 0  # its first norm keeps the input itself
        passing = max(0, again + _fused_backward(shape, size, batch) - head)
        return shape.layers * (stream if checkpointing else layer) + ends + passing
    layers = shape.layers * layer
    if checkpointing:
        layers = layer + shape.layers * batch.tokens * shape.hidden * size
    # When the backward pass comes to a layer's attention, its feed-forward part is freed already.
    freed = batch.tokens * kernels.inner * shape.inner * size
    passing = max(_feed_forward(shape, size, batch), _attending(shape, size, batch, device) - freed)
    return layers + ends + passing


def _fused_backward(shape: Shape, size: int, batch: Pass) -> int:
    """Return what the last layer's gate needs: gradients of gate, up and product, then that."""
    return batch.tokens * (3 * shape.inner * size + shape.hidden * (FLOAT + size))
