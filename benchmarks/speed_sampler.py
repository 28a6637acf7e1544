"""Sections about generation: speed beside peers and floors, ragged lengths, and batch size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from speed_device import forget, seconds_of
from speed_report import Report, reason
from speed_shapes import encoded_prompts, random_model, rollouts_of, step_bytes, word_tokenizer
from speed_sizes import Sizes

from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Limits, Sampling
from covey.garbage import freeze_garbage_collector
from covey.models.language_model import LanguageModel
from covey.models.load_model import wrap
from covey.rollout.episode import EncodedPrompt
from covey.types import Rollout

STEPS = 8
"""Decode steps that are timed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Tokens generated and the seconds of each timed call."""

    tokens: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def speed(self) -> dict[str, float]:
        """Return tokens per second of the median and the best call."""
        best = self.tokens / min(self.seconds)
        return {"tokens_per_s": self.tokens / self.median, "best_tokens_per_s": best}


def random_engine(sizes: Sizes, name: str) -> NativeEngine:
    """Return an engine with random weights whose completions never stop early."""
    config = sizes.shapes[name].config
    model = random_model(config, dtype=sizes.dtype, device=sizes.device)
    return NativeEngine(wrap(model, word_tokenizer(config.vocab_size), name))


def prompts_for(sizes: Sizes, model: LanguageModel, completions: int) -> list[EncodedPrompt]:
    vocabulary = model.model.config.vocab_size
    return encoded_prompts(completions // sizes.group, words=sizes.prompt, vocabulary=vocabulary)


def sampling_of(sizes: Sizes, slots: int) -> Sampling:
    return Sampling(group_size=sizes.group, max_tokens=sizes.tokens, max_concurrent=slots)


def timed(sampler: NativeEngine, sizes: Sizes, completions: int, repeat: int) -> Timed:
    """Time several calls, after one that compiles kernels and captures CUDA graphs."""
    prompts, sampling = (
        prompts_for(sizes, sampler.model, completions),
        sampling_of(sizes, completions),
    )
    written: list[int] = []

    def once(step: int) -> None:
        written.append(tokens_in(rollouts_of(sampler, prompts, step=step, sampling=sampling)))

    once(0)
    with freeze_garbage_collector():  # as in a run
        steps = range(1, repeat + 1)
        seconds = tuple(seconds_of(partial(once, step), sizes.device) for step in steps)
    assert set(written) == {completions * sizes.tokens}, "a completion stopped early"
    return Timed(tokens=written[0], seconds=seconds)


def tokens_in(completions: Sequence[Sequence[Rollout]]) -> int:
    return sum(len(rollout.tokens) for group in completions for rollout in group)


@torch.inference_mode()
def step_seconds(sampler: NativeEngine, sizes: Sizes, completions: int) -> float:
    """Time one decode step with every completion at half length.

    The KV cache is that of the last call, so that slots still point to their prompts.
    """
    backend, sampling = sampler.backend, sampling_of(sizes, completions)
    width = backend.width_for(completions)
    prompts = completions // sizes.group
    limits = Limits(
        sampling=sampling, requests=completions, prompts=prompts, prompt_tokens=sizes.prompt
    )
    slots = backend.begin(limits, width)
    graphs = getattr(backend, "graphs", None)
    if graphs is not None and sizes.device.startswith("cuda"):
        graph = graphs[width, slots.room, sampling.distribution]
        call, apart = graph.replay, True  # one token; prompts have a cache of their own
    else:
        call, apart = (lambda: backend.advance(slots, width, most=1)), False
    half = sizes.tokens // 2 - STEPS // 2
    slots.cache.reserve(np.arange(width), np.full(width, half + STEPS))
    times = []
    for _ in range(sizes.repeat):
        slots.count.fill_(half)
        slots.cache.place.fill_(half if apart else sizes.prompt + half)
        slots.cache.active.fill_(True)
        times.append(seconds_of(lambda: [call() for _ in range(STEPS)], sizes.device) / STEPS)
    return statistics.median(times)


def sampler(sizes: Sizes, report: Report) -> None:
    """Measure tokens per second, a decode step and its floor, and two APIs of transformers."""
    bandwidth = report.environment["copy_bytes_per_s"]
    for name, widths in sizes.sampler.items():
        forget(sizes.device)
        sampler = random_engine(sizes, name)
        weights = sum(p.nbytes for p in sampler.model.model.parameters())
        speeds: dict[int, float] = {}
        for completions in widths:
            found = timed(sampler, sizes, completions, sizes.repeat)
            least = step_bytes(
                sizes.shapes[name], weights, completions=completions, group=sizes.group,
                prompt=sizes.prompt, written=sizes.tokens // 2, size=sizes.dtype.itemsize,
            )  # fmt: skip
            step, floor = step_seconds(sampler, sizes, completions), least / bandwidth
            speeds[completions] = found.speed()["tokens_per_s"]
            report.row(
                "sampler", shape=name, completions=completions, who="covey", **found.speed(),
                step_ms=1e3 * step, floor_ms=1e3 * floor, floor_bytes=least,
                times_floor=step / floor, tokens=found.tokens, seconds=list(found.seconds),
                ran=f"{sizes.repeat} x {sizes.tokens} tokens",
            )  # fmt: skip
        del sampler
        forget(sizes.device)
        _peers(sizes, report, name, speeds.get(sizes.peer_completions))


def _peers(sizes: Sizes, report: Report, name: str, own: float | None) -> None:
    model = random_model(sizes.shapes[name].config, dtype=sizes.dtype, device=sizes.device)
    completions, new = sizes.peer_completions, sizes.peer_tokens
    prompts = encoded_prompts(
        completions // sizes.group, words=sizes.prompt, vocabulary=model.config.vocab_size
    )
    rows = [list(q.tokens) for q in prompts for _ in range(sizes.group)]
    for who, peer in PEERS.items():
        about = {"shape": name, "completions": completions, "who": who}
        try:
            peer(model, rows, WARM.get(who, new), sizes)
            seconds = seconds_of(partial(peer, model, rows, new, sizes), sizes.device)
        except Exception as error:  # the other peers are still measured
            report.row("sampler", **about, missing=reason(error))
            continue
        speed = completions * new / seconds
        report.row(
            "sampler", **about, tokens_per_s=speed, ratio=own / speed if own else None,
            seconds=[seconds], tokens=completions * new, step_ms=1e3 * seconds / new,
            ran=f"1 x {new} tokens",
        )  # fmt: skip
    # Continuous batching keeps most of a GPU's memory.
    getattr(model, "destroy_cached_continuous_batching_manager", lambda: None)()


@torch.inference_mode()
def by_generate(model: Any, rows: list[list[int]], new: int, sizes: Sizes) -> list[list[int]]:
    """transformers' `generate`, which pads prompts to a rectangle."""
    ids = torch.tensor(rows, device=sizes.device)
    found = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0,
        top_k=0, max_new_tokens=new, eos_token_id=None, pad_token_id=0,
    )[:, ids.shape[1] :]  # fmt: skip
    assert found.shape == (len(rows), new), "a completion stopped early"
    return list(found.tolist())


def by_generate_batch(model: Any, rows: list[list[int]], new: int, sizes: Sizes) -> None:
    """transformers' continuous batching, with its manager kept between calls."""
    import transformers

    settings = transformers.GenerationConfig(
        max_new_tokens=new,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        pad_token_id=0,
        eos_token_id=-1,
    )
    # By default it takes most of a GPU's memory; on a CPU that would be main memory.
    room = {} if sizes.device.startswith("cuda") else {"num_blocks": 64, "max_batch_tokens": 64}
    found = model.generate_batch(
        inputs=rows,
        generation_config=settings,
        continuous_batching_config=transformers.ContinuousBatchingConfig(**room) if room else None,
        progress_bar=False,
        persistent_manager=True,
    )
    written = sum(len(one.generated_tokens) for one in found.values())
    assert written == len(rows) * new, f"{written} tokens instead of {len(rows) * new}"


PEERS: dict[str, Callable[..., Any]] = {
    "generate": by_generate,
    "generate_batch": by_generate_batch,
}


WARM = {"generate": 4}
"""Tokens of the warm-up call, where it may be shorter than the timed one."""


def linear(sizes: Sizes, report: Report) -> None:
    """Measure growing batches: how the cost of one completion falls with their size."""
    forget(sizes.device)
    sampler = random_engine(sizes, "smollm2")
    for completions in sizes.linear:
        found = timed(sampler, sizes, completions, max(1, sizes.repeat // 2))
        report.row(
            "linear", shape="smollm2", completions=completions, seconds=found.median,
            tokens_per_s=found.speed()["tokens_per_s"], tokens=found.tokens,
            ms_per_completion=1e3 * found.median / completions,
        )  # fmt: skip


def ragged(sizes: Sizes, report: Report) -> None:
    """Measure completions of very different lengths: refilled slots against static batches."""
    forget(sizes.device)
    sampler = NativeEngine(stopping_model(sizes, "smollm2", sizes.ragged_mean))
    slots, completions = sizes.ragged_slots, sizes.ragged_completions
    sampling = replace(sampling_of(sizes, slots), max_tokens=sizes.ragged_longest)
    prompts = prompts_for(sizes, sampler.model, completions)
    at_once = slots // sizes.group
    batches = [prompts[i : i + at_once] for i in range(0, len(prompts), at_once)]
    parts = {"refill": [prompts], "static": batches}
    lengths: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}

    def all_of(who: str) -> None:
        found = [rollouts_of(sampler, call, step=0, sampling=sampling) for call in parts[who]]
        completions = chain.from_iterable(chain.from_iterable(found))
        lengths[who] = [len(rollout.tokens) for rollout in completions]

    # Both run once to warm up: a call with more prompts allocates a new cache and captures all
    # graphs again, and the end of a call passes through other batch widths.
    for who in parts:
        all_of(who)
    for who in parts:
        seconds[who] = seconds_of(partial(all_of, who), sizes.device)
    for who, found in lengths.items():
        speed = sum(found) / seconds[who]
        ratio = None if who == "refill" else sum(lengths["refill"]) / seconds["refill"] / speed
        report.row(
            "ragged", shape="smollm2", who=who, completions=completions, slots=slots,
            tokens=sum(found), mean_length=statistics.fmean(found),
            shortest=min(found), longest=max(found),
            same_lengths=found == lengths["refill"], seconds=seconds[who], tokens_per_s=speed,
            ratio=ratio, ran=f"{len(parts[who])} calls, {min(found)} to {max(found)} tokens",
        )  # fmt: skip


def stopping_model(sizes: Sizes, name: str, mean: int) -> LanguageModel:
    """Return a random model whose completions stop after a given mean number of tokens.

    One channel of the residual stream is large and equal for every token. The stop token's row in
    the tied head has a larger weight there, so it is about equally likely after every token:
    lengths are geometric, cut off at the maximum.
    """
    config = sizes.shapes[name].config
    model = random_model(config, dtype=sizes.dtype, device=sizes.device, stops=True)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        embedding[:, 0] = 5.0
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(2, config.vocab_size, (4, sizes.prompt + 8), generator=draw)
        hidden = model.base_model(ids.to(sizes.device), use_cache=False).last_hidden_state
        hidden = hidden.flatten(0, 1).float()
        logits = hidden @ embedding.float().T
        embedding[1, 0] += _more(logits, hidden[:, 0], 1 / mean)
    return wrap(model, word_tokenizer(config.vocab_size, stops=True), name)


def _more(logits: torch.Tensor, large: torch.Tensor, share: float) -> float:
    """Find by bisection the extra weight that gives the stop token this mean probability."""
    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        raised = logits.clone()
        raised[:, 1] += middle * large
        drawn = float(raised.softmax(dim=-1)[:, 1].mean())
        low, high = (middle, high) if drawn < share else (low, middle)
    return low
