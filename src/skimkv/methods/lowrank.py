"""Low rank: choose by a fixed random projection of the keys (the baseline of SparQ fig. 7a)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..stores.base import Shape, Store
from ..stores.full import Full
from .base import Method, Traffic, check


@dataclass(frozen=True, repr=False)
class LowRank(Method):
    """Scores from (q P)(K P)^T, P (H,D,r) with orthonormal columns, one per KV head, drawn from `seed`.

    Nr + 2kD + 2D elements by the paper; writing K P (r) and reading P (Dr per KV head) are counted too.
    """

    r: int
    k: int
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check("r", self.r, 1)
        check("k", self.k, 1)
        check("seed", self.seed, 0)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Full:
        check("r", self.r, 1, shape.D)
        draw = torch.Generator().manual_seed(self.seed)
        normal = torch.randn(shape.H, shape.D, shape.D, generator=draw, dtype=torch.float64)
        projection = torch.linalg.qr(normal).Q[..., : self.r].float().contiguous().to(device)
        return Full(shape, dtype, device, "copy", projection=projection, kv=self.kv)

    def decode(
        self, store: Store, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
    ) -> Tensor:
        return ops.lowrank(store, q, scale, softcap, self.k, (k, v))

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        B, H, _, D = shape
        paper = n * self.r + 2 * self.k * D + 2 * D
        rows = self.form(D).parts(2 * min(self.k, n) + 2, dtype)
        cache, fixed = Traffic.of(B * H, paper, *rows, (n * self.r + self.r, dtype.itemsize)), H * D * self.r
        return Traffic(cache.elements + fixed, cache.bytes + 4 * fixed, cache.paper)

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        B, H, _, D = shape
        index = B * H * n * self.r * dtype.itemsize + 4 * H * D * self.r
        return self.form(D).nbytes(2 * B * H * n, dtype) + index
