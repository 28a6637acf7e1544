"""Saving and restoring a policy: an ordinary Hugging Face folder with two more files.

config.json, model.safetensors, tokenizer...   load with AutoModelForCausalLM; float32 masters
optimizer.safetensors                          AdamW's moments
covey.json                                     training step and policy version

With an adapter, the first line is adapter_config.json and adapter_model.safetensors instead, as
peft has them: what never changes is not saved again.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from covey.errors import RunError
from covey.models.adapter import WEIGHTS_FILE, named_weights, save_adapter
from covey.models.from_pretrained import read_pretrained
from covey.training.policy import Policy

STATE_FILE = "covey.json"
OPTIMIZER_FILE = "optimizer.safetensors"


def master_state_dict(policy: Policy) -> dict[str, torch.Tensor]:
    """Return the model's weights at the optimizer's precision."""
    state: dict[str, torch.Tensor] = dict(policy.model.model.state_dict())
    # A tied weight stands under two names; whichever shares memory with a parameter follows it.
    names = {p.data_ptr(): n for n, p in policy.optimizer.parameters.items()}
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        own = names.get(value.data_ptr())
        if own is not None and own not in found:
            # One at a time to main memory: a device may have no room for masters that are made now.
            found[own] = policy.optimizer.masters[own].detach().cpu()
        state[name] = value.detach() if own is None else found[own]
    return state


def save_policy(policy: Policy, folder: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint into an existing, empty folder."""
    try:
        _write(policy, folder, state)
    except SafetensorError as error:
        # A full disk, told in safetensors' own words; callers know it as what it is.
        raise OSError(str(error)) from None


def _write(policy: Policy, folder: Path, state: dict[str, Any]) -> None:
    if policy.model.adapter is None:
        _write_model(policy, folder)
    else:
        save_adapter(policy.model, policy.optimizer.masters, folder)
    tensors = {k: v.contiguous() for k, v in policy.optimizer.state().items()}
    save_file(tensors, folder / OPTIMIZER_FILE)
    (folder / STATE_FILE).write_text(json.dumps({**state, "version": policy.version}, indent=2))


def _write_model(policy: Policy, folder: Path) -> None:
    model = policy.model.model
    config = copy.deepcopy(model.config)
    config.dtype = torch.float32
    model.save_pretrained(folder, state_dict=master_state_dict(policy))
    config.save_pretrained(folder)
    policy.model.tokenizer.save_pretrained(folder)


def load_policy(policy: Policy, folder: Path) -> dict[str, Any]:
    """Restore a policy in place from a checkpoint and return the state saved beside it."""
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
        raise ValueError(f"{file.name} does not say its version")
    return {"step": None, **state}


def _read_weights(policy: Policy, folder: Path) -> Mapping[str, torch.Tensor]:
    model = policy.model.model
    if policy.model.adapter is not None:
        saved = load_file(folder / WEIGHTS_FILE)
        weights = named_weights(policy.model, saved)
        if weights.keys() != policy.optimizer.masters.keys() or len(weights) != len(saved):
            raise RunError(f"checkpoint {folder} has another adapter than [adapter] asks for")
        return weights
    # In the file, many models have other names, and a tensor for each of their experts.
    exact = torch.promote_types(model.dtype, torch.float32)
    return dict(read_pretrained(type(model), str(folder), exact).named_parameters())
