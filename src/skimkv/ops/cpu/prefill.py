"""Blocks of new tokens that the CPU's library appends to a store: rows, index and mean in one pass over them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from ...stores.base import Store
from ...stores.full import Full
from . import library
from .views import view_of


def takes_blocks(store: Store) -> bool:
    """Whether the library appends blocks to this store: one of all tokens, of a type and a head size that it has."""
    if type(store) is not Full or store.pages is not None:
        return False
    return store.dtype in library.DTYPES and store.shape.D <= library.MAX_HEAD_SIZE


def append_block(store: Full, k: Tensor, v: Tensor, pad: Sequence[int] | None = None) -> None:
    """Append a block of n tokens as `Store.append` does, without counting traffic: k, v (B,H,n,D).

    Raises ValueError if shapes, types or padding do not fit.
    """
    pads = store.validate(k, v, pad)
    B, n = store.shape.B, k.shape[2]
    new = [n - p for p in pads]
    longest = max(length + count for length, count in zip(store.lengths, new, strict=True))
    view = view_of(store, store.lengths, longest - max(store.lengths))
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    tokens, skip = library.CTokens(), (ctypes.c_int64 * B)(*pads)
    tokens.cache, tokens.skip, tokens.n = view.tokens.cache, ctypes.addressof(skip), n
    tokens.k, tokens.v = k.data_ptr(), v.data_ptr()
    tokens.k_b, tokens.k_h, tokens.k_n, _ = k.stride()
    tokens.v_b, tokens.v_h, tokens.v_n, _ = v.stride()
    library.append(tokens)
    store.advance_by(new)
