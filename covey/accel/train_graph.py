"""Training passes by recorded graphs: forward and backward of a micro-batch at one go each.

A pass over a small model is thousands of short kernels, and starting them from Python takes several
times as long as they run. A CUDA graph starts them all at once. It is recorded for a bucket: a size
that micro-batches are padded to. All that it touches stays where it is in memory: the layout
(static.py), the parameters, and the sums that gradients are added to.

A bucket's first micro-batch takes the plain way, so that a single odd one costs nothing. The second
runs on the bucket's own buffers, which compiles kernels; the third is recorded, and from then on
it is replayed, for slightly smaller micro-batches too. Where there is no CUDA device passes run on
those buffers and are not recorded.

Graphs share their memory, activations above all. So one pass is under way at a time: between going
forward and going backward there must be no other, and each goes backward once.

Shapes: M trained tokens of a bucket, m those of a micro-batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from covey.accel.fused_parameters import GradSink
from covey.accel.head import token_logp
from covey.accel.packing import PackedTables, varlen_tables
from covey.accel.static_buffers import Size, StaticRows
from covey.types import HostRows

if TYPE_CHECKING:
    from covey.models.language_model import LanguageModel

BUCKETS = 64
"""Of so many sizes graphs are kept; then those that were not used for longest go."""
SPARE = 4 / 3
"""A micro-batch may be padded to so many times its tokens where that saves recording."""
FAILURES = 3
"""So often recording may go wrong."""

Values = tuple[torch.Tensor, torch.Tensor]


class GraphResult(NamedTuple):
    """What a pass says of the trained tokens of a micro-batch, [m] each."""

    logp: torch.Tensor
    entropy: torch.Tensor
    cells: torch.Tensor
    """Their places in [B, T], flattened."""


class KeptGradients:
    """The sums of gradients, in memory that stays where it is from step to step.

    A step of the optimizer clears gradients by forgetting them. Here they are found again, zeroed,
    at the next backward pass.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        found = {id(s): s for p in parameters if (s := getattr(p, "grad_sink", None)) is not None}
        self._sinks: list[GradSink] = list(found.values())
        self._own: dict[nn.Parameter, torch.Tensor] = {}

    def attach(self) -> None:
        """Put all sums that were begun once back in their places."""
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
        """Add gradients of the parameters. None: it went to its sink, or there is none."""
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

    def begun(self) -> int:
        """Return how many sums there are; recording must not begin any."""
        return len(self._own) + sum(sink.total is not None for sink in self._sinks)


class _Pass:
    """Forward and backward over the buffers of one bucket."""

    def __init__(self, passes: TrainGraphs, size: Size, *, backward: bool) -> None:
        self.passes = passes
        self.rows = StaticRows(size, passes.model.device)
        self.pulls = torch.zeros(2, size.chosen, device=passes.model.device)
        """The incoming gradients of log-probability and entropy."""
        self.backward = backward
        self.tried = False
        """Whether all of it has run, so that kernels are compiled and sums of gradients begun."""
        self.values: Values | None = None
        self.forward_graph: torch.cuda.CUDAGraph | None = None
        self.backward_graph: torch.cuda.CUDAGraph | None = None

    def forward(self, tables: PackedTables) -> Values:
        """Read a micro-batch; return log-probability and entropy [m] of its trained tokens."""
        self.rows.fill(tables)
        if self.forward_graph is None:
            self.values = None  # first, or the activations of two passes are there
            self.values = self._forward()
            self.tried |= not self.backward
        else:
            self.forward_graph.replay()
        assert self.values is not None
        logp, entropy = (v.detach()[: len(tables.chosen)].clone() for v in self.values)
        return logp, entropy

    def pull(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Go backward from gradients [m] of what was said last."""
        self.pulls.zero_()
        for pull, grad in zip(self.pulls, grads, strict=True):
            if grad is not None:
                pull[: len(grad)].copy_(grad)
        self.passes.gradients.attach()
        if self.backward_graph is None:
            self._backward()
            self.tried = True
        else:
            self.backward_graph.replay()

    def _forward(self) -> Values:
        from covey.accel.fused_forward import fused_backbone  # needs Triton

        model, packed = self.passes.model, self.rows.packed
        with torch.set_grad_enabled(self.backward):
            hidden = fused_backbone(
                model.backbone, packed.input_ids, packed.position_ids, packed.packing
            )
            return token_logp(
                model.head,
                hidden.index_select(0, packed.predictor),
                packed.chosen,
                temperature=self.passes.temperature,
                megabytes=self.passes.megabytes,
            )

    def _backward(self) -> None:
        """Add the gradients of all parameters to their sums, and let go of the activations."""
        values, gradients = self.values, self.passes.gradients
        assert values is not None
        # All of them, or autograd leaves out what only a sink would notice.
        grads = torch.autograd.grad(
            values, gradients.parameters, list(self.pulls), allow_unused=True
        )
        self.values = values[0].detach(), values[1].detach()
        with torch.no_grad():
            gradients.add(grads)

    def record(self, pool: Any) -> None:
        """Record both ways, which runs neither; all of it must have run before."""
        gradients = self.passes.gradients
        if self.backward:
            gradients.attach()
        begun = gradients.begun()
        forward = torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=pool):
            self.values = self._forward()
        if self.backward:
            backward = torch.cuda.CUDAGraph()
            with torch.cuda.graph(backward, pool=pool):
                self._backward()
            if gradients.begun() != begun:
                raise RuntimeError("a gradient appeared that was not there before")
            self.backward_graph = backward
        self.forward_graph = forward


class _Recorded(torch.autograd.Function):
    """Lets autograd go backward through a pass; the parameters' gradients do not return here."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, one: _Pass, tables: PackedTables) -> Values:
        ctx.one, ctx.turn = one, one.passes.turn
        ctx.set_materialize_grads(False)
        return one.forward(tables)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        one: _Pass = ctx.one
        if ctx.turn != one.passes.turn:
            raise RuntimeError("a recorded pass goes backward once, and before any other begins")
        one.passes.turn += 1
        one.pull(grads)
        return None, None, None


class _Bucket:
    """What is known of micro-batches of about one size."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.seen = 0
        self.ready: _Pass | None = None


class TrainGraphs:
    """All passes of a model whose parameters are trained where they are."""

    def __init__(self, model: LanguageModel, *, temperature: float, megabytes: float) -> None:
        self.model, self.temperature, self.megabytes = model, temperature, megabytes
        self.gradients = KeptGradients([p for p in model.model.parameters() if p.requires_grad])
        self.turn = 0
        """Counts what begins or ends a pass."""
        self.buckets: dict[tuple[int, bool], _Bucket] = {}
        self.failures = 0
        self.failed = False
        """Whether recording went wrong for good, and all goes the plain way."""
        self._anchor = torch.zeros((), device=model.device, requires_grad=True)
        self._pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
        self._keeper: torch.cuda.CUDAGraph | None = None
        """Of the pool, into which nothing can be recorded once all its graphs have gone."""

    def take(self, host: HostRows) -> GraphResult | None:
        """Run a micro-batch, with gradient if that is enabled. None: it has to go the plain way."""
        backward = torch.is_grad_enabled()
        if self.failed:
            return None
        tables, longest = varlen_tables(host)
        one = self._pass_for(Size.of(tables, longest), backward)
        if one is None:
            return None
        self.turn += 1
        try:
            values: Values = (
                _Recorded.apply(self._anchor, one, tables) if backward else one.forward(tables)
            )
        except torch.OutOfMemoryError as error:
            self.give_up(error)
            return None
        return GraphResult(*values, one.rows.tables.cells[: len(tables.cells)].clone())

    def give_up(self, error: Exception) -> None:
        """Record nothing any more, and let go of what was."""
        self.failed = True
        self.buckets.clear()
        self._keeper = None
        line = str(error).strip().splitlines()[0][:200]
        warnings.warn(f"training passes are not recorded as graphs: {line}", stacklevel=2)

    def recorded(self) -> list[_Pass]:
        """Return the passes that are replayed."""
        passes = (bucket.ready for bucket in self.buckets.values())
        return [one for one in passes if one is not None and one.forward_graph is not None]

    def _pass_for(self, need: Size, backward: bool) -> _Pass | None:
        key = self._key_for(need, backward)
        need = need.padded_to(key[0])
        bucket = self.buckets.pop(key, None) or _Bucket(need)
        self.buckets[key] = bucket  # the last one is that used last
        if not bucket.size.holds(need):
            self._drop(bucket)
            bucket.size = bucket.size.with_room_for(need)
        if len(self.buckets) > BUCKETS:
            self._drop(self.buckets.pop(next(iter(self.buckets))))
        bucket.seen += 1
        if bucket.seen == 1:
            return None
        if bucket.ready is None:
            bucket.ready = _Pass(self, bucket.size, backward=backward)
        elif bucket.ready.tried and not bucket.ready.forward_graph and self._pool is not None:
            return self._record(bucket.ready)
        return bucket.ready

    def _key_for(self, need: Size, backward: bool) -> tuple[int, bool]:
        """Return the least bucket that was recorded and has room, or that of this very size."""
        sizes = [one.rows.size for one in self.recorded() if one.backward is backward]
        fitting = [
            size.tokens
            for size in sizes
            if need.tokens <= size.tokens <= SPARE * need.tokens
            and size.holds(need.padded_to(size.tokens))
        ]
        return min(fitting, default=need.tokens), backward

    def _record(self, one: _Pass) -> _Pass | None:
        one.values = None
        try:
            if self._keeper is None:
                self._keeper = _trivial_graph(self._anchor, self._pool)
            one.record(self._pool)
        except RuntimeError as error:
            one.values = None
            # Perhaps somebody still holds what autograd knows of a plain pass: parameters then
            # remember its stream, and recording on another fails. Next time that may be gone.
            self.failures += 1
            if self.failures == FAILURES:
                self.give_up(error)
            return None
        return one

    def _drop(self, bucket: _Bucket) -> None:
        if self._pool is not None:
            torch.cuda.synchronize()  # its graph may be running
        bucket.ready = None


def _trivial_graph(anchor: torch.Tensor, pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool), torch.no_grad():
        anchor.clone()
    return graph


def train_graphs_for(
    model: LanguageModel, *, temperature: float, megabytes: float
) -> TrainGraphs | None:
    """Return passes by graphs if a model takes the kernels that they need, else None."""
    trained = any(p.requires_grad for p in model.model.parameters())
    if not (model.device.type == "cuda" and model.fused and model.flash and trained):
        return None
    return TrainGraphs(model, temperature=temperature, megabytes=megabytes)
