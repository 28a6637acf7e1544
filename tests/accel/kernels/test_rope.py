from __future__ import annotations

import pytest
import torch

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.to(found.device)
    return float((found.double() - expected).norm() / expected.norm())


def turned(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cosine[:, None], sine[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# Prompt of two tokens shared by two rows (home first), then a row alone: 0 1 | 2 3 | 4 | 5 6
ROWS = [[0, 1, 2, 3], [0, 1, 4], [5, 6]]


def table(device: torch.device):
    from covey.accel.attention_kernels import KeyIndex

    make = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    return KeyIndex(
        tokens=make([token for row in ROWS for token in row]),
        starts=make([0, 4, 7]),
        begin=make([0, 0, 0, 0, 1, 2, 2]),
        end=make([2, 2, 1, 1, 2, 3, 3]),
        position=make([0, 1, 2, 3, 2, 0, 1]),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("shape", [(3, 1, 8), (6, 3, 12)])
def test_rope_gathering_and_gradients_match_float64(
    device: torch.device, dtype: torch.dtype, joint: bool, shares: bool, shape: tuple[int, int, int]
) -> None:
    from covey.accel.kernels.rope import apply_rope

    torch.manual_seed(0)
    heads, key_heads, size = shape
    widths = [heads * size, key_heads * size, key_heads * size]
    product = torch.randn(7, sum(widths), device=device).to(dtype)
    angle = torch.rand(7, size // 2) * 6
    rope = (angle.cos().to(device), angle.sin().to(device))
    given = [product.requires_grad_()] if joint else [
        part.clone().requires_grad_() for part in product.split(widths, dim=1)
    ]  # fmt: skip
    found = apply_rope(*given, rope=rope, shared=table(device) if shares else None, shape=shape)

    exact = product.detach().double().cpu().requires_grad_()
    query, key, value = (part.view(7, -1, size) for part in exact.split(widths, dim=1))
    cosine, sine = angle.double().cos(), angle.double().sin()
    places = torch.tensor([t for row in ROWS for t in row]) if shares else torch.arange(7)
    expected = (
        turned(query, cosine, sine), turned(key, cosine, sine)[places], value[places],
    )  # fmt: skip
    pulls = [torch.randn(e.shape, dtype=torch.float64) for e in expected]
    # Gradients are given as they are in training, of the type that products take.
    torch.autograd.backward(found, [p.to(device, dtype) for p in pulls])
    torch.autograd.backward(expected, [p.to(dtype).double() for p in pulls])
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert apart(one.detach(), other.detach()) < TOLERANCE[dtype]
    grad = torch.cat([g.grad for g in given], dim=1)
    assert apart(grad, exact.grad) < TOLERANCE[dtype]
