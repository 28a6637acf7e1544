"""Sections about sampling: speed beside peers and floors, answers of all lengths, and growth."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from speed_device import forget, seconds_of
from speed_report import Report, reason
from speed_shapes import questions, random_model, rollouts_of, step_bytes, word_tokenizer
from speed_sizes import Sizes

from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Sampling
from covey.models.language_model import LanguageModel
from covey.models.load_model import wrap
from covey.rollout.episode import EncodedPrompt
from covey.training.garbage import freeze_garbage_collector
from covey.types import Rollout

STEPS = 8
"""Calls of the stepper that are timed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What so many answers took."""

    tokens: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def speed(self) -> dict[str, float]:
        """Return tokens a second, of the median run and of the best."""
        best = self.tokens / min(self.seconds)
        return {"tokens_per_s": self.tokens / self.median, "best_tokens_per_s": best}


def made_sampler(sizes: Sizes, name: str) -> NativeEngine:
    """Return a sampler for a shape whose answers never end by themselves."""
    config = sizes.shapes[name].config
    model = random_model(config, dtype=sizes.dtype, device=sizes.device)
    return NativeEngine(wrap(model, word_tokenizer(config.vocab_size), name))


def asked(sizes: Sizes, model: LanguageModel, answers: int) -> list[EncodedPrompt]:
    vocabulary = model.model.config.vocab_size
    return questions(answers // sizes.group, words=sizes.prompt, vocabulary=vocabulary)


def sampling_of(sizes: Sizes, slots: int) -> Sampling:
    return Sampling(group_size=sizes.group, max_tokens=sizes.tokens, max_concurrent=slots)


def timed(sampler: NativeEngine, sizes: Sizes, answers: int, repeat: int) -> Timed:
    """Sample several times, after once in which kernels are compiled and graphs recorded."""
    prompts, sampling = asked(sizes, sampler.model, answers), sampling_of(sizes, answers)
    written: list[int] = []

    def once(step: int) -> None:
        written.append(tokens_in(rollouts_of(sampler, prompts, step=step, sampling=sampling)))

    once(0)
    with freeze_garbage_collector():  # as in a run
        seconds = tuple(seconds_of(lambda n=n: once(n + 1), sizes.device) for n in range(repeat))
    assert set(written) == {answers * sizes.tokens}, "no answer ends before its time"
    return Timed(tokens=written[0], seconds=seconds)


def tokens_in(answers: Sequence[Sequence[Rollout]]) -> int:
    return sum(len(rollout.tokens) for group in answers for rollout in group)


@torch.inference_mode()
def step_seconds(sampler: NativeEngine, sizes: Sizes, answers: int) -> float:
    """Time a decode step by itself, with every answer half written.

    The memory is that of the last call, so that slots still point to their prompts.
    """
    backend, sampling = sampler.backend, sampling_of(sizes, answers)
    width = backend.width_for(answers)
    slots = backend.begin(
        width=width, prompts=answers // sizes.group, longest=sizes.prompt, sampling=sampling
    )
    graphs = getattr(backend, "graphs", None)
    if graphs is not None and sizes.device.startswith("cuda"):
        graph = graphs[width, slots.room, sampling.distribution]
        call, apart = graph.replay, True  # one token, and prompts stand apart from answers
    else:
        call, apart = (lambda: backend.advance(slots, width, most=1)), False
    half = sizes.tokens // 2 - STEPS // 2
    times = []
    for _ in range(sizes.repeat):
        slots.count.fill_(half)
        slots.cache.place.fill_(half if apart else sizes.prompt + half)
        slots.cache.active.fill_(True)
        times.append(seconds_of(lambda: [call() for _ in range(STEPS)], sizes.device) / STEPS)
    return statistics.median(times)


def sampler(sizes: Sizes, report: Report) -> None:
    """Tokens a second, the time of a step and its floor; and two ways of transformers."""
    bandwidth = report.environment["copy_bytes_per_s"]
    for name, widths in sizes.sampler.items():
        forget(sizes.device)
        sampler = made_sampler(sizes, name)
        weights = sum(p.nbytes for p in sampler.model.model.parameters())
        speeds: dict[int, float] = {}
        for answers in widths:
            found = timed(sampler, sizes, answers, sizes.repeat)
            least = step_bytes(
                sizes.shapes[name], weights, answers=answers, group=sizes.group,
                prompt=sizes.prompt, written=sizes.tokens // 2, size=sizes.dtype.itemsize,
            )  # fmt: skip
            step, floor = step_seconds(sampler, sizes, answers), least / bandwidth
            speeds[answers] = found.speed()["tokens_per_s"]
            report.row(
                "sampler", shape=name, answers=answers, who="covey", **found.speed(),
                step_ms=1e3 * step, floor_ms=1e3 * floor, floor_bytes=least,
                times_floor=step / floor, tokens=found.tokens, seconds=list(found.seconds),
                ran=f"{sizes.repeat} x {sizes.tokens} tokens",
            )  # fmt: skip
        del sampler
        forget(sizes.device)
        _peers(sizes, report, name, speeds.get(sizes.peer_answers))


def _peers(sizes: Sizes, report: Report, name: str, own: float | None) -> None:
    model = random_model(sizes.shapes[name].config, dtype=sizes.dtype, device=sizes.device)
    answers, new = sizes.peer_answers, sizes.peer_tokens
    prompts = questions(
        answers // sizes.group, words=sizes.prompt, vocabulary=model.config.vocab_size
    )
    rows = [list(q.tokens) for q in prompts for _ in range(sizes.group)]
    for who, peer in PEERS.items():
        about = {"shape": name, "answers": answers, "who": who}
        try:
            peer(model, rows, WARM.get(who, new), sizes)
            seconds = seconds_of(lambda peer=peer: peer(model, rows, new, sizes), sizes.device)
        except Exception as error:  # a peer that does not run is no reason to stop
            report.row("sampler", **about, missing=reason(error))
            continue
        speed = answers * new / seconds
        report.row(
            "sampler", **about, tokens_per_s=speed, ratio=own / speed if own else None,
            seconds=[seconds], tokens=answers * new, step_ms=1e3 * seconds / new,
            ran=f"1 x {new} tokens",
        )  # fmt: skip
    # What continuous batching has set up holds most of a GPU's memory.
    getattr(model, "destroy_cached_continuous_batching_manager", lambda: None)()


@torch.inference_mode()
def by_generate(model: Any, rows: list[list[int]], new: int, sizes: Sizes) -> list[list[int]]:
    """transformers' `generate`, which pads prompts to a rectangle."""
    ids = torch.tensor(rows, device=sizes.device)
    found = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0,
        top_k=0, max_new_tokens=new, eos_token_id=None, pad_token_id=0,
    )[:, ids.shape[1] :]  # fmt: skip
    assert found.shape == (len(rows), new), "every answer is as long as was asked"
    return list(found.tolist())


def by_generate_batch(model: Any, rows: list[list[int]], new: int, sizes: Sizes) -> None:
    """transformers' continuous batching, with what it sets up kept from call to call."""
    import transformers

    settings = transformers.GenerationConfig(
        max_new_tokens=new,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        pad_token_id=0,
        eos_token_id=-1,
    )
    # It takes most of a GPU by itself, and would take most of main memory.
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
"""Tokens to warm up with. Continuous batching is set up for as many as will be asked for."""


def linear(sizes: Sizes, report: Report) -> None:
    """More and more answers at a time: does the cost of one fall, and where does it stop?"""
    forget(sizes.device)
    sampler = made_sampler(sizes, "smollm2")
    for answers in sizes.linear:
        found = timed(sampler, sizes, answers, max(1, sizes.repeat // 2))
        report.row(
            "linear", shape="smollm2", answers=answers, seconds=found.median,
            tokens_per_s=found.speed()["tokens_per_s"], tokens=found.tokens,
            ms_an_answer=1e3 * found.median / answers,
        )  # fmt: skip


def ragged(sizes: Sizes, report: Report) -> None:
    """Answers of very different length: slots that are filled again, and batches that wait."""
    forget(sizes.device)
    sampler = NativeEngine(stopping_model(sizes, "smollm2", sizes.ragged_mean))
    slots, answers = sizes.ragged_slots, sizes.ragged_answers
    sampling = replace(sampling_of(sizes, slots), max_tokens=sizes.ragged_longest)
    prompts = asked(sizes, sampler.model, answers)
    at_once = slots // sizes.group
    batches = [prompts[i : i + at_once] for i in range(0, len(prompts), at_once)]
    parts = {"refill": [prompts], "static": batches}
    lengths: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}

    def all_of(who: str) -> None:
        found = [rollouts_of(sampler, call, step=0, sampling=sampling) for call in parts[who]]
        answers = chain.from_iterable(chain.from_iterable(found))
        lengths[who] = [len(rollout.tokens) for rollout in answers]

    # Both once to warm up: a call with more prompts makes new memory, for which all graphs are
    # recorded again, and each call comes by other numbers of slots while it ends.
    for who in parts:
        all_of(who)
    for who in parts:
        seconds[who] = seconds_of(partial(all_of, who), sizes.device)
    for who, found in lengths.items():
        speed = sum(found) / seconds[who]
        ratio = None if who == "refill" else sum(lengths["refill"]) / seconds["refill"] / speed
        report.row(
            "ragged", shape="smollm2", who=who, answers=answers, slots=slots, tokens=sum(found),
            mean_length=statistics.fmean(found), shortest=min(found), longest=max(found),
            same_lengths=found == lengths["refill"], seconds=seconds[who], tokens_per_s=speed,
            ratio=ratio, ran=f"{len(parts[who])} calls, {min(found)} to {max(found)} tokens",
        )  # fmt: skip


def stopping_model(sizes: Sizes, name: str, mean: int) -> LanguageModel:
    """Return a random model that ends its answers, after so many tokens in the mean.

    One number of the residual stream is made large and the same for every token. The row of the
    stop token in the tied head has more there than others, and so is drawn about as often after
    every token: lengths follow the geometric law, cut off at the longest answer.
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
    """Find by halving how much more the stop token needs to be drawn with a mean share."""
    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        raised = logits.clone()
        raised[:, 1] += middle * large
        drawn = float(raised.softmax(dim=-1)[:, 1].mean())
        low, high = (middle, high) if drawn < share else (low, middle)
    return low
