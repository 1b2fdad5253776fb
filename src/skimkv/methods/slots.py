"""What the methods share that keep tokens in slots: budgets, the step, what it moves, and what the slots occupy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import Kernels, SoftmaxOptions, Token
from ..ops.blocks import attend_rows
from ..stores.base import Shape, compute_dtype
from ..stores.slots import Slots
from .base import Method, Traffic, check_whole


@dataclass(frozen=True, repr=False)
class SlotMethod(Method[Slots]):
    """A method whose tokens take slots by their positions: the store knows which token a new one replaces.

    k: how many slots there are, or how many of them are the method's own choice (see `slots`).
    """

    k: int

    @property
    def slots(self) -> int:
        """How many tokens the store keeps."""
        return self.k

    def step(self, store: Slots, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Attend to the kept tokens and to the current one, which then takes its slot."""
        return attend_and_append(store, q, token, **softmax)

    def fused(
        self, kernels: Kernels, store: Slots, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """The same step by a backend's kernel."""
        return kernels.ring_slots(store, q, needed(token), **softmax)

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """Count 2kD + 2D elements for k slots, of which min(k, n) are in use."""
        rows = self.row_format(shape.D).traffic(2 * min(self.slots, n) + 2, dtype)
        return Traffic.of(shape.B * shape.H, 2 * self.slots * shape.D + 2 * shape.D, *rows)

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of min(k, n) rows of K and V for k slots."""
        return self.row_format(shape.D).nbytes(shape.B * shape.H * 2 * min(self.slots, n), dtype)


def attend_and_append(store: Slots, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
    """Attend to the kept tokens and to the current one, which then takes its slot: q (B,H,G,D) -> (B,H,G,D)."""
    token = needed(token)
    y, _ = attend_slots(store, q.to(compute_dtype(store.dtype)), token, **softmax)
    store.append_token(*token)
    return y.to(q.dtype)


def attend_slots(store: Slots, q: Tensor, token: Token, **softmax: Unpack[SoftmaxOptions]) -> tuple[Tensor, Tensor]:
    """Attention over the slots in use and the current token, which comes last. Reads 2CD elements per KV head.

    q (B,H,G,D) in the type to compute in -> y (B,H,G,D) and the weights (B,H,G,C'+1). Nothing enters the store.
    """
    store.validate(token.k[:, :, None], token.v[:, :, None])
    store.reserve()
    rows = zip(store.read_rows(), token, strict=True)
    keys, values = (torch.cat([kept, store.as_stored(new).to(q.dtype)[:, :, None]], 2) for kept, new in rows)
    valid = store.valid()
    valid = torch.cat([valid, valid.new_ones(store.shape.B, 1, 1)], 2)
    return attend_rows(q, keys, values, valid, **softmax)


def needed(token: Token | None) -> Token:
    """The current token. Raises ValueError if there is none: it enters the slots after the attention, not before."""
    if token is None:
        raise ValueError("a step over slots needs the current token's k and v")
    return token


def check_budget(name: str, value: int | float) -> None:
    """Raise ValueError unless value is a whole number of tokens, at least 1, or a share of the prompt from 0 to 1."""
    if not isinstance(value, float):
        check_whole(name, value, 1)
    elif not 0 < value <= 1:
        raise ValueError(f"{name} = {value} must be a fraction from 0 to 1, or a whole number of tokens")


def budget_in_tokens(k: int | float, prompt: int) -> int:
    """The budget k in tokens: a whole number counts tokens, a fraction is a share of a prompt of so many tokens."""
    return max(1, math.ceil(round(k * prompt, 6))) if isinstance(k, float) else k  # 0.07 of 100: 7


def best(rank: Tensor, pos: Tensor, n: int) -> Tensor:
    """The indices of the n largest ranks, ascending; of equal ones the newer tokens. rank, pos (H,m) -> (H,n)."""
    newest_first = pos.argsort(dim=-1, descending=True, stable=True)
    order = rank.gather(-1, newest_first).argsort(dim=-1, descending=True, stable=True)
    return newest_first.gather(-1, order[:, :n]).sort(-1).values


def with_block(store: Slots, b: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Stored rows of K and V that row b keeps and those of a prompt block: k, v (H,n,D) -> (H,m+n,width) twice.

    For stores without scores.
    """
    kept_k, kept_v = store.stored(b)
    return torch.cat([kept_k, store.row_format.encode(k)], 1), torch.cat([kept_v, store.row_format.encode(v)], 1)
