"""TOVA: token omission via attention (Oren et al. 2024, arXiv 2401.06104, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from .. import ops
from ..ops import KernelStep, SoftmaxOptions, Token
from ..stores.base import Shape, compute_dtype
from ..stores.slots import Slots
from .slots import ChoosingMethod, attend_slots, best, needed


@dataclass(frozen=True, repr=False)
class TOVA(ChoosingMethod):
    """Keep k tokens, and drop the one that the last query attended to least. Reads 2kD + 2D elements.

    k: the budget in tokens; a float is a fraction of the prompt. The weights are averaged over all query heads of the
    layer, as in the paper, so every KV head keeps the same tokens. The last query alone decides, and nothing is
    remembered of earlier ones; there is no recent window, and the current token may be the one that is dropped. A
    prompt is attended to whole, and then the k tokens stay to which its last query attended most.
    """

    def kernel(self, store: Slots) -> KernelStep:
        """The kernel of the same step."""
        return KernelStep("tova", recent=(0,) * store.shape.B)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Slots:
        """An empty store of slots; `take` sets their number."""
        return Slots(shape, dtype, device, self.budget(1), kv=self.kv)

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
        """The tokens to which the block's last query attends most, the same in all KV heads."""
        weight = layer_mean(ops.key_scores(q[:, :, -1:], keys, **softmax))
        age = torch.arange(keys.shape[1], device=keys.device)
        return best(weight[None], age[None], min(store.budget[b], len(age))).expand(store.shape.H, -1), ()

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


def layer_mean(weight: Tensor) -> Tensor:
    """Average weights over the KV heads of the layer, leaving out those that are not numbers: (H,...) -> (...)."""
    return weight.nan_to_num(0).mean(0)
