"""Draw the pictures of docs/concepts.md: python docs/images/concepts.py.

Every number in them is computed by the objectives, so a picture cannot contradict the code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

import covey.functional
from covey.objective.penalty import PENALTIES, Kl
from covey.objective.surrogate import Tokens, clipped

HERE = Path(__file__).parent
WIDTH, HEIGHT = 640, 300
GREEN, RED, BLUE, GREY = "#2e9e6b", "#d9534f", "#3b82c4", "#8a8f98"
REWARDS = (1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
CLIP = 0.2


def text(x: float, y: float, words: str, *, anchor: str = "middle", color: str = GREY) -> str:
    """Return a label."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{words}</text>'


def line(points: Iterable[tuple[float, float]], color: str, *, dashed: bool = False) -> str:
    """Return a line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>'


def bar(x: float, zero: float, height: float, color: str) -> str:
    """Return a bar that stands on, or hangs from, the line y = zero."""
    top = zero - max(height, 0.0)
    return f'<rect x="{x:.1f}" y="{top:.1f}" width="36" height="{abs(height):.1f}" fill="{color}"/>'


def write(name: str, title: str, parts: Sequence[str]) -> None:
    """Write a picture."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13"><title>{title}</title>'
    )
    (HERE / f"{name}.svg").write_text("\n".join([head, *parts, "</svg>\n"]), encoding="utf-8")


def advantages(name: str) -> list[float]:
    """Return what each completion of one group is reinforced by."""
    count = len(REWARDS)
    found = covey.functional.advantages(
        name,
        mask=torch.ones(count, 1),
        rewards=torch.tensor(REWARDS),
        group=torch.zeros(count, dtype=torch.long),
    )
    return [float(value) for value in found.reshape(count, -1)[:, 0]]


def advantage_picture() -> None:
    """Draw the advantages of a group of eight with two correct completions."""
    zero, scale = 170.0, 60.0
    parts = [line([(30, zero), (WIDTH - 20, zero)], GREY)]
    for index, (reward, value) in enumerate(zip(REWARDS, advantages("grpo"), strict=True)):
        x = 60 + index * 70.0
        parts.append(bar(x, zero, value * scale, GREEN if value > 0 else RED))
        parts.append(text(x + 18, 28, f"reward {reward:g}"))
        y = zero - value * scale + (-6 if value > 0 else 16)
        parts.append(text(x + 18, y, f"{value:+.2f}", color=GREEN if value > 0 else RED))
        parts.append(text(x + 18, 280, str(index + 1)))
    parts.append(text(WIDTH / 2, 298, "completions of one prompt"))
    write("advantage", "Advantages of one group under grpo", parts)


def gain(ratio: torch.Tensor, advantage: float) -> list[float]:
    """Return the clipped gain of a token at each ratio."""
    log_ratio = ratio.log()
    zeros = torch.zeros_like(ratio)
    tokens = Tokens(
        log_ratio, logp=log_ratio, old_logp=zeros, advantage=zeros + advantage, mask=zeros == 0
    )
    return [float(value) for value in clipped(tokens, clip_low=CLIP, clip_high=CLIP).value]


def place(ratio: float, left: float) -> float:
    """Return the x of a ratio in a panel."""
    return left + (ratio - 0.4) / 1.2 * 250


def clip_picture() -> None:
    """Draw the gain of a token by its ratio, for a good and a bad completion."""
    ratio = torch.linspace(0.4, 1.6, 121)
    parts = []
    for panel, (advantage, color, label) in enumerate(
        ((1.0, GREEN, "better than its group (advantage 1)"), (-1.0, RED, "worse (advantage -1)"))
    ):
        left, zero = 40 + panel * 320.0, 240.0 if panel == 0 else 60.0
        values = gain(ratio, advantage)
        parts += [
            line([(left, zero), (left + 250, zero)], GREY),
            line(
                [
                    (place(r, left), zero - v * 110)
                    for r, v in zip(ratio.tolist(), values, strict=True)
                ],
                color,
            ),
            text(left + 125, 20, label, color=color),
        ]
        for edge in (1 - CLIP, 1.0, 1 + CLIP):
            x = place(edge, left)
            parts.append(line([(x, 40), (x, 260)], GREY, dashed=True))
            parts.append(text(x, 278, f"{edge:g}"))
    parts.append(text(WIDTH / 2, 296, "ratio: new probability of the token / old probability"))
    write("clip", "The clipped gain of a token", parts)


def kl_picture() -> None:
    """Draw the estimators of KL for one token, by the log-ratio of reference and policy."""
    shift = torch.linspace(-1.5, 1.5, 121)
    parts = [
        line([(40, 170), (600, 170)], GREY),
        line([(320, 30), (320, 270)], GREY, dashed=True),
    ]
    labels: tuple[tuple[Kl, str], ...] = (("k1", RED), ("k2", BLUE), ("k3", GREEN))
    for row, (name, color) in enumerate(labels):
        d = -shift  # logp - ref_logp
        values = PENALTIES[name](d, torch.zeros_like(d), torch.ones_like(d)).tolist()
        points = [
            (320 + s / 1.5 * 280, 170 - v * 60) for s, v in zip(shift.tolist(), values, strict=True)
        ]
        parts += [line(points, color), text(60, 50 + 20 * row, name, color=color, anchor="start")]
    parts.append(text(320, 292, "log-prob of the reference minus log-prob of the policy"))
    write("kl", "Three estimators of KL divergence", parts)


if __name__ == "__main__":
    advantage_picture()
    clip_picture()
    kl_picture()
