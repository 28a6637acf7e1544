"""The wire format between a run and a reference server: safetensors, never pickle.

A request contains rows of a batch, the temperature and the digest of the client's tokenizer. A
reply contains log-probabilities and entropies, and the digest of the server's weights. Client and
server check all received data with this module. The server checks a request before its model
computes anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from covey.escape import printable_line
from covey.models.logp import LogProbs
from covey.types import Batch, HostRows

TYPES: Mapping[str, tuple[torch.dtype, int]] = {
    "prompt_tokens": (torch.int32, 2),
    "prompt_lengths": (torch.int32, 1),
    "tokens": (torch.int32, 2),
    "lengths": (torch.int32, 1),
    "mask": (torch.bool, 2),
}
"""The dtype and the number of dimensions of each tensor in a request."""

BYTES_PER_TOKEN = 17
"""Maximum number of bytes per padded token in a request, including `prompt_lengths` and
`lengths`."""
HEADER_BYTES = 4096
"""Maximum number of bytes for tensor names, shapes and metadata in a request."""
SLACK = 1e-4
"""The check of a reply allows for rounding errors: a log-probability may exceed 0 by at most
`SLACK`, and an entropy may be below 0 by at most `SLACK`.

Log-probabilities are computed in float32, as logits minus their logsumexp. With logits up to 512,
the rounding error of a log-probability is at most `2 ** -15`, about 3e-5. A temperature below 1
increases the logits, and therefore also increases the allowed error.
"""


class WireError(ValueError):
    """Raised for invalid received data, with a one-line message for the sender."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogpRequest:
    """A request for the log-probabilities of the rows of a batch at a given temperature."""

    batch: Batch
    temperature: float
    tokenizer: str
    """The digest of the client's tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of a request: vocabulary size, tokens per row, and padded tokens."""

    vocabulary: int
    context: int
    """Maximum number of tokens in one row."""
    tokens: int
    """Maximum number of padded tokens in one request."""


def padded_tokens(batch: Batch) -> int:
    """Return the number of rows times the length of the longest row, as a measure of memory use."""
    return len(batch) * int((batch.prompt_lengths + batch.lengths).max())


def encode_request(batch: Batch, *, temperature: float, tokenizer: str) -> bytes:
    """Serialize a request."""
    tensors = {
        name: getattr(batch, name).to("cpu", kind).contiguous() for name, (kind, _) in TYPES.items()
    }
    body: bytes = save(tensors, {"temperature": repr(temperature), "tokenizer": tokenizer})
    return body


def decode_request(body: bytes, bounds: Bounds) -> LogpRequest:
    """Parse a request, or raise WireError if the server cannot answer it."""
    tensors, metadata = _read(body)
    _check_types(tensors)
    _check_shapes(tensors)
    _check_values(tensors, bounds)
    try:
        temperature = float(metadata.get("temperature", "1"))
    except ValueError:
        temperature = math.nan
    if not (0 < temperature < math.inf):
        raise WireError(f"temperature = {metadata['temperature'][:40]!r} must be a number above 0")
    return LogpRequest(
        batch=_batch({n: t if n == "mask" else t.long() for n, t in tensors.items()}),
        temperature=temperature,
        tokenizer=metadata.get("tokenizer", ""),
    )


def encode_reply(values: LogProbs, weights: str) -> bytes:
    """Serialize a reply."""
    tensors = {k: v.to("cpu", torch.float32).contiguous() for k, v in values._asdict().items()}
    body: bytes = save(tensors, {"weights": weights})
    return body


def decode_reply(body: bytes, shape: torch.Size, temperature: float) -> tuple[LogProbs, str]:
    """Return the log-probabilities, the entropies and the weights digest that a reply contains.

    Raise WireError if the reply is invalid.
    """
    tensors, metadata = _read(body)
    for name in LogProbs._fields:
        found = tensors.get(name)
        if found is None or found.shape != shape or found.dtype != torch.float32:
            raise WireError(f"the reply has no float32 {name} of shape {list(shape)}")
    values = LogProbs(**{n: tensors[n] for n in LogProbs._fields})
    check_values(values, temperature)
    return values, metadata.get("weights", "")


def reply_bytes(shape: torch.Size) -> int:
    """Return the maximum size in bytes of the reply for a batch of the given shape."""
    return HEADER_BYTES + len(LogProbs._fields) * shape.numel() * torch.float32.itemsize


def check_values(values: LogProbs, temperature: float) -> None:
    """Raise WireError for log-probabilities above 0, entropies below 0, or non-finite values.

    Without this check, the loss would clamp a NaN, and the token would silently lose its gradient
    and its penalty.
    """
    slack = SLACK / min(temperature, 1.0)
    for name, sign in (("logp", 1.0), ("entropy", -1.0)):
        found = getattr(values, name).flatten()
        # Comparisons with NaN are false, so NaN is wrong too.
        wrong = ~((sign * found <= slack) & found.isfinite())
        if wrong.any():
            most = "at most" if sign > 0 else "at least"
            raise WireError(
                f"{int(wrong.sum())} of {len(found)} values of {name} are not finite and {most} 0, "
                f"the first is {float(found[wrong][0]):g}"
            )


def joined(batches: Sequence[Batch]) -> Batch:
    """Concatenate the rows of several batches into one batch."""
    tensors: dict[str, torch.Tensor] = {}
    for name, (_, dimensions) in TYPES.items():
        parts = [getattr(batch, name) for batch in batches]
        if dimensions == 2:
            width = max(part.shape[1] for part in parts)
            parts = [torch.nn.functional.pad(p, (0, width - p.shape[1])) for p in parts]
        tensors[name] = torch.cat(parts)
    return _batch(tensors)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move the model inputs of a batch to a device."""
    moved: dict[str, Any] = {name: getattr(batch, name).to(device) for name in TYPES}
    host = None if device.type == "cpu" else HostRows.of(batch)
    return replace(batch, **moved, host=host)


def _read(body: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        tensors = load(body)
        size = int.from_bytes(body[:8], "little")
        metadata = json.loads(body[8 : 8 + size]).get("__metadata__", {})
        if metadata is None:  # which safetensors accepts
            raise TypeError("__metadata__ is null")
    except (
        SafetensorError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RuntimeError,
    ) as error:
        raise WireError(f"not safetensors: {printable_line(str(error), 200)}") from None
    return tensors, metadata


def _check_types(tensors: Mapping[str, torch.Tensor]) -> None:
    if tensors.keys() != TYPES.keys():
        raise WireError(f"tensors must be {', '.join(TYPES)}, not {', '.join(sorted(tensors))}")
    for name, (kind, dimensions) in TYPES.items():
        tensor = tensors[name]
        if tensor.dtype != kind or tensor.ndim != dimensions:
            found = f"{tensor.dtype} with {tensor.ndim}".removeprefix("torch.")
            wanted = f"{kind} with {dimensions}".removeprefix("torch.")
            raise WireError(f"{name} must be {wanted} dimensions, not {found}")


def _check_shapes(tensors: Mapping[str, torch.Tensor]) -> None:
    rows = {name: tensor.shape[0] for name, tensor in tensors.items()}
    if len(set(rows.values())) > 1 or rows["tokens"] == 0:
        raise WireError(f"all tensors must have the same number of rows, at least one, not {rows}")
    if tensors["mask"].shape != tensors["tokens"].shape or not tensors["tokens"].numel():
        raise WireError("mask and tokens must have the same shape, and at least one column")
    for lengths, tokens, least in (
        ("prompt_lengths", "prompt_tokens", 1),
        ("lengths", "tokens", 0),
    ):
        most = tensors[tokens].shape[1]
        low, high = tensors[lengths].min(), tensors[lengths].max()
        if low < least or high > most:
            raise WireError(f"{lengths} must be {least} to {most}, the width of {tokens}")


def _check_values(tensors: Mapping[str, torch.Tensor], bounds: Bounds) -> None:
    for name in ("prompt_tokens", "tokens"):
        ids = tensors[name]
        if ids.min() < 0 or ids.max() >= bounds.vocabulary:
            raise WireError(f"{name} must be 0 to {bounds.vocabulary - 1}: the vocabulary")
    mask, lengths = tensors["mask"], tensors["lengths"]
    if mask.view(torch.uint8).max() > 1:
        raise WireError("mask must contain only 0 and 1")
    if (mask & (torch.arange(mask.shape[1]) >= lengths[:, None])).any():
        raise WireError("mask must be 0 beyond a row's length")
    total = tensors["prompt_lengths"].long() + lengths
    longest = int(total.max())
    if longest > bounds.context:
        raise WireError(f"a row of {longest} tokens is longer than the context, {bounds.context}")
    if longest * len(total) > bounds.tokens:
        what = f"{len(total)} rows of up to {longest} tokens"
        raise WireError(f"{what} are more than {bounds.tokens} (--max-tokens)")


def _batch(tensors: Mapping[str, torch.Tensor]) -> Batch:
    """Return a batch with the given model inputs, and 0 in the fields that the model ignores."""
    rows = len(tensors["tokens"])
    zeros = torch.zeros(rows, dtype=torch.float64)
    read: dict[str, Any] = dict(tensors)
    return Batch(
        **read,
        sampler_logp=torch.zeros(tensors["tokens"].shape),
        rewards=zeros,
        success=zeros.bool(),
        group=zeros.long(),
        truncated=zeros.bool(),
    )
