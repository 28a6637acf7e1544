"""Memory of the models besides the policy: the reference, a teacher and a critic."""

from __future__ import annotations

from covey.analysis.plan.activations import FLOAT
from covey.analysis.plan.forecast import ALWAYS, Part
from covey.analysis.plan.model_shape import Shape, shape_of
from covey.analysis.plan.run_facts import RunFacts
from covey.config import Config
from covey.config.schema import Adapter
from covey.models.model_path import adapter_base

STATE_BYTES = {"float32": (FLOAT, 2 * FLOAT), "compact": (FLOAT // 2, FLOAT)}
"""optimizer.state -> bytes of a master weight in addition to its bfloat16 copy, and bytes of the
two moments of AdamW.
"""


def teacher_parts(run: RunFacts) -> list[Part]:
    """Return the memory of a teacher's weights on this device."""
    teacher = run.config.teacher
    if "teacher" not in run.objective.needs or not (teacher.policy or teacher.path):
        return []
    under = run.shape.rank and not adapter_base(run.config.model.path)
    if teacher.policy == "current" or (teacher.policy and under):
        return [Part("teacher", 0, ALWAYS, f"{teacher.policy}: the policy's own weights")]
    if teacher.policy:  # computed like a reference of the same kind
        shape, why = run.shape, f"{teacher.policy}: a second copy of the weights"
    else:
        model = run.config.model.model_copy(update={"path": teacher.path})
        alone = run.config.model_copy(update={"model": model, "adapter": Adapter()})
        shape, why = shape_of(alone), f"{teacher.path}: its weights"
    weights = shape.parameters + shape.added
    held, phases = weights * run.size, ALWAYS
    if teacher.policy == "moving" and run.size < FLOAT:
        held, why = held + weights * FLOAT, f"{why}, also in float32"
    if run.sharded:
        held, why = -(-held // run.shards), f"{why}, 1 of {run.shards} parts"
    if teacher.offload and run.on_gpu:
        phases, why = ("prepare",), f"{why}, on the device only while it is used"
    return [Part("teacher", held, phases, why)]


def reference_part(run: RunFacts, weights: int) -> Part:
    """Return the memory of the reference policy's weights on this device."""
    kind, phases, held = run.config.reference.kind, ALWAYS, weights * run.size
    why = f"{kind}: a second copy of the weights"
    under = run.shape.rank and kind == "frozen" and not adapter_base(run.config.model.path)
    if kind in ("moving", "renewed") and run.size < FLOAT:
        held, why = held + weights * FLOAT, f"{why}, also in float32"
    if run.sharded:
        held, why = -(-held // run.shards), f"{why}, 1 of {run.shards} parts"
    if "reference" not in run.objective.needs:
        held, why = 0, "none: the objective has no penalty"
    elif kind == "server" or kind == "adapter_off" or under:
        held, why = 0, f"{kind}: no copy on this device"
    elif kind == "offloaded" and run.on_gpu and run.sharded:
        held, why = 0, "offloaded: in main memory, gathered block by block"
    elif kind == "offloaded" and run.on_gpu:
        phases, why = ("prepare",), "offloaded: a copy, on the device only while it is used"
    return Part("reference", held, phases, why)


def critic_parts(config: Config, policy: Shape, size: int, state: tuple[int, int]) -> list[Part]:
    """Return the memory of a critic, whose passes never overlap with the policy's passes.

    `size` is the number of bytes per number in the critic's computations. `state` is a value of
    `STATE_BYTES`.
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
