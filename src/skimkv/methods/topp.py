"""Top-p (Twilight, Lin et al., NeurIPS 2025, arXiv 2502.02770): as few rows as hold a share p of the softmax weights.

Twilight has two steps: any sparse method selects candidates, and its pruner keeps the smallest set of them that holds
the share p of the weights, which it estimates with keys in 4 bits. This is the pruner with every cached token as a
candidate: each head and step chooses its own number of rows. Equations are numbered here and not as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import SoftmaxOptions, Token
from ..ops.blocks import attend_rows
from ..stores.base import Shape, compute_dtype
from ..stores.channel_index import IndexFormat
from ..stores.full import Full
from .base import Method, Traffic
from .skim import compact
from .sparq import approximate_scores


@dataclass(frozen=True, repr=False)
class TopP(Method[Full]):
    """Read an index of all channels in 4 bits, and the rows that hold the share p of the weights by it.

    p: a share, above 0 and at most 1; 1 reads every row. For each query head the set is the smallest whose estimated
    weights sum to at least p. A KV head reads the union of its group's sets and the current token, and every query of
    the group attends to all of these rows. Reads ND numbers of 4 bits and 2mD elements for m rows; how many these are
    depends on the data. The index is SparQ's with channels="int4", whose codes are scaled by channel and 256 tokens.
    """

    p: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.p)

    def _index(self, D: int) -> IndexFormat:
        return IndexFormat("int4", D)

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Full:
        """An empty store of every token, with an index in 4 bits."""
        return Full(shape, dtype, device, "int4", kv=self.kv, varying=True)

    def step(self, store: Full, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Estimate all weights by the index, keep the smallest sets that hold the share p, and attend to their union.

        Gradients take the choice as given.
        """
        if token is not None:
            store.append_token(*token)
        x = q.to(compute_dtype(store.dtype))
        # (1) s_hat = softmax(q K_hat^T / sqrt D), K_hat being the keys in 4 bits
        every = torch.arange(store.shape.D, device=x.device).expand(*x.shape[:2], -1)
        logits = x @ store.read_channels(every) * softmax["scale"]
        weights = approximate_scores(logits, store, softmax.get("softcap"), softmax.get("sinks"))  # (B,H,G,N)
        # (2) I = the smallest set whose s_hat sums to at least p, for each query; the union over the group is read
        last = torch.tensor(store.lengths, device=store.device)[:, None, None] - 1
        current = torch.arange(weights.shape[-1], device=x.device) == last
        chosen = smallest_set(weights.detach(), self.p, softmax.get("sinks") is not None).any(2) & store.valid()
        rows, valid = compact(chosen | current)
        # (3) y = softmax(q K_I^T / sqrt D) V_I
        y, _ = attend_rows(x, store.read_keys(rows, valid), store.read_values(rows, valid), valid, **softmax)
        read = valid.sum((1, 2)) - store.shape.H
        store.rows_read = torch.stack([read, read], -1)
        return y.masked_fill(weights.isnan().any(-1, keepdim=True), torch.nan).to(q.dtype)

    def traffic(
        self,
        n: int,
        shape: Shape,
        dtype: torch.dtype,
        key_rows: int | None = None,
        value_rows: int | None = None,
    ) -> Traffic:
        """Count the index of n tokens, the rows that were chosen, and what an append writes, as this code moves them.

        key_rows, value_rows: rows of K and of V that the step reads, over all heads and rows of the batch, the current
        token not included; they are equal here. None: all rows, the most there can be. `paper` is n D + 2 m D + 2D for
        m rows of a KV head.
        """
        D, heads, index = shape.D, shape.B * shape.H, self._index(shape.D)
        key_rows = heads * n if key_rows is None else key_rows
        value_rows = key_rows if value_rows is None else value_rows
        rows = self.row_format(D).traffic(key_rows + value_rows + 2 * heads, dtype)
        scanned = index.read(n, D, dtype) + index.append(n, dtype)
        paper = heads * (n * D + 2 * D) + (key_rows + value_rows) * D
        return Traffic.of(1, paper, *rows, *((heads * count, each) for count, each in scanned))

    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes of K and V, and of the index with its scales and its open group."""
        rows = self.row_format(shape.D).nbytes(2 * n, dtype)
        return shape.B * shape.H * (rows + self._index(shape.D).bound(n, dtype))


def check_share(p: float) -> None:
    """Raise ValueError unless p is a share of the weights."""
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 < p <= 1:
        raise ValueError(f"p = {p!r} must be a share of the weights, above 0 and at most 1")


def smallest_set(weights: Tensor, p: float, sinks: bool) -> Tensor:
    """Which positions are in the smallest set of each query with a weight of at least p: (...,N) -> (...,N) bool.

    Of equal weights the older ones come first. sinks: the weights sum to less than 1, and a sink has the rest of the
    mass; it counts as in the set, because it is not read. Without sinks the set of p = 1 is everything.
    """
    if p == 1:
        return torch.ones_like(weights, dtype=torch.bool)
    largest, order = weights.sort(dim=-1, descending=True, stable=True)
    held = 1 - weights.sum(-1, keepdim=True) if sinks else 0
    before = held + largest.cumsum(-1) - largest  # the mass that is held before each position is taken
    return torch.zeros_like(weights, dtype=torch.bool).scatter(-1, order, before < p)
