"""benchmarks/divergence.py with RaBitQCache among the methods: python benchmarks/rabitqcache.py TEXTS --method SPEC

The arguments are those of divergence.py, whose --method then knows RaBitQCache(p=0.85). It is no method of the package,
because its index needs the queries of one prompt, which a cache that is cropped, shared or filled in blocks does not
have. Where skimkv is not installed, write PYTHONPATH=src in front.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from skimkv import ops
from skimkv.methods import register
from skimkv.methods.base import Method, Traffic
from skimkv.methods.skim import compact
from skimkv.methods.topp import check_share, smallest_set
from skimkv.ops import SoftmaxOptions, Token
from skimkv.ops.blocks import apply_softcap, attend_rows
from skimkv.stores.base import Shape, compute_dtype
from skimkv.stores.full import Full
from skimkv.stores.signs import rotate, width

INTERVAL = 128  # tokens: the first so many have no code, and later ones get theirs so many at a time


class CentredSigns(Full):
    """A store of every token, with the signs of rotated keys around the mean key of the prompt.

    k_centre (B,H,D), q_centre (B,H,G,D): the mean key of each head of the prompt, and the mean query. Of the m tokens
    that are coded, the first of which is INTERVAL: signs (B,H,m,D) int8, scales (B,H,m), and products (B,H,G,m), those
    of q_centre with the key.
    """

    k_centre: Tensor
    q_centre: Tensor
    signs: Tensor
    scales: Tensor
    products: Tensor

    def learn(self, q: Tensor, k: Tensor) -> None:
        """Take the centres from a prompt, q (B,H,G,n,D) and k (B,H,n,D), and code its tokens."""
        (B, H, G, D), x = self.shape, compute_dtype(self.dtype)
        self.k_centre, self.q_centre = (t.to(x).mean(-2).to(self.dtype) for t in (k, q))
        self.signs = torch.empty(B, H, 0, D, dtype=torch.int8, device=self.device)
        self.scales, self.products = (torch.empty(B, H, *n, 0).to(k) for n in ((), (G,)))
        self.code(self.lengths[0])

    @property
    def coded(self) -> int:
        """The number of tokens that have a code."""
        return self.signs.shape[2]

    def code(self, stop: int) -> None:
        """Code the tokens up to position `stop`, from those that have no code on."""
        start = INTERVAL + self.coded
        if stop <= start:
            return
        k, centre, query = (
            t.to(compute_dtype(self.dtype))
            for t in (self.uncounted("k")[:, :, start:stop], self.k_centre, self.q_centre)
        )
        x = rotate(k - centre[:, :, None])
        scales = x.square().sum(-1) / x.abs().sum(-1).clamp(min=torch.finfo(x.dtype).tiny)
        self.signs = torch.cat([self.signs, torch.where(x > 0, 1, -1).to(torch.int8)], 2)
        self.scales = torch.cat([self.scales, scales.to(self.dtype)], 2)
        self.products = torch.cat([self.products, (query @ k.mT).to(self.dtype)], 3)

    def estimate(self, q: Tensor) -> Tensor:
        """Read the index, and estimate the products of queries (B,H,G,D) with all coded keys: (B,H,G,m).

        With the centres c_q and c_k it is <q - c_q, k - c_k> + q.c_k + c_q.k - c_q.c_k; only the first is estimated.
        """
        parts = (self.k_centre, self.q_centre, self.scales, self.products)
        k_centre, q_centre, scales, products = (t.to(q.dtype) for t in parts)
        for part in parts:
            self.count(part.numel(), self.dtype.itemsize)
        self.count(self.signs[..., 0].numel() * width(self.shape.D), 1)
        centred = q - q_centre
        estimated = rotate(centred) @ self.signs.to(q.dtype).mT * scales[:, :, None]
        return estimated + centred @ k_centre[..., None] + products

    def share(self, rows: Sequence[int]) -> CentredSigns:
        """A store of these rows, as of `Full.share`; the index is copied."""
        twin = super().share(rows)
        assert isinstance(twin, CentredSigns)
        for name in ("k_centre", "q_centre", "signs", "scales", "products"):
            setattr(twin, name, getattr(self, name)[list(rows)])
        return twin

    def observed(self, row: int | None = None) -> dict[str, int]:
        """The rows of K and V that the last step read, and how many tokens have a code."""
        rows = super().observed(row)
        return rows and {**rows, "coded": self.coded}


@dataclass(frozen=True, repr=False)
class RaBitQCache(Method[CentredSigns]):
    """RaBitQCache (Li et al., ICML 2026, arXiv 2606.31519), as the code of its authors chooses tokens.

    p: the share of the estimated weights of the coded tokens that each query's set of them holds. Read besides are the
    first 128 tokens and the newest, which have no code. A KV head reads the union of its group's sets, and its queries
    attend to all these rows, where in the authors' code each attends to its own. Of the norm and <o_bar, o> only the
    quotient is kept. Queries are not rounded, as in the authors' accuracy tests. What coding new tokens moves is not
    counted.
    """

    p: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.p)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> CentredSigns:
        """An empty store."""
        return CentredSigns(shape, dtype, device, kv=self.kv, varying=True)

    def take(
        self,
        store: CentredSigns,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        pad: Sequence[int] | None = None,
        **softmax: Unpack[SoftmaxOptions],
    ) -> None:
        """Keep the prompt, and code it. Raises ValueError if it has padding, or is not the first block."""
        if any(store.lengths) or any(pad or ()):
            raise ValueError("RaBitQCache takes its centres from one prompt: no padding, and no second block")
        ops.append_block(store, k, v, None)
        store.learn(q, k)

    def step(self, store: CentredSigns, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Estimate the weights of the coded tokens, and attend to the sets that hold the share p, and to the others."""
        if token is not None:
            store.append_token(*token)
        n = store.lengths[0]
        if n - INTERVAL - store.coded >= INTERVAL:
            store.code(n)
        x = q.to(compute_dtype(store.dtype))
        logits = apply_softcap(store.estimate(x) * softmax["scale"], softmax.get("softcap"))
        chosen = store.valid().expand(*x.shape[:2], -1).clone()
        chosen[..., INTERVAL : INTERVAL + store.coded] = smallest_set(logits.softmax(-1), self.p, False).any(2)
        rows, valid = compact(chosen)
        y, _ = attend_rows(x, store.read_keys(rows, valid), store.read_values(rows, valid), valid, **softmax)
        read = valid.sum((1, 2)) - store.shape.H
        store.rows_read = torch.stack([read, read], -1)
        return y.to(q.dtype)

    def traffic(
        self,
        n: int,
        shape: Shape,
        dtype: torch.dtype,
        key_rows: int | None = None,
        value_rows: int | None = None,
        coded: int | None = None,
    ) -> Traffic:
        """Count the index of the coded tokens and the rows that were read; by default all."""
        (B, H, G, D), coded = shape, max(0, n - INTERVAL) if coded is None else coded
        key_rows = B * H * n if key_rows is None else key_rows
        value_rows = key_rows if value_rows is None else value_rows
        rows = self.row_format(D).traffic(key_rows + value_rows + 2 * B * H, dtype)
        index = B * H * (coded * (1 + G) + (1 + G) * D)
        codes = B * H * coded * width(D)
        paper = B * H * (coded * D + 2 * D) + (key_rows + value_rows) * D
        return Traffic.of(1, paper, *rows, (index, dtype.itemsize), (codes, 1))

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of K and V, of a bit and 1 + G numbers for each token, and of the centres."""
        B, H, G, D = shape
        rows = self.row_format(D).nbytes(2 * n, dtype)
        return B * H * (rows + n * width(D) + (1 + G) * (n + D) * dtype.itemsize)


if __name__ == "__main__":
    import divergence  # beside this file

    register(RaBitQCache)
    sys.exit(divergence.main())
