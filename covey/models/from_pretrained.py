"""Load models and tokenizers with transformers, with additional checks."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from covey.models.four_bit import check_four_bit

NO_CODE = {"trust_remote_code": False}
"""Arguments that keep transformers from running Python code that comes with a model."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_pretrained(kind: Any, source: str, dtype: torch.dtype, **more: Any) -> Any:
    """Load a model of the given class; the model files must contain every weight.

    Raise ValueError if weights are missing: transformers would initialize missing weights at random
    and only print a warning. `more` are further arguments of `from_pretrained`.
    """
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
