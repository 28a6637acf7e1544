"""Fast detokenization of many completions, with a table that maps tokens to bytes.

GPT-2-style tokenizers write every token as bytes, so the text of a completion is the concatenation
of its tokens' bytes. A table lookup takes a third of the time of the tokenizer's own decoding.
Covey uses the table only if it decodes every token exactly as the tokenizer does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

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
    """Return whether the table decodes all tokens, in shuffled order, as the tokenizer does."""
    order = list(range(len(pieces)))
    random.Random(0).shuffle(order)
    rows = [order[at : at + TRIED_TOGETHER] for at in range(0, len(order), TRIED_TOGETHER)]
    expected: list[str] = backend.decode_batch(rows, skip_special_tokens=True)
    return [joined_text(pieces, row) for row in rows] == expected
