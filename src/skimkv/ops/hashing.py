"""A hash of whole numbers to 32 bits: random numbers that depend on nothing but what they are asked for.

So a replay, a padded batch and another batch size draw the same numbers, and every backend can compute them.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B1


def mix(h: Tensor) -> Tensor:
    """The finaliser of a 32-bit hash (MurmurHash3's), in int64: products wrap, and the low word is right."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B & WORD
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & WORD
    return h ^ (h >> 16)


def hash_words(*parts: Tensor | int) -> Tensor:
    """Hash numbers one after another: h = mix(first), then h = mix(h * GOLDEN + part) for each part after it.

    parts: integers, or int64 tensors that broadcast -> int64 tensor of words from 0 to 2^32 - 1.
    """
    device = next((part.device for part in parts if isinstance(part, Tensor)), "cpu")
    first, *rest = (part if isinstance(part, Tensor) else torch.tensor(part, device=device) for part in parts)
    h = mix(first & WORD)
    for part in rest:
        h = mix((h * GOLDEN + part) & WORD)
    return h
