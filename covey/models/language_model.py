"""A Hugging Face causal language model, taken apart into what sampling and training need.

The backbone gives hidden states; the head turns chosen ones into logits. Neither the sampler nor
the trainer ever asks for the logits of a whole batch, which at a vocabulary of 150,000 are by far
the largest tensor there is.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn

from covey.accel.attention import NAME
from covey.accel.fused_parameters import join_weights
from covey.accel.head import Head
from covey.accel.packing import PackedRows
from covey.accel.parity import first_layers, near
from covey.accel.varlen_attention import HALF
from covey.embedded import CHECKPOINT
from covey.errors import ModelError
from covey.models.chat_template import Renderer, Template, renderer
from covey.models.detokenize import byte_pieces, joined_text
from covey.models.device import device_of
from covey.models.gguf import find_gguf, import_gguf
from covey.models.layout import Packed, lay_out, pack_for, trial_batch
from covey.models.model_path import check_model_path, not_here
from covey.models.pretrained import make_savable, read_pretrained, read_tokenizer
from covey.models.render_template import start_rendering
from covey.types import Batch, HostRows, Message

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
# A hub that does not answer is told in one line, when its retries are over.
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A loaded model with its tokenizer."""

    model: Any
    tokenizer: Any
    head: Head
    context: int
    """The most tokens, prompt and answer together, that the model can hold."""
    stop_ids: tuple[int, ...]
    """Tokens that end an answer."""
    packs: bool = False
    """Whether the model gives the same for packed tokens as for padded ones."""
    flash: bool = False
    """Whether packed rows attend by kernels that need no padding."""
    fused: bool = False
    """Whether packed tokens take the forward pass that is written out in fused.py."""
    renderer: Renderer | None = None
    """Turns conversations into prompts; `wrap` gives it."""
    adapter: Any = None
    """peft's description of the adapter that is trained. None: all weights are."""

    @property
    def backbone(self) -> nn.Module:
        """Everything but the head."""
        backbone = self.model.base_model
        assert isinstance(backbone, nn.Module)
        return backbone

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head.linear.weight.device

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Turn a conversation into token ids, up to where the model's answer begins."""
        assert self.renderer is not None
        return self.renderer.tokens(messages)

    @property
    def opening(self) -> str:
        """What an answer is judged and read with in front of it, though it is in the prompt."""
        return "" if self.renderer is None else self.renderer.template.opening

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn an answer's tokens into text, without end-of-sequence and padding."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def decode_many(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """Decode several answers, from a table of bytes where the tokenizer allows it."""
        pieces = byte_pieces(self.tokenizer, len(self.head.linear.weight))
        if pieces is not None:
            return [joined_text(pieces, tokens) for tokens in answers]
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or getattr(self.tokenizer, "clean_up_tokenization_spaces", False):
            return [self.decode(tokens) for tokens in answers]
        texts: list[str] = backend.decode_batch(answers, skip_special_tokens=True)
        return texts


def load_language_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    gradient_checkpointing: bool = False,
    template: Template = Template(),  # noqa: B008 - it cannot change
) -> LanguageModel:
    """Load a model by folder, hub name, GGUF file, `smollm2` or `embedded`."""
    where = device_of(device)
    wanted = _dtype(dtype, where)
    source = _source(path)
    try:
        tokenizer = read_tokenizer(source)
        if tokenizer.chat_template and template.form in ("auto", "chat"):
            start_rendering()
        model = read_pretrained(transformers.AutoModelForCausalLM, source, wanted)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"model: cannot load {path!r}: {_first_line(error)}{not_here(source)}"
        ) from None
    make_savable(model)
    model.to(where)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return wrap(model, tokenizer, name=path, template=template)


def _source(path: str) -> str:
    """Return the folder or hub name to load; a GGUF file is imported first."""
    if path == "embedded":
        return str(CHECKPOINT)
    gguf = find_gguf(path)
    if gguf is not None:
        return str(import_gguf(gguf))
    check_model_path(path)
    return path


def wrap(
    model: Any,
    tokenizer: Any,
    name: str = "model",
    template: Template = Template(),  # noqa: B008 - it cannot change
) -> LanguageModel:
    """Take a causal language model apart, and check that the parts give what the whole gives."""
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ModelError(f"model: {name} has no linear output layer, which covey needs")
    _switch_dropout_off(model)
    training = model.training
    model.eval()
    head = _matching_head(model, linear, name)
    asking = renderer(tokenizer, template, name)
    packs, flash = _use_own_attention(model)
    fused = packs and linear.weight.is_cuda and _fuses(model)
    model.train(training)
    return LanguageModel(
        model=model,
        tokenizer=tokenizer,
        head=head,
        packs=packs,
        flash=flash,
        fused=fused,
        context=_context(model.config),
        stop_ids=_stop_ids(model, tokenizer, asking.turn_end),
        renderer=asking,
    )


def _context(config: Any) -> int:
    """Return how many tokens a model can hold without a row's numbers depending on other rows.

    `longrope` takes other angles for a whole call as soon as one of its rows is longer than the
    model was first trained on, and keys that are kept would still have those of before.
    """
    most = int(getattr(config, "max_position_embeddings", None) or 2**31)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return most
    return min(most, int(rope.get("original_max_position_embeddings") or most))


def _switch_dropout_off(model: Any) -> None:
    """Make training mode say what evaluation mode says.

    With dropout the policy that is trained is not the one that sampled, ratios are noise from the
    first update on, and what is drawn depends on a generator that no checkpoint holds.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def _matching_head(model: Any, linear: nn.Linear, name: str) -> Head:
    """Find the scale and soft cap that reproduce the model's own logits.

    Architectures keep them under different names, and some multiply where others divide. A wrong
    guess would train on wrong probabilities without a word, so every guess is tried.
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
        # The best guess, not the first good one: a soft cap hardly shows while logits are small.
        errors = [float((h.logits(hidden).float() - expected).abs().max()) for h in heads]
    best = min(range(len(heads)), key=errors.__getitem__)
    if errors[best] > 1e-2 * float(expected.abs().max()):
        raise ModelError(
            f"model: {name} ({type(model).__name__}) computes its logits in an unknown way"
        )
    return heads[best]


def packed_forward(backbone: nn.Module, packed: Packed | PackedRows) -> torch.Tensor:
    """Run a model over packed tokens; return hidden states [N, D]."""
    input_ids = packed.input_ids.view(1, -1)
    hidden: torch.Tensor = backbone(
        input_ids=input_ids,
        position_ids=packed.position_ids.view(1, -1),
        # A mask of four dimensions is handed on as it is, instead of one being made of N x N.
        attention_mask=input_ids.new_zeros(1, 1, 1, 1, dtype=torch.bool),
        packing=packed.packing,
        use_cache=False,
    ).last_hidden_state
    return hidden[0]


def _use_own_attention(model: Any) -> tuple[bool, bool]:
    """Give a model covey's attention, if it then says the same as before.

    Returns whether it says the same packed, and whether it does so by flash kernels. Whether a
    model's attention is standard, and whether the rest of it works token by token, is not written
    anywhere; three rows of different length show it.
    """
    if model.config._attn_implementation == NAME:  # a configuration that served another model
        model.set_attn_implementation("sdpa")
    before_us = model.config._attn_implementation
    if getattr(model.config, "attn_logit_softcapping", None) is not None and before_us == "sdpa":
        before_us = "eager"  # sdpa leaves a soft cap out without a word
        model.set_attn_implementation(before_us)
    if before_us not in ("sdpa", "eager"):
        return False, False
    batch = _trial_batch(model)
    layout = lay_out(batch)
    try:
        with torch.no_grad():
            before = _tried(model)(layout.input_ids, use_cache=False).last_hidden_state
            model.set_attn_implementation(NAME)
            tried = _tried(model)
            same = near(tried(layout.input_ids, use_cache=False).last_hidden_state, before)
    except (TypeError, ValueError, RuntimeError, IndexError):
        same = False
    if not same:
        model.set_attn_implementation(before_us)
        return False, False
    rows = torch.arange(len(batch), device=before.device)[:, None].expand_as(layout.predictor)
    padded = before[rows, layout.predictor][batch.mask]
    packed = pack_for(HostRows.of(batch), before.device, flash=False)
    try:
        with torch.no_grad():
            packs = near(packed_forward(tried, packed)[packed.predictor], padded)
    except (TypeError, ValueError, RuntimeError, IndexError):
        packs = False
    return packs, packs and _flashes(model, tried, batch, padded)


def _tried(model: Any) -> nn.Module:
    """Return a backbone to try things with: of a model that rounds much, first layers alone."""
    rounds = model.get_output_embeddings().weight.dtype in HALF
    backbone: nn.Module = model.base_model
    return first_layers(backbone) if rounds else backbone


def _flashes(model: Any, tried: nn.Module, batch: Batch, padded: torch.Tensor) -> bool:
    """Tell whether flash kernels, which there are for half precision only, do as well."""
    weight = model.get_output_embeddings().weight
    if not weight.is_cuda or weight.dtype not in HALF or tried is model.base_model:
        return False
    packed = pack_for(HostRows.of(batch), weight.device, flash=True)
    try:
        with torch.no_grad():
            rounded = copy.deepcopy(tried).to(weight.dtype)
            found = packed_forward(rounded, packed)[packed.predictor].float()
    except (TypeError, ValueError, RuntimeError, IndexError, NotImplementedError):
        return False
    # A few layers round away about one percent; attention to wrong tokens is far off.
    return float((found - padded).norm()) <= 0.05 * float(padded.norm())


def _fuses(model: Any) -> bool:
    """Tell whether the fused forward pass says what a model's own says; if so, join its weights."""
    try:
        from covey.accel.fused_forward import fused_backbone, understood
    except ImportError:  # without Triton there are no kernels
        return False
    if not understood(model):
        return False
    batch = _trial_batch(model)
    packed = pack_for(HostRows.of(batch), batch.tokens.device, flash=False)
    try:
        small = _tried(model)
        with torch.no_grad():
            own = packed_forward(small, packed)
            fused = fused_backbone(small, packed.input_ids, packed.position_ids, packed.packing)
        if not near(fused, own):
            return False
    except (AttributeError, TypeError, ValueError, RuntimeError, LookupError, AssertionError):
        return False
    join_weights(model.base_model)
    return True


def _trial_batch(model: Any) -> Batch:
    device = model.get_output_embeddings().weight.device
    prompt = torch.arange(2, 6, device=device) % model.config.vocab_size
    return trial_batch(prompt, torch.tensor([3, 1, 5], device=device))


def _stop_ids(model: Any, tokenizer: Any, turn_end: int | None) -> tuple[int, ...]:
    """Return every token that some file, or the chat template, takes for the end of an answer."""
    ids = [turn_end, tokenizer.eos_token_id, model.config.eos_token_id]
    if model.generation_config is not None:
        ids.append(model.generation_config.eos_token_id)
    flat = itertools.chain.from_iterable(i if isinstance(i, list) else [i] for i in ids)
    return tuple(sorted({int(i) for i in flat if i is not None}))


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300].rstrip(".") if lines else type(error).__name__
