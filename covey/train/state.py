"""What a step hands on to the next, and how it is kept: with the policy, in a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from covey.errors import RunError
from covey.policy.checkpoint import load_policy, save_policy
from covey.run.folder import RunFolder
from covey.train.assemble import Parts
from covey.train.budget import Used


@dataclass(slots=True, kw_only=True)
class State:
    """What a step hands on to the next, beside the policy. It is saved with the policy."""

    step: int = 0
    episode: int = 0
    """Answers sampled so far."""
    tokens: int = 0
    """Tokens of these answers."""
    beta: float
    """Weight of the KL, which an objective may adapt."""
    flat: list[float] = field(default_factory=list)
    """Share of groups with equal rewards in each of the last steps."""


def used_by(parts: Parts, state: State) -> Used:
    """Return how much of its budget a run has used."""
    return Used(steps=state.step, tokens=state.tokens, updates=parts.policy.version)


def restore(parts: Parts, run: RunFolder) -> State:
    """Load the newest checkpoint, if any, and return the state saved with it."""
    checkpoints = run.checkpoints()
    if not checkpoints:
        run.forget_after(-1)  # the evaluation of step 0 comes again as well
        return State(beta=parts.objective.beta)
    step, folder = checkpoints[-1]
    state = load_state(parts, step, folder)
    run.forget_after(step)
    return state


def load_state(parts: Parts, step: int, folder: Path) -> State:
    """Load the checkpoint of a step, and return the state saved with it."""
    saved = load_policy(parts.policy, folder)
    if saved["step"] != step:
        raise RunError(f"{folder} holds step {saved['step']}")
    if parts.reference is not None:
        parts.reference.load(folder)
    return State(
        step=step,
        episode=saved["episode"],
        tokens=saved.get("tokens", 0),
        beta=saved["beta"],
        flat=saved.get("flat", []),
    )


def save(parts: Parts, run: RunFolder, state: State) -> None:
    """Write a checkpoint, whole or not at all, and remove those that are too old."""
    with run.new_checkpoint(state.step) as folder:
        save_policy(parts.policy, folder, asdict(state))
        if parts.reference is not None:
            parts.reference.save(folder)
    run.prune_checkpoints(parts.config.save.keep)
