"""Full: the store that forgets nothing, with an optional channel-major index of K."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from .base import Shape, Store, compute_dtype, map_tensors
from .channel_index import ChannelIndex, IndexFormat
from .chunks import Chunk, spans
from .mean_value import MeanValue
from .memory import empty, ordinary_tensors
from .pages import PageBounds
from .quantise import BITS, GROUP, round_up

KeyOrValue = Literal["k", "v"]
BOTH: tuple[KeyOrValue, KeyOrValue] = ("k", "v")
CHANNELS = ("none", "copy", *BITS)  # where the channels of K are read: see Full
FILL_BLOCK = 4096  # tokens that `adopt` indexes at once


class Full(Store):
    """Every token, in chunks that are never moved; growth allocates an eighth more and copies nothing.

    chunks, index, mean: a tuple of immutable chunks, and immutable parts, so that whoever remembers addresses of their
    tensors sees by their identity that one was replaced.
    channels: where a channel of K is read. "none" or None: in K itself; otherwise in an index (see IndexFormat).
    mean: keep the running mean of V.
    projection (H,D,R): the index is of K @ projection instead of K.
    kv: the form of rows of K and V (see RowFormat); index and v_mean are then those of the decoded rows.
    group_means: as of IndexFormat; it needs a quantised index.
    page: the tokens of a page; the bounds of the keys of every page are kept (see PageBounds). None: there are none.
    varying: the method reads as many rows as the data ask for; it sets rows_read (B,2) int64, the rows of K and of V
    that its last step read in all KV heads. They are None before its first step.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        channels: str | None = None,
        mean: bool = False,
        projection: Tensor | None = None,
        kv: str | None = None,
        group_means: bool = False,
        page: int | None = None,
        varying: bool = False,
    ) -> None:
        super().__init__(shape, dtype, device, kv)
        self.chunks: tuple[Chunk, ...] = ()
        self.channels = "none" if channels is None else channels
        self.R = shape.D if projection is None else projection.shape[-1]
        form = None if self.channels == "none" else IndexFormat(self.channels, self.R, group_means)
        self.bits, self.group_means = None if form is None else form.bits, group_means
        assert self.bits or not group_means
        self.index = None if form is None else ChannelIndex.empty(form, shape, dtype, self.device, projection)
        self.mean = MeanValue.empty(shape, self.device) if mean else None
        self.pages = None if page is None else PageBounds(page, shape, dtype, self.device)
        self.varying = varying
        self.rows_read: Tensor | None = None
        self.shared_tokens = 0  # positions before this one may be other stores' memory too

    @property
    def tail(self) -> Tensor | None:
        """The open group of a quantised index (B,H,R,GROUP), in the type of the cache: see `ChannelIndex`."""
        return None if self.index is None else self.index.tail

    @property
    def projection(self) -> Tensor | None:
        """What keys are multiplied by before they enter the index (H,D,R); None if by nothing."""
        return None if self.index is None else self.index.projection

    @property
    def v_mean(self) -> Tensor | None:
        """The running mean of V (B,H,D) float32."""
        return None if self.mean is None else self.mean.value

    def reserve(self, n: int = 1) -> None:
        """Make room for n more tokens in every row: one more chunk, of at least an eighth of the rest, if needed."""
        self._reserve_total(max(self.lengths) + n)

    def advance_by(self, tokens: Sequence[int]) -> None:
        """Note that a kernel has written tokens[b] tokens into each row b."""
        self.lengths = [length + n for length, n in zip(self.lengths, tokens, strict=True)]

    def _reserve_total(self, total: int, rows: tuple[Tensor, Tensor] | None = None) -> None:
        """Make room for `total` tokens; rows: K and V of the new chunk, which is then as long as they are."""
        start = self.chunks[-1].start + self.chunks[-1].cap if self.chunks else 0
        if total <= start:
            return
        B, H, _, _ = self.shape
        cap, stored = round_up(max(total - start, start // 8)), self.row_format.storage_dtype(self.dtype)
        if rows is None:
            k, v = (empty((B, H, cap, self.row_format.width), stored, self.device) for _ in "kv")
        else:
            (k, v), cap = rows, rows[0].shape[2]
        with ordinary_tensors():
            index = (None, None, None) if self.index is None else self.index.memory(self.shape, cap, self.device)
        self.chunks += (Chunk(start, cap, k, v, *index),)
        if self.pages is not None:
            self.pages.reserve(-(-(start + cap) // self.pages.page))

    def _append(self, rows: slice, start: int, k: Tensor, v: Tensor) -> None:
        n = k.shape[2]
        self._reserve_total(start + n)
        stored = [self.row_format.encode(x) for x in (k, v)]
        for chunk, there, here in spans(self.chunks, start, start + n):
            chunk.k[rows, :, there], chunk.v[rows, :, there] = (x[:, :, here] for x in stored)
        self.count_rows(2 * k.shape[0] * k.shape[1] * n)
        self._append_to_parts(rows, start, *stored)

    def _append_to_parts(self, rows: slice, start: int, k: Tensor, v: Tensor) -> None:
        """Bring rows that are stored from position `start` on into the index, the bounds of pages and the mean."""
        if self.index is not None:
            if before := self.index.keys_before(start, k.shape[2]):
                opened = torch.cat([self._stored("k", rows, start - before, start), k], 2)
            else:
                opened = k
            self.index.append(self.chunks, rows, start, self.row_format.decode(opened, self.dtype), self.count)
        if self.pages is not None:
            numbers = self.pages.append(rows, start, self.row_format.decode(k, self.dtype))
            self.count(numbers, self.dtype.itemsize)
        if self.mean is not None:
            self.count(self.mean.append(rows, start, self.row_format.decode(v, self.dtype)), 4)

    def adopt(self, source: Full, n: int) -> None:
        """Make this empty store one of the first n tokens of `source`, whose K and V it shares without a copy.

        Its own index and mean are made from them. Neither store may be written to before position n afterwards.
        Raises ValueError if the shapes, the types, or the forms of rows differ, or if this store is not empty.
        """
        same = (self.shape, self.dtype, self.device, self.row_format.bits) == (
            source.shape, source.dtype, source.device, source.row_format.bits,
        )  # fmt: skip
        if not same or any(self.lengths) or not 0 < n <= min(source.lengths):
            raise ValueError(f"a store of {self.shape}, {self.lengths} tokens, cannot adopt {n} of {source.shape}")
        for chunk in source.chunks:
            self._reserve_total(chunk.start + chunk.cap, (chunk.k, chunk.v))
        rows = slice(0, self.shape.B)
        for start in range(0, n, FILL_BLOCK):
            k, v = (self._stored(name, rows, start, min(start + FILL_BLOCK, n)) for name in BOTH)
            self._append_to_parts(rows, start, k, v)
        self.lengths = [n] * self.shape.B

    def _stored(self, name: KeyOrValue, rows: slice, start: int, stop: int) -> Tensor:
        """Stored rows of K or V at positions start .. stop-1: (b,H,stop-start,width)."""
        if start == stop:
            shape = (rows.stop - rows.start, self.shape.H, 0, self.row_format.width)
            return torch.empty(shape, dtype=self.row_format.storage_dtype(self.dtype), device=self.device)
        parts = [getattr(chunk, name)[rows, :, there] for chunk, there, _ in spans(self.chunks, start, stop)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def uncounted(self, name: KeyOrValue) -> Tensor:
        """K or V of all positions, without counting the read: (B,H,N,D), zero where a row has no token."""
        stored = self._stored(name, slice(0, self.shape.B), 0, max(self.lengths))
        rows = self.row_format.decode(stored, compute_dtype(self.dtype))
        return rows if len(set(self.lengths)) == 1 else rows.masked_fill(~self.valid()[..., None], 0)

    def read_keys(self, index: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        """Read rows of K: all positions (B,H,N,D), or index (B,H,m) -> (B,H,m,D).

        valid (B,H,m) bool says which of the index count as read. The current token's row is never counted.
        """
        return self._read_rows("k", index, valid)

    def read_values(self, index: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        """Read rows of V, as `read_keys` does."""
        return self._read_rows("v", index, valid)

    def _read_rows(self, name: KeyOrValue, index: Tensor | None, valid: Tensor | None) -> Tensor:
        B, H, _, D = self.shape
        rows = self.uncounted(name)
        if index is None:
            self.count_rows((sum(self.lengths) - B) * H)
            return rows
        last = torch.tensor(self.lengths, device=self.device)[:, None, None] - 1
        fetched = index != last if valid is None else valid & (index != last)
        self.count_rows(int(fetched.sum()))
        return rows.gather(2, index[..., None].expand(-1, -1, -1, D))

    def read_channels(self, index: Tensor) -> Tensor:
        """Read these channels of the index, or of K where there is no index: index (B,H,r) -> (B,H,r,N)."""
        if self.index is not None:
            x = self.index.read(self.chunks, index, self.lengths, self.count)
            return x.masked_fill(~self.valid()[:, :, None], 0)
        cached, r = (sum(self.lengths) - self.shape.B) * self.shape.H, index.shape[-1]
        for amount in self.row_format.traffic_of_channels(cached, r, self.dtype):
            self.count(*amount)
        keys = self.uncounted("k").transpose(-1, -2)
        return keys.gather(2, index[..., None].expand(-1, -1, -1, keys.shape[-1]))

    @property
    def traffic_depends_on_data(self) -> bool:
        """Whether a method reads as many rows as the data ask for; see `rows_read`."""
        return self.varying

    def observed(self, row: int | None = None) -> dict[str, int]:
        """The rows of K and V that the last step read, where a method reads as many as the data ask for."""
        if self.rows_read is None:
            return {}
        keys, values = (self.rows_read.sum(0) if row is None else self.rows_read[row]).tolist()
        return {"key_rows": keys, "value_rows": values}

    def read_group_means(self) -> Tensor:
        """Read the means of the closed groups of the index: see `ChannelIndex.read_group_means`."""
        assert self.index is not None
        return self.index.read_group_means(self.chunks, self.lengths, self.count)

    def read_last_steps(self) -> Tensor:
        """Read the step of the last closed group's codes: see `ChannelIndex.read_last_steps`."""
        assert self.index is not None
        return self.index.read_last_steps(self.chunks, self.lengths, self.count)

    def read_page_bounds(self) -> tuple[Tensor, Tensor, Tensor]:
        """Read the bounds of the pages before the current token's: low and high (B,H,P,D), and closed (B,1,P) bool.

        closed is False where a row has fewer such pages; the bounds are zero there.
        """
        assert self.pages is not None
        counts = [(n - 1) // self.pages.page for n in self.lengths]
        closed = torch.arange(max(counts), device=self.device) < torch.tensor(counts, device=self.device)[:, None, None]
        self.count(2 * sum(counts) * self.shape.H * self.shape.D, self.dtype.itemsize)
        bounds = self.pages.first(max(counts)).to(compute_dtype(self.dtype))
        low, high = bounds.masked_fill(~closed[:, :, None, :, None], 0).unbind(2)
        return low, high, closed

    def read_mean(self) -> Tensor:
        """Read v_mean (B,H,D). Its read and write were counted by `append`."""
        assert self.mean is not None
        return self.mean.value.to(compute_dtype(self.dtype))

    def history(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The cached keys and values of these rows, which all have one length: (b,H,m,D) twice; not counted."""
        n = self.lengths[rows.start]
        k, v = (self.row_format.decode(self._stored(name, rows, 0, n), self.dtype) for name in BOTH)
        return k, v

    def share(self, rows: Sequence[int]) -> Full:
        """A store of these rows, independent of this one, over the same memory where it is never written again.

        Whole groups of tokens are shared if the rows are one row several times, or all rows in order; otherwise the
        rows are copied.
        """
        twin, n = copy.copy(self), len(rows)
        if n == 0 or not (list(rows) == list(range(self.shape.B)) or len(set(rows)) == 1):
            twin.select(torch.tensor(rows, dtype=torch.int64))
            return twin
        first = slice(rows[0], rows[0] + (n if rows[0] != rows[-1] else 1))

        def expanded(t: Tensor) -> Tensor:
            """Return the tensor with its one row repeated n times."""
            return t[first].expand(n, *t.shape[1:])

        twin.lengths, twin.shape = [self.lengths[b] for b in rows], self.shape._replace(B=n)
        closed, stop = min(twin.lengths) // GROUP * GROUP, round_up(max(twin.lengths))
        twin.chunks, twin.shared_tokens = (), closed
        self.shared_tokens = max(self.shared_tokens, closed)
        for c, there, _ in spans(self.chunks, 0, closed):
            k, v, *index = (t if t is None else expanded(t) for t in c.tensors(there))
            assert k is not None and v is not None
            twin.chunks += (Chunk(c.start, there.stop, k, v, *index),)
        with ordinary_tensors():
            for name in ("index", "mean", "pages", "rows_read"):
                setattr(twin, name, map_tensors(getattr(self, name), lambda t: expanded(t).clone()))
        twin._reserve_total(stop)
        for c, there, here in spans(self.chunks, closed, stop):
            for to, t in zip(twin.chunks[-1].tensors(here), c.tensors(there), strict=True):
                if to is not None and t is not None:
                    to.copy_(expanded(t))
        return twin

    def crop(self, n: int) -> None:
        """Forget the last n tokens of every row. Raises ValueError if a row has fewer."""
        if not 0 <= n <= min(self.lengths):
            raise ValueError(f"cannot forget {n} tokens of rows that have {self.lengths}")
        if min(self.lengths) - n < self.shared_tokens:
            self._become(self.fork())
            self.shared_tokens = 0
        old, self.lengths = self.lengths, [length - n for length in self.lengths]

        def values(row: slice, start: int, stop: int) -> Tensor:
            """Return the values of tokens start .. stop-1 of a row."""
            return self.row_format.decode(self._stored("v", row, start, stop), self.dtype)

        for b, (was, now) in enumerate(zip(old, self.lengths, strict=True)):
            row = slice(b, b + 1)
            if self.mean is not None and n:
                self.mean.forget(row, now, values(row, now, was), partial(values, row, 0, now))
            if self.pages is not None and n:
                opened = now // self.pages.page * self.pages.page
                self.pages.reopen(row, now, self.row_format.decode(self._stored("k", row, opened, now), self.dtype))
            start = now // GROUP * GROUP
            if self.index is not None and start < was // GROUP * GROUP and now > start:
                # the group is open again: its keys before quantisation are still in k
                k = self.row_format.decode(self._stored("k", row, start, now), self.dtype)
                self.index.reopen(self.chunks, row, now, k)
        if self.chunks and self.chunks[-1].start >= max(self.lengths):
            self.chunks = tuple(chunk for chunk in self.chunks if chunk.start < max(self.lengths))

    @property
    def nbytes(self) -> int:
        """Live bytes: rows of K and V, the index, its scales and its open group, bounds of pages, v_mean and the
        projection."""
        (_, H, _, D), dtype = self.shape, self.dtype
        total = 0 if self.projection is None else self.projection.nbytes
        for n in self.lengths:
            total += self.row_format.nbytes(2 * n * H, dtype)
            total += 0 if self.index is None else H * self.index.form.nbytes(n, dtype)
            total += 0 if self.pages is None else H * PageBounds.nbytes(n, self.pages.page, D, dtype)
            total += 0 if self.mean is None else H * MeanValue.nbytes(D)
        return total
