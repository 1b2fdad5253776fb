"""Full: the store that forgets nothing, and its optional channel-major index of K."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .base import Part, Shape, Store, compute_dtype
from .codes import BITS, GROUP, dequantise, quantise, roundup
from .memory import empty


class Chunk(Part):
    """Positions start .. start+cap-1: k, v (B,H,cap,D), index (B,H,R,cap), or codes; scale (B,H,cap/GROUP,2,R)."""

    def __init__(self, start: int, cap: int, k: Tensor, v: Tensor, index: Tensor | None, scale: Tensor | None) -> None:
        self.start, self.cap, self.k, self.v, self.index, self.scale = start, cap, k, v, index, scale


class Full(Store):
    """Every token, in chunks that are never re-laid; growth allocates an eighth more and copies nothing.

    channels: None or "none" (K once), "copy" (K again, channel-major), "int8", "int4" (the same, quantised by
    group; the open group stays in full precision in `tail` (B,H,R,GROUP)).
    mean: keep v_mean (B,H,D) float32, the running mean of V. projection (H,D,R): index K @ projection instead of K.
    kv: rows of K and V in codes (rows.py); index, tail and v_mean are then those of the decoded rows.
    """

    batchless = frozenset({"projection"})

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        channels: str | None = None,
        mean: bool = False,
        projection: Tensor | None = None,
        kv: str | None = None,
    ) -> None:
        super().__init__(shape, dtype, device, kv)
        B, H, _, D = shape
        self.chunks: list[Chunk] = []
        self.channels = "none" if channels is None else channels
        self.bits = BITS.get(self.channels)
        self.projection = projection
        self.R = D if projection is None else projection.shape[-1]
        self.tail = torch.zeros(B, H, self.R, GROUP, dtype=dtype, device=self.device) if self.bits else None
        self.v_mean = torch.zeros(B, H, D, device=self.device) if mean else None
        self.shared = 0  # positions before this one may be other stores' memory too

    def _reserve(self, n: int) -> None:
        """Room for n tokens in all: one more chunk, of an eighth of what is held or what is asked."""
        start = self.chunks[-1].start + self.chunks[-1].cap if self.chunks else 0
        if n <= start:
            return
        B, H, _, _ = self.shape
        cap, held = roundup(max(n - start, start // 8)), self.form.dtype(self.dtype)
        k, v = (empty((B, H, cap, self.form.width), held, self.device) for _ in "kv")
        index = scale = None
        if self.bits:
            index = empty((B, H, self.R, cap * self.bits // 8), torch.uint8, self.device)
            # in memory a channel's scales lie together: a step reads those of the chosen channels only
            scale = torch.empty(B, H, self.R, 2, cap // GROUP, device=self.device).permute(0, 1, 4, 3, 2)
        elif self.channels == "copy":
            index = empty((B, H, self.R, cap), self.dtype, self.device)
        self.chunks.append(Chunk(start, cap, k, v, index, scale))

    def _spans(self, start: int, stop: int) -> Iterator[tuple[Chunk, slice, slice]]:
        """The chunks that hold start .. stop-1: (chunk, columns in it, columns counted from start)."""
        for chunk in self.chunks:
            a, b = max(start, chunk.start), min(stop, chunk.start + chunk.cap)
            if a < b:
                yield chunk, slice(a - chunk.start, b - chunk.start), slice(a - start, b - start)

    def _append(self, rows: slice, start: int, k: Tensor, v: Tensor) -> None:
        n = k.shape[2]
        self._reserve(start + n)
        held = [self.form.encode(x) for x in (k, v)]
        for chunk, there, here in self._spans(start, start + n):
            chunk.k[rows, :, there], chunk.v[rows, :, there] = (x[:, :, here] for x in held)
        self.count_rows(2 * k.shape[0] * k.shape[1] * n)
        if self.channels != "none":
            k = self.form.decode(held[0], self.dtype)
            x = k if self.projection is None else (k.to(self.projection.dtype) @ self.projection).to(k.dtype)
            self._append_index(rows, start, x.transpose(-1, -2))
        if self.v_mean is not None and n:
            v, mean = self.form.decode(held[1], self.dtype), self.v_mean[rows]
            mean += (v.float().sum(2) - n * mean) / (start + n)
            self.count(2 * mean.numel(), 4)

    def _append_index(self, rows: slice, start: int, x: Tensor) -> None:
        """x (b,H,R,n): into the channel-major copy, or into the open group and the codes of those it closes."""
        n = x.shape[-1]
        self.count(x.numel(), x.element_size())
        if self.tail is None:
            for chunk, there, here in self._spans(start, start + n):
                assert chunk.index is not None
                chunk.index[rows, :, :, there] = x[..., here]
            return
        tail, held = self.tail[rows], start % GROUP
        if held + n < GROUP:
            tail[..., held : held + n] = x
            return
        x = torch.cat([tail[..., :held], x], -1)
        start, closed = start - held, (held + n) // GROUP * GROUP
        assert self.bits is not None
        codes, scale = quantise(x[..., :closed], self.bits)
        per_byte = 8 // self.bits
        for chunk, there, here in self._spans(start, start + closed):
            assert chunk.index is not None and chunk.scale is not None
            to, of = (slice(s.start // per_byte, s.stop // per_byte) for s in (there, here))
            chunk.index[rows, :, :, to] = codes[..., of]
            to, of = (slice(s.start // GROUP, s.stop // GROUP) for s in (there, here))
            chunk.scale[rows, :, to] = scale[:, :, of]
        tail[..., : x.shape[-1] - closed] = x[..., closed:]
        self.count(x[..., :closed].numel(), x.element_size())
        self.count(codes.numel(), 1)
        self.count(scale.numel(), 4)

    def whole(self, name: str) -> Tensor:
        """Uncounted: k or v of all chunks, (B,H,N,D), unused positions zero."""
        parts = [getattr(chunk, name) for chunk in self.chunks]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        rows = self.form.decode(rows[:, :, : max(self.lengths)], compute_dtype(self.dtype))
        return rows if len(set(self.lengths)) == 1 else rows.masked_fill(~self.mask()[..., None], 0)

    def rows(self, name: str, index: Tensor | None = None, held: Tensor | None = None) -> Tensor:
        """Read k or v: every position (B,H,N,D), or index (B,H,m) where `held` (B,H,m) says which count."""
        B, H, _, D = self.shape
        whole = self.whole(name)
        if index is None:
            self.count_rows((sum(self.lengths) - B) * H)
            return whole
        last = torch.tensor(self.lengths, device=self.device)[:, None, None] - 1
        fetched = index != last if held is None else held & (index != last)
        self.count_rows(int(fetched.sum()))
        return whole.gather(2, index[..., None].expand(-1, -1, -1, D))

    def columns(self, index: Tensor) -> Tensor:
        """Read the chosen channels of the index, or of K where there is none: index (B,H,r) -> (B,H,r,N)."""
        H = self.shape.H
        r, cached = index.shape[-1], [n - 1 for n in self.lengths]
        pick = index[..., None]
        if self.channels == "none":
            self._count_coded(sum(cached) * H * r, self.form.bits or 8 * self.dtype.itemsize)
            self.count(sum(cached) * H * self.form.ends // 2, 2)
            return self.whole("k").transpose(-1, -2).gather(2, pick.expand(-1, -1, -1, max(self.lengths)))
        codes = [c.index for c in self.chunks if c.index is not None]
        parts = [c.gather(2, pick.expand(-1, -1, -1, c.shape[-1])) for c in codes]
        if self.bits is None or self.tail is None:
            self.count(sum(cached) * H * r, self.dtype.itemsize)
            x = torch.cat(parts, -1).to(compute_dtype(self.dtype))[..., : max(self.lengths)]
            return x.masked_fill(~self.mask()[:, :, None], 0)
        groups = torch.cat([c.scale for c in self.chunks if c.scale is not None], 2)  # (B,H,N/GROUP,2,R)
        groups = groups.gather(-1, index[:, :, None, None].expand(-1, -1, *groups.shape[2:4], -1))
        x = dequantise(torch.cat(parts, -1), groups, self.bits).to(compute_dtype(self.dtype))
        x = x[..., : max(self.lengths)].masked_fill(~self.mask()[:, :, None], 0)
        tail = self.tail.gather(2, pick.expand(-1, -1, -1, GROUP)).to(x.dtype)
        for b, length in enumerate(self.lengths):
            closed = length // GROUP * GROUP
            x[b, :, :, closed:length] = tail[b, :, :, : length - closed]
            coded = min(cached[b], closed)
            self._count_coded(coded * H * r, self.bits)
            self.count(closed // GROUP * 2 * H * r, 4)
            self.count((cached[b] - coded) * H * r, self.dtype.itemsize)
        return x

    def _count_coded(self, elements: int, bits: int) -> None:
        self.elements += elements
        self.bytes += -(-elements * bits // 8)

    def mean(self) -> Tensor:
        """v_mean (B,H,D); its read and write are counted by `append`."""
        assert self.v_mean is not None
        return self.v_mean.to(compute_dtype(self.dtype))

    def history(self, rows: slice) -> tuple[Tensor, Tensor]:
        n = self.lengths[rows.start]
        held = (torch.cat([getattr(c, name)[rows] for c in self.chunks], 2)[:, :, :n] for name in "kv")
        k, v = (self.form.decode(x, self.dtype) for x in held)
        return k, v

    def share(self, rows: Sequence[int]) -> Full:
        """These rows, independent of ours, over the same memory where it is never written again: whole groups.

        Other than of one row several times, or of all in order, it is a copy.
        """
        twin, n = copy.copy(self), len(rows)
        if n == 0 or not (list(rows) == list(range(self.shape.B)) or len(set(rows)) == 1):
            twin.select(torch.tensor(rows))
            return twin
        first = slice(rows[0], rows[0] + (n if rows[0] != rows[-1] else 1))

        def of(t: Tensor) -> Tensor:
            return t[first].expand(n, *t.shape[1:])

        twin.lengths, twin.shape = [self.lengths[b] for b in rows], self.shape._replace(B=n)
        closed, stop = min(twin.lengths) // GROUP * GROUP, roundup(max(twin.lengths))
        twin.chunks, twin.shared = [], closed
        self.shared = max(self.shared, closed)
        for c, there, _ in self._spans(0, closed):
            k, v, *rest = self._cut(c, there)
            twin.chunks.append(Chunk(c.start, there.stop, of(k), of(v), *(t if t is None else of(t) for t in rest)))
        twin._reserve(stop)
        for c, there, here in self._spans(closed, stop):
            for to, t in zip(twin._cut(twin.chunks[-1], here), self._cut(c, there), strict=True):
                if to is not None and t is not None:
                    to.copy_(of(t))
        twin.tail, twin.v_mean = (t if t is None else of(t).clone() for t in (self.tail, self.v_mean))
        return twin

    def _cut(self, c: Chunk, there: slice) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Whole groups of a chunk's columns: k, v, index, scale."""
        a, b = there.start, there.stop
        index, scale = c.index, c.scale
        if index is not None:
            index = index[..., a * (self.bits or 8) // 8 : b * (self.bits or 8) // 8]
        return c.k[:, :, a:b], c.v[:, :, a:b], index, None if scale is None else scale[:, :, a // GROUP : b // GROUP]

    def crop(self, n: int) -> None:
        if not 0 <= n <= min(self.lengths):
            raise ValueError(f"cannot forget {n} tokens of rows that hold {self.lengths}")
        if min(self.lengths) - n < self.shared:
            vars(self).update(vars(self.fork()), shared=0)
        old, self.lengths = self.lengths, [length - n for length in self.lengths]
        for b, (was, now) in enumerate(zip(old, self.lengths, strict=True)):
            row = slice(b, b + 1)
            if self.v_mean is not None and n:
                gone = torch.cat([c.v[row, :, there] for c, there, _ in self._spans(now, was)], 2)
                total = self.form.decode(gone, self.dtype).float().sum(2)
                self.v_mean[row] = (self.v_mean[row] * was - total) / now if now else 0
            open_ = now // GROUP * GROUP
            if self.tail is not None and open_ < was // GROUP * GROUP and now > open_:
                # the group is open again: its keys as they were before they became codes are still in k
                k = torch.cat([c.k[row, :, there] for c, there, _ in self._spans(open_, now)], 2)
                self.tail[row, ..., : now - open_] = self.form.decode(k, self.dtype).transpose(-1, -2)
        while self.chunks and self.chunks[-1].start >= max(self.lengths):
            del self.chunks[-1]

    @property
    def nbytes(self) -> int:
        H, size, total = self.shape.H, self.dtype.itemsize, 0
        for n in self.lengths:
            total += self.form.nbytes(2 * n * H, self.dtype)
            if self.bits:
                closed = n // GROUP * GROUP
                total += H * self.R * (closed * self.bits // 8 + closed // GROUP * 8 + (n - closed) * size)
            elif self.channels == "copy":
                total += n * H * self.R * size
        return total + sum(t.nbytes for t in (self.v_mean, self.projection) if t is not None)
