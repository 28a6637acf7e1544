"""What a stranger may send to a reference server, and what is refused before a model sees it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save

from covey.models.logp import LogProbs
from covey.parallel.passes import micro_batches
from covey.reference.wire import (
    BYTES_PER_TOKEN,
    HEADER_BYTES,
    TYPES,
    Bounds,
    WireError,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    joined,
    padded_tokens,
)
from tests.conftest import make_batch

BOUNDS = Bounds(vocabulary=262, context=64, tokens=200)
Tensors = dict[str, torch.Tensor]


def tensors() -> Tensors:
    batch = make_batch()
    return {name: getattr(batch, name).to(kind) for name, (kind, _) in TYPES.items()}


def test_a_request_reads_back_as_it_was_written() -> None:
    batch = make_batch()
    request = decode_request(encode_request(batch, temperature=0.7, tokenizer="abc"), BOUNDS)
    assert (request.temperature, request.tokenizer) == (0.7, "abc")
    for name in TYPES:
        found, expected = getattr(request.batch, name), getattr(batch, name)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_a_reply_reads_back_as_it_was_written() -> None:
    values = LogProbs(logp=-torch.rand(3, 4), entropy=torch.rand(3, 4))
    back, weights = decode_reply(encode_reply(values, "abc"), torch.Size([3, 4]), 1.0)
    assert weights == "abc"
    assert torch.equal(back.logp, values.logp)
    assert torch.equal(back.entropy, values.entropy)
    with pytest.raises(WireError, match=r"no float32 logp of shape \[3, 5\]"):
        decode_reply(encode_reply(values, "abc"), torch.Size([3, 5]), 1.0)


def change(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def apply(t: Tensors) -> None:
        t[name] = value(t[name]).contiguous()

    return apply


def put(place: int | tuple[int, int], value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(t: torch.Tensor) -> torch.Tensor:
        t = t.clone()
        t[place] = value
        return t

    return apply


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change("tokens", lambda t: t.long()), "tokens must be int32 with 2 dimensions, not int64"),
        (change("mask", lambda t: t.float()), "mask must be bool"),
        (change("lengths", lambda t: t[:, None]), "lengths must be int32 with 1 dimensions"),
        (change("lengths", lambda t: t[:-1]), "same number of rows"),
        (change("mask", lambda t: t[:, :-1]), "same shape"),
        (change("lengths", put(1, -1)), "lengths must be 0 to 9"),
        (change("lengths", put(1, 10)), "lengths must be 0 to 9"),
        (change("prompt_lengths", put(0, 0)), "prompt_lengths must be 1 to 7"),
        (change("prompt_lengths", put(0, 2**31 - 1)), "prompt_lengths must be 1 to 7"),
        (change("tokens", put((0, 0), 262)), "tokens must be 0 to 261: the vocabulary"),
        (change("tokens", put((0, 0), -1)), "tokens must be 0 to 261"),
        (change("prompt_tokens", put((5, 6), 2**31 - 1)), "prompt_tokens must be 0 to 261"),
        (change("lengths", put(0, 8)), "beyond a row's length"),
        (change("mask", lambda t: t.to(torch.uint8).mul(2).view(torch.bool)), "0 and 1"),
        (lambda t: t.update({n: v[:0] for n, v in t.items()}), "at least one"),
        (lambda t: t.update(tokens=t["tokens"][:, :0], mask=t["mask"][:, :0]), "at least one col"),
        (lambda t: t.update(extra=torch.zeros(1)), "tensors must be prompt_tokens"),
        (lambda t: t.pop("mask"), "tensors must be prompt_tokens"),
        (lambda t: t.update({n: torch.cat([v] * 20) for n, v in t.items()}), "more than 200"),
    ],
)
def test_what_cannot_be_computed_is_refused_in_one_line(
    damage: Callable[[Tensors], object], words: str
) -> None:
    sent = tensors()
    damage(sent)
    with pytest.raises(WireError) as raised:
        decode_request(save(sent, {"temperature": "1.0"}), BOUNDS)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", ["0", "-1.0", "nan", "inf", "warm", ""])
def test_a_temperature_is_a_number_above_zero(value: str) -> None:
    with pytest.raises(WireError, match="temperature"):
        decode_request(save(tensors(), {"temperature": value}), BOUNDS)


def test_a_row_longer_than_the_context_is_refused() -> None:
    with pytest.raises(WireError, match="longer than the context, 10"):
        decode_request(save(tensors()), Bounds(vocabulary=262, context=10, tokens=10**6))


def framed(header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"abc",
        b"\xff" * 64,
        (2**60).to_bytes(8, "little") + b"{}",
        framed([]),
        framed({"__metadata__": {"temperature": 5}}),
        framed({"__metadata__": 7}),
        framed({"tokens": {"dtype": "I32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}),
        framed({"tokens": {"dtype": "I32", "shape": [2], "data_offsets": [0, 800]}}),
        framed({"tokens": {"dtype": "?", "shape": [1], "data_offsets": [0, 0]}}),
        b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00cos\nsystem\n.",  # pickle
    ],
    ids=range(11),
)
def test_bytes_that_are_not_a_request_are_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        decode_request(body, BOUNDS)


def test_metadata_that_is_null_is_refused_though_safetensors_reads_it() -> None:
    body = save(tensors())
    size = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + size]) | {"__metadata__": None}
    with pytest.raises(WireError, match="__metadata__ is null"):
        decode_request(framed(header) + body[8 + size :], BOUNDS)


def test_the_most_bytes_a_token_takes_hold_for_any_batch() -> None:
    """By this a client keeps below a limit in bytes by counting tokens."""
    for rows, longest, seed in [(1, 1, 0), (6, 9, 1), (40, 60, 2), (200, 2, 3)]:
        batch = make_batch(rows=rows, longest=longest, seed=seed)
        body = encode_request(batch, temperature=1 / 3, tokenizer="f" * 64)
        assert len(body) <= BYTES_PER_TOKEN * padded_tokens(batch) + HEADER_BYTES


def test_the_split_of_a_client_fits_the_bounds_of_a_server() -> None:
    batch = make_batch(rows=40, longest=30)
    parts = [batch.rows(index) for index in micro_batches(batch, 200)]
    assert len(parts) > 1
    for part in parts:
        decode_request(encode_request(part, temperature=1.0, tokenizer=""), BOUNDS)


def test_joined_batches_keep_their_rows() -> None:
    a, b = make_batch(rows=2, longest=3, seed=1), make_batch(rows=3, longest=7, seed=2)
    both = joined([a, b])
    assert both.tokens.shape == (5, 7)
    assert torch.equal(both.tokens[:2, :3], a.tokens)
    assert torch.equal(both.tokens[2:], b.tokens)
    assert not both.mask[:2, 3:].any()
    assert both.prompt_lengths.tolist() == [*a.prompt_lengths.tolist(), *b.prompt_lengths.tolist()]
