"""CUDA graphs for training: a single launch runs a whole forward or backward pass.

In a forward pass of a small model, Python takes several times longer to launch the thousands of
short kernels than the GPU takes to run them. A CUDA graph launches all kernels at once. A graph is
captured for a bucket, which is a size to which micro-batches are padded. All data that a graph
reads or writes stays at fixed addresses: the packed micro-batch (accel/packing.py), the
parameters, and the gradient sums.

The first micro-batch of a bucket runs eagerly, because a capture does not pay off for a size that
occurs only once. The second micro-batch runs on the bucket's static buffers, so that all kernels
are compiled before the capture. At the third micro-batch of a bucket, the forward and backward pass
are captured as CUDA graphs. Later micro-batches that have the captured size, or are slightly
smaller, replay the graphs. A micro-batch with long rows runs eagerly if the fastest attention
kernel cannot be captured (accel/attention_kernels.py). Without a CUDA device, passes run on the
bucket's buffers and are not captured.

All graphs share one memory pool, mostly for activations. Because the graphs share memory, no other
pass may run between a forward pass and its backward pass. Each forward pass may have at most one
backward pass.

In tensor shapes, m is the number of trained tokens in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from covey.accel.attention_kernels import KERNELS, chosen_for, has_long_rows
from covey.accel.fused_parameters import GradSink
from covey.accel.head import token_logp
from covey.accel.packing import MaxLengths, PackedTables, Size, StaticBuffers, varlen_tables
from covey.models.language_model import LanguageModel
from covey.notices import notice
from covey.types import HostRows

MAX_BUCKETS = 64
"""Maximum number of buckets; if there are more, the least recently used bucket is dropped."""
MAX_PADDING = 4 / 3
"""Maximum factor by which a micro-batch may be padded to reuse a captured graph."""
MAX_FAILURES = 3
"""The number of failed captures after which training stops using CUDA graphs."""

Values = tuple[torch.Tensor, torch.Tensor]


class GraphResult(NamedTuple):
    """The log-prob and entropy of a micro-batch's trained tokens; all fields have shape [m]."""

    logp: torch.Tensor
    entropy: torch.Tensor
    cells: torch.Tensor
    """The flat index of each trained token in a [B, T] tensor."""


class GradientBuffers:
    """Buffers at fixed addresses that accumulate the gradients of the parameters.

    An optimizer step clears gradients by setting them to None. Before the next backward pass,
    `attach` sets the cleared sums to zero and assigns them to `.grad` again.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        found = {id(s): s for p in parameters if (s := getattr(p, "grad_sink", None)) is not None}
        self._sinks: list[GradSink] = list(found.values())
        self._own: dict[nn.Parameter, torch.Tensor] = {}

    def attach(self) -> None:
        """Assign each gradient sum to its parameter's `.grad`. Sums whose `.grad` was None restart
        at 0."""
        cleared = [total for sink in self._sinks if (total := sink.resume()) is not None]
        for parameter, total in self._own.items():
            if parameter.grad is total:
                continue
            if parameter.grad is None:
                cleared.append(total)
            else:
                total.copy_(parameter.grad)
            parameter.grad = total
        if cleared:
            torch._foreach_zero_(cleared)

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add one gradient per parameter to the gradient sums.

        An entry of `grads` is None if the parameter has no gradient, or if the backward pass has
        already added the gradient to a GradSink.
        """
        for parameter, grad in zip(self.parameters, grads, strict=True):
            if grad is None:
                continue
            sink: GradSink | None = getattr(parameter, "grad_sink", None)
            if sink is not None:
                sink.add_part(parameter.grad_part, grad)  # type: ignore[attr-defined]
                continue
            if parameter not in self._own:
                self._own[parameter] = torch.zeros_like(parameter, requires_grad=False)
                self.attach()
            self._own[parameter].add_(grad)

    def count(self) -> int:
        """Return the number of gradient sums; capturing a graph must not change this number."""
        return len(self._own) + sum(sink.total is not None for sink in self._sinks)


class _Pass:
    """The forward and backward pass over the buffers of one bucket."""

    def __init__(self, graphs: TrainGraphs, size: Size, *, backward: bool) -> None:
        self.graphs = graphs
        self.rows = StaticBuffers(size, graphs.model.device)
        self.incoming = torch.zeros(2, size.chosen, device=graphs.model.device)
        """Gradients of the loss with respect to log-probability and entropy."""
        self.backward = backward
        self.has_run = False
        """Whether the passes have run once, so that all kernels are compiled and the gradient sums
        exist."""
        self.values: Values | None = None
        self.forward_graph: torch.cuda.CUDAGraph | None = None
        self.backward_graph: torch.cuda.CUDAGraph | None = None

    def forward(self, tables: PackedTables) -> Values:
        """Run the forward pass; return the log-prob and entropy [m] of the trained tokens."""
        self.rows.fill(tables)
        if self.forward_graph is None:
            self.values = None  # before the forward pass, so that only one pass has activations
            self.values = self._forward()
            self.has_run |= not self.backward
        else:
            self.forward_graph.replay()
        assert self.values is not None
        logp, entropy = (v.detach()[: len(tables.chosen)].clone() for v in self.values)
        return logp, entropy

    def run_backward(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Run the backward pass, given the gradients [m] with respect to log-prob and entropy."""
        self.incoming.zero_()
        for buffer, grad in zip(self.incoming, grads, strict=True):
            if grad is not None:
                buffer[: len(grad)].copy_(grad)
        self.graphs.gradients.attach()
        if self.backward_graph is None:
            self._backward()
            self.has_run = True
        else:
            self.backward_graph.replay()

    def _forward(self) -> Values:
        from covey.accel.fused_forward import fused_backbone  # needs Triton

        model, packed = self.graphs.model, self.rows.packed
        with torch.set_grad_enabled(self.backward):
            hidden = fused_backbone(
                model.backbone, packed.input_ids, packed.position_ids, packed.packing
            )
            return token_logp(
                model.head,
                hidden.index_select(0, packed.predictor),
                packed.chosen,
                temperature=self.graphs.temperature,
                megabytes=self.graphs.megabytes,
            )

    def _backward(self) -> None:
        """Add the gradients of all parameters to the gradient sums, and free the activations."""
        values, gradients = self.values, self.graphs.gradients
        assert values is not None
        # All parameters are passed, because autograd would skip parameters whose gradient only a
        # GradSink receives.
        grads = torch.autograd.grad(
            values, gradients.parameters, list(self.incoming), allow_unused=True
        )
        self.values = values[0].detach(), values[1].detach()
        with torch.no_grad():
            gradients.add(grads)

    def capture(self, pool: Any) -> None:
        """Capture the forward and backward pass without running them; both must have run before."""
        gradients = self.graphs.gradients
        if self.backward:
            gradients.attach()
        count = gradients.count()
        forward = torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=pool):
            self.values = self._forward()
        if self.backward:
            backward = torch.cuda.CUDAGraph()
            with torch.cuda.graph(backward, pool=pool):
                self._backward()
            if gradients.count() != count:
                raise RuntimeError("the capture created a new gradient")
            self.backward_graph = backward
        self.forward_graph = forward


class _PassFunction(torch.autograd.Function):
    """An autograd function that runs a bucket's passes and sums parameter gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, one: _Pass, tables: PackedTables) -> Values:
        ctx.one, ctx.ticket = one, one.graphs.ticket
        ctx.set_materialize_grads(False)
        return one.forward(tables)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        one: _Pass = ctx.one
        if ctx.ticket != one.graphs.ticket:
            raise RuntimeError("a pass must run backward once, before another begins")
        one.graphs.ticket += 1
        one.run_backward(grads)
        return None, None, None


class _Bucket:
    """A bucket: a size to which micro-batches are padded, and the passes at this size."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.seen = 0
        self.ready: _Pass | None = None


class TrainGraphs:
    """CUDA graphs of a model's training passes."""

    def __init__(self, model: LanguageModel, *, temperature: float, megabytes: float) -> None:
        self.model, self.temperature, self.megabytes = model, temperature, megabytes
        self.gradients = GradientBuffers([p for p in model.model.parameters() if p.requires_grad])
        self.ticket = 0
        """Counts passes, to detect a backward pass that runs twice or too late."""
        self.buckets: dict[tuple[int, bool], _Bucket] = {}
        self.failures = 0
        self.failed = False
        """Whether captures have failed too often, so that all passes run eagerly."""
        self._anchor = torch.zeros((), device=model.device, requires_grad=True)
        self._pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
        self._pool_keeper: torch.cuda.CUDAGraph | None = None
        """A graph that keeps the memory pool alive; a pool without graphs cannot be used again.
        """

    def run(self, host: HostRows) -> GraphResult | None:
        """Run a micro-batch's forward pass; return None if the caller must run it eagerly."""
        backward = torch.is_grad_enabled()
        if self.failed:
            return None
        tables, longest = varlen_tables(host)
        if self._too_long(tables, longest):
            return None
        one = self._pass_for(Size.of(tables, longest), backward)
        if one is None:
            return None
        self.ticket += 1
        try:
            values: Values = (
                _PassFunction.apply(self._anchor, one, tables) if backward else one.forward(tables)
            )
        except torch.OutOfMemoryError as error:
            self.give_up(error)
            return None
        return GraphResult(*values, one.rows.tables.cells[: len(tables.cells)].clone())

    def give_up(self, error: Exception) -> None:
        """Stop using CUDA graphs, and free all captured graphs."""
        self.failed = True
        self.buckets.clear()
        self._pool_keeper = None
        line = str(error).strip().splitlines()[0][:200]
        notice(f"training does not use CUDA graphs: {line}")

    def captured(self) -> list[_Pass]:
        passes = (bucket.ready for bucket in self.buckets.values())
        return [one for one in passes if one is not None and one.forward_graph is not None]

    def _pass_for(self, need: Size, backward: bool) -> _Pass | None:
        key = self._key_for(need, backward)
        need = need.padded_to(key[0])
        bucket = self.buckets.pop(key, None) or _Bucket(need)
        self.buckets[key] = bucket  # the dictionary is ordered from least to most recently used
        if not bucket.size.holds(need):
            self._drop(bucket)
            bucket.size = bucket.size.with_room_for(need)
        if len(self.buckets) > MAX_BUCKETS:
            self._drop(self.buckets.pop(next(iter(self.buckets))))
        bucket.seen += 1
        if bucket.seen == 1:
            return None
        if bucket.ready is None:
            bucket.ready = _Pass(self, bucket.size, backward=backward)
        elif bucket.ready.has_run and not bucket.ready.forward_graph and self._pool is not None:
            return self._capture(bucket.ready)
        return bucket.ready

    def _too_long(self, tables: PackedTables, longest: MaxLengths) -> bool:
        """Return whether long rows use an attention kernel that no CUDA graph can replay."""
        if not has_long_rows(tables.key_starts.tolist()):
            return False
        model, dtype = self.model, self.model.head.linear.weight.dtype
        name = chosen_for(model.model.config, model.device, dtype, longest.key)
        return not KERNELS[name].captured

    def _key_for(self, need: Size, backward: bool) -> tuple[int, bool]:
        """Return the key of the smallest captured bucket that fits without too much padding.

        If no bucket fits, return the key of a bucket with exactly the needed number of tokens.
        """
        sizes = [one.rows.size for one in self.captured() if one.backward is backward]
        fitting = [
            size.tokens
            for size in sizes
            if need.tokens <= size.tokens <= MAX_PADDING * need.tokens
            and size.holds(need.padded_to(size.tokens))
        ]
        return min(fitting, default=need.tokens), backward

    def _capture(self, one: _Pass) -> _Pass | None:
        one.values = None
        try:
            if self._pool_keeper is None:
                keeper = torch.cuda.CUDAGraph()
                with torch.cuda.graph(keeper, pool=self._pool), torch.no_grad():
                    self._anchor.clone()
                self._pool_keeper = keeper
            one.capture(self._pool)
        except RuntimeError as error:
            one.values = None
            # While a reference to an eager pass's autograd graph exists, parameters remember its
            # stream, and a capture on another stream fails. By the next attempt, the reference may
            # be gone.
            self.failures += 1
            if self.failures == MAX_FAILURES:
                self.give_up(error)
            return None
        return one

    def _drop(self, bucket: _Bucket) -> None:
        if self._pool is not None:
            torch.cuda.synchronize()  # its graph may be running
        bucket.ready = None


def train_graphs_for(
    model: LanguageModel, *, temperature: float, megabytes: float
) -> TrainGraphs | None:
    """Return a TrainGraphs; None if the model is frozen or does not use the GPU kernels."""
    trained = any(p.requires_grad for p in model.model.parameters())
    if not (model.device.type == "cuda" and model.fused and model.flash and trained):
        return None
    return TrainGraphs(model, temperature=temperature, megabytes=megabytes)
