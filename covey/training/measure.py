"""Evaluation of the policy of a run, which its trackers are told of."""

from __future__ import annotations

from covey.evaluation.evaluate import Evaluation, evaluate
from covey.rollout.collect import Collector
from covey.run.trackers import Tracker
from covey.training.build import Components


def measure(parts: Components, log: Tracker, step: int) -> Evaluation:
    """Evaluate the policy as it is after `step`, and log that."""
    model, engine = parts.policy.model, parts.engine
    with parts.engine_lock:
        engine.load_weights(parts.policy.weights, parts.policy.version)
        evaluation = evaluate(
            parts.held_out_prompts,
            Collector(
                engine=engine,
                model=model,
                scorer=parts.eval_scorer,
                progress=log.sampled,
                ranks=parts.world,
                interaction=parts.interaction,
            ),
            sampling=parts.sampling,
            samples=parts.config.evaluate.samples,
            temperature=parts.config.evaluate.temperature,
            baselines=parts.baselines,
        )
    # The rows first: a line in eval.jsonl means that they are there.
    log.table("evaluations", step, [item.row() for item in evaluation.items])
    log.evaluation(step, evaluation)
    return evaluation
