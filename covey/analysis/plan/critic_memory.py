"""Memory of a critic, part by part: a second model in training."""

from __future__ import annotations

from covey.analysis.plan.activations import FLOAT
from covey.analysis.plan.forecast import ALWAYS, Part
from covey.analysis.plan.model_shape import Shape, shape_of
from covey.config import Config


def critic_parts(config: Config, policy: Shape, size: int, state: tuple[int, int]) -> list[Part]:
    """Return what a critic holds; its passes take turns with the policy's, without logits.

    `size` is the bytes of a number that it computes with, `state` those that complete a weight to
    its master, and those of two moments.
    """
    path, (master, moments) = config.critic.path, state
    model = config.model.model_copy(update={"path": path})
    shape = shape_of(config.model_copy(update={"model": model})) if path else policy
    kept = (shape.parameters + shape.added) * size
    kept += shape.trained * (moments + (master if size < FLOAT else 0))
    return [
        Part("critic", kept, ALWAYS, "a second model with master weights and moments"),
        Part("critic gradients", shape.trained * FLOAT, ("update", "step"), "float32"),
    ]
