"""Full: the store that forgets nothing, with an optional channel-major index of K."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .base import Part, Shape, Store, compute_dtype, map_tensors
from .memory import empty
from .pages import PageBounds
from .quantise import BITS, GROUP, dequantise_channels, encode_channels, put_codes, quantise_channels, round_up

KeyOrValue = Literal["k", "v"]
BOTH: tuple[KeyOrValue, KeyOrValue] = ("k", "v")
CHANNELS = ("none", "copy", *BITS)  # where the channels of K are read: see Full
FILL_BLOCK = 4096  # tokens that `adopt` indexes at once


@dataclass(frozen=True, eq=False)
class Chunk(Part):
    """The memory of positions start .. start+cap-1.

    k, v (B,H,cap,width of a stored row) · index (B,H,R,cap), in 8 bits (B,H,R,cap) and in 4 bits (B,H,R,cap/2) uint8 ·
    scale (B,H,cap/GROUP,2,R) float32 of a quantised index · means (B,H,cap/GROUP,R) of its groups, where they are kept.
    """

    start: int
    cap: int
    k: Tensor
    v: Tensor
    index: Tensor | None
    scale: Tensor | None
    means: Tensor | None = None


class Full(Store):
    """Every token, in chunks that are never moved; growth allocates an eighth more and copies nothing.

    chunks: a tuple of immutable chunks, so that whoever remembers addresses sees by its identity that one has changed.
    channels: where a channel of K is read. "none" or None: in K itself. "copy": in an index, K again in channel-major
    order. "int8", "int4": in such an index, quantised by groups of GROUP tokens; the open group stays in full precision
    in `tail` (B,H,R,GROUP).
    mean: keep v_mean (B,H,D) float32, the running mean of V.
    projection (H,D,R): the index is of K @ projection instead of K.
    kv: the form of rows of K and V (see RowFormat); index, tail and v_mean are then those of the decoded rows.
    group_means: keep the mean of every channel over every closed group too, in the type of the cache, and code the open
    group by the scale of the group before it, so that a step reads the open group's codes and not its tail. It needs a
    quantised index.
    page: keep the bounds of the keys of every page of so many tokens (see PageBounds).
    rows_read (B,2) int64: rows of K and of V that the last step of a method read in all KV heads, where the method
    reads as many as the data ask for; such a method sets them, and they are None before its first step.
    """

    without_batch = frozenset({"projection"})

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
    ) -> None:
        super().__init__(shape, dtype, device, kv)
        B, H, _, D = shape
        self.chunks: tuple[Chunk, ...] = ()
        self.channels = "none" if channels is None else channels
        self.bits = BITS.get(self.channels)
        self.projection = projection
        self.R = D if projection is None else projection.shape[-1]
        self.tail = torch.zeros(B, H, self.R, GROUP, dtype=dtype, device=self.device) if self.bits else None
        self.v_mean = torch.zeros(B, H, D, device=self.device) if mean else None
        assert self.bits or not group_means
        self.group_means = group_means
        self.pages = None if page is None else PageBounds(page, shape, dtype, self.device)
        self.rows_read: Tensor | None = None
        self.shared_tokens = 0  # positions before this one may be other stores' memory too

    def reserve(self, n: int = 1) -> None:
        """Make room for n more tokens in every row: one more chunk, of at least an eighth of the rest, if needed."""
        self._reserve_total(max(self.lengths) + n)

    def advance_by(self, tokens: Sequence[int]) -> None:
        """Note that a kernel has written so many tokens into each row."""
        self.lengths = [length + n for length, n in zip(self.lengths, tokens, strict=True)]

    def _reserve_total(self, total: int, rows: tuple[Tensor, Tensor] | None = None) -> None:
        """Make room for so many tokens; rows: K and V of the new chunk, which is then as long as they are."""
        start = self.chunks[-1].start + self.chunks[-1].cap if self.chunks else 0
        if total <= start:
            return
        B, H, _, _ = self.shape
        cap, stored = round_up(max(total - start, start // 8)), self.row_format.storage_dtype(self.dtype)
        if rows is None:
            k, v = (empty((B, H, cap, self.row_format.width), stored, self.device) for _ in "kv")
        else:
            (k, v), cap = rows, rows[0].shape[2]
        index = scale = means = None
        if self.bits:
            index = empty((B, H, self.R, cap * self.bits // 8), torch.uint8, self.device)
            # in memory a channel's scales lie together: a step reads those of the chosen channels only
            scale = torch.empty(B, H, self.R, 2, cap // GROUP, device=self.device).permute(0, 1, 4, 3, 2)
            if self.group_means:
                means = torch.zeros(B, H, cap // GROUP, self.R, dtype=self.dtype, device=self.device)
        elif self.channels == "copy":
            index = empty((B, H, self.R, cap), self.dtype, self.device)
        self.chunks += (Chunk(start, cap, k, v, index, scale, means),)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[Chunk, slice, slice]]:
        """The chunks that hold start .. stop-1: (chunk, positions in it, positions counted from start)."""
        for chunk in self.chunks:
            a, b = max(start, chunk.start), min(stop, chunk.start + chunk.cap)
            if a < b:
                yield chunk, slice(a - chunk.start, b - chunk.start), slice(a - start, b - start)

    def _append(self, rows: slice, start: int, k: Tensor, v: Tensor) -> None:
        n = k.shape[2]
        self._reserve_total(start + n)
        stored = [self.row_format.encode(x) for x in (k, v)]
        for chunk, there, here in self._spans(start, start + n):
            chunk.k[rows, :, there], chunk.v[rows, :, there] = (x[:, :, here] for x in stored)
        self.count_rows(2 * k.shape[0] * k.shape[1] * n)
        if self.channels != "none":
            self._append_index(rows, start, self.row_format.decode(stored[0], self.dtype))
        if self.pages is not None:
            self.count(self.pages.append(rows, start, self.row_format.decode(stored[0], self.dtype)), k.element_size())
        if self.v_mean is not None and n:
            v, mean = self.row_format.decode(stored[1], self.dtype), self.v_mean[rows]
            mean += (v.float().sum(2) - n * mean) / (start + n)
            self.count(2 * mean.numel(), 4)

    def _append_index(self, rows: slice, start: int, k: Tensor) -> None:
        """Put k (b,H,n,D) into the channel-major copy, or into the open group and the codes of those it closes."""
        projected = k if self.projection is None else (k.to(self.projection.dtype) @ self.projection).to(k.dtype)
        x = projected.transpose(-1, -2)  # (b,H,R,n)
        n = x.shape[-1]
        self.count(x.numel(), x.element_size())
        if self.tail is None:
            for chunk, there, here in self._spans(start, start + n):
                assert chunk.index is not None
                chunk.index[rows, :, :, there] = x[..., here]
            return
        tail, open_tokens = self.tail[rows], start % GROUP
        if open_tokens + n < GROUP:
            tail[..., open_tokens : open_tokens + n] = x
            coded = self._code_open_group(rows, start - open_tokens, open_tokens, open_tokens + n)
            self._count_bits(coded, self.bits or 0)
            return
        x = torch.cat([tail[..., :open_tokens], x], -1)
        start, closed = start - open_tokens, (open_tokens + n) // GROUP * GROUP
        assert self.bits is not None
        codes, scale = quantise_channels(x[..., :closed], self.bits)
        per_byte = 8 // self.bits
        for chunk, there, here in self._spans(start, start + closed):
            assert chunk.index is not None and chunk.scale is not None
            to, of = (slice(s.start // per_byte, s.stop // per_byte) for s in (there, here))
            chunk.index[rows, :, :, to] = codes[..., of]
            to, of = (slice(s.start // GROUP, s.stop // GROUP) for s in (there, here))
            chunk.scale[rows, :, to] = scale[:, :, of]
            if chunk.means is not None:
                means = x[..., :closed].float().unflatten(-1, (-1, GROUP)).mean(-1).transpose(-1, -2)
                chunk.means[rows, :, to] = means[:, :, of].to(self.dtype)
        tail[..., : x.shape[-1] - closed] = x[..., closed:]
        self.count(x[..., :closed].numel(), x.element_size())
        self.count(codes.numel(), 1)
        self.count(scale.numel(), 4)
        if self.group_means:
            self.count(scale.numel() // 2, self.dtype.itemsize)
        self._count_bits(self._code_open_group(rows, start + closed, 0, x.shape[-1] - closed), self.bits)

    def _code_open_group(self, rows: slice, start: int, coded: int, n: int) -> int:
        """Code the open group, the n tokens from `start` on, by the scale of the group before it.

        Its first `coded` tokens have their codes; in the first group there is no scale, and it stays in the tail.
        Returns how many numbers got a code.
        """
        if not self.group_means or start == 0 or n == coded:
            return 0
        assert self.tail is not None and self.bits is not None
        before, here = (next(self._spans(a, a + GROUP)) for a in (start - GROUP, start))
        assert before[0].scale is not None and here[0].index is not None
        group = before[1].start // GROUP
        x = self.tail[rows][..., coded:n]  # (b,H,R,n-coded)
        step, low = before[0].scale[rows, :, group, :, :, None].unbind(2)  # (b,H,R,1) each
        codes = encode_channels(x.float(), step, low, self.bits)
        put_codes(here[0].index[rows], here[1].start + coded, codes, self.bits)
        return codes.numel()

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
            if self.channels != "none":
                self._append_index(rows, start, self.row_format.decode(k, self.dtype))
            if self.pages is not None:
                self.pages.append(rows, start, self.row_format.decode(k, self.dtype))
            if self.v_mean is not None:
                self.v_mean += self.row_format.decode(v, self.dtype).float().sum(2) / n
        self.lengths = [n] * self.shape.B

    def _stored(self, name: KeyOrValue, rows: slice, start: int, stop: int) -> Tensor:
        """Stored rows of K or V at positions start .. stop-1: (b,H,stop-start,width)."""
        if start == stop:
            shape = (rows.stop - rows.start, self.shape.H, 0, self.row_format.width)
            return torch.empty(shape, dtype=self.row_format.storage_dtype(self.dtype), device=self.device)
        parts = [getattr(chunk, name)[rows, :, there] for chunk, there, _ in self._spans(start, stop)]
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
        H = self.shape.H
        r, cached = index.shape[-1], [n - 1 for n in self.lengths]
        pick = index[..., None]
        if self.channels == "none":
            self._count_bits(sum(cached) * H * r, self.row_format.bits or 8 * self.dtype.itemsize)
            self.count(sum(cached) * H * self.row_format.ends_bytes // 2, 2)
            keys = self.uncounted("k").transpose(-1, -2)
            return keys.gather(2, pick.expand(-1, -1, -1, max(self.lengths)))
        indices = [chunk.index for chunk in self.chunks if chunk.index is not None]
        parts = [x.gather(2, pick.expand(-1, -1, -1, x.shape[-1])) for x in indices]
        if self.bits is None or self.tail is None:
            self.count(sum(cached) * H * r, self.dtype.itemsize)
            x = torch.cat(parts, -1).to(compute_dtype(self.dtype))[..., : max(self.lengths)]
            return x.masked_fill(~self.valid()[:, :, None], 0)
        scale = torch.cat([chunk.scale for chunk in self.chunks if chunk.scale is not None], 2)  # (B,H,N/GROUP,2,R)
        scale = scale.gather(-1, index[:, :, None, None].expand(-1, -1, *scale.shape[2:4], -1))
        for b, length in enumerate(self.lengths if self.group_means else ()):
            if closed := length // GROUP:
                scale[b, :, closed:] = scale[b, :, closed - 1 : closed]  # the open group has the scale before it
        x = dequantise_channels(torch.cat(parts, -1), scale, self.bits).to(compute_dtype(self.dtype))
        x = x[..., : max(self.lengths)].masked_fill(~self.valid()[:, :, None], 0)
        tail = self.tail.gather(2, pick.expand(-1, -1, -1, GROUP)).to(x.dtype)
        for b, length in enumerate(self.lengths):
            closed = length // GROUP * GROUP
            coded = length if self.group_means and closed else closed
            x[b, :, :, coded:length] = tail[b, :, :, : length - coded]
            quantised = min(cached[b], coded)
            self._count_bits(quantised * H * r, self.bits)
            self.count(closed // GROUP * 2 * H * r, 4)
            self.count((cached[b] - quantised) * H * r, self.dtype.itemsize)
        return x

    @property
    def traffic_depends_on_data(self) -> bool:
        """Whether a method reads as many rows as the data ask for; see `rows_read`."""
        return self.group_means

    def observed(self, row: int | None = None) -> dict[str, int]:
        """The rows of K and V that the last step read, where a method reads as many as the data ask for."""
        if self.rows_read is None:
            return {}
        keys, values = (self.rows_read.sum(0) if row is None else self.rows_read[row]).tolist()
        return {"key_rows": keys, "value_rows": values}

    def read_group_means(self) -> Tensor:
        """Read the means of all channels over the closed groups: (B,H,N,R), each token with that of its group.

        A token of the open group has the mean of the group before it, and 0 in the first group.
        """
        parts = [chunk.means for chunk in self.chunks if chunk.means is not None]
        means = torch.cat(parts, 2).to(compute_dtype(self.dtype))
        for b, length in enumerate(self.lengths):
            closed = length // GROUP
            means[b, :, closed:] = means[b, :, closed - 1 : closed] if closed else 0
            self.count(closed * means.shape[1] * self.R, self.dtype.itemsize)
        return means.repeat_interleave(GROUP, 2)[:, :, : max(self.lengths)]

    def read_last_steps(self) -> Tensor:
        """Read the step of the last closed group's codes, by channel: (B,H,R); 1 where no group is closed."""
        B, H = self.shape.B, self.shape.H
        steps = torch.ones(B, H, self.R, dtype=compute_dtype(self.dtype), device=self.device)
        for b, length in enumerate(self.lengths):
            if closed := length // GROUP * GROUP:
                chunk, there, _ = next(self._spans(closed - GROUP, closed))
                assert chunk.scale is not None
                steps[b] = chunk.scale[b, :, there.start // GROUP, 0]
                self.count(H * self.R, 4)
        return steps

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

    def _count_bits(self, elements: int, bits: int) -> None:
        self.elements += elements
        self.bytes += -(-elements * bits // 8)

    def read_mean(self) -> Tensor:
        """Read v_mean (B,H,D). Its read and write were counted by `append`."""
        assert self.v_mean is not None
        return self.v_mean.to(compute_dtype(self.dtype))

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
            twin.select(torch.tensor(rows))
            return twin
        first = slice(rows[0], rows[0] + (n if rows[0] != rows[-1] else 1))

        def expanded(t: Tensor) -> Tensor:
            """Return the tensor with its one row repeated n times."""
            return t[first].expand(n, *t.shape[1:])

        twin.lengths, twin.shape = [self.lengths[b] for b in rows], self.shape._replace(B=n)
        closed, stop = min(twin.lengths) // GROUP * GROUP, round_up(max(twin.lengths))
        twin.chunks, twin.shared_tokens = (), closed
        self.shared_tokens = max(self.shared_tokens, closed)
        for c, there, _ in self._spans(0, closed):
            k, v, *rest = self._cut(c, there)
            optional = (t if t is None else expanded(t) for t in rest)
            twin.chunks += (Chunk(c.start, there.stop, expanded(k), expanded(v), *optional),)
        twin._reserve_total(stop)
        for c, there, here in self._spans(closed, stop):
            for to, t in zip(twin._cut(twin.chunks[-1], here), self._cut(c, there), strict=True):
                if to is not None and t is not None:
                    to.copy_(expanded(t))
        twin.tail, twin.v_mean, twin.rows_read = (
            t if t is None else expanded(t).clone() for t in (self.tail, self.v_mean, self.rows_read)
        )
        twin.pages = map_tensors(self.pages, lambda t: expanded(t).clone())
        return twin

    def _cut(self, c: Chunk, there: slice) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Whole groups of a chunk's positions: k, v, index, scale, means."""
        a, b = there.start, there.stop
        index = c.index
        if index is not None:
            index = index[..., a * (self.bits or 8) // 8 : b * (self.bits or 8) // 8]
        groups = slice(a // GROUP, b // GROUP)
        scale, means = (t if t is None else t[:, :, groups] for t in (c.scale, c.means))
        return c.k[:, :, a:b], c.v[:, :, a:b], index, scale, means

    def crop(self, n: int) -> None:
        """Forget the last n tokens of every row. Raises ValueError if a row has fewer."""
        if not 0 <= n <= min(self.lengths):
            raise ValueError(f"cannot forget {n} tokens of rows that have {self.lengths}")
        if min(self.lengths) - n < self.shared_tokens:
            self._become(self.fork())
            self.shared_tokens = 0
        old, self.lengths = self.lengths, [length - n for length in self.lengths]
        for b, (was, now) in enumerate(zip(old, self.lengths, strict=True)):
            row = slice(b, b + 1)
            if self.v_mean is not None and n:
                dropped = self.row_format.decode(self._stored("v", row, now, was), self.dtype).float().sum(2)
                self.v_mean[row] = (self.v_mean[row] * was - dropped) / now if now else 0
            if self.pages is not None and n:
                opened = now // self.pages.page * self.pages.page
                self.pages.reopen(row, now, self.row_format.decode(self._stored("k", row, opened, now), self.dtype))
            start = now // GROUP * GROUP
            if self.tail is not None and start < was // GROUP * GROUP and now > start:
                # the group is open again: its keys before quantisation are still in k
                k = self.row_format.decode(self._stored("k", row, start, now), self.dtype)
                self.tail[row, ..., : now - start] = k.transpose(-1, -2)
                self._code_open_group(row, start, 0, now - start)
        if self.chunks and self.chunks[-1].start >= max(self.lengths):
            self.chunks = tuple(chunk for chunk in self.chunks if chunk.start < max(self.lengths))

    @property
    def nbytes(self) -> int:
        """Live bytes: rows of K and V, the index, its scales and its open group, bounds of pages, v_mean and the
        projection."""
        H, size = self.shape.H, self.dtype.itemsize
        total = 0 if self.pages is None else self.pages.nbytes(self.lengths)
        for n in self.lengths:
            total += self.row_format.nbytes(2 * n * H, self.dtype)
            if self.bits:
                closed = n // GROUP * GROUP
                total += H * self.R * (closed * self.bits // 8 + closed // GROUP * 8 + (n - closed) * size)
                if self.group_means:
                    coded = (n - closed) * self.bits // 8 if closed else 0
                    total += H * self.R * (coded + closed // GROUP * size)
            elif self.channels == "copy":
                total += n * H * self.R * size
        return total + sum(t.nbytes for t in (self.v_mean, self.projection) if t is not None)
