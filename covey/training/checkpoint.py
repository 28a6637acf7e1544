"""Checkpoints: saving, loading and resuming a run. A checkpoint is an ordinary Hugging Face folder:

    config.json, model.safetensors, tokenizer...   for AutoModelForCausalLM; float32 masters
    optimizer.safetensors                          AdamW's moments
    covey.json                                     the state of the run and the policy version

With an adapter, the first line is adapter_config.json and adapter_model.safetensors instead, as
peft has them: frozen weights are not saved again. A reference that moves adds files of its own, and
so do rollouts that were generated ahead (in_flight.jsonl).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from covey.errors import RunError
from covey.models.adapter import WEIGHTS_FILE, named_weights, save_adapter
from covey.models.from_pretrained import read_pretrained
from covey.reference import Reference
from covey.run.best import best_step
from covey.run.folder import RunFolder
from covey.run.records import Note
from covey.run.resume import Start, offer, put_aside_after
from covey.training.budget import Used
from covey.training.policy import Policy

STATE_FILE = "covey.json"
OPTIMIZER_FILE = "optimizer.safetensors"


@dataclass(slots=True, kw_only=True)
class State:
    """What a training step hands on to the next, beside the policy and the reference."""

    step: int = 0
    episode: int = 0
    """Rollouts sampled so far."""
    tokens: int = 0
    """Tokens of these rollouts."""
    beta: float = 0.0
    """Weight of the KL, which an objective may adapt."""
    seconds: float = 0.0
    """Time of all steps so far."""

    def used(self, policy: Policy) -> Used:
        """Return how much of its budget the run has used."""
        return Used(steps=self.step, tokens=self.tokens, updates=policy.version)


def save(
    run: RunFolder,
    policy: Policy,
    reference: Reference | None,
    state: State,
    *,
    keep: int,
    more: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write the checkpoint of a step, whole or not at all; keep the newest `keep`, and the best.

    `more` adds files to it.
    """
    with run.new_checkpoint(state.step) as folder:
        save_policy(policy, folder, asdict(state))
        if reference is not None:
            reference.save(folder)
        more(folder)
    run.prune_checkpoints(keep, best_step(run))


def load(policy: Policy, reference: Reference | None, folder: Path, step: int) -> State:
    """Restore policy and reference from the checkpoint of a step; return the state saved there."""
    saved = load_policy(policy, folder)
    if saved["step"] != step:
        raise RunError(f"{folder} holds step {saved['step']}, not step {step}")
    if reference is not None:
        reference.load(folder)
    if saved.keys() == {"step", "version"}:  # supervised training once saved no more
        return State(step=step)
    try:
        return State(
            step=step,
            episode=int(saved["episode"]),
            tokens=int(saved.get("tokens", 0)),
            beta=float(saved["beta"]),
            seconds=float(saved.get("seconds", 0.0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"checkpoint {folder} cannot be read: {STATE_FILE}: {error!r}") from None


def resume(
    run: RunFolder,
    policy: Policy,
    reference: Reference | None,
    start: Start,
    *,
    fresh: State,
    note: Note,
) -> State:
    """Restore a run at `start`: the state of its checkpoint, or `fresh` where it has none.

    Records of later steps are moved aside, since these steps are done again.
    """
    state = fresh
    if start.checkpoint is not None:
        try:
            state = load(policy, reference, start.checkpoint, start.step)
        except RunError as error:
            raise RunError(f"{error}; {offer(run, before=start.step)}") from None
    aside = put_aside_after(run, start)
    if aside is not None:
        note(f"steps after {start.step} are done again; their earlier records are in {aside}")
    return state


def save_policy(policy: Policy, folder: Path, state: Mapping[str, Any]) -> None:
    """Write policy and optimizer into an existing, empty folder, and `state` beside them."""
    try:
        if policy.model.adapter is None:
            _write_model(policy, folder)
        else:
            save_adapter(policy.model, policy.optimizer.masters, folder)
        tensors = {k: v.contiguous() for k, v in policy.optimizer.state().items()}
        save_file(tensors, folder / OPTIMIZER_FILE)
    except SafetensorError as error:
        # A full disk, in safetensors' own words; callers handle it as an OSError.
        raise OSError(str(error)) from None
    (folder / STATE_FILE).write_text(json.dumps({**state, "version": policy.version}, indent=2))


def _write_model(policy: Policy, folder: Path) -> None:
    model = policy.model.model
    config = copy.deepcopy(model.config)
    config.dtype = torch.float32
    model.save_pretrained(folder, state_dict=master_state_dict(policy))
    config.save_pretrained(folder)
    policy.model.tokenizer.save_pretrained(folder)


def master_state_dict(policy: Policy) -> dict[str, torch.Tensor]:
    """Return the model's weights at the optimizer's precision."""
    state: dict[str, torch.Tensor] = dict(policy.model.model.state_dict())
    # A tied weight has two names; whichever shares memory with a parameter gets its master.
    names = {p.data_ptr(): n for n, p in policy.optimizer.parameters.items()}
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        own = names.get(value.data_ptr())
        if own is not None and own not in found:
            # One at a time to main memory: a device may have no room for masters made on demand.
            found[own] = policy.optimizer.masters[own].detach().cpu()
        state[name] = value.detach() if own is None else found[own]
    return state


def load_policy(policy: Policy, folder: Path) -> dict[str, Any]:
    """Restore policy and optimizer in place; return the state that was saved beside them."""
    try:
        weights = _read_weights(policy, folder)
        moments = load_file(folder / OPTIMIZER_FILE)
        state = _read_state(folder / STATE_FILE)
        policy.optimizer.load(weights, moments)
        policy.version = state["version"]
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise RunError(f"checkpoint {folder} cannot be read: {error}") from None
    return state


def _read_state(file: Path) -> dict[str, Any]:
    try:
        state: Any = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{file.name} is not JSON") from None
    if not isinstance(state, dict) or type(state.get("version")) is not int:
        raise ValueError(f"{file.name} has no version")
    return {"step": None, **state}


def _read_weights(policy: Policy, folder: Path) -> Mapping[str, torch.Tensor]:
    model = policy.model.model
    if policy.model.adapter is not None:
        saved = load_file(folder / WEIGHTS_FILE)
        weights = named_weights(policy.model, saved)
        if weights.keys() != policy.optimizer.masters.keys() or len(weights) != len(saved):
            raise RunError(
                f"checkpoint {folder} has another adapter than the [adapter] section describes"
            )
        return weights
    # In the file, many models use other names, and one tensor for each expert.
    exact = torch.promote_types(model.dtype, torch.float32)
    return dict(read_pretrained(type(model), str(folder), exact).named_parameters())
