"""The native sampler: batched generation with the trainer's own weights.

There is no second copy of the model, nothing to synchronise, and no other engine whose
probabilities differ. A prompt is read once for its whole group; answers are written in slots, and a
slot whose answer has ended takes the next one, so a long answer does not hold up the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache

from covey.errors import DataError
from covey.policy.model import LanguageModel
from covey.sampler.decoder import Decoder, decoder_for
from covey.sampler.pick import pick_tokens
from covey.sampler.protocol import Question, Sampling
from covey.sampler.random import token_uniforms
from covey.sampler.slots import SlotCache
from covey.types import Finish, Rollout

PREFILL_TOKENS = 16_384
"""Prompt tokens, padded, that are read in one forward pass."""
CAPACITY_STEP = 32
"""Slots hold a multiple of so many positions, so that one cache serves many calls."""
SPARE_BYTES = 64 * 2**20
"""The largest cache that is kept between calls."""
REFILL_SHARE = 8
"""Free slots are refilled once they are one in so many: reading prompts one by one is slow."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer to be written: sample number `sample` of question number `question`."""

    question: int
    sample: int


@dataclass(slots=True)
class _Prefix:
    """A question that has been read: its keys and values, and what comes next."""

    cache: DynamicCache
    row: int
    logits: torch.Tensor
    """[V]."""
    unwritten: int
    """Samples not yet given a slot; at 0 the prefix is forgotten."""


@dataclass(slots=True)
class NativeSampler:
    """Samples from a language model that somebody else may be training."""

    model: LanguageModel
    decoder: Decoder = field(init=False)
    spare: SlotCache | None = field(init=False, default=None)
    """A small cache on a CPU is kept for the next call: fresh memory is slow to touch."""

    def __post_init__(self) -> None:
        self.decoder = decoder_for(self.model)

    @torch.inference_mode()
    def generate(
        self,
        questions: Sequence[Question],
        *,
        step: int,
        sampling: Sampling,
        version: int = 0,
        finished: Callable[[int, Rollout], None] | None = None,
    ) -> list[list[Rollout]]:
        """Return `sampling.samples` answers for each question, in order."""
        self._check_lengths(questions, sampling.max_tokens)
        training = self.model.model.training
        self.model.model.eval()
        try:
            writer = _Writer(self, questions, step, sampling)
            rollouts: dict[_Answer, Rollout] = {}
            for answer, tokens, logps, finish in writer.run():
                question = questions[answer.question]
                rollout = Rollout(
                    prompt_id=question.prompt.id,
                    sample=answer.sample,
                    prompt_tokens=question.tokens,
                    tokens=tuple(tokens),
                    trained=(True,) * len(tokens),
                    sampler_logp=tuple(logps),
                    text=self.model.decode(tokens),
                    finish=finish,
                    policy_version=version,
                )
                rollouts[answer] = rollout
                if finished is not None:
                    finished(answer.question, rollout)
            self._keep(writer)
        finally:
            self.model.model.train(training)
        return [
            [rollouts[_Answer(question, sample)] for sample in range(sampling.samples)]
            for question in range(len(questions))
        ]

    def _keep(self, writer: _Writer) -> None:
        cache = None if writer.slots is None else writer.slots.cache
        if cache is not None and cache.place.device.type == "cpu" and cache.bytes <= SPARE_BYTES:
            self.spare = cache

    def _check_lengths(self, questions: Sequence[Question], max_tokens: int) -> None:
        for question in questions:
            needed = len(question.tokens) + max_tokens
            if not question.tokens:
                raise DataError(f"prompt {question.prompt.id} has no tokens")
            if needed > self.model.context:
                raise DataError(
                    f"prompt {question.prompt.id} has {len(question.tokens)} tokens, and with "
                    f"max_tokens = {max_tokens} that is {needed}: the model's context is "
                    f"{self.model.context}"
                )


@dataclass(slots=True)
class _Slots:
    """What is being written. Row s of every tensor is slot s."""

    answers: list[_Answer | None]
    cache: SlotCache
    uniforms: torch.Tensor
    """[S, max_tokens]."""
    tokens: torch.Tensor
    """[S, max_tokens]."""
    logps: torch.Tensor
    """[S, max_tokens]."""
    count: torch.Tensor
    """[S]: tokens written so far."""
    active: torch.Tensor = field(init=False)
    """[S] bool."""

    def __post_init__(self) -> None:
        self.active = torch.zeros_like(self.count, dtype=torch.bool)

    def keep(self, slots: torch.Tensor) -> None:
        """Move the given slots to the front."""
        self.cache.keep(slots)
        moved = slots.tolist()
        self.answers[: len(moved)] = [self.answers[s] for s in moved]
        for tensor in (self.uniforms, self.tokens, self.logps, self.count, self.active):
            tensor[: len(moved)] = tensor[slots]
        self.active[len(moved) :] = False


class _Writer:
    """One call of the sampler."""

    def __init__(
        self,
        sampler: NativeSampler,
        questions: Sequence[Question],
        step: int,
        sampling: Sampling,
    ) -> None:
        model = sampler.model
        self.model = model
        self.decoder = sampler.decoder
        self.spare = sampler.spare
        self.questions = questions
        self.step = step
        self.sampling = sampling
        self.queue = deque(
            _Answer(q, s) for q in range(len(questions)) for s in range(sampling.samples)
        )
        self.prefixes: dict[int, _Prefix] = {}
        self.slots: _Slots | None = None
        self.stop_ids = torch.tensor(model.stop_ids, device=model.device)
        self.stop_reach = 1 + max((len(s.encode()) for s in sampling.stop_strings), default=0)

    def run(self) -> Iterator[tuple[_Answer, list[int], list[float], Finish]]:
        """Yield every answer as it ends."""
        while self.queue or (self.slots is not None and bool(self.slots.active.any())):
            if self.queue and self._may_refill():
                self._refill()
            else:
                self._advance()
            yield from self._retire()

    def _may_refill(self) -> bool:
        if self.slots is None:
            return True
        free = self.slots.cache.width - int(self.slots.active.sum())
        return free >= min(max(1, self.slots.cache.width // REFILL_SHARE), len(self.queue))

    def _refill(self) -> None:
        """Give waiting answers the free slots and write their first token."""
        width = min(self.sampling.slots, len(self.queue)) if self.slots is None else None
        free = list(range(width)) if width else self._free_slots()
        answers = [self.queue.popleft() for _ in range(min(len(free), len(self.queue)))]
        self._read(sorted({a.question for a in answers} - self.prefixes.keys()))
        if self.slots is None:
            self.slots = self._make_slots(len(free), self.prefixes[answers[0].question].cache)
        slots = self.slots
        free = free[: len(answers)]
        for slot, answer in zip(free, answers, strict=True):
            slots.answers[slot] = answer
            slots.uniforms[slot] = self._uniforms(answer)
        index = torch.tensor(free, device=self.model.device)
        logits = self._copy_prefixes(index, answers)
        slots.count[index] = 0
        slots.active[index] = True
        self._write(index, logits)

    def _free_slots(self) -> list[int]:
        assert self.slots is not None
        free: list[int] = (
            (~self.slots.active[: self.slots.cache.width]).nonzero().flatten().tolist()
        )
        return free

    def _read(self, wanted: list[int]) -> None:
        """Read questions that nobody has read yet, several at a time."""
        start = 0
        while start < len(wanted):
            longest, size = 0, 0
            for question in wanted[start:]:
                longest = max(longest, len(self.questions[question].tokens))
                if size and longest * (size + 1) > PREFILL_TOKENS:
                    break
                size += 1
            self._read_together(wanted[start : start + size])
            start += size

    def _read_together(self, wanted: list[int]) -> None:
        device = self.model.device
        rows = [torch.tensor(self.questions[q].tokens, device=device) for q in wanted]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        last = torch.tensor([len(row) - 1 for row in rows], device=device)
        cache = DynamicCache()
        # Padding stands on the right, where causal attention never looks, so no mask is needed.
        hidden = self.model.backbone(
            input_ids=ids, past_key_values=cache, use_cache=True
        ).last_hidden_state
        logits = self.model.head.logits(hidden[torch.arange(len(rows), device=device), last])
        for row, question in enumerate(wanted):
            self.prefixes[question] = _Prefix(cache, row, logits[row], self.sampling.samples)

    def _copy_prefixes(self, slots: torch.Tensor, answers: list[_Answer]) -> torch.Tensor:
        """Put each answer's prompt into its slot; return the logits [S, V] of the first tokens."""
        assert self.slots is not None
        prefixes = [self.prefixes[a.question] for a in answers]
        for cache in {id(p.cache): p.cache for p in prefixes}.values():
            mine = [i for i, p in enumerate(prefixes) if p.cache is cache]
            rows = torch.tensor([prefixes[i].row for i in mine], device=slots.device)
            self.slots.cache.write_prefix(slots[mine], cache, rows)
        lengths = [len(self.questions[a.question].tokens) for a in answers]
        # `_write` moves the place on by one for the token that it writes.
        self.slots.cache.place[slots] = torch.tensor(lengths, device=slots.device) - 1
        for answer, prefix in zip(answers, prefixes, strict=True):
            prefix.unwritten -= 1
            if prefix.unwritten == 0:
                del self.prefixes[answer.question]
        return torch.stack([p.logits for p in prefixes])

    def _make_slots(self, width: int, prefix: DynamicCache) -> _Slots:
        device, room = self.model.device, self.sampling.max_tokens
        capacity = max(len(q.tokens) for q in self.questions) + room
        capacity = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
        cache = self.spare
        if cache is None or cache.slots != width or cache.capacity != capacity:
            cache = SlotCache(width, capacity, prefix)
        self.decoder.begin(capacity)
        return _Slots(
            answers=[None] * width,
            cache=cache.emptied(),
            uniforms=torch.zeros(width, room, device=device),
            tokens=torch.zeros(width, room, dtype=torch.long, device=device),
            logps=torch.zeros(width, room, device=device),
            count=torch.zeros(width, dtype=torch.long, device=device),
        )

    def _uniforms(self, answer: _Answer) -> torch.Tensor:
        drawn = token_uniforms(
            seed=self.sampling.seed,
            step=self.step,
            prompt=self.questions[answer.question].prompt.id,
            sample=answer.sample,
            count=self.sampling.max_tokens,
        )
        return torch.from_numpy(drawn).to(self.model.device)

    def _advance(self) -> None:
        """Write one more token in every active slot."""
        assert self.slots is not None
        slots, cache = self.slots, self.slots.cache
        if not self.queue and 2 * int(slots.active.sum()) <= cache.width:
            slots.keep(slots.active[: cache.width].nonzero().flatten())
        width = cache.width
        cache.reach = int(cache.place[:width].max()) + 1
        last = slots.tokens[:width].gather(1, (slots.count[:width, None] - 1).clamp(min=0))
        hidden = self.decoder.step(last.squeeze(1), cache)
        index = slots.active[:width].nonzero().flatten()
        self._write(index, self.model.head.logits(hidden[index]))

    def _write(self, index: torch.Tensor, logits: torch.Tensor) -> None:
        """Draw the next token of the slots `index` from their `logits`, row by row."""
        assert self.slots is not None
        slots = self.slots
        count = slots.count[index]
        tokens, logps = pick_tokens(
            logits, slots.uniforms[index, count], self.sampling.distribution
        )
        slots.tokens[index, count] = tokens
        slots.logps[index, count] = logps
        slots.count[index] += 1
        slots.cache.place[index] += 1

    def _retire(self) -> Iterator[tuple[_Answer, list[int], list[float], Finish]]:
        """Free the slots whose answer has ended, and yield it."""
        assert self.slots is not None
        slots, width = self.slots, self.slots.cache.width
        count = slots.count[:width]
        last = slots.tokens[:width].gather(1, (count[:, None] - 1).clamp(min=0)).squeeze(1)
        stopped = torch.isin(last, self.stop_ids) | self._at_stop_string(width)
        ended = slots.active[:width] & (stopped | (count == self.sampling.max_tokens))
        for slot in ended.nonzero().flatten().tolist():
            length = int(slots.count[slot])
            answer = slots.answers[slot]
            assert answer is not None
            finish: Finish = "stop" if bool(stopped[slot]) else "length"
            tokens, logps = slots.tokens[slot, :length], slots.logps[slot, :length]
            yield answer, tokens.tolist(), logps.tolist(), finish
            slots.answers[slot] = None
        slots.active[:width] &= ~ended

    def _at_stop_string(self, width: int) -> torch.Tensor:
        """Return which slots [width] have just completed a stop string."""
        assert self.slots is not None
        found = torch.zeros_like(self.slots.active[:width])
        if not self.sampling.stop_strings:
            return found
        for slot in self.slots.active[:width].nonzero().flatten().tolist():
            length = int(self.slots.count[slot])
            # A stop string of n bytes spans at most n tokens, unless they decode to nothing.
            tail = self.slots.tokens[slot, max(0, length - self.stop_reach) : length].tolist()
            text = self.model.decode(tail)
            found[slot] = any(stop in text for stop in self.sampling.stop_strings)
        return found
