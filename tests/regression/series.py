"""What a command left behind, as series of values: a name, and a value for each step or place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.regression import names

Value = float | int | str | None
Series = dict[str, list[Value]]

LABELS = ("name", "arm")
"""An entry of a list that has one of these fields is known by it, others by their place."""


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def run_series(folder: Path) -> Series:
    """Return the metrics, weights and rollouts of each step of a run, and its evaluations."""
    steps = read_lines(folder / names.STEPS_FILE)
    found: Series = {}
    for present in sorted({metric for row in steps for metric in row}):
        if not present.startswith(names.UNRECORDED_METRICS):
            # A metric may be missing in some steps: the length of right completions, say.
            found[names.fixed(present)] = [row.get(present) for row in steps]
    numbers = [row["step"] for row in steps]
    found["weights"] = [weights_digest(folder, step) for step in numbers]
    rollouts = [folder / names.ROLLOUTS_FILE.format(step=step) for step in numbers]
    if all(file.exists() for file in rollouts):
        found |= _rollout_series([read_lines(file) for file in rollouts])
    if (folder / names.EVALUATIONS_FILE).exists():
        found |= prefixed("evaluation", flat(read_lines(folder / names.EVALUATIONS_FILE)))
    return found


def _rollout_series(steps: Iterable[list[dict[str, Any]]]) -> Series:
    found: Series = {"rollouts": [], "rewards": []}
    for rows in steps:
        found["rollouts"].append(digest([[r[names.TOKENS], r[names.SAMPLER_LOGP]] for r in rows]))
        found["rewards"].append(digest([[r[names.REWARD], r[names.ADVANTAGE]] for r in rows]))
    return found


def weights_digest(folder: Path, step: int) -> str:
    """Return the digest of all tensors of a checkpoint, by name."""
    checkpoint = folder / names.CHECKPOINT_FOLDER.format(step=step)
    files = [checkpoint / name for name in names.WEIGHTS_FILES if (checkpoint / name).exists()]
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert tensors, f"{checkpoint} has no weights"
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        whole.update(tensor.tobytes())
    return whole.hexdigest()[:16]


def digest(values: Any) -> str:
    """Return the digest of plain data. Python writes every float so that it reads back the same."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def flat(data: Any) -> Series:
    """Return the numbers of plain data, by the path of their fields; lists are series."""
    found: Series = {}
    _flatten(data, (), found)
    return found


def _flatten(data: Any, path: tuple[str, ...], found: Series) -> None:
    if isinstance(data, Mapping):
        for present, value in data.items():
            if present not in names.UNRECORDED_FIELDS:
                # Below "parts" stand the names that a reward gives its parts.
                name = present if path[-1:] == ("parts",) else names.fixed(present)
                _flatten(value, (*path, name), found)
    elif isinstance(data, list):
        for entry in data:
            _flatten(entry, (*path, *_label(entry)), found)
    elif not isinstance(data, str) or (path and path[-1] in names.TEXT_FIELDS):
        found.setdefault("/".join(path), []).append(data)


def _label(entry: Any) -> tuple[str, ...]:
    if not isinstance(entry, Mapping):
        return ()
    return next(((str(entry[key]),) for key in LABELS if key in entry), ())


def prefixed(prefix: str, series: Series) -> Series:
    return {f"{prefix}/{name}": values for name, values in series.items()}
