"""Load models and tokenizers with transformers, with additional checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from covey.errors import ConfigError, ModelError
from covey.escape import printable_line
from covey.models.model_path import ADAPTER_CONFIG, check_four_bit, check_index

NO_CODE = {"trust_remote_code": False}
"""Arguments that keep transformers from running Python code that comes with a model."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_pretrained(kind: Any, source: str, dtype: torch.dtype, **more: Any) -> Any:
    """Load a model of the given class; the model files must contain every weight.

    Raise ValueError if weights are missing: transformers would initialize missing weights at random
    and only print a warning. `more` are further arguments of `from_pretrained`.
    """
    _check_files(source)
    model, found = kind.from_pretrained(
        source,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below, by name
        use_safetensors=True,  # all other formats are pickles, which can run code
        **more,
        **NO_CODE,
    )
    missing = sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])])
    if missing:
        what = f"{len(missing)} of its weights are missing or have another shape"
        raise ValueError(f"{what}, for example {missing[0]}")
    return model


def _check_files(source: str) -> None:
    """Raise ModelError if the model's files could make transformers run code from elsewhere."""
    settings, _ = transformers.PreTrainedConfig.get_config_dict(source, **NO_CODE)
    if kernel := _hub_kernel(settings):
        raise ModelError(
            f"model: the config.json of {source} asks for the attention kernel "
            f"{printable_line(kernel, 100)}, which is code from the Hub; remove it from config.json"
        )
    if _file(source, ADAPTER_CONFIG) is not None:  # transformers would load the adapter by itself
        raise ConfigError(
            f"config: model.path = {source!r} contains both an adapter and a model; give a folder "
            "with only adapter_config.json and adapter_model.safetensors"
        )
    # The index of a hub model is downloaded here; a folder may have several.
    names = [transformers.utils.SAFE_WEIGHTS_INDEX_NAME, settings.get("transformers_weights")]
    for name in names:
        if isinstance(name, str) and name.endswith(".index.json"):
            index = _file(source, name)
            if index is not None:
                check_index(Path(index))


def _file(source: str, name: str) -> str | None:
    """Return the path of a model's file, downloaded if necessary; None if there is no such file."""
    found: str | None = transformers.utils.cached_file(
        source, name, _raise_exceptions_for_missing_entries=False
    )
    return found


def _hub_kernel(settings: Any) -> str | None:
    """Return the name of a Hub kernel that the settings of a model use for attention, if any."""
    if not isinstance(settings, dict):
        return None
    for key, value in settings.items():
        if "attn_implementation" in key and isinstance(value, str) and "/" in value:
            return value
        if found := _hub_kernel(value):
            return found
    return None


def four_bit_options(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return `from_pretrained` arguments that load linear layers in 4 bits, as in QLoRA."""
    check_four_bit()
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": settings, "device_map": {"": device}}


def keep_gradients(model: Any) -> None:
    """Turn off a CPU layout of 4-bit weights that does not support gradients.

    In evaluation mode, bitsandbytes converts 4-bit weights to the CPU layout, and never converts
    them back. With the CPU layout, training after an evaluation would silently have no gradients.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def read_tokenizer(source: str, **more: str) -> Any:
    """Load a tokenizer without running code from its files."""
    return transformers.AutoTokenizer.from_pretrained(source, **more, **NO_CODE)


def make_savable(model: Any) -> None:
    """Reset generation settings that transformers refuses to save; keep special tokens.

    For example, transformers refuses to save a temperature if do_sample is not set. Covey does not
    use the generation settings for sampling.
    """
    settings = model.generation_config
    try:
        settings.validate(strict=True)
    except ValueError:
        kept = {name: getattr(settings, name) for name in IDS}
        model.generation_config = transformers.GenerationConfig(**kept)
