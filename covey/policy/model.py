"""A Hugging Face causal language model, taken apart into what sampling and training need.

The backbone gives hidden states; the head turns chosen ones into logits. Neither the sampler nor
the trainer ever asks for the logits of a whole batch, which at a vocabulary of 150,000 are by far
the largest tensor there is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from covey.embedded import CHECKPOINT
from covey.errors import ModelError
from covey.policy.attention import NAME
from covey.policy.gguf import find_gguf, import_gguf
from covey.policy.layout import Packed, lay_out, pack, trial_batch
from covey.policy.template import Renderer, Template, renderer
from covey.types import Message

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """From hidden states to logits: scale * (h W^T + b), then perhaps a soft cap."""

    linear: nn.Linear
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] in float32 or better."""
        logits = self.linear(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


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


def load_language_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    gradient_checkpointing: bool = False,
    template: Template = Template(),  # noqa: B008 - it cannot change
) -> LanguageModel:
    """Load a model by folder, hub name, GGUF file, `smollm2` or `embedded`."""
    where = _device(device)
    wanted = _dtype(dtype, where)
    source = _source(path)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=wanted)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"model: cannot load {path!r}: {_first_line(error)}") from None
    model.to(where)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return wrap(model, tokenizer, name=path, template=template)


def _source(path: str) -> str:
    """Return the folder or hub name to load; a GGUF file is imported first."""
    if path == "embedded":
        return str(CHECKPOINT)
    gguf = find_gguf(path)
    return path if gguf is None else str(import_gguf(gguf))


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
    head = _matching_head(model, linear, name)
    asking = renderer(tokenizer, template, name)
    return LanguageModel(
        model=model,
        tokenizer=tokenizer,
        head=head,
        packs=_use_own_attention(model),
        context=int(getattr(model.config, "max_position_embeddings", None) or 2**31),
        stop_ids=_stop_ids(model, tokenizer, asking.turn_end),
        renderer=asking,
    )


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


def packed_forward(backbone: nn.Module, packed: Packed) -> torch.Tensor:
    """Run a model over packed tokens; return hidden states [N, D]."""
    hidden: torch.Tensor = backbone(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        # A mask of four dimensions is handed on as it is, instead of one being made of N x N.
        attention_mask=packed.input_ids.new_zeros(1, 1, 1, 1, dtype=torch.bool),
        packing=packed.packing,
        use_cache=False,
    ).last_hidden_state
    return hidden[0]


def _use_own_attention(model: Any) -> bool:
    """Give a model covey's attention, if it then says the same as before, packed and not.

    Whether a model's attention is standard, and whether the rest of it works token by token, is
    not written anywhere; three rows of different length show it.
    """
    if model.config._attn_implementation != "sdpa":
        return False
    device = model.get_output_embeddings().weight.device
    prompt = torch.arange(2, 6, device=device) % model.config.vocab_size
    lengths = torch.tensor([3, 1, 5], device=device)
    batch = trial_batch(prompt, lengths)
    layout, packed = lay_out(batch), pack(batch)
    try:
        with torch.no_grad():
            before = model.base_model(layout.input_ids, use_cache=False).last_hidden_state
            model.set_attn_implementation(NAME)
            after = model.base_model(layout.input_ids, use_cache=False).last_hidden_state
            together = packed_forward(model.base_model, packed)
        rows = torch.arange(len(batch), device=device)[:, None].expand_as(layout.predictor)
        padded = before[rows, layout.predictor][batch.mask]
        tolerance = 3e-2 if before.dtype == torch.bfloat16 else 1e-4
        limit = tolerance * float(before.abs().max())
        same = float((after - before).abs().max()) <= limit
        packs = float((together[packed.predictor[batch.mask]] - padded).abs().max()) <= limit
    except (TypeError, ValueError, RuntimeError, IndexError):
        same = packs = False
    if not same:
        model.set_attn_implementation("sdpa")
    return same and packs


def _stop_ids(model: Any, tokenizer: Any, turn_end: int | None) -> tuple[int, ...]:
    """Return every token that some file, or the chat template, takes for the end of an answer."""
    ids = [turn_end, tokenizer.eos_token_id, model.config.eos_token_id]
    if model.generation_config is not None:
        ids.append(model.generation_config.eos_token_id)
    flat = itertools.chain.from_iterable(i if isinstance(i, list) else [i] for i in ids)
    return tuple(sorted({int(i) for i in flat if i is not None}))


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"model: device {name!r} was asked for, but torch sees no CUDA device")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
