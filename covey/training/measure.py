"""Measuring the policy of a run while it is trained, whatever it is trained by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from covey.config import Config
from covey.engines.protocol import Engine, Sampling
from covey.evaluate.evaluate import Evaluation, evaluate
from covey.rollout.collect import Collector
from covey.run.folder import RunFolder
from covey.scoring import Scorer
from covey.training.policy import Policy
from covey.training.report import Reporter
from covey.types import Prompt


class Measurable(Protocol):
    """The parts of a run that a measurement needs."""

    @property
    def config(self) -> Config:
        """How many samples, and how hot."""

    @property
    def held_out_prompts(self) -> Sequence[Prompt]:
        """What is asked."""

    @property
    def policy(self) -> Policy:
        """Who is asked."""

    @property
    def sampler(self) -> Engine:
        """Who writes the answers."""

    @property
    def sampling(self) -> Sampling:
        """How they are written."""

    @property
    def judge(self) -> Scorer:
        """Who judges them."""


def measure(parts: Measurable, run: RunFolder, reporter: Reporter, step: int) -> Evaluation:
    """Evaluate the policy as it is after `step`, and write that down."""
    model = parts.policy.model
    parts.sampler.load_weights(model.model.named_parameters, parts.policy.version)
    evaluation = evaluate(
        parts.held_out_prompts,
        Collector(engine=parts.sampler, model=model, scorer=parts.judge, progress=reporter.sampled),
        sampling=parts.sampling,
        samples=parts.config.evaluate.samples,
        temperature=parts.config.evaluate.temperature,
    )
    # The items first: a line in eval.jsonl means that they are there.
    run.write_items(step, [item.row() for item in evaluation.items])
    run.log_evaluation({"step": step, **evaluation.row()})
    reporter.evaluated(step, evaluation)
    return evaluation
