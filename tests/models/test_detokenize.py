import random

import pytest
import tokenizers
import transformers

from covey.embedded import CHECKPOINT
from covey.models.language_model import LanguageModel, _says_the_same, byte_pieces, joined_text

BEYOND = 40
"""More tokens than the tokenizer has: models round their vocabulary up."""


def test_decoded_text_equals_the_tokenizers(embedded: LanguageModel) -> None:
    backend = embedded.tokenizer.backend_tokenizer
    size = backend.get_vocab_size() + BEYOND
    pieces = byte_pieces(embedded.tokenizer, size)
    assert pieces is not None
    sample_tokens = random.Random(1)
    rows = [
        [sample_tokens.randrange(size) for _ in range(sample_tokens.randrange(60))]
        for _ in range(300)
    ]
    expected = backend.decode_batch(rows, skip_special_tokens=True)
    assert [joined_text(pieces, row) for row in rows] == expected
    assert any("\ufffd" in text for text in expected), "some bytes make no character"


@pytest.mark.parametrize("text", ["naïve ½ → 我们 😀", "", " a  b\n", "e\u0301"])
def test_text_round_trips(embedded: LanguageModel, text: str) -> None:
    tokens = embedded.tokenizer.encode(text, add_special_tokens=False)
    end = embedded.tokenizer.eos_token_id
    assert embedded.decode_many([[*tokens, end], tokens]) == [text, text]


def test_a_tokenizer_without_bytes_uses_its_own_decoding() -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.decoder = tokenizers.decoders.WordPiece()
    assert byte_pieces(transformers.PreTrainedTokenizerFast(tokenizer_object=words), 2) is None
    spaces = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    spaces.clean_up_tokenization_spaces = True
    assert byte_pieces(spaces, 262) is None


def test_a_table_with_one_wrong_token_is_rejected(embedded: LanguageModel) -> None:
    pieces = byte_pieces(embedded.tokenizer, 262)
    assert pieces is not None
    backend = embedded.tokenizer.backend_tokenizer
    assert _says_the_same(pieces, backend)
    wrong = (*pieces[:100], pieces[100] + b"!", *pieces[101:])
    assert not _says_the_same(wrong, backend)
