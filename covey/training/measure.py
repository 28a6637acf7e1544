"""Evaluate the policy of a run, and report the results to the run's trackers."""

from __future__ import annotations

from covey.evaluation.evaluate import Evaluation, evaluate
from covey.rollout.collect import Collector
from covey.run.trackers import Tracker
from covey.training.build import Components


def measure(parts: Components, log: Tracker, step: int) -> Evaluation:
    """Evaluate the policy after `step`, and log the results."""
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
                max_steps=parts.config.train.steps,
            ),
            sampling=parts.sampling,
            samples=parts.config.evaluate.samples,
            temperature=parts.config.evaluate.temperature,
            baselines=parts.baselines,
        )
    # Rows are written first, so that every line of eval.jsonl has its rows.
    log.table("evaluations", step, [item.row() for item in evaluation.items])
    log.evaluation(step, evaluation)
    return evaluation
