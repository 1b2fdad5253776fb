"""Clusters: the store of SubGen's algorithm 1, clusters of keys and a reservoir of pairs of key and value."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .base import Part, Shape, Store, compute_dtype
from .memory import ordinary_tensors

UNIT = 8  # clusters; sizes of blocks are multiples of it


class Update(Protocol):
    """How a block of tokens, the same number for every row, enters a store of clusters: the method's algorithm."""

    def __call__(self, store: Clusters, rows: slice, start: int, k: Tensor, v: Tensor) -> None:
        """Take tokens start, start+1, ... of these rows of the batch: k, v (b,H,n,D)."""


class Block(Part):
    """The memory of clusters start .. start+cap-1.

    rep (B,H,cap,D) representatives · samples (B,H,cap,t,D) · size (B,H,cap) int32 members.
    """

    def __init__(self, start: int, rep: Tensor, samples: Tensor, size: Tensor) -> None:
        self.start, self.cap, self.rep, self.samples, self.size = start, rep.shape[2], rep, samples, size


class Clusters(Store):
    """D = {(x_i, S_i, n_i)} and M of algorithm 1, per KV head; m (B,H) int64 clusters are in use.

    x_i is a representative, S_i are t samples of the cluster's keys, n_i is its size. k, v (B,H,s,D): the reservoir M.
    mu (B,H) float64: the sum of the squared norms of all values. delta: radius of a cluster. seed: of the coins.
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
        update: Update,
    ) -> None:
        super().__init__(shape, dtype, device)
        B, H, _, D = shape
        self.delta, self.t, self.s, self.seed = delta, t, s, seed
        self._update = update
        self.blocks: list[Block] = []
        self.m = torch.zeros(B, H, dtype=torch.int64, device=self.device)
        self.k, self.v = (torch.zeros(B, H, s, D, dtype=dtype, device=self.device) for _ in "kv")
        self.mu = torch.zeros(B, H, dtype=torch.float64, device=self.device)
        # rows of D numbers that the last append wrote into samples and the reservoir; None after a kernel's append
        self.accepted_rows: int | None = 0

    def reserve(self, n: int = 1) -> None:
        """Make room for what n more tokens may found: n clusters in every row and KV head."""
        self.reserve_clusters(int(self.m.max()) + n)

    def reserve_clusters(self, m: int) -> None:
        """Make room for m clusters in all: if there is none, one more block, at least an eighth of the rest."""
        B, H, _, D = self.shape
        start = self.blocks[-1].start + self.blocks[-1].cap if self.blocks else 0
        if m > start:
            cap = -(-max(m - start, start // 8) // UNIT) * UNIT
            with ordinary_tensors():
                rep = torch.zeros(B, H, cap, D, dtype=self.dtype, device=self.device)
                samples = torch.zeros(B, H, cap, self.t, D, dtype=self.dtype, device=self.device)
                size = torch.zeros(B, H, cap, dtype=torch.int32, device=self.device)
            self.blocks.append(Block(start, rep, samples, size))

    def uncounted(self, name: str) -> Tensor:
        """Give rep, samples or size of all clusters, without counting the read: (B,H,M,...)."""
        if not self.blocks:
            self.reserve_clusters(1)
        return torch.cat([getattr(block, name) for block in self.blocks], 2)

    def _append(self, rows: slice, start: int, k: Tensor, v: Tensor) -> None:
        if rows.start == 0:
            self.accepted_rows = 0
        self._update(self, rows, start, k, v)

    def advance(self) -> None:
        """Note that a kernel has written one token into every row."""
        super().advance()
        self.accepted_rows = None

    @property
    def traffic_depends_on_data(self) -> bool:
        """True: how many clusters the keys form is no function of their number."""
        return True

    def observed(self, row: int | None = None) -> dict[str, int]:
        """How many clusters there are, and for the whole batch the rows that the last append wrote, where known."""
        if row is not None:
            return {"clusters": int(self.m[row].sum())}
        accepted = {} if self.accepted_rows is None else {"accepted_rows": self.accepted_rows}
        return {"clusters": int(self.m.sum()), **accepted}

    def assign(self, rows: slice, k: Tensor, cluster: Tensor, founds: Tensor, accepted: Tensor, last: Tensor) -> None:
        """Write a block of n keys into their clusters.

        k (b,H,n,D) · cluster (b,H,n) the number of each key's cluster · founds (b,H,n) bool, the key is the
        representative of a new cluster · accepted (b,H,n,t) bool, the key takes that sample · last (b,H,n,t) bool, and
        no later key of the block takes it.
        Counted as n tokens one by one: every representative is read or written, samples are written where a key was
        accepted, and a size is written.
        """
        n, D, m = k.shape[2], self.shape.D, self.m[rows]
        number = m + founds.sum(-1)
        self.reserve_clusters(int(number.max()))
        size = self.uncounted("size")[rows].long()
        size.scatter_add_(-1, cluster, torch.ones_like(cluster))
        for block in self.blocks:
            here, stop = block.start, block.start + block.cap
            inside = (cluster >= here) & (cluster < stop)
            at = (founds & inside).nonzero(as_tuple=True)
            block.rep[rows][at[0], at[1], cluster[at] - here] = k[at]
            at = (last & inside[..., None]).nonzero(as_tuple=True)
            block.samples[rows][at[0], at[1], cluster[at[:3]] - here, at[3]] = k[at[:3]]
            block.size[rows] = size[..., here:stop].int()
        self.m[rows] = number
        taken = int(accepted.sum())
        self.accepted_rows = (self.accepted_rows or 0) + taken
        self.count(int(number.sum()) * D * n + taken * D, k.element_size())
        self.count(m.numel() * n, 4)

    def resample(self, rows: slice, k: Tensor, v: Tensor, accepted: Tensor, mu: Tensor) -> None:
        """Write a block of n tokens into the reservoir.

        k, v (b,H,n,D) · accepted (b,H,n,s) bool, the token takes the place of that pair · mu (b,H) the new sum of
        squared norms. Counted as n tokens one by one: a pair is written where a token was accepted, mu is read and
        written.
        """
        n = k.shape[2]
        source = (accepted * torch.arange(1, n + 1, device=k.device)[:, None]).amax(-2)  # (b,H,s), 0: keep
        at = (source - 1).clamp_min(0)[..., None].expand(-1, -1, -1, self.shape.D)
        for reservoir, x in ((self.k, k), (self.v, v)):
            reservoir[rows] = torch.where(source[..., None] > 0, x.gather(2, at), reservoir[rows])
        self.mu[rows] = mu
        taken = 2 * int(accepted.sum())
        self.accepted_rows = (self.accepted_rows or 0) + taken
        self.count(taken * self.shape.D, k.element_size())
        self.count(2 * mu.numel() * n, 8)

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Read all that the estimator needs: samples (B,H,M,t,D), size (B,H,M), and k and v (B,H,s,D)."""
        clusters, D = int(self.m.sum()), self.shape.D
        self.count(clusters * self.t * D + 2 * self.k.numel(), self.dtype.itemsize)
        self.count(clusters, 4)
        to = compute_dtype(self.dtype)
        return self.uncounted("samples").to(to), self.uncounted("size").to(to), self.k.to(to), self.v.to(to)

    @property
    def nbytes(self) -> int:
        """Live bytes: the clusters in use, the reservoir, mu and the number of clusters."""
        size, D = self.dtype.itemsize, self.shape.D
        clusters = int(self.m.sum()) * ((1 + self.t) * D * size + 4)
        return clusters + 2 * self.k.numel() * size + self.mu.nbytes + self.m.nbytes
