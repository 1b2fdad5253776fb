"""SnapKV (Li et al. 2024, arXiv 2404.14469, section 4): the end of a prompt says which of its tokens are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from .. import ops
from ..ops import Kernels, SoftmaxOptions, Token
from ..stores.base import Shape
from ..stores.slots import Slots
from .base import Method, Traffic, check_whole
from .slots import attend_and_append, best, budget_in_tokens, check_budget, needed, with_block

WINDOW = 32  # the default of the authors' code


@dataclass(frozen=True, repr=False)
class SnapKV(Method[Slots]):
    """Keep k tokens of the prompt, chosen once at its end, and every token after it. Reads 2(k + g)D + 2D elements.

    g is the number of tokens since the prompt: the cache grows with them, as in the paper, which compresses prompts
    only. k: tokens; a float is a fraction of the prompt. window: the last tokens of the prompt, which stay and whose
    queries choose the others (None: 32, and at most half of k). pool: how many neighbouring positions share their
    weights, an odd number, so that what is kept comes in clusters.

    The weights that the window's queries give are added up, averaged over the group of a KV head and then over `pool`
    positions (the authors' code, whose defaults these are; there each query head keeps tokens of its own). A later
    prompt block chooses anew among all that the store has and the block.
    """

    k: int | float
    window: int | None = None
    pool: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget("k", self.k)
        if self.window is not None:
            check_whole("window", self.window, 1, 2**31 - 1 if isinstance(self.k, float) else self.k)
        check_whole("pool", self.pool, 1)
        if self.pool % 2 == 0:
            raise ValueError(f"pool = {self.pool} must be odd, so that a position is the middle of its neighbours")

    def observed_tokens(self, budget: int) -> int:
        """How many tokens the window has, for a budget of so many tokens."""
        return min(WINDOW, max(1, budget // 2)) if self.window is None else min(self.window, budget)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Slots:
        """An empty store of slots that grows."""
        return Slots(shape, dtype, device, 0, kv=self.kv, grows=True)

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
        """Keep k of the tokens that the store has and those of the block; a prompt of no more than k stays whole."""
        n, pads = k.shape[2], store.validate(k, v, pad)
        seen = [length + n - p for length, p in zip(store.lengths, pads, strict=True)]
        held = [c + n - p for c, p in zip(store.filled, pads, strict=True)]
        kept = [min(budget_in_tokens(self.k, s), m) for s, m in zip(seen, held, strict=True)]
        store.reserve(max(c - f for c, f in zip(kept, store.filled, strict=True)))
        for b, p in enumerate(pads):
            if p == n:
                continue
            keys, values = with_block(store, b, k[b, :, p:], v[b, :, p:])
            chosen = torch.arange(held[b], device=k.device).expand(store.shape.H, -1)
            if kept[b] < held[b]:
                window = self.observed_tokens(kept[b])
                queries = q[b, :, :, p:][:, :, -window:]
                weight = ops.key_scores(queries, store.row_format.decode(keys, k.dtype), **softmax)
                pooled = self.pooled(weight[:, :-window])
                clusters = best(pooled, chosen[:, :-window], kept[b] - window)
                chosen = torch.cat([clusters, chosen[:, -window:]], 1)
            store.replace(b, chosen, (keys, values), seen[b])

    def pooled(self, weight: Tensor) -> Tensor:
        """Average over `pool` neighbouring positions; beyond both ends there are zeros: (H,m) -> (H,m)."""
        return F.avg_pool1d(weight, self.pool, stride=1, padding=self.pool // 2)

    def step(self, store: Slots, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Attend to the kept tokens and to the current one, which takes a new slot."""
        return attend_and_append(store, q, token, **softmax)

    def fused(
        self, kernels: Kernels, store: Slots, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """The same step by a backend's kernel."""
        return kernels.ring_slots(store, q, needed(token), **softmax)

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype, dropped: int | None = None) -> Traffic:
        """Count 2(k + g)D + 2D elements.

        dropped: tokens that the rows of the batch have dropped, over all of them (Store.observed); None: n is the
        length of the prompt, and nothing was generated since.
        """
        B, H, _, D = shape
        rows = H * (2 * self._held(n, B, dropped) + 2 * B)
        return Traffic.of(1, rows * D, *self.row_format(D).traffic(rows, dtype))

    def bound(self, n: int, shape: Shape, dtype: torch.dtype, dropped: int | None = None) -> int:
        """The bytes of k rows of K and V for a prompt of n tokens; with `dropped`, as of `traffic`, of k + g rows."""
        return self.row_format(shape.D).nbytes(2 * shape.H * self._held(n, shape.B, dropped), dtype)

    def _held(self, n: int, batch: int, dropped: int | None) -> int:
        """Tokens that the rows of the batch hold, over all of them."""
        return batch * min(budget_in_tokens(self.k, n), n) if dropped is None else batch * n - dropped
