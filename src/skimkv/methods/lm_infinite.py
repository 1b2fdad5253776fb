"""LM-Infinite (Han et al. 2023) as in SparQ appendix G; with initial=0 the "Local" baseline of H2O section 5."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import Kernels, Token
from ..ops.blocks import attend_rows
from ..stores.base import Shape, compute_dtype
from ..stores.slots import Slots
from .base import Method, Traffic, check_whole


@dataclass(frozen=True, repr=False)
class LMInfinite(Method[Slots]):
    """The first `initial` tokens and the most recent k - initial, at their original positions.

    Reads 2kD + 2D elements.
    """

    k: int
    initial: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("k", self.k, 1)
        check_whole("initial", self.initial, 0, self.k - 1)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Slots:
        """An empty store of k slots, of which the first `initial` are never overwritten."""
        return Slots(shape, dtype, device, self.k, fixed=self.initial, kv=self.kv)

    def step(self, store: Slots, q: Tensor, token: Token | None, *, scale: float, softcap: float | None) -> Tensor:
        """Attend to the kept tokens and the current one, which then takes the slot of the oldest that may go."""
        return attend_then_append(store, q, token, scale, softcap)

    def fused(
        self, kernels: Kernels, store: Slots, q: Tensor, token: Token | None, *, scale: float, softcap: float | None
    ) -> Tensor:
        """The same step by a backend's kernel."""
        return kernels.ring_slots(store, q, needed(token), scale=scale, softcap=softcap)

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """Count 2kD + 2D elements."""
        return slots_traffic(self.k, n, self, shape, dtype)

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of at most k rows of K and V."""
        return slots_bound(self.k, n, self, shape, dtype)


def attend_slots(store: Slots, q: Tensor, token: Token, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Attention over the slots in use and the current token, which comes last. Reads 2CD elements per KV head.

    q (B,H,G,D) in the type to compute in -> y (B,H,G,D) and the weights (B,H,G,C'+1). Nothing enters the store.
    """
    store.validate(token.k[:, :, None], token.v[:, :, None])
    store.reserve()
    rows = zip(store.read_rows(), token, strict=True)
    keys, values = (torch.cat([kept, store.as_stored(new).to(q.dtype)[:, :, None]], 2) for kept, new in rows)
    valid = store.valid()
    valid = torch.cat([valid, valid.new_ones(store.shape.B, 1, 1)], 2)
    return attend_rows(q, keys, values, valid, scale, softcap)


def attend_then_append(store: Slots, q: Tensor, token: Token | None, scale: float, softcap: float | None) -> Tensor:
    """One step of a method whose tokens take slots by their positions: attention, then the token takes its slot."""
    token = needed(token)
    y, _ = attend_slots(store, q.to(compute_dtype(store.dtype)), token, scale, softcap)
    store.append_token(*token)
    return y.to(q.dtype)


def needed(token: Token | None) -> Token:
    """The current token. Raises ValueError if there is none: it enters the slots after the attention, not before."""
    if token is None:
        raise ValueError("a step over slots needs the current token's k and v")
    return token


def slots_traffic(budget: int, n: int, method: Method[Slots], shape: Shape, dtype: torch.dtype) -> Traffic:
    """Count 2kD + 2D elements for a budget of k tokens, of which min(k, n) exist."""
    rows = method.row_format(shape.D).traffic(2 * min(budget, n) + 2, dtype)
    return Traffic.of(shape.B * shape.H, 2 * budget * shape.D + 2 * shape.D, *rows)


def slots_bound(budget: int, n: int, method: Method[Slots], shape: Shape, dtype: torch.dtype) -> int:
    """The bytes of min(k, n) rows of K and V for a budget of k tokens."""
    return method.row_format(shape.D).nbytes(shape.B * shape.H * 2 * min(budget, n), dtype)
