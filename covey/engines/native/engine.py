"""The native sampler: batched generation with the trainer's own weights.

There is no second copy of the model, nothing to synchronise, and no other engine whose
probabilities differ. A prompt is read once for its whole group; answers are written in slots, and a
slot whose answer has ended takes the next one, so a long answer does not hold up the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from covey.engines.native.backend import DecodeBackend, choose_backend
from covey.engines.native.scheduler import Answer, Ended, Writer
from covey.engines.protocol import Question, Sampling
from covey.errors import DataError, ModelError
from covey.models.deterministic import skip_determinism_check
from covey.models.language_model import LanguageModel
from covey.types import Rollout


@dataclass(slots=True)
class NativeEngine:
    """Samples from a language model that somebody else may be training."""

    model: LanguageModel
    backend: DecodeBackend = field(init=False)

    def __post_init__(self) -> None:
        self.backend = choose_backend(self.model)

    @property
    def way(self) -> str:
        """How answers are written."""
        return self.backend.description

    @torch.inference_mode()
    @skip_determinism_check()
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
        if not questions:
            return []
        self._check_lengths(questions, sampling.max_tokens)
        training = self.model.model.training
        if training:
            self.model.model.eval()
        rollouts: dict[Answer, Rollout] = {}
        try:
            for ended in Writer(self.model, self.backend, questions, step, sampling).run():
                tokens = [_tuple(one.tokens) for one in ended]
                texts = self.model.decode_many(tokens)
                for one, row, text in zip(ended, tokens, texts, strict=True):
                    question = questions[one.answer.question]
                    _check_numbers(one, question)
                    rollout = Rollout(
                        prompt_id=question.prompt.id,
                        sample=one.answer.sample,
                        prompt_tokens=question.tokens,
                        tokens=row,
                        trained=(True,) * len(row),
                        sampler_logp=_tuple(one.logps),
                        text=text,
                        finish=one.finish,
                        policy_version=version,
                    )
                    rollouts[one.answer] = rollout
                    if finished is not None:
                        finished(one.answer.question, rollout)
        finally:
            if training:
                self.model.model.train()
        return [
            [rollouts[Answer(question, sample)] for sample in range(sampling.samples)]
            for question in range(len(questions))
        ]

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


def _check_numbers(ended: Ended, question: Question) -> None:
    """Refuse an answer whose tokens mean nothing; asked here, no device has to wait."""
    wrong = ~np.isfinite(ended.logps)
    if wrong.any():
        raise ModelError(
            f"model: its logits are not finite, from token {1 + int(wrong.argmax())} of an answer "
            f"to prompt {question.prompt.id} on; its weights may be none either"
        )


def _tuple(row: np.ndarray) -> tuple[Any, ...]:
    """Return a row's numbers as Python's own, without the list that `tolist` makes between."""
    return struct.unpack(f"{len(row)}{row.dtype.char}", row.data)
