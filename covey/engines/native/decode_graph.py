"""CUDA graph backend, which replays several decode steps per call without Python in between.

A decode step runs hundreds of small kernels, and launching them one by one takes longer than
running them. A CUDA graph launches all kernels at once. The backend captures one graph for each
combination of slot count, maximum completion length and sampling distribution. A graph stays valid
while slots, completions and weights change, because all tensors keep their addresses.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding

from covey.accel.attention_kernels import HALF
from covey.accel.fused_forward import gain, rope_table
from covey.accel.kernels.decode_attention import SMALLEST_HEAD, decode_attention
from covey.accel.kernels.gated_linear import fuses_swiglu, gated_linear
from covey.accel.kernels.quantize import (
    Product,
    Quantized,
    Weight,
    add_norm_quantized,
    product,
    quantize_rows,
    quantize_weight,
    rescaled,
    silu_mul_quantized,
)
from covey.accel.kernels.rms_norm import add_norm_in_place
from covey.accel.kernels.sample import SlotState, sample_tokens
from covey.accel.kernels.swiglu import silu_mul
from covey.accel.parity import FAILURES, is_silu
from covey.engines.draw import Distribution, pick_tokens
from covey.engines.native.backend import (
    MODEL_PRECISION,
    Precision,
    advance_by,
    checked_decoder,
    first_error_line,
)
from covey.engines.native.kv_cache import KVShape
from covey.engines.native.llama_decoder import (
    Block,
    Decoder,
    Linear,
    LlamaDecoder,
    UnsupportedModel,
)
from covey.engines.native.shared_prompt_cache import SharedPromptCache, slots_together
from covey.engines.native.sizes import PROMPT_STEP, page_for, width_for
from covey.engines.native.slots import Progress, Slots, empty_kept
from covey.engines.native.transformers_decoder import SharedPromptDecoder
from covey.engines.protocol import Limits
from covey.models.language_model import LanguageModel

# Decode step of Llama-like models on a GPU: the arithmetic of `LlamaDecoder` in fused kernels.
#
# The residual stream is float32, as in the trainer's fused forward pass, so that engine and
# trainer agree. The inputs of matrix products have the dtype of the weights. A decode step can
# be captured as a CUDA graph, because it never synchronizes with the CPU and its kernels do not
# depend on the lengths of completions.


class FusedDecoder(LlamaDecoder):
    """A decoder that runs Llama-like models with fused kernels on a GPU."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        if not all(is_silu(block.activation) for block in self.blocks):
            raise UnsupportedModel
        half = self.embedding.weight.dtype in HALF
        if half and min(block.head_size for block in self.blocks) < SMALLEST_HEAD:
            raise UnsupportedModel("its heads are too small for products of 16-bit numbers")
        self.fuses = not any(block.adapted for block in self.blocks)

    def begin(self, positions: int) -> None:
        if len(self.rope[0]) != positions:
            weight = self.embedding.weight
            places = torch.arange(positions, device=weight.device)
            self.rope = rope_table(self.rotary, weight[:1, None].float(), places)
        if self.fuses:
            for block in self.blocks:
                block.fuse()

    def step(self, tokens: torch.Tensor, cache: SharedPromptCache) -> torch.Tensor:
        hidden = embedding(tokens, self.embedding.weight).float()
        delta = None
        for number, block in enumerate(self.blocks):
            normed = add_norm_in_place(hidden, delta, *gain(block.input_norm))
            attended = decode_attention(
                block.qkv.together(normed),
                cache.layer(number),
                rope=self.rope,
                scale=block.scaling,
                norms=head_norms(block),
            )
            delta = block.output(attended)
            normed = add_norm_in_place(hidden, delta, *gain(block.post_norm))
            delta = block.down(self._swiglu(block, normed))
        return add_norm_in_place(hidden, delta, *gain(self.final_norm))

    def _swiglu(self, block: Block, normed: torch.Tensor) -> torch.Tensor:
        if self.fuses and fuses_swiglu(len(normed), block.gate_up.fused[0]):
            return gated_linear(normed, *block.gate_up.fused)
        return silu_mul(*block.gate_up.apart(normed))


def head_norms(block: Block) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """Return weights and epsilon of a layer's query and key norms; None without such norms."""
    if block.query_norm is None or block.key_norm is None:
        return None
    weight, eps = gain(block.query_norm)
    return weight, gain(block.key_norm)[0], eps


# Decode step of Llama-like models with float8 matrix products.
#
# Float8 numbers take half the memory of 16-bit numbers, and tensor cores multiply them twice as
# fast. Whenever the engine gets new weights, it quantizes the weights of the layers, with one scale
# (a power of two) per output. The kernel that computes the input of a product also quantizes it,
# with one scale per token. Embedding, norms, residual stream, attention and head are not rounded to
# float8.
#
# An engine with float8 products samples from a slightly different policy than the trainer's, so a
# run needs a correction (covey/objective/correction.py).

MULTIPLE = 16
"""Input and output sizes of a float8 linear layer must be multiples of this number."""


FLOAT8_TOLERANCE = 0.25
"""The allowed relative difference of hidden states in the parity check of a float8 decoder.

A float8 number has three mantissa bits, so a matrix product of random numbers has a relative error
of about 4 %. The errors of several matrix products add up. A bug, such as a wrong scale or a wrong
row index, changes the hidden states by more than this tolerance.
"""


class Float8Linear:
    """Several linear layers with the same input, fused into one float8 matrix product."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        self.layers = [each.layer for each in layers]
        first = self.layers[0].weight
        rows, size = sum(layer.out_features for layer in self.layers), first.shape[1]
        if rows % MULTIPLE or size % MULTIPLE:
            raise UnsupportedModel(
                f"a layer of {size} inputs and {rows} outputs has no float8 product, which needs "
                f"multiples of {MULTIPLE}"
            )
        # A captured graph contains the addresses of the copies.
        self.weight = Weight.empty(rows, size, first.device)
        biased = any(layer.bias is not None for layer in self.layers)
        self.bias = first.new_zeros(rows, dtype=torch.bfloat16) if biased else None

    def refresh(self) -> None:
        """Quantize the current weights into the existing float8 buffer."""
        at = 0
        for layer in self.layers:
            end = at + layer.out_features
            quantize_weight(layer.weight.detach(), self.weight.rows(at, end))
            if self.bias is not None and layer.bias is not None:
                self.bias[at:end] = layer.bias.detach()
            at = end

    def __call__(self, values: Quantized) -> Product:
        """Return W x + b of all fused layers, not yet multiplied by the float8 scales."""
        return product(values, self.weight, self.bias)


class _Products:
    """The float8 matrix products (QKV, output, gate-up and down) of a transformer layer."""

    def __init__(self, block: Block) -> None:
        self.qkv = Float8Linear(block.qkv.layers)
        self.output = Float8Linear([block.output])
        self.gate_up = Float8Linear(block.gate_up.layers)
        self.down = Float8Linear([block.down])

    def refresh(self) -> None:
        for linear in (self.qkv, self.output, self.gate_up, self.down):
            linear.refresh()


class Float8Decoder(FusedDecoder):
    """A decoder that runs Llama-like models with float8 matrix products on a GPU."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        if any(block.adapted for block in self.blocks):
            raise UnsupportedModel("its adapter cannot be quantized")
        self.fuses = False  # the float8 copies are fused; the 16-bit weights are not used
        self.products = [_Products(block) for block in self.blocks]

    @torch.inference_mode()
    def begin(self, positions: int) -> None:
        super().begin(positions)
        for products in self.products:
            products.refresh()

    def step(self, tokens: torch.Tensor, cache: SharedPromptCache) -> torch.Tensor:
        hidden = embedding(tokens, self.embedding.weight).float()
        delta, kind = None, self.embedding.weight.dtype
        for number, (block, products) in enumerate(zip(self.blocks, self.products, strict=True)):
            normed = add_norm_quantized(hidden, delta, *gain(block.input_norm))
            attended = decode_attention(
                rescaled(products.qkv(normed)).to(kind),
                cache.layer(number),
                rope=self.rope,
                scale=block.scaling,
                norms=head_norms(block),
            )
            delta = products.output(quantize_rows(attended))
            normed = add_norm_quantized(hidden, delta, *gain(block.post_norm))
            delta = products.down(silu_mul_quantized(products.gate_up(normed)))
        assert delta is not None, "a model has layers"
        return add_norm_in_place(hidden, rescaled(delta), *gain(self.final_norm))


STEPS = 8
"""Number of consecutive decode steps after which the CPU looks for finished completions."""
FREE_SHARE = 0.8
"""Maximum fraction of free GPU memory for the KV cache; training uses the remainder."""
SLOTS = 4
"""Number of slots in `check_capture`, the check that a decode step can be captured."""
TOLERANCE = 0.02
"""Allowed relative difference between the results of a replayed and an eager decode step. A
replayed and an eager step may use different kernels, so their results may differ by rounding."""


@dataclass(slots=True)
class GraphBackend:
    """The CUDA graph backend, which generates several tokens per slot in each call of `advance`."""

    model: LanguageModel
    decoder: Decoder
    shape: KVShape
    description: str
    steps: int = STEPS
    cache: SharedPromptCache | None = None
    """The KV cache, kept between calls because CUDA graphs contain its memory addresses."""
    sizes: dict[str, int] = field(default_factory=dict)
    """The sizes with which the KV cache was allocated."""
    slots: dict[int, Slots] = field(default_factory=dict)
    """Maps a maximum completion length to the slots that were allocated for this length."""
    distribution: Distribution = field(default_factory=Distribution)
    graphs: dict[tuple[int, int, Distribution], torch.cuda.CUDAGraph] = field(default_factory=dict)

    def width_for(self, completions: int) -> int:
        return width_for(completions)

    def begin(self, limits: Limits, width: int) -> Slots:
        """Return empty slots; reuse the KV cache of earlier calls if it is large enough."""
        sampling = limits.sampling
        # One row more than slots, for a prompt whose last requests are still queued without a slot.
        sizes = {
            "slots": width,
            "capacity": sampling.max_tokens,
            "prompts": min(width, limits.prompts) + 1,
            "prompt_capacity": -(-limits.prompt_tokens // PROMPT_STEP) * PROMPT_STEP,
        }
        if self.cache is None or any(self.sizes[name] < size for name, size in sizes.items()):
            self.graphs.clear()
            self.slots.clear()
            self.sizes = {name: max(size, self.sizes.get(name, 0)) for name, size in sizes.items()}
            self.cache = None  # freed before the next allocation, because both may not fit
            pages = self._pool_pages(sampling.cache_gigabytes)
            config: Any = self.model.backbone.config
            together = slots_together(config.num_attention_heads // self.shape.heads)
            self.cache = SharedPromptCache(
                **self.sizes, shape=self.shape, pages=pages, together=together
            )
        cache, room = self.cache, sampling.max_tokens
        if room not in self.slots:
            self.slots[room] = Slots.make(cache, sampling, self.model.stop_ids)
        cache.emptied()
        self.refresh()
        self.distribution = sampling.distribution
        return replace(self.slots[room], kept=empty_kept(cache.slots, sampling))

    def _pool_pages(self, gigabytes: float) -> int:
        """Return the number of KV cache pages: enough for all slots, if memory allows."""
        shape, capacity = self.shape, self.sizes["capacity"]
        page = page_for(capacity)
        longest = -(-capacity // page)
        room = gigabytes * 2**30 if gigabytes else self._free_bytes()
        return max(longest, int(min(self.sizes["slots"] * longest, room // shape.bytes(page))))

    def _free_bytes(self) -> float:
        """Return the default size in bytes of the KV cache for completions."""
        if self.shape.device.type != "cuda":
            return math.inf
        free, _ = torch.cuda.mem_get_info(self.shape.device)
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        prompts = self.shape.bytes(self.sizes["prompts"] * self.sizes["prompt_capacity"])
        return FREE_SHARE * (free + cached) - prompts

    def refresh(self) -> None:
        self.decoder.begin(self.sizes["capacity"] + self.sizes["prompt_capacity"])

    def advance(self, slots: Slots, width: int, most: int) -> Progress:
        # Without CUDA, kernels run in Triton's interpreter, so there are no graphs. A graph also
        # cannot record kept sets, which are copied to main memory in every step.
        if self.shape.device.type != "cuda" or slots.kept is not None:
            self._step(slots, width)
            return slots.progress(width)
        key = width, slots.room, self.distribution
        if key not in self.graphs:
            self.graphs[key] = self._capture(slots, width)
        return advance_by(self.graphs[key].replay, slots, width, steps=self.steps, most=most)

    def _capture(self, slots: Slots, width: int) -> torch.cuda.CUDAGraph:
        """Capture a decode step as a CUDA graph, which takes about a quarter of a second."""
        active = slots.cache.active.clone()
        slots.cache.active.zero_()  # the warm-up step, which compiles kernels, writes nothing
        self._step(slots, width)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = next((g.pool() for g in self.graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            self._step(slots, width)
        slots.cache.active.copy_(active)
        return graph

    def _step(self, slots: Slots, width: int) -> None:
        cache, distribution = slots.cache, self.distribution
        hidden = self.decoder.step(slots.last[:width], cache)
        logits = self.model.head.logits(hidden)
        if slots.kept is not None:  # runs outside the graph, so that finished slots can be left out
            index = cache.active[:width].nonzero().flatten()
            if len(index):
                slots.draw(index, logits[index], distribution)
            return
        if distribution.temperature != 0.0 and distribution.truncates:
            self._pick(slots, width, logits)
            return
        state = SlotState(
            slots.tokens,
            slots.logps,
            slots.uniforms,
            slots.last,
            slots.count,
            cache.place,
            cache.active,
        )
        sample_tokens(logits, state, temperature=distribution.temperature, stop_ids=slots.stop_ids)

    def _pick(self, slots: Slots, width: int, logits: torch.Tensor) -> None:
        """Sample one token per slot from a truncated distribution; skip finished slots."""
        cache, count = slots.cache, slots.count[:width]
        active, at = cache.active[:width], count.clamp(max=slots.room - 1)[:, None]
        uniforms = slots.uniforms[:width].gather(1, at).squeeze(1)
        tokens, logps = pick_tokens(logits, uniforms, self.distribution)
        for target, new in ((slots.tokens, tokens), (slots.logps, logps)):
            old = target[:width].gather(1, at).squeeze(1)
            target[:width].scatter_(1, at, new.where(active, old)[:, None])
        slots.last[:width] = tokens.where(active, slots.last[:width])
        count += active
        cache.place[:width] += active
        ended = (tokens[:, None] == slots.stop_ids).any(dim=1) | (count == slots.room)
        active &= ~ended


def graph_backend(
    model: LanguageModel, shape: KVShape, precision: Precision = MODEL_PRECISION
) -> GraphBackend:
    """Return a CUDA graph backend; raise UnsupportedModel if it cannot run the model."""
    if not precision.exact:
        return _float8_backend(model, shape, precision)
    try:
        decoder = checked_decoder(model, FusedDecoder, _small_cache)
        return GraphBackend(model, decoder, shape, "CUDA graphs of the fused decoder")
    except UnsupportedModel as error:
        why = error
    decoder = checked_decoder(model, SharedPromptDecoder, _small_cache)
    if shape.device.type == "cuda":
        check_capture(decoder, _small_cache(SLOTS, shape))
    description = f"CUDA graphs of the model's own forward pass; not fused, because {why}"
    return GraphBackend(model, decoder, shape, description)


def _float8_backend(model: LanguageModel, shape: KVShape, precision: Precision) -> GraphBackend:
    """Return a float8 backend; its description says how long quantization takes."""
    checked_decoder(model, FusedDecoder, _small_cache)  # the same layers, without rounding
    kind = Float8Decoder if precision.products else FusedDecoder
    small = partial(_small_cache, float8=precision.cache)
    decoder = checked_decoder(model, kind, small, tolerance=FLOAT8_TOLERANCE)
    shape = replace(shape, float8=precision.cache)
    cache = ", with a float8 KV cache" if precision.cache else ""
    if not precision.products:
        return GraphBackend(model, decoder, shape, f"CUDA graphs of the fused decoder{cache}")
    decoder.begin(1)  # compiles kernels
    seconds = _seconds(lambda: decoder.begin(1), shape.device)
    description = (
        f"CUDA graphs of the float8 decoder{cache}; quantizing the weights takes "
        f"{1e3 * seconds:.1f} ms per generation call"
    )
    return GraphBackend(model, decoder, shape, description)


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    """Return how many seconds `call` takes, including the work that `call` starts on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _small_cache(slots: int, shape: KVShape, *, float8: bool = False) -> SharedPromptCache:
    shape = replace(shape, float8=float8)
    return SharedPromptCache(slots=slots, capacity=4, prompts=slots, prompt_capacity=5, shape=shape)


def check_capture(decoder: Decoder, cache: SharedPromptCache) -> None:
    """Raise UnsupportedModel if a decode step cannot be captured and replayed for other tokens.

    A step that synchronizes with the CPU is refused before the capture, because a failed capture
    leaves the CUDA context in a bad state. The replay uses different tokens than the capture, to
    detect code that branches on token values. A graph always repeats the captured branch.
    """
    cache.active[:] = True
    for layer in (cache.layer_keys, cache.prompt_keys, cache.layer_values, cache.prompt_values):
        for tensor in layer:
            tensor.normal_()
    cache.prompt_length[:] = 2
    cache.reserve(np.arange(SLOTS), np.ones(SLOTS, dtype=np.int64))
    tokens = torch.arange(2, 2 + SLOTS, device=cache.place.device)
    decoder.begin(9)
    try:
        decoder.step(tokens, cache)  # compiles kernels, which may synchronize
        with _no_synchronization():
            decoder.step(tokens, cache)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = decoder.step(tokens, cache)
        tokens += SLOTS
        graph.replay()
        expected = decoder.step(tokens, cache)
    except FAILURES as error:
        reason = first_error_line(error)
        raise UnsupportedModel(f"its decode step cannot be captured ({reason})") from error
    if float((found - expected).norm()) > TOLERANCE * float(expected.norm()):
        raise UnsupportedModel("its captured decode step gives wrong numbers for other tokens")


@contextmanager
def _no_synchronization() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this feature is new
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
