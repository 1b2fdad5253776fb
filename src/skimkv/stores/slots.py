"""Slots: the store with a fixed budget of tokens, for the methods that drop what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import Shape, Store, compute_dtype
from .memory import empty, ordinary_tensors
from .pages import PageBounds
from .rotation import KeyRotation
from .text_positions import TextPositions

ROOM = 128  # least number of slots that a store which grows allocates ahead


class Slots(Store):
    """A budget of C tokens per KV head; a new token overwrites the slot of a dropped one, and nothing else moves.

    k, v (B,H,C,width of a stored row). Slots 0 .. filled[b]-1 of row b are in use, of budget[b] <= C. Token p goes to
    slot order(budget[b], p); without an order the slots are a ring that never overwrites the `fixed` first ones.
    budget_of: gives a row's budget from the length of its prompt, its first tokens; by default it is the capacity.
    With `moves_fixed`, the keys of the fixed tokens are turned to other positions before a step (`move_fixed`): by
    `rotation`, which belongs to the model and is put here by whoever knows it; fixed_k (B,H,fixed,width) keeps these
    keys as they came, and `places` says at which positions the model put the tokens.
    With `scored`: score (B,H,C) float32, accumulated weights, and pos (B,H,C) int32, original positions; then the
    method says which slot a token takes (`put`).
    grows: the store has no budget. A method may drop tokens of a prompt (`replace`), and every token after it takes a
    new slot; where the slots end, they are copied into more memory, by a quarter more.
    page: a store that grows keeps the bounds of the keys of every `page` slots in a row (see PageBounds).
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | str,
        capacity: int,
        fixed: int = 0,
        scored: bool = False,
        order: Callable[[int, int], int] | None = None,
        kv: str | None = None,
        moves_fixed: bool = False,
        grows: bool = False,
        budget_of: Callable[[int], int] | None = None,
        page: int | None = None,
    ) -> None:
        super().__init__(shape, dtype, device, kv)
        self.budget_of = budget_of
        self.capacity, self.fixed, self.order, self.grows = capacity, fixed, order, grows
        assert grows or page is None
        self.pages = None if page is None else PageBounds(page, shape, dtype, self.device)
        self.rotation: KeyRotation | None = None
        self.filled, self.budget = [0] * shape.B, [capacity] * shape.B
        width, stored = self.row_format.width, self.row_format.storage_dtype(dtype)
        self.k = self.v = torch.empty(shape.B, shape.H, 0, width, dtype=stored, device=self.device)
        self.fixed_k = self.k if moves_fixed and fixed else None
        self.places = TextPositions(shape.B)
        self.score = torch.empty(shape.B, shape.H, 0, dtype=torch.float32, device=self.device) if scored else None
        self.pos = torch.empty(shape.B, shape.H, 0, dtype=torch.int32, device=self.device) if scored else None

    def set_budget(self, budget: Sequence[int]) -> None:
        """Set the budget of every row, and make room for the largest. Raises ValueError if memory does not suffice."""
        self.budget = list(budget)
        self.capacity = max(self.capacity, *budget)
        self.reserve()

    def reserve(self, n: int = 1) -> None:
        """Allocate the slots: once before the first token, and again when a prompt raises the budget.

        A store that grows makes room for n more tokens in every row. Raises ValueError if memory does not suffice.
        """
        B, H, _, _ = self.shape
        needed = max(self.filled) + n
        if self.grows and needed > self.capacity:
            self.capacity = needed + max(ROOM, needed // 4)
            self.budget = [self.capacity] * B
        old, capacity = self.k.shape[2], self.capacity
        if capacity <= old:
            return
        before = (self.k, self.v, self.score, self.pos, self.fixed_k)
        try:
            self.k, self.v = (empty((B, H, capacity, self.row_format.width), self.k.dtype, self.device) for _ in "kv")
        except RuntimeError as error:
            raise ValueError(f"a budget of {capacity} tokens does not fit in memory") from error
        if self.fixed_k is not None:
            self.fixed_k = empty((B, H, self.fixed, self.row_format.width), self.k.dtype, self.device)
        if self.score is not None:
            with ordinary_tensors():
                self.score = torch.zeros(B, H, capacity, dtype=torch.float32, device=self.device)
                self.pos = torch.full((B, H, capacity), -1, dtype=torch.int32, device=self.device)
        for new, was in zip((self.k, self.v, self.score, self.pos, self.fixed_k), before, strict=True):
            if new is not None and was is not None:
                new[:, :, : was.shape[2]] = was

    def next_slots(self) -> list[int]:
        """The slot that the next token of every row takes in a store without scores."""
        if self.grows:
            return self.filled
        fixed = self.fixed
        if len(self.lengths) == 1 and self.order is None:  # no loop: its code would come from memory at every step
            (p,), (budget,) = self.lengths, self.budget
            return [p if p < budget else fixed + (p - fixed) % (budget - fixed)]
        rows = zip(self.lengths, self.budget, strict=True)
        if self.order is not None:
            return [self.order(budget, p) for p, budget in rows]
        return [p if p < budget else fixed + (p - fixed) % (budget - fixed) for p, budget in rows]

    def free_slots(self) -> list[int]:
        """The next free slot of every row; -1 where the budget is used up, and a slot is chosen by the scores."""
        return [c if c < budget else -1 for c, budget in zip(self.filled, self.budget, strict=True)]

    def slot_of(self, p: int, budget: int) -> int:
        """The slot that token p takes in a row of that budget, in a store whose slots are a ring or have an order."""
        if self.order is not None:
            return self.order(budget, p)
        return p if p < budget else self.fixed + (p - self.fixed) % (budget - self.fixed)

    def use_memory(self, k: Tensor, v: Tensor, score: Tensor | None, pos: Tensor | None) -> None:
        """Put the slots of an empty store into memory that the caller owns, and that has room for the whole capacity.

        k, v (B,H,capacity,width of a stored row) · score, pos (B,H,capacity) for a store with scores: they are set to
        those of slots that are not in use. Raises ValueError if the store has tokens, grows, or moves its fixed tokens.
        """
        if any(self.lengths) or self.grows or self.fixed_k is not None:
            raise ValueError("only an empty store of a fixed number of slots that stay where they are can use memory")
        self.k, self.v, self.score, self.pos = k, v, score, pos
        if score is not None and pos is not None:
            score.zero_()
            pos.fill_(-1)

    def _append(self, rows: slice, start: int, k: Tensor, v: Tensor) -> None:
        """Put each token into its slot; tokens that a later one of the block would overwrite are skipped."""
        if self.grows:
            self._extend(rows, k, v)
            return
        if self.budget_of is not None and start == 0:
            budgets = [self.budget_of(k.shape[2])] * (rows.stop - rows.start)
            self.budget = self.budget[: rows.start] + budgets + self.budget[rows.stop :]
            self.capacity = max(self.capacity, *self.budget)
        if len(set(self.budget[rows])) > 1:
            for i, b in enumerate(range(rows.start, rows.stop)):
                self._append(slice(b, b + 1), start, k[i : i + 1], v[i : i + 1])
            return
        self.reserve()
        budget = self.budget[rows.start]
        end, ring = start + k.shape[2], budget - self.fixed
        stay = [*range(start, min(self.fixed, end)), *range(max(start, self.fixed, end - ring), end)]
        last = {self.slot_of(p, budget): p - start for p in (stay if self.order is None else range(start, end))}
        slots, source = list(last), list(last.values())
        self.k[rows, :, slots], self.v[rows, :, slots] = (self.row_format.encode(x[:, :, source]) for x in (k, v))
        self.count_rows(2 * k.shape[0] * k.shape[1] * len(source))
        self._keep_fixed(rows, range(start, min(end, self.fixed)))
        for b in range(rows.start, rows.stop):
            self.filled[b] = min(end, budget)

    def _extend(self, rows: slice, k: Tensor, v: Tensor) -> None:
        """Put each token into a new slot."""
        n = k.shape[2]
        self.reserve(n)
        for i, b in enumerate(range(rows.start, rows.stop)):
            at = slice(self.filled[b], self.filled[b] + n)
            self.k[b, :, at], self.v[b, :, at] = (self.row_format.encode(x[i]) for x in (k, v))
            if self.pages is not None:
                numbers = self.pages.append(slice(b, b + 1), at.start, self._keys(b, at))
                self.count(numbers, self.dtype.itemsize)
            self.filled[b] += n
        self.count_rows(2 * k.shape[0] * k.shape[1] * n)

    def _keys(self, b: int, slots: slice) -> Tensor:
        """The keys in these slots of row b as a step reads them, in the type of the cache: (1,H,m,D)."""
        return self.row_format.decode(self.k[b : b + 1, :, slots], self.dtype)

    def _keep_fixed(self, rows: slice, slots: range) -> None:
        """Keep the keys that were just put into these of the fixed slots as they are."""
        if self.fixed_k is not None and slots:
            self.fixed_k[rows, :, slots.start : slots.stop] = self.k[rows, :, slots.start : slots.stop]
            self.count_rows((rows.stop - rows.start) * self.shape.H * len(slots))

    def moves(self) -> dict[int, int]:
        """Return by how many positions the fixed keys of each row that has dropped tokens are to be turned on.

        In a row of budget C that has seen n tokens, n - C were dropped between the fixed ones and those of the ring:
        these positions are free. Raises ValueError if there are such rows, and no rotation was put here.
        """
        if self.fixed_k is None:
            return {}
        dropped = {b: n - c for b, (n, c) in enumerate(zip(self.lengths, self.budget, strict=True)) if n > c}
        if dropped and self.rotation is None:
            raise ValueError("positions in the cache need the model's rotation: use skimkv.Cache or skimkv.attach")
        return {b: self.places.distance(b, self.fixed, n) for b, n in dropped.items()}

    def moves_as(self, other: Slots) -> bool:
        """Whether `moves` returns what it returns of another store of as many rows, without computing it."""
        same = self.fixed == other.fixed and self.lengths == other.lengths and self.budget == other.budget
        return same and (self.fixed_k is None) == (other.fixed_k is None) and self.places == other.places

    def move_fixed(self) -> None:
        """Turn the keys of the fixed tokens to the positions just before those of the ring, in the fixed slots.

        The keys as they came are turned, on every axis alike. Reads and writes `fixed` rows of K in each KV head of a
        row that has dropped tokens. Raises ValueError as `moves`.
        """
        moves = self.moves()
        if not moves:
            return
        assert self.fixed_k is not None and self.rotation is not None
        at: Any = slice(None) if len(moves) == self.shape.B else [*moves]
        keys = self.row_format.decode(self.fixed_k[at], compute_dtype(self.dtype))
        self.k[at, :, : self.fixed] = self.row_format.encode(self.rotation(keys, [*moves.values()]).to(self.dtype))
        self.count_rows(2 * len(moves) * self.shape.H * self.fixed)

    def advance(self) -> None:
        """Note that a kernel has written one token into every row."""
        if self.fixed_k is not None and min(self.lengths) < self.fixed:
            for b, n in enumerate(self.lengths):
                self._keep_fixed(slice(b, b + 1), range(n, min(n + 1, self.fixed)))
        if self.filled != self.budget:
            self.filled = [min(c + 1, budget) for c, budget in zip(self.filled, self.budget, strict=True)]
        lengths = self.lengths  # as in `Store.advance`, whose call takes microseconds in a store like this
        self.lengths = [lengths[0] + 1] if len(lengths) == 1 else [n + 1 for n in lengths]

    def mark(self) -> Any:
        """The store's numbers as they are now, for `rewind`."""
        return list(self.lengths), list(self.filled)

    def rewind(self, mark: Any) -> None:
        """Take the store's numbers back to a mark."""
        lengths, filled = mark
        self.lengths, self.filled = list(lengths), list(filled)
        if self.pages is not None:
            for b, n in enumerate(self.filled):
                self.pages.reopen(slice(b, b + 1), n, self._keys(b, slice(n // self.pages.page * self.pages.page, n)))

    @property
    def traffic_depends_on_data(self) -> bool:
        """Whether a step's traffic depends on how many tokens were dropped with the prompt; see `observed`."""
        return self.grows

    def observed(self, row: int | None = None) -> dict[str, int]:
        """How many tokens a store that grows has dropped, of one row of the batch or of all; else nothing."""
        if not self.grows:
            return {}
        dropped = [n - c for n, c in zip(self.lengths, self.filled, strict=True)]
        return {"dropped": sum(dropped) if row is None else dropped[row]}

    def stored(self, b: int, slots: Sequence[int] | None = None) -> list[Tensor]:
        """What these slots of row b hold, all in use by default, not counted: stored rows of K and V (H,m,width), and
        score and pos (H,m) where there are scores."""
        at: Any = slice(0, self.filled[b]) if slots is None else list(slots)
        return [t[b, :, at] for t in (self.k, self.v, self.score, self.pos) if t is not None]

    def replace(self, b: int, index: Tensor, candidates: Sequence[Tensor], seen: int) -> None:
        """Let row b hold exactly the chosen candidates, in order, after it has seen `seen` tokens.

        index (H,c) · candidates as `stored` gives them: stored rows of K and V (H,m,width)[, score, pos (H,m)].
        """
        c, heads = index.shape[1], torch.arange(index.shape[0], device=index.device)[:, None]
        for tensor, pool in zip(
            (t for t in (self.k, self.v, self.score, self.pos) if t is not None), candidates, strict=True
        ):
            tensor[b, :, :c] = pool[heads, index]
        if self.pages is not None:
            self.pages.append(slice(b, b + 1), 0, self._keys(b, slice(0, c)))
        self.filled[b], self.lengths[b] = c, seen

    def add_scores(self, weights: Tensor) -> None:
        """Add weights (B,H,m) to the scores of the slots in use; each score is read and written."""
        assert self.score is not None
        self.score[:, :, : weights.shape[-1]] += weights
        self.count(2 * sum(self.filled) * self.shape.H, 4)

    def read_positions(self, b: int) -> Tensor:
        """Read the original positions of the tokens in all slots of row b: (H,C) int32, -1 in a slot not in use."""
        assert self.pos is not None
        self.count(self.budget[b] * self.shape.H, 4)
        return self.pos[b]

    def put(self, slot: Tensor, keep: Tensor | None, k: Tensor, v: Tensor, weight: Tensor | None = None) -> None:
        """Put the current token, k and v (B,H,D), into slot (B,H), with its weight (B,H) as score where there are any.

        Where `keep` (B,H) bool is true, the slot keeps what it holds and the current token is dropped.
        """
        targets = [(self.k, self.row_format.encode(k)), (self.v, self.row_format.encode(v))]
        if self.score is not None:
            assert weight is not None and self.pos is not None
            position = torch.tensor(self.lengths, dtype=torch.int32, device=slot.device)[:, None].expand_as(slot)
            targets += [(self.score, weight.to(self.score.dtype)), (self.pos, position)]
        for tensor, new in targets:
            column = (*slot.shape, *[1] * (new.ndim - 1))
            x = new[:, :, None]
            at = slot.reshape(column).expand_as(x)
            if keep is not None:  # autograd keeps what it gathers from, which must not change afterwards
                before = tensor.clone() if tensor.requires_grad else tensor
                x = torch.where(keep.reshape(column), before.gather(2, at), x)
            tensor.scatter_(2, at, x)
            if new.ndim == 2:
                self.count(x.numel(), x.element_size())
        self.count_rows(2 * slot.numel())
        self.advance()

    def valid(self) -> Tensor:
        """Which slots, up to the fullest row, are in use: (B,1,C') bool."""
        filled = torch.tensor(self.filled, device=self.device)
        return torch.arange(max(self.filled), device=self.device) < filled[:, None, None]

    def read_rows(self) -> tuple[Tensor, Tensor]:
        """Read K and V of all slots in use: (B,H,C',D) twice, zero in slots that are not in use."""
        c, to = max(self.filled), compute_dtype(self.dtype)
        unused = ~self.valid()[..., None]
        self.count_rows(2 * sum(self.filled) * self.shape.H)
        k, v = (self.row_format.decode(t[:, :, :c], to).masked_fill(unused, 0) for t in (self.k, self.v))
        return k, v

    def read_chosen(self, index: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Read K and V of chosen slots: index (B,H,m), valid (B,H,m) bool says which count -> (B,H,m,D) twice.

        The row of the last token is never counted.
        """
        last = torch.tensor(self.filled, device=self.device)[:, None, None] - 1
        self.count_rows(2 * int((valid & (index != last)).sum()))
        at, to = index[..., None].expand(-1, -1, -1, self.k.shape[-1]), compute_dtype(self.dtype)
        k, v = (self.row_format.decode(t.gather(2, at), to).masked_fill(~valid[..., None], 0) for t in (self.k, self.v))
        return k, v

    def read_page_extremes(self, channels: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """Read one bound of each page before the last token's: channels, largest (B,H,r) -> (B,H,r,P), closed (B,1,P).

        It is the largest key of the page in that channel, or the smallest where `largest` is False. closed is False
        where a row has fewer such pages; the bounds are zero there.
        """
        assert self.pages is not None
        counts = [(c - 1) // self.pages.page for c in self.filled]
        closed = torch.arange(max(counts), device=self.device) < torch.tensor(counts, device=self.device)[:, None, None]
        self.count(sum(counts) * self.shape.H * channels.shape[-1], self.dtype.itemsize)
        bounds = self.pages.first(max(counts)).to(compute_dtype(self.dtype))  # (B,H,2,P,D)
        at = channels[:, :, None].expand(-1, -1, max(counts), -1)
        low, high = (bounds[:, :, i].gather(-1, at) for i in (0, 1))
        chosen = torch.where(largest[:, :, None], high, low).masked_fill(~closed[..., None], 0)
        return chosen.transpose(-1, -2), closed

    def as_stored(self, x: Tensor) -> Tensor:
        """A row as a later step will read it: x (...,D), rounded as the form of rows rounds it."""
        return self.row_format.decode(self.row_format.encode(x), compute_dtype(self.dtype))

    @property
    def has_even_rows(self) -> bool:
        """Whether all rows have seen equally many tokens, and keep equally many of them."""
        return super().has_even_rows and len(set(self.filled)) == 1

    def history(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The kept keys and values of these rows, which all have one number of them: (b,H,m,D) twice; not counted."""
        self.move_fixed()
        c = self.filled[rows.start]
        k, v = (self.row_format.decode(t[rows, :, :c], self.dtype) for t in (self.k, self.v))
        return k, v

    @property
    def nbytes(self) -> int:
        """Live bytes: rows of K and V in use, scores and positions, keys that are kept as they came, and bounds."""
        row = self.row_format.nbytes(2, self.dtype) + (0 if self.score is None else 8)
        fixed = 0 if self.fixed_k is None else sum(min(n, self.fixed) for n in self.filled)
        total = self.shape.H * (sum(self.filled) * row + self.row_format.nbytes(fixed, self.dtype))
        if self.pages is not None:
            pages = (PageBounds.nbytes(n, self.pages.page, self.shape.D, self.dtype) for n in self.filled)
            total += self.shape.H * sum(pages)
        return total

    def fork(self) -> Slots:
        """An independent copy: every tensor, every list of numbers, and the positions of the tokens."""
        clone = super().fork()
        assert isinstance(clone, Slots)
        clone.places = self.places.select(range(self.shape.B))
        return clone

    def select(self, index: Tensor) -> None:
        """Replace the batch by its rows index (B',): reorders, repeats and drops rows in one step."""
        super().select(index)
        order = index.tolist()
        self.filled, self.budget = [self.filled[i] for i in order], [self.budget[i] for i in order]
        self.places = self.places.select(order)
