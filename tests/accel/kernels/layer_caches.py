"""Random caches of one layer, with the completions in shuffled pages, and their dense contents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from covey.engines.native.shared_prompt_cache import slots_by_prompt

if TYPE_CHECKING:
    from covey.accel.kernels.decode_attention import LayerCache

KEY_HEADS, CAPACITY, PROMPT_CAPACITY = 2, 100, 80
PLACE = [0, 7, 64, 99]
PROMPT_ROW = [0, 1, 1, 0]
PROMPT_LENGTH = [80, 70, 70, 80]
ACTIVE = [True, False, True, True]


def random_layer(size: int, page: int, device: torch.device, together: int = 2) -> LayerCache:
    """Return a cache of four slots, the same for every page size but for where positions are."""
    from covey.accel.kernels.decode_attention import LayerCache

    torch.manual_seed(0)
    both = torch.randn(2, 4, KEY_HEADS, CAPACITY, size)
    prompts = torch.randn(2, 2, KEY_HEADS, PROMPT_CAPACITY, size)
    per_slot = -(-CAPACITY // page)
    pages = torch.randperm(4 * per_slot + 3)[: 4 * per_slot].view(4, per_slot)
    pool = torch.full((2, 4 * per_slot + 3, KEY_HEADS, page, size), torch.nan)
    at = torch.arange(CAPACITY)
    pool[:, pages[:, at // page], :, at % page] = both.permute(1, 3, 0, 2, 4)
    sharing = torch.from_numpy(slots_by_prompt(np.array(PROMPT_ROW), together))
    found = LayerCache(
        prompts[0], prompts[1], torch.tensor(PROMPT_ROW), torch.tensor(PROMPT_LENGTH),
        pool[0], pool[1], pages.int(), torch.tensor(PLACE), torch.tensor(ACTIVE),
        sharing, torch.zeros(4, KEY_HEADS, dtype=torch.int32), torch.ones(2, KEY_HEADS),
    )  # fmt: skip
    return LayerCache(*(tensor.to(device) for tensor in found))


def completion(cache: LayerCache, tensor: torch.Tensor, slot: int) -> torch.Tensor:
    """Return keys or values [K, C, D] of a slot's completion, in the order of positions."""
    return tensor[cache.pages[slot].long()].transpose(0, 1).flatten(1, 2)[:, :CAPACITY]
