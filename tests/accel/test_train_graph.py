"""Training passes on static buffers without capture; test_gpu.py captures graphs."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from covey.accel import fused_forward as fused
from covey.accel import head, sizes
from covey.accel import packing as static
from covey.accel import train_graph as graph
from covey.accel.activation_offload import checkpoint_layers
from covey.accel.fused_parameters import attach_grad_sinks, fuse_parameters
from covey.accel.head import token_logp
from covey.accel.packing import Size, StaticBuffers, pack, varlen_tables
from covey.accel.train_graph import TrainGraphs
from covey.models.adapter import add_adapter, perturbed_adapter
from covey.models.language_model import LanguageModel
from covey.models.logp import LogProbs, packed_hidden, scatter_logp
from covey.objective import ALGORITHMS, with_advantage
from covey.policy.optimizer import MasterAdamW
from covey.policy.policy import Policy
from covey.run import Run
from covey.step import StepSettings, optimize
from covey.types import Batch, HostRows
from tests.accel.test_fused_forward import CPU, SETTINGS, per_row, shared_batch
from tests.conftest import build

TEMPERATURE, MEGABYTES = 0.8, 0.05


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of a few tokens, because the interpreter is slow."""
    monkeypatch.setattr(fused, "flash_attention", per_row)
    monkeypatch.setattr(sizes, "TOKEN_STEP", 24)
    monkeypatch.setattr(static, "PADDING_ROW", 4)


def fast(model: LanguageModel) -> LanguageModel:
    model.backbone.layers = model.backbone.layers[:1]  # the interpreter is slow
    fuse_parameters(model.backbone)
    return replace(model, fused=True, flash=True)


def passes_of(model: LanguageModel) -> TrainGraphs:
    return TrainGraphs(model, temperature=TEMPERATURE, megabytes=MEGABYTES)


def parts() -> list[Batch]:
    """Micro-batches of different sizes that share prompts; a row of the first trains nothing."""
    batch = shared_batch()
    mask = batch.mask.clone()
    mask[1] = False
    whole = replace(batch, mask=mask)
    return [whole.rows(torch.tensor(rows)) for rows in ([0, 1, 2, 5], [3, 4], [0, 1, 2, 3])]


def plain(model: LanguageModel, batch: Batch) -> LogProbs:
    packed = pack(HostRows.of(batch), CPU, varlen=True)
    hidden = packed_hidden(model, packed).index_select(0, packed.predictor)
    said = token_logp(
        model.head, hidden, packed.chosen, temperature=TEMPERATURE, megabytes=MEGABYTES
    )
    return scatter_logp(batch, *said, packed.cells)


def taken(passes: TrainGraphs, batch: Batch) -> LogProbs:
    found = passes.run(HostRows.of(batch))
    assert found is not None
    return scatter_logp(batch, *found)


def seen_once(passes: TrainGraphs, *batches: Batch) -> None:
    for batch in batches:
        key = Size.of(*varlen_tables(HostRows.of(batch))).tokens, torch.is_grad_enabled()
        if key not in passes.buckets:
            assert passes.run(HostRows.of(batch)) is None


def pull(values: LogProbs, *, entropy: bool = True) -> None:
    weights = torch.cos(torch.arange(values.logp.numel())).view_as(values.logp)
    loss = (values.logp * weights).sum()
    (loss + (values.entropy * weights.flip(0)).sum() if entropy else loss).backward()


def gradients(model: LanguageModel) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.model.named_parameters() if p.grad is not None}
    model.model.zero_grad()
    return found


def assert_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert expected
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, grad in expected.items():
        assert float((found[name] - grad).abs().max()) <= 2e-6 * scale, name


@pytest.mark.parametrize("kind", ["qwen2", "adapter"])
def test_values_and_gradients_equal_the_eager_pass(kind: str) -> None:
    model = fast(build("llama" if kind == "adapter" else kind))
    if kind == "adapter":
        model = add_adapter(model, rank=2, targets=["q_proj", "down_proj"], also_train=["norm"])
    with perturbed_adapter(model):
        passes, micro = passes_of(model), parts()
        assert len({len(varlen_tables(HostRows.of(b))[0].input_ids) for b in micro}) == 3
        seen_once(passes, *micro)
        assert len(passes.buckets) == 1
        expected = [plain(model, batch) for batch in micro]
        for values in expected:
            pull(values)
        right = gradients(model)
        for _ in range(2):  # the second time gradients were cleared, and the buffers are dirty
            for batch, values in zip(micro, expected, strict=True):
                found = taken(passes, batch)
                for one, other in zip(found, values, strict=True):
                    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
                pull(found)
            assert_alike(gradients(model), right)


def test_eager_and_captured_passes_add_up_without_entropy_gradients() -> None:
    model = fast(build("llama"))
    passes, micro = passes_of(model), parts()
    for batch in micro:
        pull(plain(model, batch), entropy=False)
    right = gradients(model)
    seen_once(passes, *micro)
    pull(plain(model, micro[0]), entropy=False)
    for batch in micro[1:]:
        pull(taken(passes, batch), entropy=False)
    assert_alike(gradients(model), right)


def test_sinks_keep_their_memory_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fast(build("qwen2"))
    named = dict(model.model.named_parameters())
    masters = {n: torch.nn.Parameter(p.detach().clone()) for n, p in named.items()}
    micro = parts()
    for batch in micro:
        pull(plain(model, batch))
    right = gradients(model)
    # The head as on a GPU, whose gradient goes to a sink.
    monkeypatch.setattr(head, "uses_kernels", lambda weight: True)
    attach_grad_sinks((p, masters[name]) for name, p in named.items())
    passes = passes_of(model)
    seen_once(passes, *micro)
    places = []
    for _ in range(2):
        for batch in micro:
            pull(taken(passes, batch))
        assert all(p.grad is None for p in named.values())
        assert_alike({n: m.grad for n, m in masters.items()}, right)
        places.append({n: m.grad.data_ptr() for n, m in masters.items()})
        for master in masters.values():
            master.grad = None
    assert places[0] == places[1]


def test_results_are_the_same_without_gradient() -> None:
    model = fast(build("llama"))
    passes, micro = passes_of(model), parts()
    with torch.no_grad():
        seen_once(passes, *micro)
        for batch in micro:
            found = taken(passes, batch)
            assert not found.logp.requires_grad
            for one, other in zip(found, plain(model, batch), strict=True):
                torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    assert all(p.grad is None for p in model.model.parameters())


def test_a_pass_goes_backward_once_and_before_the_next() -> None:
    model = fast(build("llama"))
    passes, batch = passes_of(model), parts()[0]
    seen_once(passes, batch)
    first = taken(passes, batch).logp.sum()
    second = taken(passes, batch).logp.sum()
    with pytest.raises(RuntimeError, match="before another"):
        first.backward()
    second.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run backward once"):
        second.backward()


def test_checkpointing_changes_nothing() -> None:
    model, micro = fast(build("llama")), parts()
    for batch in micro:
        pull(plain(model, batch))
    right = gradients(model)
    model.model.zero_grad()
    model.model.train()
    checkpoint_layers(model.model, offload=False)
    passes = passes_of(model)
    seen_once(passes, *micro)
    for batch in micro:
        pull(taken(passes, batch))
    assert_alike(gradients(model), right)


def test_a_bucket_grows_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MAX_BUCKETS", 2)
    passes = passes_of(fast(build("llama")))
    size = Size(tokens=32, places=64, chosen=32, rows=32, longest_query=8, longest_key=8)
    assert passes._pass_for(size, True) is None
    first = passes._pass_for(size, True)
    assert first is passes._pass_for(size._replace(rows=16), True)
    grown = passes._pass_for(size._replace(rows=64, places=32), True)
    assert grown.rows.size == size._replace(rows=64)
    assert passes._pass_for(size, True) is grown
    assert passes._pass_for(size, False) is None
    assert passes._pass_for(size, True) is grown
    assert passes._pass_for(size._replace(tokens=64), True) is None
    assert list(passes.buckets) == [(32, True), (64, True)]


def test_a_captured_graph_serves_smaller_micro_batches() -> None:
    passes = passes_of(fast(build("llama")))
    size = Size(tokens=48, places=96, chosen=48, rows=32, longest_query=8, longest_key=8)
    large = size._replace(tokens=64)
    for one in (size, large):
        assert passes._pass_for(one, True) is None
        passes._pass_for(one, True).forward_graph = Graph()
    need = size._replace(tokens=40, places=80, rows=30)
    assert passes._pass_for(need, True).rows.size == size
    assert passes._pass_for(size, True).rows.size == size
    assert passes._pass_for(need._replace(tokens=49, rows=28), True).rows.size == large
    assert not passes.captured()[0].rows.size.holds(need.padded_to(49))
    # Too small, no room for padding or the longest row, and without gradient.
    for other in (
        need._replace(tokens=32), need._replace(places=90), need._replace(rows=31),
        need._replace(longest_key=16),
    ):  # fmt: skip
        passes.buckets.pop((40, True), None)
        assert passes._pass_for(other, True) is None
    assert passes._pass_for(need, False) is None


@pytest.mark.parametrize("more", [0, 5, 48])
def test_every_padding_token_has_a_row_and_every_key_position_its_token(more: int) -> None:
    for batch in parts():
        tables, longest = varlen_tables(HostRows.of(batch))
        size = Size.of(tables, longest)
        size = size.padded_to(size.tokens + more)
        rows = StaticBuffers(size, CPU)
        rows.fill(tables)
        full = rows.tables
        lengths = full.query_starts.diff()
        assert int(full.query_starts[-1]) == size.tokens > len(tables.input_ids)
        assert 0 <= int(lengths.min()) <= int(lengths.max()) <= size.longest_query
        assert bool((full.key_starts.diff() >= lengths).all())
        for token in range(size.tokens):
            entries = range(int(full.begin[token]), int(full.end[token]))
            places = [int(full.starts[e] + full.position[token]) for e in entries]
            assert places
            assert all(int(full.tokens[place]) == token for place in places)
        bounds = itertools.pairwise(full.key_starts.tolist())
        held = [full.tokens[a:b].tolist() for a, b in bounds]
        asking = [list(range(a, b)) for a, b in itertools.pairwise(full.query_starts.tolist())]
        assert all(keys[len(keys) - len(q) :] == q for keys, q in zip(held, asking, strict=True))
        for name in ("predictor", "chosen", "cells"):
            assert torch.equal(getattr(full, name)[: len(tables.cells)], getattr(tables, name))
            assert not getattr(full, name)[len(tables.cells) :].any()


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, 256), (256, 256), (4096, 4096), (4336, 4352), (6504, 6656), (17_000, 17_408)],
)
def test_buckets_waste_a_sixteenth_at_most(
    count: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "TOKEN_STEP", 256)
    assert sizes.padded_tokens(count) == expected


class Graph:
    """A graph that captures nothing."""

    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


def test_the_third_pass_is_captured_and_failures_fall_back_to_eager(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def recording(graph: Graph, pool: Any) -> Any:
        assert pool == "pool"
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    model = fast(build("llama"))
    passes, host = passes_of(model), HostRows.of(parts()[0])
    passes._pool = "pool"
    passes.run(host)
    for _ in range(2):  # a pass without backward has not compiled all kernels
        unused = passes.run(host)
        assert not passes.captured()
    unused.logp.sum().backward()
    for replays in (2, 4):
        passes.run(host).logp.sum().backward()
        assert len(passes.captured()) == 1
        assert Graph.replays == replays

    def broken(graph: Graph, pool: Any) -> Any:
        raise RuntimeError("no\nreally")

    monkeypatch.setattr(torch.cuda, "graph", broken)
    with torch.no_grad():
        assert passes.run(host) is None
        assert passes.run(host) is not None
        assert [passes.run(host) for _ in range(2)] == [None, None]
        assert not passes.failed
        assert passes.run(host) is None
    assert capsys.readouterr().err == "covey: training does not use CUDA graphs: no\n"
    assert passes.run(host) is None
    assert not passes.captured()


def test_graphs_are_freed_when_memory_runs_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from covey.policy import policy as module

    model, batch, calls = fast(build("llama")), parts()[0], []
    policy = Policy(
        model=model,
        optimizer=MasterAdamW(model.model.named_parameters(), **SETTINGS),
        temperature=TEMPERATURE,
        logits_megabytes=MEGABYTES,
        passes=passes_of(model),
    )

    def short(*arguments: Any, **options: Any) -> LogProbs:
        calls.append(1)
        if policy.passes.failed and len(calls) == 2:
            return plain(model, batch)
        raise torch.OutOfMemoryError("short of memory")

    monkeypatch.setattr(module, "batch_logp", short)
    policy.logp(batch)
    assert "does not use CUDA graphs: short of memory" in capsys.readouterr().err
    assert len(calls) == 2
    with pytest.raises(torch.OutOfMemoryError):
        policy.logp(batch)
    assert not policy.passes.buckets


def test_an_update_with_graphs_equals_the_eager_update() -> None:
    objective = ALGORITHMS["grpo"](beta=0.0)
    batch = with_advantage(objective, shared_batch())
    settings = StepSettings(
        mini_batches=1, epochs=2, micro_batch_tokens=16, old_logp_from_sampler=False,
        learning_rate=lambda *_: 1e-3, seed=0,
    )  # fmt: skip
    weights, metrics = [], []
    for by_passes in (False, True):
        model = fast(build("qwen2"))
        policy = Policy(
            model=model,
            optimizer=MasterAdamW(model.model.named_parameters(), **SETTINGS),
            temperature=TEMPERATURE,
            logits_megabytes=MEGABYTES,
            passes=passes_of(model) if by_passes else None,
        )
        metrics.append(
            optimize(Run(policy=policy, objective=objective, settings=settings), batch, step=0)
        )
        weights.append([p.detach() for p in model.model.parameters()])
        if by_passes:
            assert any(bucket.ready is not None for bucket in policy.passes.buckets.values())
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-3, abs=1e-5)
