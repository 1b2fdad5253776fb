"""Low rank: choose by a fixed random projection of the keys (the baseline of SparQ fig. 7a)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import KernelStep, SoftmaxOptions, Token, kernel_step
from ..ops.blocks import attend_rows, choose_positions
from ..stores.base import Shape, compute_dtype
from ..stores.channel_index import IndexFormat
from ..stores.full import Full
from .base import Method, Traffic, check_whole
from .sparq import approximate_scores, covered_mass


@dataclass(frozen=True, repr=False)
class LowRank(Method[Full]):
    """Scores from (q P)(K P)^T, P (H,D,r) with orthonormal columns, one per KV head, drawn from `seed`.

    Reads Nr + 2kD + 2D elements by the paper; writing K P (r) and reading P (Dr per KV head) are counted too.
    """

    r: int
    k: int
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("r", self.r, 1)
        check_whole("k", self.k, 1)
        check_whole("seed", self.seed, 0)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Full:
        """An empty store of every token, with an index of K @ P. Raises ValueError if r exceeds the head size."""
        check_whole("r", self.r, 1, shape.D)
        draw = torch.Generator().manual_seed(self.seed)
        normal = torch.randn(shape.H, shape.D, shape.D, generator=draw, dtype=torch.float64, device="cpu")
        projection = torch.linalg.qr(normal).Q[..., : self.r].float().contiguous().to(device)
        return Full(shape, dtype, device, "copy", projection=projection, kv=self.kv)

    def step(self, store: Full, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Approximate scores of every position in the projection, then attention over the k best rows."""
        if token is not None:
            store.append_token(*token)
        assert store.projection is not None
        x = q.to(compute_dtype(store.dtype))
        P = store.projection.to(x.dtype)  # (H,D,r)
        store.count(P.numel(), 4)
        all_channels = torch.arange(store.R, device=q.device).expand(*q.shape[:2], -1)
        logits = (x @ P) @ store.read_channels(all_channels) * softmax["scale"]
        s_hat = approximate_scores(logits, store, softmax.get("softcap"), softmax.get("sinks"))
        index, valid = choose_positions(s_hat.sum(2), store.lengths, self.k, 0)
        y, _ = attend_rows(x, store.read_keys(index, valid), store.read_values(index, valid), valid, **softmax)
        return y.masked_fill(covered_mass(s_hat, index, valid).isnan(), torch.nan).to(q.dtype)

    def kernel(self, store: Full) -> KernelStep:
        """The kernel of the same step."""
        return kernel_step("low_rank", k=self.k)

    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """Count Nr + 2kD + 2D elements, the write of K P (r), and P itself (Dr per KV head)."""
        B, H, _, D = shape
        paper, index = n * self.r + 2 * self.k * D + 2 * D, IndexFormat("copy", self.r)
        rows = self.row_format(D).traffic(2 * min(self.k, n) + 2, dtype)
        cache = Traffic.of(B * H, paper, *rows, *index.read(n, self.r, dtype), *index.append(n, dtype))
        projection = H * D * self.r
        return Traffic(cache.elements + projection, cache.bytes + 4 * projection, cache.paper)

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of K and V, of the index (Nr per KV head and row) and of P."""
        B, H, _, D = shape
        rows = self.row_format(D).nbytes(2 * n, dtype)
        return B * H * (rows + IndexFormat("copy", self.r).bound(n, dtype)) + 4 * H * D * self.r
