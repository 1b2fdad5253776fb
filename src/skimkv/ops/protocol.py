"""The fused decode steps that a backend offers, and the current token that they take.

A method gives its algorithm in PyTorch; a kernel is an optional faster form of the same step. Every operation stands
here with all its arguments, so that a type checker sees them at both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from typing_extensions import Unpack

from ..stores.base import Store
from ..stores.clusters import Clusters
from ..stores.full import Full
from ..stores.slots import Slots
from .step import SoftmaxOptions as SoftmaxOptions
from .step import Token as Token


class Again(Protocol):
    """A decode step of a store, with all of its settings, to be taken again."""

    def take(self, store: Store, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Tensor | None:
        """Take the token k and v (B,H,D), and attend with q (B,H,G,D) -> (B,H,G,D) in q's dtype.

        None, and nothing was done, if the store, its last step or the form of the tensors is no longer the same: then
        an operation of `Kernels` checks them and says what is wrong. Raises RuntimeError if another thread uses the
        store (`Store.exclusive`).
        """


class Kernels(Protocol):
    """What a backend can do. Each decode step takes q (B,H,G,D) and returns (B,H,G,D) in q's dtype.

    token is appended first; None means that it was appended before. All operations raise ValueError for shapes, types
    or devices they do not have.
    """

    @property
    def name(self) -> str:
        """The name of the backend: "cpu" or "gpu"."""

    @property
    def max_head_size(self) -> int:
        """The largest head size D that the kernels take."""

    def append(self, store: Store, k: Tensor, v: Tensor) -> None:
        """Append one token per row: k, v (B,H,D)."""

    def again(self, store: Store) -> Again | None:
        """The last step of this store, which took a token, to be taken again; None where it cannot be."""

    def dense(self, store: Full, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Attention over all positions (methods/dense.py)."""

    def sparq(
        self,
        store: Full,
        q: Tensor,
        token: Token | None,
        *,
        r: int,
        k: int,
        local: int,
        temperature: str,
        mean_value: bool,
        **softmax: Unpack[SoftmaxOptions],
    ) -> Tensor:
        """Steps 1 to 3 of SparQ's algorithm 1 (methods/sparq.py)."""

    def top_k(
        self,
        store: Full,
        q: Tensor,
        token: Token | None,
        *,
        k: int,
        oracle: bool,
        **softmax: Unpack[SoftmaxOptions],
    ) -> Tensor:
        """Exact scores and the k best positions (methods/topk.py)."""

    def low_rank(
        self, store: Full, q: Tensor, token: Token | None, *, k: int, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """Scores in a projection of the keys and the k best positions (methods/lowrank.py)."""

    def ring_slots(self, store: Slots, q: Tensor, token: Token, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Attention over the slots in use and the current token, which then takes its slot (methods/slots.py)."""

    def scored_slots(
        self,
        store: Slots,
        q: Tensor,
        token: Token,
        *,
        recent: Sequence[int],
        **softmax: Unpack[SoftmaxOptions],
    ) -> Tensor:
        """The same, with scores: the token takes the slot of the lowest score that is not recent (methods/h2o.py)."""


class SkimKernels(Kernels, Protocol):
    """A backend that can do Skim's step too, and that of SubGen's algorithm 1."""

    def clusters(
        self, store: Clusters, q: Tensor, token: Token | None, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """SubGen's estimate z / tau (methods/subgen.py)."""

    def skim(
        self, store: Full, q: Tensor, token: Token | None, *, r: int, k: int, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """All steps of Skim (methods/skim.py); store.rows_read becomes what they read."""
