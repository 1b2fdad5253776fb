"""Slots: a fixed budget of tokens, for the methods that drop what does not fit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .base import Shape, Store, compute_dtype
from .memory import empty


class Slots(Store):
    """A budget of C tokens per KV head; a new token overwrites a victim's slot, nothing else moves.

    k, v (B,H,C,D), or codes. Slots 0 .. filled[b]-1 are in use, of budget[b] <= C. Token p goes to slot order(p);
    without an order the slots are a ring that never overwrites the `fixed` first.
    With `scored`: score (B,H,C) float32 accumulated weights, pos (B,H,C) int32 original positions.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | str,
        capacity: int,
        fixed: int = 0,
        scored: bool = False,
        order: Callable[[int], int] | None = None,
        kv: str | None = None,
    ) -> None:
        super().__init__(shape, dtype, device, kv)
        self.capacity, self.fixed, self.order = capacity, fixed, order
        self.filled, self.budget = [0] * shape.B, [capacity] * shape.B
        width, held = self.form.width, self.form.dtype(dtype)
        self.k = self.v = torch.empty(shape.B, shape.H, 0, width, dtype=held, device=self.device)
        self.score = torch.empty(shape.B, shape.H, 0, device=self.device) if scored else None
        self.pos = torch.empty(shape.B, shape.H, 0, dtype=torch.int32, device=self.device) if scored else None

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` slots, once before the first token or when a prompt raises the budget."""
        B, H, _, _ = self.shape
        old, self.capacity = self.k.shape[2], capacity
        if capacity <= old:
            return
        held = (self.k, self.v, self.score, self.pos)
        try:
            self.k, self.v = (empty((B, H, capacity, self.form.width), self.k.dtype, self.device) for _ in "kv")
        except RuntimeError as error:
            raise ValueError(f"a budget of {capacity} tokens does not fit in memory") from error
        if held[2] is not None:
            self.score = torch.zeros(B, H, capacity, device=self.device)
            self.pos = torch.full((B, H, capacity), -1, dtype=torch.int32, device=self.device)
        for new, was in zip((self.k, self.v, self.score, self.pos), held, strict=True):
            if new is not None and was is not None:
                new[:, :, :old] = was

    def ring_slot(self, p: int) -> int:
        """The slot of token p."""
        if self.order is not None:
            return self.order(p)
        C, fixed = self.capacity, self.fixed
        return p if p < C else fixed + (p - fixed) % (C - fixed)

    def _append(self, rows: slice, start: int, k: Tensor, v: Tensor) -> None:
        """A token goes to its slot; those that a later one would overwrite are skipped."""
        self.reserve(self.capacity)
        end, ring = start + k.shape[2], self.capacity - self.fixed
        stay = [*range(start, min(self.fixed, end)), *range(max(start, self.fixed, end - ring), end)]
        last = {self.ring_slot(p): p - start for p in (stay if self.order is None else range(start, end))}
        slots, source = list(last), list(last.values())
        self.k[rows, :, slots], self.v[rows, :, slots] = (self.form.encode(x[:, :, source]) for x in (k, v))
        self.count_rows(2 * k.shape[0] * k.shape[1] * len(source))
        for b in range(rows.start, rows.stop):
            self.filled[b] = min(end, self.capacity)

    def keep(self, b: int, index: Tensor, *candidates: Tensor) -> None:
        """Row b holds exactly the candidates (H,m,...) chosen by index (H,c), in order: encoded k, v[, score, pos]."""
        held = [t for t in (self.k, self.v, self.score, self.pos) if t is not None]
        c = index.shape[1]
        for tensor, pool in zip(held, candidates, strict=True):
            at = index.reshape(*index.shape, *[1] * (pool.ndim - 2)).expand(-1, -1, *pool.shape[2:])
            tensor[b, :, :c] = pool.gather(1, at)
        self.filled[b] = c

    def write(self, slot: Tensor, lost: Tensor | None, *current: Tensor) -> None:
        """The current token (encoded k, v (B,H,D); score, pos (B,H)) into slot (B,H); where `lost`, nothing changes."""
        for held, new in zip((self.k, self.v, self.score, self.pos), current, strict=True):
            assert held is not None
            column = (*slot.shape, *[1] * (new.ndim - 1))
            x = new[:, :, None]
            at = slot.reshape(column).expand_as(x)
            held.scatter_(2, at, x if lost is None else torch.where(lost.reshape(column), held.gather(2, at), x))
            if new.ndim == 2:
                self.count(x.numel(), x.element_size())
        self.count_rows(2 * slot.numel())

    def mask(self) -> Tensor:
        filled = torch.tensor(self.filled, device=self.device)
        return torch.arange(max(self.filled), device=self.device) < filled[:, None, None]

    def rows(self) -> tuple[Tensor, Tensor]:
        """All slots in use, read and counted: k, v (B,H,C',D), unused ones zero."""
        c, to = max(self.filled), compute_dtype(self.dtype)
        unused = ~self.mask()[..., None]
        self.count_rows(2 * sum(self.filled) * self.shape.H)
        k, v = (self.form.decode(t[:, :, :c], to).masked_fill(unused, 0) for t in (self.k, self.v))
        return k, v

    def history(self, rows: slice) -> tuple[Tensor, Tensor]:
        c = self.filled[rows.start]
        k, v = (self.form.decode(t[rows, :, :c], self.dtype) for t in (self.k, self.v))
        return k, v

    @property
    def nbytes(self) -> int:
        return sum(self.filled) * self.shape.H * (self.form.nbytes(2, self.dtype) + (0 if self.score is None else 8))

    def select(self, index: Tensor) -> None:
        super().select(index)
        order = index.tolist()
        self.filled, self.budget = [self.filled[i] for i in order], [self.budget[i] for i in order]
