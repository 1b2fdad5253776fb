"""SnapKV (Li et al. 2024, arXiv 2404.14469, section 4): the end of a prompt says which of its tokens are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from .. import ops
from ..ops import SoftmaxOptions
from ..stores.base import Shape
from ..stores.slots import Slots
from .base import Traffic, check_whole
from .slots import ChoosingMethod, best

WINDOW = 32  # the default of the authors' code


@dataclass(frozen=True, repr=False)
class SnapKV(ChoosingMethod):
    """Keep k tokens of the prompt, chosen once at its end, and every token after it. Reads 2(k + g)D + 2D elements.

    g is the number of tokens since the prompt: the cache grows with them, as in the paper, which compresses prompts
    only. k: tokens; a float is a fraction of the prompt. window: the last tokens of the prompt, which stay and whose
    queries choose the others (None: 32, and at most half of k). pool: how many neighbouring positions share their
    weights, an odd number, so that what is kept comes in clusters.

    The weights that the window's queries give are added up, averaged over the group of a KV head and then over `pool`
    positions (the authors' code, whose defaults these are; there each query head keeps tokens of its own). A later
    prompt block chooses anew among all that the store has and the block.
    """

    window: int | None = None
    pool: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None:
            check_whole("window", self.window, 1, 2**31 - 1 if isinstance(self.k, float) else self.k)
        check_whole("pool", self.pool, 1)
        if self.pool % 2 == 0:
            raise ValueError(f"pool = {self.pool} must be odd, so that a position is the middle of its neighbours")

    def observed_tokens(self, budget: int) -> int:
        """How many tokens the window has, for a budget in tokens."""
        return min(WINDOW, max(1, budget // 2)) if self.window is None else min(self.window, budget)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Slots:
        """An empty store of slots that grows."""
        return Slots(shape, dtype, device, 0, kv=self.kv, grows=True)

    def make_room(self, store: Slots, candidates: Sequence[int], seen: Sequence[int]) -> None:
        """Make room for what stays of a prompt; what comes after it makes room for itself."""
        kept = (min(self.budget(s), m) for s, m in zip(seen, candidates, strict=True))
        store.reserve(max(c - f for c, f in zip(kept, store.filled, strict=True)))

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
        """The window and the tokens to which its queries attend most; a prompt of no more than k stays whole."""
        tokens = torch.arange(keys.shape[1], device=keys.device).expand(store.shape.H, -1)
        kept = min(self.budget(seen), keys.shape[1])
        if kept == keys.shape[1]:
            return tokens, ()
        window = self.observed_tokens(kept)
        weight = self.pooled(ops.key_scores(q[:, :, -window:], keys, **softmax)[:, :-window])
        clusters = best(weight, tokens[:, :-window], kept - window)
        return torch.cat([clusters, tokens[:, -window:]], 1), ()

    def pooled(self, weight: Tensor) -> Tensor:
        """Average over `pool` neighbouring positions; beyond both ends there are zeros: (H,m) -> (H,m)."""
        return F.avg_pool1d(weight, self.pool, stride=1, padding=self.pool // 2)

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype, dropped: int | None = None) -> Traffic:
        """Count 2(k + g)D + 2D elements.

        dropped: tokens that the rows of the batch have dropped, over all of them (Store.observed); None: n is the
        length of the prompt, and nothing was generated since.
        """
        B, H, _, D = shape
        rows = H * (2 * self._kept_tokens(n, B, dropped) + 2 * B)
        return Traffic.of(1, rows * D, *self.row_format(D).traffic(rows, dtype))

    def bound(self, n: int, shape: Shape, dtype: torch.dtype, dropped: int | None = None) -> int:
        """The bytes of k rows of K and V for a prompt of n tokens; with `dropped`, as of `traffic`, of k + g rows."""
        return self.row_format(shape.D).nbytes(2 * shape.H * self._kept_tokens(n, shape.B, dropped), dtype)

    def _kept_tokens(self, n: int, batch: int, dropped: int | None) -> int:
        """How many tokens the rows of the batch keep, over all of them."""
        return batch * min(self.budget(n), n) if dropped is None else batch * n - dropped
