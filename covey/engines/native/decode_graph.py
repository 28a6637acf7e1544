"""Stepping by a recorded graph: the host says "go on" and looks in now and then.

A decode step is some hundred small kernels, and starting them one by one takes longer than they
run. A CUDA graph starts them all at once. It is recorded once for each number of slots and way of
sampling, and stays valid while slots, answers and weights change, because all of them stay where
they are in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from covey.accel.kernels.sample import Written, draw
from covey.engines.draw import Distribution, pick_tokens
from covey.engines.native.choose_backend import FAILURES, first_line, tried
from covey.engines.native.fused_decoder import FusedDecoder
from covey.engines.native.kv_cache import KeyShape, Slots
from covey.engines.native.llama_decoder import Decoder, NotUnderstood
from covey.engines.native.shared_prompt_cache import PROMPT_STEP, PooledCache, width_for
from covey.engines.native.transformers_decoder import PooledDecoder
from covey.engines.protocol import Sampling
from covey.models.language_model import LanguageModel

STEPS = 8
"""Tokens written before the host looks which answers have ended."""
SLOTS = 4
"""Slots that are recorded for a trial."""
SAME = 0.02
"""How far a recorded step may be off: kernels may be others, and round elsewhere."""


@dataclass(slots=True)
class GraphStepper:
    """Several tokens a call, without the host in between."""

    model: LanguageModel
    decoder: Decoder
    shape: KeyShape
    way: str
    memory: PooledCache | None = None
    """Kept from call to call: graphs hold its addresses."""
    needs: dict[str, int] = field(default_factory=dict)
    """What it was made for."""
    slots: dict[int, Slots] = field(default_factory=dict)
    """By the longest answer."""
    distribution: Distribution = field(default_factory=Distribution)
    graphs: dict[tuple[int, int, Distribution], torch.cuda.CUDAGraph] = field(default_factory=dict)

    def width_for(self, answers: int) -> int:
        """Return the next number of slots that graphs are recorded for."""
        return width_for(answers)

    def begin(self, *, width: int, questions: int, longest: int, sampling: Sampling) -> Slots:
        """Return empty slots: those of the last call, if they are large enough."""
        # One more: a prompt whose last answers still wait may have none that is being written.
        needs = {
            "slots": width,
            "capacity": sampling.max_tokens,
            "prompts": min(width, questions) + 1,
            "prompt_capacity": -(-longest // PROMPT_STEP) * PROMPT_STEP,
        }
        if self.memory is None or not self.memory.holds(**needs):
            self.graphs.clear()
            self.slots.clear()
            if self.memory is not None:
                needs = {name: max(more, self.needs[name]) for name, more in needs.items()}
            self.memory = None  # before the next is made: both together may not fit
            self.memory, self.needs = PooledCache(**needs, shape=self.shape), needs
        memory, room = self.memory, sampling.max_tokens
        if room not in self.slots:
            self.slots[room] = Slots.make(memory, room, self.model.stop_ids)
        memory.emptied()
        self.decoder.begin(self.needs["capacity"] + self.needs["prompt_capacity"])
        self.distribution = sampling.distribution
        return self.slots[room]

    def advance(self, slots: Slots, width: int, most: int) -> None:
        """Write some tokens in every slot that goes on; this does not wait for them."""
        if self.shape.device.type != "cuda":  # kernels can be tried by Triton's interpreter
            self._step(slots, width)
            return
        key = width, slots.room, self.distribution
        if key not in self.graphs:
            self.graphs[key] = self._record(slots, width)
        for _ in range(min(STEPS, most)):
            self.graphs[key].replay()

    def _record(self, slots: Slots, width: int) -> torch.cuda.CUDAGraph:
        """Record a step once for good; about a quarter of a second."""
        active = slots.cache.active.clone()
        slots.cache.active.zero_()  # a rehearsal, in which kernels are compiled, writes nothing
        self._step(slots, width)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = next((g.pool() for g in self.graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            self._step(slots, width)
        slots.cache.active.copy_(active)
        return graph

    def _step(self, slots: Slots, width: int) -> None:
        cache = slots.cache
        hidden = self.decoder.step(slots.last[:width], cache)
        logits = self.model.head.logits(hidden)
        written = Written(
            slots.tokens,
            slots.logps,
            slots.uniforms,
            slots.last,
            slots.count,
            cache.place,
            cache.active,
        )
        if self.distribution.temperature == 0.0 or not self.distribution.truncates:
            draw(
                logits,
                written,
                temperature=self.distribution.temperature,
                stop_ids=slots.stop_ids,
            )
        else:
            self._pick(slots, width, logits)

    def _pick(self, slots: Slots, width: int, logits: torch.Tensor) -> None:
        """Draw from a truncated distribution; slots that have ended keep what they have."""
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


def graph_stepper(model: LanguageModel, shape: KeyShape) -> GraphStepper:
    """Return a stepper by graphs, or raise NotUnderstood."""
    try:
        decoder = tried(model, FusedDecoder, _small_memory)
        return GraphStepper(model, decoder, shape, way="recorded graphs, the model written out")
    except NotUnderstood as error:
        why = error
    decoder = tried(model, PooledDecoder, _small_memory)
    if shape.device.type == "cuda":
        check_recorded(decoder, _small_memory(SLOTS, shape))
    way = f"recorded graphs of the model's own forward pass; not written out, because {why}"
    return GraphStepper(model, decoder, shape, way=way)


def _small_memory(slots: int, shape: KeyShape) -> PooledCache:
    return PooledCache(slots=slots, capacity=4, prompts=slots, prompt_capacity=5, shape=shape)


def check_recorded(decoder: Decoder, memory: PooledCache) -> None:
    """Raise NotUnderstood unless a step can be recorded and says the same for other tokens.

    What waits for the host is found before anything is recorded: a recording that fails leaves
    traces. What the host decides by looking at tokens would stay as it was decided first.
    """
    memory.active[:] = True
    for layer in (memory.layer_keys, memory.prompt_keys, memory.layer_values, memory.prompt_values):
        for tensor in layer:
            tensor.normal_()
    memory.prompt_length[:] = 2
    tokens = torch.arange(2, 2 + SLOTS, device=memory.place.device)
    decoder.begin(9)
    try:
        decoder.step(tokens, memory)  # compiles kernels, which may wait
        with _host_may_not_wait():
            decoder.step(tokens, memory)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = decoder.step(tokens, memory)
        tokens += SLOTS
        graph.replay()
        expected = decoder.step(tokens, memory)
    except FAILURES as error:
        raise NotUnderstood(f"a step of it cannot be recorded ({first_line(error)})") from error
    if float((found - expected).norm()) > SAME * float(expected.norm()):
        raise NotUnderstood("a recorded step of it gives other numbers for other tokens")


@contextmanager
def _host_may_not_wait() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this is new
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
