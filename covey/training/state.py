"""What a step hands on to the next, and how it is kept: with the policy, in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from covey.errors import RunError
from covey.run.folder import RunFolder
from covey.run.records import Note
from covey.run.resume import Start, offer, put_aside_after
from covey.training.budget import Used
from covey.training.build import Parts
from covey.training.policy_files import STATE_FILE, load_policy, save_policy


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


def restore(parts: Parts, run: RunFolder, start: Start, note: Note) -> State:
    """Load the checkpoint that a run goes on from, if any, and return the state saved with it."""
    state = State(beta=parts.objective.beta)
    if start.checkpoint is not None:
        with offering(run, start):
            state = load_state(parts, start.step, start.checkpoint)
    put_aside(run, start, note)
    return state


@contextmanager
def offering(run: RunFolder, start: Start) -> Iterator[None]:
    """Add to what is wrong with a checkpoint which other one a run can go on from."""
    try:
        yield
    except RunError as error:
        raise RunError(f"{error}; {offer(run, before=start.step)}") from None


def put_aside(run: RunFolder, start: Start, note: Note) -> None:
    """Make room for the steps that are done again, and say where their records are."""
    aside = put_aside_after(run, start)
    if aside is not None:
        note(f"records after step {start.step} are done again; those of before are in {aside}")


def load_state(parts: Parts, step: int, folder: Path) -> State:
    """Load the checkpoint of a step, and return the state saved with it."""
    saved = load_policy(parts.policy, folder)
    if saved["step"] != step:
        raise RunError(f"{folder} holds step {saved['step']}")
    if parts.reference is not None:
        parts.reference.load(folder)
    return state_of(saved, folder)


def state_of(saved: Mapping[str, Any], folder: Path) -> State:
    """Return the state that a checkpoint holds. RunError if it lacks some of it."""
    try:
        return State(
            step=int(saved["step"]),
            episode=int(saved["episode"]),
            tokens=int(saved.get("tokens", 0)),
            beta=float(saved["beta"]),
            flat=[float(share) for share in saved.get("flat", [])],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"checkpoint {folder} cannot be read: {STATE_FILE}: {error!r}") from None


def save(parts: Parts, run: RunFolder, state: State) -> None:
    """Write a checkpoint, whole or not at all, and remove those that are too old."""
    with run.new_checkpoint(state.step) as folder:
        save_policy(parts.policy, folder, asdict(state))
        if parts.reference is not None:
            parts.reference.save(folder)
    run.prune_checkpoints(parts.config.save.keep)
