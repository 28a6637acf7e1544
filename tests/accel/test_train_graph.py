"""Training passes on static buffers, not recorded; tests/policy/test_gpu.py has the graphs."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.policy.test_fused import CPU, SETTINGS, per_row, shared_batch

from covey.accel import fused_forward as fused
from covey.accel import static_buffers as static
from covey.accel import train_graph as graph
from covey.accel.fused_head import device_logp
from covey.accel.fused_parameters import give_sinks, join_weights
from covey.accel.head import token_logp
from covey.accel.packing import lay_spans
from covey.accel.static_buffers import Size, StaticRows
from covey.accel.train_graph import Passes
from covey.models.adapter import add_adapter, stirred
from covey.models.language_model import LanguageModel
from covey.models.layout import pack_for
from covey.models.logp import LogProbs, device_hidden, in_places
from covey.objective import ALGORITHMS, with_advantage
from covey.training.optimizer import MasterAdamW
from covey.training.policy import Policy
from covey.training.step import Learner, StepSettings, optimize
from covey.types import Batch, HostRows
from tests.conftest import build

TEMPERATURE, MEGABYTES = 0.8, 0.05


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of a few tokens: the kernels are interpreted, a token at a time."""
    monkeypatch.setattr(fused, "flash_attention", per_row)
    monkeypatch.setattr(static, "STEP", 16)
    monkeypatch.setattr(static, "DUMMY", 4)


def fast(model: LanguageModel) -> LanguageModel:
    model.backbone.layers = model.backbone.layers[:1]  # what is interpreted takes its time
    join_weights(model.backbone)
    return replace(model, fused=True, flash=True)


def passes_of(model: LanguageModel) -> Passes:
    return Passes(model, temperature=TEMPERATURE, megabytes=MEGABYTES)


def parts() -> list[Batch]:
    """Micro-batches of different sizes that share prompts; a row of the first trains nothing."""
    batch = shared_batch()
    mask = batch.mask.clone()
    mask[1] = False
    whole = replace(batch, mask=mask)
    return [whole.rows(torch.tensor(rows)) for rows in ([0, 1, 2, 5], [3, 4], [0, 1, 2, 3])]


def plain(model: LanguageModel, batch: Batch) -> LogProbs:
    packed = pack_for(HostRows.of(batch), CPU, flash=True)
    hidden = device_hidden(model, packed).index_select(0, packed.predictor)
    said = token_logp(
        model.head, hidden, packed.chosen, temperature=TEMPERATURE, megabytes=MEGABYTES
    )
    return in_places(batch, *said, packed.cells)


def taken(passes: Passes, batch: Batch) -> LogProbs:
    found = passes.take(HostRows.of(batch))
    assert found is not None
    return in_places(batch, *found)


def seen_once(passes: Passes, *batches: Batch) -> None:
    for batch in batches:
        key = Size.of(*lay_spans(HostRows.of(batch))).tokens, torch.is_grad_enabled()
        if key not in passes.buckets:
            assert passes.take(HostRows.of(batch)) is None


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
        assert float((found[name] - grad).abs().max()) <= 1e-6 * scale, name


@pytest.mark.parametrize("kind", ["llama", "qwen2", "adapter"])
def test_values_and_gradients_are_those_of_the_plain_way(kind: str) -> None:
    model = fast(build("llama" if kind == "adapter" else kind))
    if kind == "adapter":
        model = add_adapter(model, rank=2, targets=["q_proj", "down_proj"], also_train=["norm"])
    with stirred(model):
        passes, micro = passes_of(model), parts()
        assert len({len(lay_spans(HostRows.of(b))[0].input_ids) for b in micro}) == 3
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


def test_a_plain_pass_and_others_add_up_and_an_entropy_nobody_asks_for_is_none() -> None:
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


def on_device(head: Any, hidden: torch.Tensor, tokens: torch.Tensor, **options: float) -> Any:
    """The head as it is on a device, whose gradient goes to a sink."""
    return device_logp(
        hidden,
        head.linear,
        tokens,
        scale=head.scale / options["temperature"],
        softcap=None,
        megabytes=options["megabytes"],
    )


def test_sinks_keep_their_memory_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fast(build("qwen2"))
    named = dict(model.model.named_parameters())
    masters = {n: torch.nn.Parameter(p.detach().clone()) for n, p in named.items()}
    micro = parts()
    for batch in micro:
        pull(plain(model, batch))
    right = gradients(model)
    monkeypatch.setattr(graph, "token_logp", on_device)
    give_sinks((p, masters[name]) for name, p in named.items())
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


def test_without_gradient_the_same_is_said() -> None:
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
    with pytest.raises(RuntimeError, match="before any other"):
        first.backward()
    second.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="goes backward once"):
        second.backward()


def test_checkpointing_changes_nothing() -> None:
    model, micro = fast(build("llama")), parts()
    for batch in micro:
        pull(plain(model, batch))
    right = gradients(model)
    model.model.zero_grad()
    model.model.train()
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    passes = passes_of(model)
    seen_once(passes, *micro)
    for batch in micro:
        pull(taken(passes, batch))
    assert_alike(gradients(model), right)


def test_a_bucket_grows_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "BUCKETS", 2)
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


def test_what_was_recorded_serves_smaller_micro_batches() -> None:
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
    assert not passes.recorded()[0].rows.size.holds(need.padded_to(49))
    # Too small, no room for padding or the longest row, and only to be looked at.
    for other in (
        need._replace(tokens=32), need._replace(places=90), need._replace(rows=31),
        need._replace(longest_key=16),
    ):  # fmt: skip
        passes.buckets.pop((40, True), None)
        assert passes._pass_for(other, True) is None
    assert passes._pass_for(need, False) is None


@pytest.mark.parametrize("more", [0, 5, 48])
def test_every_padding_token_has_a_row_and_every_place_its_token(more: int) -> None:
    for batch in parts():
        tables, longest = lay_spans(HostRows.of(batch))
        size = Size.of(tables, longest)
        size = size.padded_to(size.tokens + more)
        rows = StaticRows(size, CPU)
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
    monkeypatch.setattr(static, "STEP", 256)
    assert static.bucket(count) == expected


class Graph:
    """A graph that records nothing."""

    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


def test_the_third_is_recorded_and_a_failure_leads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def recording(graph: Graph, pool: Any) -> Any:
        assert pool == "pool"
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    model = fast(build("llama"))
    passes, host = passes_of(model), HostRows.of(parts()[0])
    passes._pool = "pool"
    passes.take(host)
    for _ in range(2):  # what has not gone backward is not known well enough
        unused = passes.take(host)
        assert not passes.recorded()
    unused.logp.sum().backward()
    for replays in (2, 4):
        passes.take(host).logp.sum().backward()
        assert len(passes.recorded()) == 1
        assert Graph.replays == replays

    def broken(graph: Graph, pool: Any) -> Any:
        raise RuntimeError("no\nreally")

    monkeypatch.setattr(torch.cuda, "graph", broken)
    with torch.no_grad():
        assert passes.take(host) is None
        assert passes.take(host) is not None
        assert [passes.take(host) for _ in range(2)] == [None, None]
        assert not passes.failed
        with pytest.warns(UserWarning, match="not recorded as graphs: no$"):
            assert passes.take(host) is None
    assert passes.take(host) is None
    assert not passes.recorded()


def test_where_memory_is_short_graphs_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from covey.training import policy as module

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
    with pytest.warns(UserWarning, match="short of memory"):
        policy.logp(batch)
    assert len(calls) == 2
    with pytest.raises(torch.OutOfMemoryError):
        policy.logp(batch)
    assert not policy.passes.buckets


def test_an_update_by_passes_is_the_plain_update() -> None:
    objective = ALGORITHMS["grpo"](beta=0.0)
    batch = with_advantage(objective, shared_batch())
    settings = StepSettings(
        mini_batches=1, epochs=2, micro_batch_tokens=30, old_logp_from_sampler=False,
        learning_rate=lambda _: 1e-3, seed=0,
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
        metrics.append(optimize(Learner(policy=policy, objective=objective, settings=settings), batch, step=0))
        weights.append([p.detach() for p in model.model.parameters()])
        if by_passes:
            assert any(bucket.ready is not None for bucket in policy.passes.buckets.values())
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-3, abs=1e-5)
