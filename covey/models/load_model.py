"""Load a model from a folder, the Hub, a GGUF file or Covey's package, and check the model."""

from __future__ import annotations

import copy
import itertools
import logging
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from covey.accel.activation_offload import checkpoint_layers
from covey.accel.attention import NAME
from covey.accel.attention_kernels import HALF
from covey.accel.fused_parameters import fuse_parameters
from covey.accel.head import Head
from covey.accel.packing import pack
from covey.accel.parity import attempt, first_layers, matches, parity_rows
from covey.embedded import MODELS
from covey.errors import ConfigError, CoveyError, ModelError
from covey.escape import printable_line
from covey.models.chat import Template, make_renderer
from covey.models.device import device_of
from covey.models.language_model import LanguageModel, packed_forward
from covey.models.model_path import (
    ADAPTER_CONFIG,
    check_four_bit,
    check_index,
    check_model_path,
    missing_folder_note,
)
from covey.models.template_worker import RENDERER

# Load models and tokenizers with transformers, with additional checks.


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


transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
# The hub's retries would each print a warning; one error line at the end is enough.
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)

ROUNDED_TOLERANCE = 0.05
"""Relative tolerance of parity checks that run in a 16-bit type. Rounding changes the hidden states
of a few 16-bit layers by 1 %, but wrong attention changes the hidden states by more than 5 %."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def load_language_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    gradient_checkpointing: bool = False,
    offload_activations: bool = False,
    template: Template = Template(),  # noqa: B008 - immutable
    four_bit: bool = False,
) -> LanguageModel:
    """Load a model from a folder, hub name, GGUF file, `smollm2` or `embedded`.

    With `offload_activations`, the inputs of checkpointed layers are stored in CPU memory. With
    `four_bit`, the weights of linear layers are stored in 4 bits and cannot be trained.
    """
    where = device_of(device)
    wanted = DTYPES[dtype] if dtype != "auto" else torch.float32
    if dtype == "auto" and where.type == "cuda":
        wanted = torch.bfloat16
    if path in MODELS:
        source = str(MODELS[path])
    else:
        from covey.models.gguf import find_gguf, import_gguf  # reads its result with this module

        check_model_path(path)
        gguf = find_gguf(path)
        source = path if gguf is None else str(import_gguf(gguf))
    more = four_bit_options(wanted, where) if four_bit else {}
    try:
        tokenizer = _tokenizer(source)
        if tokenizer.chat_template and template.form in ("auto", "chat"):
            RENDERER.start()
        model = read_pretrained(transformers.AutoModelForCausalLM, source, wanted, **more)
    except CoveyError:
        raise
    except Exception as error:  # a wrong value in the model's files may raise anything
        raise _unusable(path, error, missing_folder_note(source)) from None
    make_savable(model)
    if four_bit:
        keep_gradients(model)
    else:
        model.to(where)
    if gradient_checkpointing:
        checkpoint_layers(model, offload=offload_activations)
    return wrap(model, tokenizer, name=path, template=template)


def _unusable(path: str, error: Exception, note: str = "") -> ModelError:
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else type(error).__name__
    if not isinstance(error, OSError | ValueError | RuntimeError):  # says little without its kind
        first = f"{type(error).__name__}: {first}"
    if first.endswith(":"):  # a list follows, which the first line alone does not show
        first = " ".join(" ".join(lines[:4]).split())
    problem = ModelError(f"model: cannot load {path!r}: {first[:300].rstrip('.')}{note}")
    problem.details = "".join(traceback.format_exception(error))
    return problem


def _tokenizer(source: str) -> Any:
    try:
        return read_tokenizer(source)
    except (OSError, ValueError, TypeError) as error:
        folder = Path(source)
        if folder.is_dir() and not any((folder / name).exists() for name in TOKENIZER_FILES):
            raise ValueError(
                "the folder has no tokenizer (tokenizer.json or another of its files); save it "
                "there with tokenizer.save_pretrained(FOLDER)"
            ) from error
        if isinstance(error, TypeError):
            raise ValueError(f"the tokenizer cannot be read: {error}") from error
        raise


def wrap(
    model: Any,
    tokenizer: Any,
    name: str = "model",
    template: Template = Template(),  # noqa: B008 - immutable
) -> LanguageModel:
    """Split a model into backbone and head; check that the two reproduce the model's logits."""
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ModelError(f"model: {name} has no linear output layer, which Covey needs")
    # With dropout, the trained policy would differ from the policy that sampled the completions:
    # probability ratios would be noisy from the first optimizer step on, and results would depend
    # on the state of a random generator, which checkpoints do not contain.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    training = model.training
    model.eval()
    try:
        head = _matching_head(model, linear, name)
    except CoveyError:
        raise
    except Exception as error:  # the first pass through the model, which its files describe
        raise _unusable(name, error) from None
    renderer = make_renderer(tokenizer, template, name)
    packs, flash = _register_attention(model)
    fused = packs and linear.weight.is_cuda and _supports_fused(model)
    model.train(training)
    context = int(getattr(model.config, "max_position_embeddings", None) or 2**31)
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # It changes the RoPE angles of all rows as soon as one row exceeds the original training
        # length, but cached keys keep the old angles.
        context = min(context, int(rope.get("original_max_position_embeddings") or context))
    stops = [renderer.turn_end, tokenizer.eos_token_id, model.config.eos_token_id]
    if model.generation_config is not None:
        stops.append(model.generation_config.eos_token_id)
    flat = itertools.chain.from_iterable(i if isinstance(i, list) else [i] for i in stops)
    return LanguageModel(
        model=model,
        tokenizer=tokenizer,
        head=head,
        packs=packs,
        flash=flash,
        fused=fused,
        context=context,
        stop_ids=tuple(sorted({int(i) for i in flat if i is not None})),
        renderer=renderer,
    )


def _matching_head(model: Any, linear: nn.Linear, name: str) -> Head:
    """Return a Head with the logit scale and soft cap that reproduce the model's own logits.

    Architectures use different names for the logit scale and the soft cap. Some architectures
    divide the logits by the scale instead of multiplying by the scale. With a wrong scale or soft
    cap, training would silently use wrong probabilities. The function tries several scales and soft
    caps, and compares the resulting logits with the model's own logits.
    """
    config = model.config
    scales = [1.0]
    for field in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        value = getattr(config, field, None)
        if value:
            scales += [float(value), 1 / float(value)]
    softcaps = [None, getattr(config, "final_logit_softcapping", None)]
    ids = torch.arange(4, device=linear.weight.device)[None] % config.vocab_size
    with torch.no_grad():
        hidden = model.base_model(ids, use_cache=False).last_hidden_state
        expected = model(ids, use_cache=False).logits.float()
        heads = [
            Head(linear=linear, scale=scale, softcap=softcap)
            for scale, softcap in itertools.product(scales, softcaps)
        ]
        # Take the best guess, not the first good one, because a soft cap has little effect on small
        # logits.
        errors = [float((h.logits(hidden).float() - expected).abs().max()) for h in heads]
    best = min(range(len(heads)), key=errors.__getitem__)
    if errors[best] > 1e-2 * float(expected.abs().max()):
        raise ModelError(
            f"model: {name} ({type(model).__name__}) computes its logits in a way that Covey does "
            "not support"
        )
    return heads[best]


def _register_attention(model: Any) -> tuple[bool, bool]:
    """Use Covey's attention in a model if the model's hidden states stay the same.

    Return two flags. The first returned flag says whether packed rows give the same hidden states
    as the model's own attention. The second returned flag says whether packed rows with flash
    attention give the same hidden states as the model's own attention. The parity check runs the
    model on three rows of different lengths. The parity check is necessary because a model's
    configuration does not say whether its attention is standard, or whether its other layers
    process each token separately.
    """
    original = model.config._attn_implementation
    if original == NAME:  # an earlier model used this configuration
        original = "sdpa"
    if original == "sdpa" and getattr(model.config, "attn_logit_softcapping", None) is not None:
        original = "eager"  # sdpa ignores a soft cap, or refuses it
    if original != model.config._attn_implementation:
        model.set_attn_implementation(original)
    if original not in ("sdpa", "eager"):
        return False, False

    def hidden_states(attention: str) -> torch.Tensor:
        model.set_attn_implementation(attention)
        ids = torch.cat([rows.prompt_tokens, rows.tokens], dim=1).to(weight.device)
        found: torch.Tensor = _checked_backbone(model)(ids, use_cache=False).last_hidden_state
        return found

    weight, rows = model.get_output_embeddings().weight, parity_rows(model.config.vocab_size)
    before = attempt(lambda: hidden_states(original))
    if before is None or not matches(attempt(lambda: hidden_states(NAME)), before):
        model.set_attn_implementation(original)
        return False, False
    # The hidden state that predicts each completion token, one position before it.
    expected = before[:, rows.prompt_tokens.shape[1] - 1 : -1][rows.mask.to(before.device)]
    small = _checked_backbone(model)

    def packed_states(backbone: nn.Module, varlen: bool) -> torch.Tensor:
        packed = pack(rows, weight.device, varlen=varlen)
        return packed_forward(backbone, packed)[packed.predictor].to(expected.dtype)

    packs = matches(attempt(lambda: packed_states(small, False)), expected)
    # Flash attention exists only for 16-bit types on a GPU.
    if not packs or not weight.is_cuda or small is model.base_model:
        return packs, False
    rounded = attempt(lambda: packed_states(copy.deepcopy(small).to(weight.dtype), True))
    return packs, matches(rounded, expected, ROUNDED_TOLERANCE)


def _checked_backbone(model: Any) -> nn.Module:
    """Return the backbone for parity checks: for a 16-bit model, its first layers in float32."""
    rounds = model.get_output_embeddings().weight.dtype in HALF
    backbone: nn.Module = model.base_model
    return first_layers(backbone) if rounds else backbone


def _supports_fused(model: Any) -> bool:
    """If the fused forward pass matches the model's forward pass, fuse weights and return True."""
    try:
        from covey.accel.fused_forward import fused_backbone, is_llama_like
    except ImportError:  # without Triton there are no kernels
        return False
    if not is_llama_like(model):
        return False
    device = model.get_output_embeddings().weight.device
    packed = pack(parity_rows(model.config.vocab_size), device, varlen=False)
    small = _checked_backbone(model)
    own = attempt(lambda: packed_forward(small, packed))
    fused = attempt(
        lambda: fused_backbone(small, packed.input_ids, packed.position_ids, packed.packing)
    )
    if own is None or not matches(fused, own):
        return False
    fuse_parameters(model.base_model)
    return True
