"""One call of the native sampler: questions wait, are read, and are answered in slots."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from covey.accel.packing import to_device
from covey.engines.draw import pick_tokens
from covey.engines.native.backend import DecodeBackend
from covey.engines.native.prefill import PREFILL_TOKENS, read_prompts
from covey.engines.protocol import Question, Sampling
from covey.models.language_model import LanguageModel
from covey.rng import completion_uniforms
from covey.types import Finish

REFILL_SHARE = 8
"""Free slots are refilled once they are one in so many: reading prompts one by one is slow."""


class Answer(NamedTuple):
    """An answer to be written: sample number `sample` of question number `question`."""

    question: int
    sample: int


class Ended(NamedTuple):
    """An answer that is complete."""

    answer: Answer
    tokens: np.ndarray
    logps: np.ndarray
    finish: Finish


class Writer:
    """Answers a list of questions."""

    def __init__(
        self,
        model: LanguageModel,
        backend: DecodeBackend,
        questions: Sequence[Question],
        step: int,
        sampling: Sampling,
    ) -> None:
        self.model, self.backend = model, backend
        self.questions, self.step, self.sampling = questions, step, sampling
        self.queue = deque(
            Answer(q, s) for q in range(len(questions)) for s in range(sampling.samples)
        )
        self.first_logits: dict[int, torch.Tensor] = {}
        """By question that was read and for which answers still wait."""
        self.width = backend.width_for(min(sampling.slots, len(self.queue)))
        self.slots = backend.begin(
            width=self.width,
            prompts=len(questions),
            longest=max(len(q.tokens) for q in questions),
            sampling=sampling,
        )
        self.waiting = Counter({q: sampling.samples for q in range(len(questions))})
        self.unended = Counter(self.waiting)
        self.answers: list[Answer | None] = [None] * self.width
        self.taken = np.zeros(self.width, dtype=bool)
        """Slots that have one."""
        self.counts = np.zeros(self.width, dtype=np.int64)
        """Tokens of each slot when the device was last asked."""
        self.looked_at = [0] * self.width
        """Tokens of each slot that were searched for stop strings."""
        self.stop_ids = frozenset(model.stop_ids)
        self.stop_tokens = _special_tokens(model, sampling.stop_strings)
        """Stop strings that are in no text, because decoding leaves special tokens out."""
        self.stop_reach = 1 + max((len(s.encode()) for s in sampling.stop_strings), default=0)

    @property
    def running(self) -> int:
        """How many answers are being written."""
        return int(self.taken.sum())

    @property
    def left(self) -> int:
        """How many tokens the shortest answer may still get."""
        return self.sampling.max_tokens - int(self.counts[self.taken].min())

    def run(self) -> Iterator[list[Ended]]:
        """Yield answers as they end, some at a time.

        What has ended is handed out while the device goes on with the rest.
        """
        ended: list[Ended] = []
        while self.queue or self.running:
            if self.queue and self._may_refill():
                self._refill()
            elif not self.queue:
                self._shrink()
            self.backend.advance(self.slots, self.width, self.left)
            if ended:
                yield ended
            ended = self._take_ended()
        if ended:
            yield ended

    def _may_refill(self) -> bool:
        free = self.width - self.running
        return free >= min(max(1, self.width // REFILL_SHARE), len(self.queue))

    def _refill(self) -> None:
        """Give waiting answers the free slots and write their first token."""
        free = np.flatnonzero(~self.taken)[: len(self.queue)].tolist()
        answers = [self.queue.popleft() for _ in free]
        cache = self.slots.cache
        self.first_logits |= read_prompts(
            self.model, cache, {q: self.questions[q].tokens for q in self._to_read(answers)}
        )
        # The device reads prompts meanwhile, and nothing that is sent waits for it.
        ready = [torch.tensor(free), torch.from_numpy(self._uniforms(answers))]
        index, uniforms = to_device(ready, self.model.device)
        cache.enter(index, [a.question for a in answers])
        self.slots.open(index, uniforms)
        tokens, logps = pick_tokens(
            self._logits(answers), self.slots.uniforms[index, 0], self.sampling.distribution
        )
        self.slots.write(index, tokens, logps)
        self.taken[free], self.counts[free] = True, 1
        for slot, answer in zip(free, answers, strict=True):
            self.answers[slot], self.looked_at[slot] = answer, 0
            self.waiting[answer.question] -= 1
            if not self.waiting[answer.question]:
                del self.first_logits[answer.question]
                cache.all_entered(answer.question)

    def _to_read(self, answers: Sequence[Answer]) -> list[int]:
        """Return the questions of some answers that were not read yet.

        If there are any, those that come next are read with them as far as there is room: a pass
        over few prompts takes a GPU as long as one over many, and all slots wait for it.
        """
        known = self.first_logits
        needed = {a.question for a in answers if a.question not in known}
        if not needed:
            return []
        longest = max(len(question.tokens) for question in self.questions)
        room = min(PREFILL_TOKENS // longest, self.slots.cache.spare_prompts)
        coming = dict.fromkeys(
            a.question for a in chain(answers, self.queue) if a.question not in known
        )
        return list(coming)[: max(room, len(needed))]

    def _uniforms(self, answers: Sequence[Answer]) -> np.ndarray:
        return completion_uniforms(
            seed=self.sampling.seed,
            step=self.step,
            answers=[(self.questions[a.question].prompt.id, a.sample) for a in answers],
            count=self.sampling.max_tokens,
        )

    def _logits(self, answers: Sequence[Answer]) -> torch.Tensor:
        """Return the logits [n, V] of the first token of each answer."""
        asked = dict.fromkeys(answer.question for answer in answers)
        rows = {question: row for row, question in enumerate(asked)}
        logits = torch.stack([self.first_logits[question] for question in asked])
        (index,) = to_device([torch.tensor([rows[a.question] for a in answers])], logits.device)
        return logits[index]

    def _shrink(self) -> None:
        """Once nobody waits, free slots only cost: move the rest together."""
        width = self.backend.width_for(self.running)
        if 2 * self.running > self.width or width >= self.width:
            return
        kept = np.flatnonzero(self.taken).tolist()
        self.slots.keep(torch.tensor(kept, device=self.model.device))
        spare = width - len(kept)
        self.answers = [self.answers[slot] for slot in kept] + [None] * spare
        self.looked_at = [self.looked_at[slot] for slot in kept] + [0] * spare
        self.counts = np.pad(self.counts[kept], (0, spare))
        self.taken = np.arange(width) < len(kept)
        self.width = width

    def _take_ended(self) -> list[Ended]:
        """Free the slots whose answer has ended, and return the answers.

        The device waits for this, so what can be done later is left to whoever takes them.
        """
        active, self.counts = self.slots.progress(self.width)
        cut = self._stop_strings() if self.sampling.stop_strings else {}
        self.slots.close([slot for slot in cut if active[slot]])
        active[list(cut)] = False
        ended = np.flatnonzero(self.taken & ~active).tolist()
        if not ended:
            return []
        tokens, logps = self.slots.written(ended)
        self.taken[ended] = False
        result = []
        for slot, row, row_logps in zip(ended, tokens, logps, strict=True):
            answer, length = self.answers[slot], cut.get(slot, int(self.counts[slot]))
            assert answer is not None
            stopped = slot in cut or int(row[length - 1]) in self.stop_ids
            finish: Finish = "stop" if stopped else "length"
            result.append(Ended(answer, row[:length], row_logps[:length], finish))
            self.answers[slot] = None
            self.unended[answer.question] -= 1
            if not self.unended[answer.question]:
                self.slots.cache.all_ended(answer.question)
        return result

    def _stop_strings(self) -> dict[int, int]:
        """Return the slots that have completed a stop string, and how many tokens that took."""
        found: dict[int, int] = {}
        slots, counts = np.flatnonzero(self.taken).tolist(), self.counts.tolist()
        tokens, _ = self.slots.written(slots)
        # A stop string of n bytes spans at most n tokens, unless they decode to nothing.
        starts = [max(0, self.looked_at[slot] + 1 - self.stop_reach) for slot in slots]
        tails = [
            row[start : counts[slot]].tolist()
            for slot, start, row in zip(slots, starts, tokens, strict=True)
        ]
        texts = self.model.decode_many(tails)
        for slot, start, tail, text in zip(slots, starts, tails, texts, strict=True):
            if self._stops(tail, text):
                found[slot] = start + self._first_stop(tail, self.looked_at[slot] - start)
            self.looked_at[slot] = counts[slot]
        return found

    def _first_stop(self, tail: list[int], seen: int) -> int:
        """Return after how many tokens of `tail` a stop string is complete; more than `seen`."""
        for length in range(seen + 1, len(tail)):
            tokens = tail[max(0, length - self.stop_reach) : length]
            if self._stops(tokens, self.model.decode(tokens)):
                return length
        return len(tail)

    def _stops(self, tokens: list[int], text: str) -> bool:
        """Tell whether there is a stop string in some tokens, whose text is `text`."""
        found = any(stop in text for stop in self.sampling.stop_strings)
        return found or not self.stop_tokens.isdisjoint(tokens)


def _special_tokens(model: LanguageModel, texts: Sequence[str]) -> frozenset[int]:
    """Return the special tokens that are written as one of some texts."""
    if not texts:
        return frozenset()
    added = model.tokenizer.added_tokens_decoder
    return frozenset(i for i, token in added.items() if token.special and token.content in texts)
