"""What the methods share that keep tokens in slots: budgets, the step, what it moves, and what the slots occupy."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Self, Unpack

from ..ops import KernelStep, SoftmaxOptions, Token, kernel_step
from ..ops.blocks import attend_rows
from ..stores.base import Shape, compute_dtype
from ..stores.slots import Slots
from .base import Method, Traffic, check_whole


@dataclass(frozen=True, repr=False)
class SlotMethod(Method[Slots]):
    """A method whose tokens take slots by their positions: the store knows which token a new one replaces.

    k: how many slots there are, or how many of them are the method's own choice (see `slots`). A whole number counts
    tokens. A float is a share of the prompt's tokens, which is decided when the prompt ends, and stays; such settings
    have no kernel on a GPU, whose rows all have one budget.
    """

    k: int | float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget("k", self.k)

    @property
    def least(self) -> int:
        """The least number of tokens with which the method works."""
        return 1

    def budget(self, prompt: int) -> int:
        """Give k in tokens, for a prompt of this length."""
        return max(self.least, budget_in_tokens(self.k, prompt))

    @property
    def budget_of(self) -> Callable[[int], int] | None:
        """How a store finds the budget of a row where k is a share of the prompt; None where k counts tokens."""
        return self.budget if isinstance(self.k, float) else None

    def as_in(self, store: Slots, row: int = 0) -> Self:
        """The method with k in tokens, as a row of a store has decided it: its `traffic` holds after the prompt too.

        It is this method itself where k counts tokens, and where the store grows: then `Store.observed` tells more.
        """
        return self.in_tokens(store.budget[row]) if isinstance(self.k, float) and not store.grows else self

    def in_tokens(self, budget: int) -> Self:
        """The method that decodes as this one does with a budget of so many tokens, where k is a share."""
        return replace(self, k=budget)

    def slots(self, prompt: int) -> int:
        """How many tokens the store keeps of a prompt of this length."""
        return self.budget(prompt)

    def step(self, store: Slots, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Attend to the kept tokens and to the current one, which then takes its slot."""
        token = needed(token)
        y, _ = attend_slots(store, q.to(compute_dtype(store.dtype)), token, **softmax)
        store.append_token(*token)
        return y.to(q.dtype)

    def kernel(self, store: Slots) -> KernelStep | None:
        """The kernel of the same step."""
        return kernel_step("ring_slots")

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """Count 2kD + 2D elements for k slots, of which min(k, n) are in use.

        Where k is a share, n is also taken as the length of the prompt; so it is in `bound`. After more tokens, ask the
        method that `as_in` gives.
        """
        slots = self.slots(n)
        rows = self.row_format(shape.D).traffic(2 * min(slots, n) + 2, dtype)
        return Traffic.of(shape.B * shape.H, 2 * slots * shape.D + 2 * shape.D, *rows)

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of min(k, n) rows of K and V for k slots."""
        return self.row_format(shape.D).nbytes(shape.B * shape.H * 2 * min(self.slots(n), n), dtype)


class ChoosingMethod(SlotMethod):
    """A method that chooses which tokens of a prompt stay, for each row of the batch by itself."""

    def take(
        self,
        store: Slots,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        pad: Sequence[int] | None = None,
        **softmax: Unpack[SoftmaxOptions],
    ) -> None:
        """Choose among the tokens that the store has and those of the block, and keep no others."""
        self.keep_chosen(store, q, k, v, pad, None, **softmax)

    def keep_chosen(
        self,
        store: Slots,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pad: Sequence[int] | None,
        scores: Sequence[Tensor] | None,
        **softmax: Unpack[SoftmaxOptions],
    ) -> None:
        """Take a block, of which the attention may have computed the key scores (H,m) of every row: see `take`."""
        n, pads = k.shape[2], store.validate(k, v, pad)
        seen = [length + n - p for length, p in zip(store.lengths, pads, strict=True)]
        self.make_room(store, [c + n - p for c, p in zip(store.filled, pads, strict=True)], seen)
        for b, p in enumerate(pads):
            if p == n:
                continue
            kept_k, kept_v = store.stored(b)[:2]
            keys, values = store.row_format.encode(k[b, :, p:]), store.row_format.encode(v[b, :, p:])
            if store.filled[b]:
                keys, values = torch.cat([kept_k, keys], 1), torch.cat([kept_v, values], 1)
            decoded = store.row_format.decode(keys, k.dtype)
            known = None if scores is None else scores[b]
            index, more = self.choose(store, b, q[b, :, :, p:], decoded, seen[b], known, **softmax)
            store.replace(b, index, (keys, values, *more), seen[b])

    def make_room(self, store: Slots, candidates: Sequence[int], seen: Sequence[int]) -> None:
        """Set the budgets of a batch's rows: candidates to choose from, and tokens seen, of each row."""
        store.set_budget([self.budget(length) for length in seen])

    @abc.abstractmethod
    def choose(
        self,
        store: Slots,
        b: int,
        q: Tensor,
        keys: Tensor,
        seen: int,
        scores: Tensor | None,
        **softmax: Unpack[SoftmaxOptions],
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Which tokens of row b stay: their indices (H,c), and what the store keeps of all candidates besides K and V.

        q (H,G,n,D): the block's queries · keys (H,m+n,D): those of the m tokens that the store has, then the block's.
        scores (H,m+n): the key scores of all these queries, where the attention has computed them.
        """


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


def check_at_most(name: str, value: int, low: int, k: int | float, less: int = 0) -> None:
    """Raise ValueError unless value is a whole number from low to k - less; a share k has room for any."""
    if isinstance(k, float):
        check_whole(name, value, low)
    else:
        check_whole(name, value, low, k - less)


def budget_in_tokens(k: int | float, prompt: int) -> int:
    """The budget k in tokens: a whole number counts tokens, a fraction is a share of the prompt's tokens."""
    return max(1, math.ceil(round(k * prompt, 6))) if isinstance(k, float) else k  # 0.07 of 100: 7


def best(rank: Tensor, pos: Tensor, n: int) -> Tensor:
    """The indices of the n largest ranks, ascending; of equal ones the newer tokens. rank, pos (H,m) -> (H,n)."""
    newest_first = pos.argsort(dim=-1, descending=True, stable=True)
    order = rank.gather(-1, newest_first).argsort(dim=-1, descending=True, stable=True)
    return newest_first.gather(-1, order[:, :n]).sort(-1).values
