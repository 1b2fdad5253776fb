"""Clusters: the store of SubGen's algorithm 1, online k-centre clusters of keys and an l2 reservoir of values."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Part, Shape, Store, compute_dtype

TOKENS = 256  # of a prompt taken at once
_WORD = 0xFFFFFFFF


def _mix(h: Tensor) -> Tensor:
    """The finaliser of a 32-bit hash, in int64 (products wrap, the low word is right)."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B & _WORD
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & _WORD
    return h ^ (h >> 16)


def coins(seed: int, stream: int, start: int, H: int, n: int, slots: int, device: torch.device) -> Tensor:
    """(H,n,slots) float64 uniform in [0,1): a pure function of (seed, stream, token, head, slot).

    Counter-based, so a replay, a padded batch and another batch size all flip the same coins.
    """
    parts = (
        torch.full((1, 1, 1), stream, device=device),
        torch.arange(start, start + n, device=device)[None, :, None],
        torch.arange(H, device=device)[:, None, None],
        torch.arange(slots, device=device),
    )
    h = _mix(torch.full((1, 1, 1), seed & _WORD, device=device))
    for x in parts:
        h = _mix((h * 0x9E3779B1 + x) & _WORD)
    return h.double() / 2**32


class Block(Part):
    """Clusters start .. start+cap-1: rep (B,H,cap,D), samples (B,H,cap,t,D), size (B,H,cap) int32."""

    def __init__(self, start: int, rep: Tensor, samples: Tensor, size: Tensor) -> None:
        self.start, self.cap, self.rep, self.samples, self.size = start, rep.shape[2], rep, samples, size


class Clusters(Store):
    """D = {(x_i, S_i, n_i)} and M of alg. 1, per KV head; m (B,H) int64 clusters are in use.

    k, v (B,H,s,D): the reservoir M. mu (B,H) float64: the sum of squared norms of all values.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | str,
        delta: float,
        t: int,
        s: int,
        seed: int,
    ) -> None:
        super().__init__(shape, dtype, device)
        B, H, _, D = shape
        self.delta, self.t, self.s, self.seed = delta, t, s, seed
        self.blocks: list[Block] = []
        self.m = torch.zeros(B, H, dtype=torch.int64, device=self.device)
        self.k, self.v = (torch.zeros(B, H, s, D, dtype=dtype, device=self.device) for _ in "kv")
        self.mu = torch.zeros(B, H, dtype=torch.float64, device=self.device)

    def _reserve(self, m: int) -> None:
        B, H, _, D = self.shape
        start = self.blocks[-1].start + self.blocks[-1].cap if self.blocks else 0
        if m > start:
            cap = -(-max(m - start, start // 8) // 8) * 8
            rep = torch.zeros(B, H, cap, D, dtype=self.dtype, device=self.device)
            samples = torch.zeros(B, H, cap, self.t, D, dtype=self.dtype, device=self.device)
            size = torch.zeros(B, H, cap, dtype=torch.int32, device=self.device)
            self.blocks.append(Block(start, rep, samples, size))

    def whole(self, name: str) -> Tensor:
        """Uncounted: rep, samples or size of all clusters, (B,H,M,...)."""
        if not self.blocks:
            self._reserve(1)
        return torch.cat([getattr(block, name) for block in self.blocks], 2)

    def _append(self, rows: slice, start: int, k: Tensor, v: Tensor) -> None:
        for a in range(0, k.shape[2], TOKENS):
            self._clusters(rows, start + a, k[:, :, a : a + TOKENS])
            self._reservoir(rows, start + a, k[:, :, a : a + TOKENS], v[:, :, a : a + TOKENS])

    def _clusters(self, rows: slice, start: int, k: Tensor) -> None:
        """UpdateSoftmaxNormalizer for n tokens at once; equal to taking them one by one."""
        n, H = k.shape[2], k.shape[1]
        x, m = k.to(compute_dtype(self.dtype)), self.m[rows]
        exact = "donot_use_mm_for_euclid_dist"
        self._reserve(1)
        reps = (block.rep[rows].to(x.dtype) for block in self.blocks)
        old = torch.cat([torch.cdist(x, rep, compute_mode=exact) for rep in reps], -1)
        old = old.masked_fill(torch.arange(old.shape[-1], device=k.device) >= m[..., None, None], torch.inf)
        new = torch.cdist(x, x, compute_mode=exact)  # (b,H,n,n)
        # a token founds a cluster if no representative before it is within delta
        far, near = ~(old <= self.delta).any(-1), new <= self.delta
        founds = torch.zeros_like(far)
        for j in range(n):
            founds[..., j] = far[..., j] & ~(near[..., j, :j] & founds[..., :j]).any(-1)
        number = m[..., None] + founds.cumsum(-1) - 1
        self._reserve(int(number.max()) + 1)
        before = torch.ones(n, n, dtype=torch.bool, device=k.device).tril()  # [i, j]: j <= i
        new = new.masked_fill(~(before & founds[..., None, :]), torch.inf)
        nearest = torch.cat([old, new], -1).nan_to_num(torch.inf).argmin(-1)
        M = old.shape[-1]
        founder = number.gather(-1, (nearest - M).clamp_min(0))
        cluster = torch.where(founds, number, torch.where(nearest < M, nearest, founder))
        same = cluster[..., :, None] == cluster[..., None, :]  # (b,H,n,n)
        size = self.whole("size")[rows].long()
        count = size.gather(-1, cluster) + (same & before).sum(-1)
        accepted = coins(self.seed, 0, start, H, n, self.t, k.device) < 1 / count.double()[..., None]  # (b,H,n,t)
        later = (same & ~before).to(x.dtype) @ accepted.to(x.dtype)
        last = accepted & (later == 0)
        size.scatter_add_(-1, cluster, torch.ones_like(cluster))
        for block in self.blocks:
            here, stop = block.start, block.start + block.cap
            at = (founds & (number >= here) & (number < stop)).nonzero(as_tuple=True)
            block.rep[rows][at[0], at[1], number[at] - here] = k[at]
            won = (last & ((cluster >= here) & (cluster < stop))[..., None]).nonzero(as_tuple=True)
            block.samples[rows][won[0], won[1], cluster[won[:3]] - here, won[3]] = k[won[:3]]
            block.size[rows] = size[..., here:stop].int()
        self.m[rows] = number[..., -1] + 1
        _, _, _, D = self.shape
        heads, total = m.numel(), int(self.m[rows].sum())
        self.count((total * D + heads * self.t * D) * n, k.element_size())
        self.count(heads * n, 4)

    def _reservoir(self, rows: slice, start: int, k: Tensor, v: Tensor) -> None:
        """UpdateMatrixProduct: entry i becomes (k, v) with probability |v|^2 / (mu + |v|^2)."""
        n, H = k.shape[2], k.shape[1]
        norm = v.double().square().sum(-1)
        mu = torch.cat([self.mu[rows][..., None], norm], -1).cumsum(-1)[..., 1:]  # (b,H,n), added in order of time
        p = torch.where(mu > 0, norm / mu, 0)
        accepted = coins(self.seed, 1, start, H, n, self.s, k.device) < p[..., None]  # (b,H,n,s)
        last = (accepted * torch.arange(1, n + 1, device=k.device)[:, None]).amax(-2)  # (b,H,s), 0: keep
        source = (last - 1).clamp_min(0)[..., None].expand(-1, -1, -1, self.shape.D)
        for held, x in ((self.k, k), (self.v, v)):
            held[rows] = torch.where(last[..., None] > 0, x.gather(2, source), held[rows])
        self.mu[rows] = mu[..., -1]
        self.count(2 * held[rows].numel() * n, k.element_size())
        self.count(2 * norm.numel(), 8)

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All that the estimator reads, counted: samples (B,H,M,t,D), size (B,H,M), k and v (B,H,s,D)."""
        clusters, D = int(self.m.sum()), self.shape.D
        self.count(clusters * self.t * D + 2 * self.k.numel(), self.dtype.itemsize)
        self.count(clusters, 4)
        to = compute_dtype(self.dtype)
        return self.whole("samples").to(to), self.whole("size").to(to), self.k.to(to), self.v.to(to)

    @property
    def nbytes(self) -> int:
        size, D = self.dtype.itemsize, self.shape.D
        clusters = int(self.m.sum()) * ((1 + self.t) * D * size + 4)
        return clusters + 2 * self.k.numel() * size + self.mu.nbytes + self.m.nbytes
