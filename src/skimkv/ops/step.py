"""A decode step as data: what a method asks a kernel to compute, the current token, and what a backend offers.

A method gives its algorithm in PyTorch; a kernel is an optional faster form of the same step. `Method.kernel` says
which one in a `KernelStep`, and a `Backend` runs it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

from torch import Tensor
from typing_extensions import Required, TypedDict

from ..stores.base import Store


class Token(NamedTuple):
    """The current token of every row: its key and its value, (B,H,D) each."""

    k: Tensor
    v: Tensor


class SoftmaxOptions(TypedDict, total=False):
    """How the attention weights of a query head are made of its products with keys: softmax(scale q K^T).

    scale: 1/sqrt(D) unless the model says otherwise. softcap: logits become softcap * tanh(logits / softcap) (Gemma 2);
    None: they stay. sinks (H,G) float32: a logit of each query head that joins the sum of every softmax and has no
    value, so that the weights of the positions sum to less than 1 (gpt-oss). A sink is neither scaled nor capped; it is
    a finite number, or -inf, which changes nothing. None: no sinks.
    """

    scale: Required[float]
    softcap: float | None
    sinks: Tensor | None


class KernelStep(NamedTuple):
    """What a kernel computes in one decode step. Two equal values are the same step, with another token.

    operation: the name of the kernel. "dense", "sparq", "top_k", "oracle", "low_rank", "skim" and "quest" read a store
    that keeps every token, and append the current one first. "ring_slots", "scored_slots" and "tova" read slots, and
    the current token takes its slot afterwards; scores choose the slot in the second, and this step's weights in the
    last.
    r: channels that score. k: positions that are chosen, of which the last `local` always are, or pages of "quest".
    temperature, mean_value: as of SparQ. recent: of each row of the batch, how many of the latest tokens keep their
    slots whatever their scores.
    What an operation does not use stays as it is here.
    """

    operation: str
    r: int = 0
    k: int = 0
    local: int = 0
    temperature: str = "coverage"
    mean_value: bool = False
    recent: tuple[int, ...] = ()


# A KernelStep that is made once for the same numbers: after a model's weights were read, the code that makes one comes
# from memory.
kernel_step = functools.cache(KernelStep)


class Backend(Protocol):
    """Kernels for decode steps: those in C++, or those in Triton."""

    @property
    def name(self) -> str:
        """The name of the backend: "cpu" or "gpu"."""

    @property
    def max_head_size(self) -> int:
        """The largest head size D that the kernels take."""

    def unavailable(self) -> str | None:
        """Why this backend cannot run here, or None if it can."""

    def supports(self, step: KernelStep, store: Store) -> bool:
        """Whether there is a kernel for this step of this store."""

    def run(self, step: KernelStep, store: Store, q: Tensor, token: Token | None, softmax: SoftmaxOptions) -> Tensor:
        """Take the current token, and attend: q (B,H,G,D) -> (B,H,G,D) in q's dtype.

        token None: it was appended before. Raises ValueError for shapes, types or devices that the kernel does not
        take.
        """

    def append(self, store: Store, k: Tensor, v: Tensor) -> None:
        """Append one token per row: k, v (B,H,D). Raises ValueError as `run` does."""
