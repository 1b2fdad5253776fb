"""The channel-major index of K: what it keeps, what a step reads and an append writes of it, and its open group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .base import Part, Shape, compute_dtype
from .chunks import Chunk, spans
from .memory import empty
from .quantise import BITS, GROUP, dequantise_channels, encode_channels, put_codes, quantise_channels

Amounts = list[tuple[int, float]]  # pairs of a number of scalars and the bytes of each
Count = Callable[[int, float], None]  # takes such a pair


class IndexFormat(NamedTuple):
    """What an index keeps of R channels of the keys, and what that moves and occupies, per KV head and row.

    kind: "copy" keeps them in the type of the cache. "int8" and "int4" quantise groups of GROUP tokens; the open group
    stays in full precision. group_means: keep the mean of every channel over every closed group too, in the type of the
    cache, and code the open group by the scale of the group before it, so that a step reads the open group's codes;
    only the first group, before which there is none, stays in full precision while it is open.
    """

    kind: str
    R: int
    group_means: bool = False

    @property
    def bits(self) -> int | None:
        """The bits of a code; None if the index is not quantised."""
        return BITS.get(self.kind)

    def coded_at_once(self, position: int) -> bool:
        """Whether a token at this position enters the index as codes, before its group is closed."""
        return self.group_means and position >= GROUP

    def coded(self, n: int) -> int:
        """How many of n tokens a step reads as codes, in a quantised index."""
        return n if self.coded_at_once(n) else n // GROUP * GROUP

    def read(self, n: int, r: int, dtype: torch.dtype) -> Amounts:
        """What a step reads of r channels with n cached tokens besides the current one."""
        if self.bits is None:
            return [(n * r, dtype.itemsize)]
        coded = min(n, self.coded(n + 1))
        return [(coded * r, self.bits / 8), ((n + 1) // GROUP * 2 * r, 4), ((n - coded) * r, dtype.itemsize)]

    def read_means(self, n: int, dtype: torch.dtype) -> Amounts:
        """What a step reads of the group means, and of the steps of the last closed group's codes."""
        groups = (n + 1) // GROUP
        return [(groups * self.R, dtype.itemsize), (min(groups, 1) * self.R, 4)]

    def append(self, n: int, dtype: torch.dtype) -> Amounts:
        """What it moves to append a token to n others: every GROUP tokens a group is read, quantised and written."""
        amounts: Amounts = [] if self.coded_at_once(n) else [(self.R, dtype.itemsize)]
        if self.bits and (n + 1) % GROUP == 0:
            amounts += [(GROUP * self.R, dtype.itemsize), (GROUP * self.R * self.bits // 8, 1), (2 * self.R, 4)]
            amounts += [(self.R, dtype.itemsize)] * self.group_means
        elif self.bits and self.coded(n + 1) > n:
            amounts += [(self.R, self.bits / 8)]
        return amounts

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        """The live bytes of n tokens."""
        if self.bits is None:
            return n * self.R * dtype.itemsize
        groups, coded = n // GROUP, self.coded(n)
        codes = groups * GROUP * self.bits // 8 + (coded - groups * GROUP) * self.bits // 8
        numbers = n - coded + (groups if self.group_means else 0)
        return self.R * (codes + 8 * groups + numbers * dtype.itemsize)

    def bound(self, n: int, dtype: torch.dtype) -> int:
        """The most bytes that up to n tokens occupy: a quantised index may have an open group besides its codes."""
        if self.bits is None:
            return self.nbytes(n, dtype)
        if self.group_means:
            return max(self.nbytes(n, dtype), self.nbytes(min(n, GROUP - 1), dtype))
        return -(-n * self.R * self.bits // 8) + self.R * (n // GROUP * 8 + GROUP * dtype.itemsize)


@dataclass(frozen=True, eq=False)
class ChannelIndex(Part):
    """An index of the keys of a store, in the memory of its chunks, and its open group.

    dtype: of the cache. projection (H,D,R): the index is of K @ projection instead of K. tail (B,H,R,GROUP): the open
    group of a quantised index, in full precision; with means of groups the first group only.
    """

    form: IndexFormat
    dtype: torch.dtype
    projection: Tensor | None
    tail: Tensor | None
    without_batch: ClassVar[frozenset[str]] = frozenset({"projection"})

    @classmethod
    def empty(
        cls, form: IndexFormat, shape: Shape, dtype: torch.dtype, device: torch.device, projection: Tensor | None
    ) -> ChannelIndex:
        """The index of a store that has no token yet."""
        sizes = (shape.B, shape.H, form.R, GROUP)
        tail = torch.zeros(sizes, dtype=dtype, device=device) if form.bits else None
        return cls(form, dtype, projection, tail)

    def memory(self, shape: Shape, cap: int, device: torch.device) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Allocate index, scale and means of a chunk of `cap` positions."""
        B, H, _, _ = shape
        R, bits, means = self.form.R, self.form.bits, None
        if bits is None:
            return empty((B, H, R, cap), self.dtype, device), None, None
        if self.form.group_means:
            means = empty((B, H, cap // GROUP, R), self.dtype, device)
        # in memory a channel's scales lie together: a step reads those of the chosen channels only
        scale = empty((B, H, R, 2, cap // GROUP), torch.float32, device).permute(0, 1, 4, 3, 2)
        return empty((B, H, R, cap * bits // 8), torch.uint8, device), scale, means

    def keys_before(self, start: int, n: int) -> int:
        """How many of the keys before position `start` have to be given to `append` together with n keys."""
        opened = start % GROUP
        return opened if self.form.coded_at_once(start) and opened + n >= GROUP else 0

    def append(self, chunks: Sequence[Chunk], rows: slice, start: int, k: Tensor, count: Count) -> None:
        """Take n keys, at positions start .. start+n-1 of these rows; `count` what it reads and writes.

        k (b,H,m,D): the last `keys_before` keys before them, and then these.
        """
        projected = k if self.projection is None else (k.to(self.projection.dtype) @ self.projection).to(k.dtype)
        x = projected.transpose(-1, -2)  # (b,H,R,m)
        bits, size, opened = self.form.bits, self.dtype.itemsize, start % GROUP
        if self.tail is None or bits is None:
            count(x.numel(), size)
            for chunk, there, here in spans(chunks, start, start + x.shape[-1]):
                assert chunk.index is not None
                chunk.index[rows, :, :, there] = x[..., here]
            return
        tail, coded_at_once = self.tail[rows], self.form.coded_at_once(start)
        if not coded_at_once:
            count(x[..., : GROUP - start if self.form.group_means else None].numel(), size)
        if opened + x.shape[-1] < GROUP:
            if coded_at_once:
                count(self._code_open_group(chunks, rows, start - opened, opened, x), bits / 8)
            else:
                tail[..., opened : opened + x.shape[-1]] = x
            return
        if not coded_at_once:
            x = torch.cat([tail[..., :opened], x], -1)
        start, closed = start - opened, x.shape[-1] // GROUP * GROUP
        codes, scale = quantise_channels(x[..., :closed], bits)
        for chunk, there, here in spans(chunks, start, start + closed):
            assert chunk.index is not None and chunk.scale is not None
            to, of = (slice(s.start * bits // 8, s.stop * bits // 8) for s in (there, here))
            chunk.index[rows, :, :, to] = codes[..., of]
            to, of = (slice(s.start // GROUP, s.stop // GROUP) for s in (there, here))
            chunk.scale[rows, :, to] = scale[:, :, of]
            if chunk.means is not None:
                means = x[..., :closed].float().unflatten(-1, (-1, GROUP)).mean(-1).transpose(-1, -2)
                chunk.means[rows, :, to] = means[:, :, of].to(self.dtype)
        if not self.form.group_means:
            tail[..., : x.shape[-1] - closed] = x[..., closed:]
        count(x[..., :closed].numel(), size)
        count(codes.numel(), 1)
        count(scale.numel(), 4)
        if self.form.group_means:
            count(scale.numel() // 2, size)
            count(self._code_open_group(chunks, rows, start + closed, 0, x[..., closed:]), bits / 8)

    def _code_open_group(self, chunks: Sequence[Chunk], rows: slice, start: int, coded: int, x: Tensor) -> int:
        """Code keys of the open group, which begins at `start`, by the scale of the group before it.

        Its first `coded` tokens have their codes, and x (b,H,R,n) are those that follow. Returns how many numbers got a
        code.
        """
        if not x.numel():
            return 0
        assert self.form.bits is not None
        before, here = (next(spans(chunks, a, a + GROUP)) for a in (start - GROUP, start))
        assert before[0].scale is not None and here[0].index is not None
        group = before[1].start // GROUP
        step, low = before[0].scale[rows, :, group, :, :, None].unbind(2)  # (b,H,R,1) each
        codes = encode_channels(x.float(), step, low, self.form.bits)
        put_codes(here[0].index[rows], here[1].start + coded, codes, self.form.bits)
        return codes.numel()

    def reopen(self, chunks: Sequence[Chunk], row: slice, n: int, k: Tensor) -> None:
        """Forget all but the first n tokens of a row; the group that is open again has the keys k (1,H,m,D)."""
        if self.tail is None:
            return
        x = k.transpose(-1, -2)
        if self.form.coded_at_once(n):
            self._code_open_group(chunks, row, n - x.shape[-1], 0, x)
        else:
            self.tail[row, ..., : x.shape[-1]] = x

    def read(self, chunks: Sequence[Chunk], index: Tensor, lengths: Sequence[int], count: Count) -> Tensor:
        """Read these channels of all tokens: index (B,H,r) -> (B,H,r,N); beyond a row's tokens stands anything."""
        H, r = index.shape[1:]
        pick, longest, size = index[..., None], max(lengths), self.dtype.itemsize
        indices = [chunk.index for chunk in chunks if chunk.index is not None]
        stored = torch.cat([x.gather(2, pick.expand(-1, -1, -1, x.shape[-1])) for x in indices], -1)
        if self.tail is None or self.form.bits is None:
            count((sum(lengths) - len(lengths)) * H * r, size)
            return stored.to(compute_dtype(self.dtype))[..., :longest]
        scale = torch.cat([chunk.scale for chunk in chunks if chunk.scale is not None], 2)  # (B,H,N/GROUP,2,R)
        scale = scale.gather(-1, index[:, :, None, None].expand(-1, -1, *scale.shape[2:4], -1))
        for b, length in enumerate(lengths if self.form.group_means else ()):
            if closed := length // GROUP:
                scale[b, :, closed:] = scale[b, :, closed - 1 : closed]  # the open group has the scale before it
        x = dequantise_channels(stored, scale, self.form.bits).to(compute_dtype(self.dtype))[..., :longest]
        tail = self.tail.gather(2, pick.expand(-1, -1, -1, GROUP)).to(x.dtype)
        for b, length in enumerate(lengths):
            coded = self.form.coded(length)
            x[b, :, :, coded:length] = tail[b, :, :, : length - coded]
            from_codes = min(length - 1, coded)
            count(from_codes * H * r, self.form.bits / 8)
            count(length // GROUP * 2 * H * r, 4)
            count((length - 1 - from_codes) * H * r, size)
        return x

    def read_group_means(self, chunks: Sequence[Chunk], lengths: Sequence[int], count: Count) -> Tensor:
        """Read the means of all channels over the closed groups: (B,H,N,R), each token with that of its group.

        A token of the open group has the mean of the group before it, and 0 in the first group.
        """
        parts = [chunk.means for chunk in chunks if chunk.means is not None]
        means = torch.cat(parts, 2).to(compute_dtype(self.dtype))
        for b, length in enumerate(lengths):
            closed = length // GROUP
            means[b, :, closed:] = means[b, :, closed - 1 : closed] if closed else 0
            count(closed * means.shape[1] * self.form.R, self.dtype.itemsize)
        return means.repeat_interleave(GROUP, 2)[:, :, : max(lengths)]

    def read_last_steps(self, chunks: Sequence[Chunk], lengths: Sequence[int], count: Count) -> Tensor:
        """Read the step of the last closed group's codes, by channel: (B,H,R); 1 where no group is closed."""
        assert self.tail is not None
        steps = torch.ones_like(self.tail[..., 0], dtype=compute_dtype(self.dtype))
        for b, length in enumerate(lengths):
            if closed := length // GROUP * GROUP:
                chunk, there, _ = next(spans(chunks, closed - GROUP, closed))
                assert chunk.scale is not None
                steps[b] = chunk.scale[b, :, there.start // GROUP, 0]
                count(steps[b].numel(), 4)
        return steps
