"""The memory of a store of every token: chunks of positions, which are never moved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from .base import Part
from .quantise import GROUP


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

    def tensors(self, there: slice | None = None) -> tuple[Tensor | None, ...]:
        """Return k, v, index, scale and means of these positions of the chunk, whole groups of them, or of all."""
        if there is None:
            return self.k, self.v, self.index, self.scale, self.means
        a, b = there.start, there.stop
        index = self.index
        if index is not None:
            a_index, b_index = (place * index.shape[-1] // self.cap for place in (a, b))
            index = index[..., a_index:b_index]
        groups = slice(a // GROUP, b // GROUP)
        scale, means = (t if t is None else t[:, :, groups] for t in (self.scale, self.means))
        return self.k[:, :, a:b], self.v[:, :, a:b], index, scale, means


def spans(chunks: Sequence[Chunk], start: int, stop: int) -> Iterator[tuple[Chunk, slice, slice]]:
    """Yield the chunks that hold start .. stop-1: (chunk, positions in it, positions counted from start)."""
    for chunk in chunks:
        a, b = max(start, chunk.start), min(stop, chunk.start + chunk.cap)
        if a < b:
            yield chunk, slice(a - chunk.start, b - chunk.start), slice(a - start, b - start)
