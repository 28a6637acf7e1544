"""What sampling takes on a GPU, for models whose steps are recorded.

Keys and values stay where they are from call to call, because recorded graphs hold their addresses:
so do the graphs' own temporaries. Both are there while a run trains, too. The numbers are those of
covey/engines/native/decode_graph.py and device_head.py, which need Triton; a forecast does not, so they are here
once more, and tests compare them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from covey.analysis.plan.activations import FLOAT, Pass, passing_bytes
from covey.analysis.plan.forecast import ALWAYS, Part
from covey.analysis.plan.shapes import Shape
from covey.engines.native.prefill import PREFILL_TOKENS
from covey.engines.native.shared_prompt_cache import PROMPT_STEP, width_for

STRETCH = 2048
"""Tokens of the vocabulary that one program of a draw looks at."""
NOTES = FLOAT + FLOAT + 8
"""Bytes of a token in a slot: its uniform, its log-probability and itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Answering questions so many times each."""

    questions: int
    samples: int
    copies: int
    """Tensors of the size of the logits while first tokens are drawn."""
    recorded_copies: int
    """The same while all later ones are: one, unless a truncation sorts them."""
    slots: int
    """The most answers that are asked to be written at once."""

    @property
    def width(self) -> int:
        """Slots that there are: the next number for which graphs are recorded."""
        answers = min(self.slots, self.questions * self.samples)
        return width_for(answers)

    @property
    def answers(self) -> int:
        """How many begin together."""
        return min(self.width, self.questions * self.samples)

    @property
    def read(self) -> int:
        """Prompts that these are answers to."""
        return min(self.questions, -(-self.answers // self.samples))


def pooled_parts(
    shape: Shape, size: int, calls: Sequence[Call], *, longest: int, room: int
) -> list[Part]:
    """Return what all calls take together; the memory is as large as the largest needs it."""
    position = 2 * shape.layers * shape.key * size
    width = max(call.width for call in calls)
    prompts = max(min(call.width, call.questions) + 1 for call in calls)
    prompt_room = -(-longest // PROMPT_STEP) * PROMPT_STEP
    passing = [
        part
        for call in calls
        for part in (_reading(shape, size, call, longest), _drawing(shape, call))
    ]
    return [
        Part(
            name="slots",
            bytes=width * room * (position + NOTES),
            phases=ALWAYS,
            why=f"keys and values of {width} answers, {room} positions each",
        ),
        Part(
            name="prompts",
            bytes=prompts * prompt_room * position,
            phases=ALWAYS,
            why=f"keys and values of {prompts} prompts, {prompt_room} positions each",
        ),
        Part(
            name="graph",
            bytes=max(_recorded(shape, size, call) for call in calls),
            phases=ALWAYS,
            why=f"what a recorded step of {width} answers writes to, logits above all",
        ),
        # One after the other, so that only the largest counts.
        max(passing, key=lambda part: part.bytes),
    ]


def _recorded(shape: Shape, size: int, call: Call) -> int:
    """Return what is alive in one step: logits and their sums, or a layer's own."""
    parts = -(-shape.vocabulary // STRETCH)
    logits = call.recorded_copies * shape.vocabulary * FLOAT + 2 * parts * FLOAT
    layer = (2 * shape.query + 2 * shape.key + 3 * shape.inner + 2 * shape.hidden) * size
    return call.width * (shape.hidden * (FLOAT + size) + max(logits, layer))


def _reading(shape: Shape, size: int, call: Call, longest: int) -> Part:
    together = max(1, min(call.read, PREFILL_TOKENS // longest))
    tokens = together * longest
    batch = Pass(rows=together, columns=longest, tokens=tokens, chosen=together, packed=shape.fuses)
    # The keys and values of those that were read before are freed when the next are there.
    kept = 1 if together == call.read else 2
    held = kept * tokens * 2 * shape.layers * shape.key * size
    return Part(
        name="asking",
        bytes=held
        + passing_bytes(shape, size, batch, "cuda")
        + call.read * shape.vocabulary * FLOAT,
        phases=("sample",),
        why=f"{call.read} prompts, {together} at a time",
    )


def _drawing(shape: Shape, call: Call) -> Part:
    return Part(
        name="drawing",
        bytes=(call.answers * call.copies + call.read) * shape.vocabulary * FLOAT,
        phases=("sample",),
        why=f"first tokens of {call.answers} answers, from {shape.vocabulary:,}, "
        f"{call.copies} times",
    )
