"""Export of a model: weights, tokenizer and stop tokens, without training state."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError

from covey.models.chat_template import Template
from covey.models.language_model import LanguageModel
from covey.models.load_model import load_language_model
from covey.models.merge import merge_adapter
from covey.models.model_path import adapter_base
from covey.run.files import check_free, whole_folder

MakeCard = Callable[[Sequence[int], bool], str]
"""Callable that returns the text of README.md, given the stop tokens and whether an adapter was
merged."""


def export_model(
    source: str, folder: Path, *, dtype: str, template: Template, card: MakeCard
) -> None:
    """Write a model folder for transformers and inference engines, atomically."""
    check_free(folder)
    with whole_folder(folder) as partial:
        adapted = adapter_base(source) is not None
        merged = partial / "merged"
        if adapted:
            merge_adapter(Path(source), merged)
        model = load_language_model(
            str(merged) if adapted else source, dtype=dtype, device="cpu", template=template
        )
        _write(model, partial)
        shutil.rmtree(merged, ignore_errors=True)
        (partial / "README.md").write_text(card(model.stop_ids, adapted), encoding="utf-8")


def _write(model: LanguageModel, folder: Path) -> None:
    tokenizer, inner = model.tokenizer, model.model
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    first = [i for i in model.stop_ids if i == tokenizer.eos_token_id]
    stops = first + [i for i in model.stop_ids if i not in first]
    for config in (inner.config, inner.generation_config):
        # List all stop tokens, because inference engines stop only at eos_token_id.
        config.eos_token_id = stops[0] if len(stops) == 1 else stops or None
        config.pad_token_id = tokenizer.pad_token_id
    try:
        inner.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(str(error)) from None  # from safetensors, for example on a full disk
    tokenizer.save_pretrained(folder)
    readable = (folder / "config.json").stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(readable)  # safetensors makes its files readable only by their owner
