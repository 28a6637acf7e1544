"""A language model: backbone and head of a Hugging Face causal model, and a tokenizer.

The backbone returns hidden states; the head turns selected hidden states into logits. The engine
and the trainer never compute all logits of a batch at once. With a vocabulary of 150,000 tokens,
the logits of a batch would be by far the largest tensor.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from transformers.convert_slow_tokenizer import bytes_to_unicode

from covey.accel.head import Head
from covey.accel.packing import PackedBatch
from covey.models.chat import Renderer
from covey.types import Message

# Fast detokenization of many completions, with a table that maps tokens to bytes.
#
# GPT-2-style tokenizers write every token as bytes, so the text of a completion is the
# concatenation of its tokens' bytes. A table lookup takes a third of the time of the tokenizer's
# own decoding. Covey uses the table only if it decodes every token exactly as the tokenizer
# does.


TRIED_TOGETHER = 64
"""Length of the token sequences on which Covey compares the table with the tokenizer."""

Pieces = tuple[bytes, ...]


def joined_bytes(pieces: Pieces, tokens: Sequence[int]) -> bytes:
    """Return the joined bytes of tokens, which may begin or end inside a UTF-8 character."""
    if len(tokens) < 2:  # itemgetter returns several items as a tuple, but one item as it is
        return b"".join(pieces[token] for token in tokens)
    return b"".join(itemgetter(*tokens)(pieces))


def joined_text(pieces: Pieces, tokens: Sequence[int]) -> str:
    """Return the text of tokens; bytes that are not valid UTF-8 become U+FFFD."""
    return joined_bytes(pieces, tokens).decode("utf-8", errors="replace")


@lru_cache(maxsize=4)
def byte_pieces(tokenizer: Any, size: int) -> Pieces | None:
    """Return the bytes of the first `size` tokens of the vocabulary; special tokens have no bytes.

    Return None if the tokenizer is not byte-level, or if the bytes do not reproduce the tokenizer's
    text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return None
    if type(backend.decoder).__name__ != "ByteLevel":
        return None
    special = {n for n, t in backend.get_added_tokens_decoder().items() if t.special}
    characters = {character: byte for byte, character in bytes_to_unicode().items()}
    pieces = tuple(
        b"" if number in special else _bytes(backend.id_to_token(number), characters)
        for number in range(size)
    )
    return pieces if _says_the_same(pieces, backend) else None


def _bytes(token: str | None, characters: dict[str, int]) -> bytes:
    """Return a token's bytes; an added token that is plain text is encoded as UTF-8."""
    try:
        return bytes(characters[character] for character in token or "")
    except KeyError:
        return (token or "").encode()


def _says_the_same(pieces: Pieces, backend: Any) -> bool:
    order = list(range(len(pieces)))
    random.Random(0).shuffle(order)
    rows = [order[at : at + TRIED_TOGETHER] for at in range(0, len(order), TRIED_TOGETHER)]
    expected: list[str] = backend.decode_batch(rows, skip_special_tokens=True)
    return [joined_text(pieces, row) for row in rows] == expected


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A loaded model with its tokenizer."""

    model: Any
    tokenizer: Any
    head: Head
    context: int
    """The context length: maximum number of tokens of prompt and completion together."""
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""
    packs: bool = False
    """Whether packed tokens give the same hidden states as padded tokens."""
    flash: bool = False
    """Whether packed rows use flash attention, which needs no padding."""
    fused: bool = False
    """Whether packed tokens use the fused forward pass (accel/fused_forward.py)."""
    renderer: Renderer | None = None
    """Renders conversations as prompts."""
    adapter: Any = None
    """peft's configuration of the trained adapter; None if all weights are trained."""
    longest_prompt: int | None = None
    """Maximum number of prompt tokens, or None for no limit. A longer prompt is cut at its
    beginning."""
    sharded: bool = False
    """Whether the parameters are sharded over ranks (parallel/shard.py)."""

    @property
    def backbone(self) -> nn.Module:
        backbone = self.model.base_model
        assert isinstance(backbone, nn.Module)
        return backbone

    @property
    def device(self) -> torch.device:
        return self.head.linear.weight.device

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of a conversation, up to where the completion begins."""
        assert self.renderer is not None
        tokens, most = self.renderer.tokens(messages), self.longest_prompt
        if most is None or len(tokens) <= most:
            return tokens
        start = tokens[:1] if tokens[0] == self.tokenizer.bos_token_id else ()
        return (*start, *tokens[len(tokens) - most + len(start) :])

    @property
    def opening(self) -> str:
        """The prefill, if Covey scores and shows completions with the prefill; otherwise ""."""
        return "" if self.renderer is None else self.renderer.template.opening

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a completion, without special tokens."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    @property
    def pieces(self) -> Pieces | None:
        """The bytes of each token; None if the tokenizer is not byte-level."""
        return byte_pieces(self.tokenizer, len(self.head.linear.weight))

    def decode_many(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of several completions, decoded with the byte table `pieces` if it
        exists."""
        pieces = self.pieces
        if pieces is not None:
            return [joined_text(pieces, tokens) for tokens in completions]
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or getattr(self.tokenizer, "clean_up_tokenization_spaces", False):
            return [self.decode(tokens) for tokens in completions]
        texts: list[str] = backend.decode_batch(completions, skip_special_tokens=True)
        return texts


def packed_forward(backbone: nn.Module, packed: PackedBatch) -> torch.Tensor:
    """Run a backbone over packed tokens; return hidden states [N, D]."""
    input_ids = packed.input_ids.view(1, -1)
    hidden: torch.Tensor = backbone(
        input_ids=input_ids,
        position_ids=packed.position_ids.view(1, -1),
        # transformers uses a four-dimensional mask unchanged, instead of building an N x N mask.
        attention_mask=input_ids.new_zeros(1, 1, 1, 1, dtype=torch.bool),
        packing=packed.packing,
        use_cache=False,
    ).last_hidden_state
    return hidden[0]
