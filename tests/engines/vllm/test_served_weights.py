"""Weights for a server: padded heads and an untied head compute what the model computes."""

from __future__ import annotations

import pytest
import torch
import transformers

from covey.engines.vllm.sync import HeadPadding, served_config, served_weights
from covey.errors import ModelError
from covey.models.language_model import LanguageModel

TINY = {
    "vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "max_position_embeddings": 128,
}  # fmt: skip
KINDS = [
    ("Llama", {"tie_word_embeddings": True}),
    ("Llama", {"tie_word_embeddings": False, "attention_bias": True}),
    ("Qwen2", {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_padded_model_computes_the_same_logits(kind: str, options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**TINY, **options)
    make = getattr(transformers, f"{kind}ForCausalLM")
    model = make(config).eval()
    for parameter in model.parameters():  # biases start at zero, which would hide a mistake
        torch.nn.init.normal_(parameter, std=0.2)
    wide = make(type(config)(**served_config(config))).eval()
    assert wide.config.head_dim == 32
    wide.load_state_dict(dict(served_weights(model.named_parameters(), model)), strict=True)
    tokens = torch.arange(40)[None] % 64
    with torch.no_grad():
        gap = (model(tokens).logits - wide(tokens).logits).abs().max()
    assert float(gap) < 1e-4
    assert HeadPadding.of(wide.config) is None


def test_a_wrong_place_of_a_rotary_pair_would_show(embedded: LanguageModel) -> None:
    padding = HeadPadding.of(embedded.model.config)
    assert padding is not None
    assert (padding.width, padding.padded, padding.times) == (16, 32, 2)
    assert padding._places("k", torch.device("cpu")).tolist() == [
        0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
    ]  # fmt: skip
    assert padding._places("v", torch.device("cpu")).tolist() == list(range(16))


def test_heads_with_a_norm_of_their_own_are_refused() -> None:
    config = transformers.Qwen3Config(**TINY)
    with pytest.raises(ModelError, match="heads of at least 32 dimensions"):
        HeadPadding.of(config)


def test_the_tied_head_is_sent_once_more_under_its_own_name(embedded: LanguageModel) -> None:
    sent = list(served_weights(embedded.model.named_parameters(), embedded.model))
    names = [name for name, _ in sent]
    weights = dict(sent)
    assert names.count("lm_head.weight") == 1
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
