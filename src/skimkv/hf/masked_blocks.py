"""Attention with a mask that hides most keys, such as a sliding window's over a prompt, by blocks of queries.

PyTorch multiplies every query with every key and then applies the mask. A block of queries sees few of the keys, and
the others need not be multiplied: over n tokens a window of w then costs n w products instead of n^2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

QUERIES = 256  # of a block


def attend_in_blocks(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> Tensor:
    """Call the library's function for PyTorch's attention for each block of queries and the keys that it sees.

    query (B,Hq,n,D) · key, value (B,H,m,D) -> (B,n,Hq,D). It is called once, as it would be otherwise, where a mask
    hides less than half, where there is none of (B or 1,Hq or 1,n,m), and with dropout or a bias of positions.
    """
    is_whole = not isinstance(mask, Tensor) or mask.shape[-2:] != (query.shape[2], key.shape[2])
    blocks = None if is_whole or kwargs.get("dropout") or kwargs.get("position_bias") is not None else blocks_of(mask)
    function: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if blocks is None:
        return function(module, query, key, value, mask, **kwargs)[0]  # type: ignore[no-any-return]
    parts = [
        function(module, query[:, :, q], key[:, :, k], value[:, :, k], mask[..., q, k], **kwargs)[0] for q, k in blocks
    ]
    return torch.cat(parts, 1)


def blocks_of(mask: Tensor) -> list[tuple[slice, slice]] | None:
    """The blocks of queries of a mask (...,n,m), and the keys that one of them sees; None if these are over half.

    A mask of True and False shows where it is True; one of numbers, which is added, hides by the smallest number of its
    type or by minus infinity. Where it hides all keys of a query, the result depends on how many these are: None. The
    answer is kept with the mask, which all layers of a kind have in common.
    """
    if mask.shape[-2] <= QUERIES:
        return None
    if not hasattr(mask, "blocks_of_queries"):
        mask.blocks_of_queries = _find_blocks(mask)  # type: ignore[attr-defined]
    blocks: list[tuple[slice, slice]] | None = mask.blocks_of_queries  # type: ignore[attr-defined]
    return blocks


def _find_blocks(mask: Tensor) -> list[tuple[slice, slice]] | None:
    n, m = mask.shape[-2:]
    blocks, area = [], 0
    for first in range(0, n, QUERIES):
        rows = mask[..., first : first + QUERIES, :]
        shown = rows if rows.dtype == torch.bool else rows > torch.finfo(rows.dtype).min
        if rows.dtype != torch.bool and not bool(shown.any(-1).all()):
            return None
        keys = shown.flatten(0, -2).any(0).nonzero().flatten().tolist()
        start, end = (keys[0], keys[-1] + 1) if keys else (0, 1)
        blocks.append((slice(first, min(first + QUERIES, n)), slice(start, end)))
        area += rows.shape[-2] * (end - start)
    return blocks if 2 * area <= n * m else None
