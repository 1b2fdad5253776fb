"""TOVA: token omission via attention (Oren et al. 2024, arXiv 2401.06104, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from .. import ops
from ..ops import SoftmaxOptions, Token
from ..stores.base import Shape, compute_dtype
from ..stores.slots import Slots
from .base import Method, Traffic
from .slots import attend_slots, best, budget_in_tokens, check_budget, needed, with_block


@dataclass(frozen=True, repr=False)
class TOVA(Method[Slots]):
    """Keep k tokens, and drop the one that the last query attended to least. Reads 2kD + 2D elements.

    k: the budget in tokens; a float is a fraction of the prompt. The weights are averaged over all query heads of the
    layer, as in the paper, so every KV head keeps the same tokens. The last query alone decides, and nothing is
    remembered of earlier ones; there is no recent window, and the current token may be the one that is dropped. A
    prompt is attended to whole, and then the k tokens stay to which its last query attended most.
    """

    k: int | float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget("k", self.k)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Slots:
        """An empty store of slots; `take` sets their number."""
        return Slots(shape, dtype, device, budget_in_tokens(self.k, 1), kv=self.kv)

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
        """Keep the best of the kept tokens and the block by the attention of the block's last query."""
        n, pads = k.shape[2], store.validate(k, v, pad)
        seen = [length + n - p for length, p in zip(store.lengths, pads, strict=True)]
        store.set_budget([budget_in_tokens(self.k, length) for length in seen])
        for b, p in enumerate(pads):
            if p == n:
                continue
            keys, values = with_block(store, b, k[b, :, p:], v[b, :, p:])
            weight = ops.key_scores(q[b, :, :, -1:], store.row_format.decode(keys, k.dtype), **softmax)
            age = torch.arange(keys.shape[1], device=k.device)
            kept = min(store.budget[b], len(age))
            chosen = best(layer_mean(weight)[None], age[None], kept).expand(store.shape.H, -1)
            store.replace(b, chosen, (keys, values), seen[b])

    def step(self, store: Slots, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Attend to the kept tokens and to the current one; of them all the one with the least weight is dropped."""
        token = needed(token)
        y, weights = attend_slots(store, q.to(compute_dtype(store.dtype)), token, **softmax)
        weight = layer_mean(weights.mean(2).transpose(0, 1))  # (B,C'+1), the current token last
        slots, keeps = [], []
        for b, (filled, budget) in enumerate(zip(store.filled, store.budget, strict=True)):
            lowest = int(weight[b, :filled].argmin()) if filled == budget else filled
            slots.append(lowest)
            keeps.append(filled == budget and bool(weight[b, -1] < weight[b, lowest]))
        slot, keep = (torch.tensor(x, device=q.device)[:, None].expand(-1, store.shape.H) for x in (slots, keeps))
        store.put(slot, keep if any(keeps) else None, *token)
        return y.to(q.dtype)

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """Count 2kD + 2D elements. For a fractional budget, n is also taken as the length of the prompt."""
        k, D = budget_in_tokens(self.k, n), shape.D
        rows = self.row_format(D).traffic(2 * min(k, n) + 2, dtype)
        return Traffic.of(shape.B * shape.H, 2 * k * D + 2 * D, *rows)

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of at most k rows of K and V."""
        kept = min(budget_in_tokens(self.k, n), n)
        return self.row_format(shape.D).nbytes(shape.B * shape.H * 2 * kept, dtype)


def layer_mean(weight: Tensor) -> Tensor:
    """Average weights over the KV heads of the layer, leaving out those that are not numbers: (H,...) -> (...)."""
    return weight.nan_to_num(0).mean(0)
