"""What all methods have in common: which part of the cached tokens a decode step reads, keeps or drops.

A method is a frozen dataclass whose fields are its hyperparameters. Its repr is its spec, `parse(repr(m)) == m`: the
command line, result files and Python share it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from torch import Tensor, is_grad_enabled
from typing_extensions import TypeVar, Unpack

from .. import ops
from ..ops import Backend, KernelStep, SoftmaxOptions, Token
from ..ops.blocks import check_query, check_sinks, check_softcap
from ..spec import check_positive as check_positive
from ..spec import check_whole as check_whole
from ..stores.base import Shape, Store
from ..stores.quantise import RowFormat, check_kv

S = TypeVar("S", bound=Store, default=Any)


@dataclass(frozen=True)
class Traffic:
    """Scalars and bytes that one decode step of one layer reads and writes, for the whole batch.

    `paper` is the paper's own formula, in elements. The current token's k and v are written, never fetched.
    """

    elements: int
    bytes: int
    paper: int

    @classmethod
    def of(cls, heads: int, paper: int, *parts: tuple[int, float]) -> Traffic:
        """The traffic of `heads` KV heads in the batch.

        parts: pairs of a number of elements and the bytes of each, per KV head; paper: per KV head too.
        """
        total = sum(math.ceil(n * heads * size) for n, size in parts)
        return cls(sum(n for n, _ in parts) * heads, total, paper * heads)


@dataclass(frozen=True, repr=False)
class Method(abc.ABC, Generic[S]):
    """One way to decode, over a kind of store: `class SparQ(Method[Full])`.

    A subclass must give `store`, `step`, `traffic` and `bound`: without them Python refuses to make it. It may give
    `kernel` (which kernel computes the same as `step`), `prepare` (what has to happen before either of them) and `take`
    (what of a prompt stays in the store).
    kv: how the store keeps rows of K and V: None (in the model's type), "int8" or "int4" (see RowFormat).
    """

    kv: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_kv(self.kv)

    def __repr__(self) -> str:
        shown = []
        for item in sorted(dataclasses.fields(self), key=lambda f: f.kw_only is True):
            value = getattr(self, item.name)
            if item.default is dataclasses.MISSING or value != item.default:
                shown.append(f"{item.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def row_format(self, D: int) -> RowFormat:
        """The form of the rows of K and V that the store keeps."""
        return RowFormat(D, self.kv)

    @abc.abstractmethod
    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> S:
        """The empty cache of one layer. Raises ValueError if the hyperparameters do not fit the shape."""

    def prefill(
        self,
        store: S,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        pad: Sequence[int] | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Dense causal attention of a block over what the store has and the block itself; then `take`.

        q (B,H,G,n,D) · k, v (B,H,n,D), of which the first pad[b] of row b are padding -> (B,H,G,n,D).
        scale, softcap, sinks: as of `ops.SoftmaxOptions`, here and in `decode`.
        Raises ValueError if shapes, types or padding do not fit, or if the method does not know sinks.
        """
        store.validate(k, v, pad)
        B, H, G, D = store.shape
        check_query(q, (B, H, G, k.shape[2], D), store.device, store.dtype)
        softmax = self._softmax_options(store, scale, softcap, sinks)
        with store.exclusive():
            if is_grad_enabled() and _needs_gradient(store, q, k, v, sinks):
                store.detach_from_saved()
            return self.attend_and_take(store, q, k, v, pad=pad, **softmax)

    def attend_and_take(
        self, store: S, q: Tensor, k: Tensor, v: Tensor, *, pad: Sequence[int] | None, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """What `prefill` does with a valid block: the attention first, and then `take`."""
        y = ops.causal_attention(store, q, k, v, pad=pad, **softmax)
        self.take(store, q, k, v, pad=pad, **softmax)
        return y

    def take(
        self,
        store: S,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        pad: Sequence[int] | None = None,
        **softmax: Unpack[SoftmaxOptions],
    ) -> None:
        """Put into the store what this method keeps of a prompt block: all of it by default. Shapes as in `prefill`."""
        ops.append_block(store, k, v, pad)

    def decode(
        self,
        store: S,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """One decode step: the current token, k and v (B,H,D), enters the store, and q (B,H,G,D) attends.

        Returns (B,H,G,D) in q's dtype. Raises ValueError if shapes, types or devices do not fit, or if the method does
        not know sinks.
        """
        return self.attend(store, q, Token(k, v), scale=scale, softcap=softcap, sinks=sinks)

    def attend(
        self,
        store: S,
        q: Tensor,
        token: Token | None,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Decode by the kernel of the backend in use if this method has one, otherwise by `step`.

        Where a gradient is needed, `step` computes, because kernels have no backward pass; it warns once. It also warns
        where keys and values are kept as codes (kv), because these pass no gradient on.
        token None: the current token was appended before (stores that keep every token only).
        """
        softmax = self._softmax_options(store, scale, softcap, sinks)
        in_use = store.exclusive()
        in_use.begin()
        try:
            backend, kernel = self.kernel_of(store)
            if is_grad_enabled() and _needs_gradient(store, q, *(token or ()), sinks):
                if self.kv is not None:
                    _warn_of_codes(self.kv)
                if backend is not None:
                    _warn_of_gradients()
                backend = None
                store.detach_from_saved()
            if backend is None or type(self).prepare is not Method.prepare:  # kernels check q themselves
                check_query(q, store.shape, store.device)
            self.prepare([store], token)
            if backend is None or kernel is None:
                return self.step(store, q, token, **softmax)
            return backend.run(kernel, store, q, token, softmax)
        finally:
            in_use.end()

    def kernel_of(self, store: S) -> tuple[Backend, KernelStep] | tuple[None, None]:
        """The backend in use and its kernel for the next step of this store; None twice where `step` computes.

        Warns once where a backend does not have the kernel that computes the method elsewhere.
        """
        backend = ops.backend_for(store.device, store.shape.D)
        kernel = None if backend is None else self.kernel(store)
        if backend is None or kernel is None:
            return None, None
        if not backend.supports(kernel, store):
            _warn_of_missing_kernel(type(self).__name__, backend.name)
            return None, None
        return backend, kernel

    def _softmax_options(self, store: S, scale: float, softcap: float | None, sinks: Tensor | None) -> SoftmaxOptions:
        """These options, with `sinks` only where there are any: a method that does not know them need not take them.

        Raises ValueError if softcap is not positive, if the sinks do not fit the store, or if this is such a method.
        """
        if softcap is not None:
            check_softcap(softcap)
        if sinks is None:
            return {"scale": scale, "softcap": softcap}
        check_sinks(sinks, store.shape.H, store.shape.G, store.device)
        if without := self.functions_without_sinks():
            raise ValueError(f"{type(self).__name__} does not support attention sinks: {without} takes no `sinks`")
        return {"scale": scale, "softcap": softcap, "sinks": sinks}

    @abc.abstractmethod
    def step(self, store: S, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """The algorithm of one decode step in PyTorch, on the store's counted accessors, on any device.

        q (B,H,G,D) -> (B,H,G,D) in q's dtype; it computes in float32, for a float64 store in float64.
        """

    def kernel(self, store: S) -> KernelStep | None:
        """Which kernel computes the next step of this store, with all its numbers; None: `step` does, everywhere."""
        return None

    def prepare(self, stores: Sequence[S], token: Token | None = None) -> None:
        """Bring stores into the state that `step` and the kernel expect before a token; by default they are.

        stores: of layers of one model, which take a token in one step. token: that of the first of them; None where its
        tensors are not at hand, and fit. Raises ValueError, and changes nothing, if it does not.
        """

    def has_kernel(self, backend: str) -> bool:
        """Whether this backend, "cpu" or "gpu", has a kernel for this setting; otherwise `step` computes.

        The reference, "ref", has none.
        """
        store = self.store(Shape(1, 1, 1, max(64, getattr(self, "r", None) or 0)), torch.float32)
        kernel = None if backend == "ref" else self.kernel(store)
        return kernel is not None and ops.named_backend(backend).supports(kernel, store)

    def positions_used(self, n: int) -> int:
        """How many of the model's positions a step uses after n tokens; n + 1 where keys stay at theirs in the text."""
        return n + 1

    @property
    def counts_in_cache(self) -> bool:
        """Whether positions are counted in the cache, which needs the model's rotation, and not in the text.

        So it is where a text of any length uses a bounded number of positions; a budget without a bound must say it.
        """
        return self.positions_used(2**24) < 2**24

    @classmethod
    @functools.cache
    def functions_without_sinks(cls) -> str:
        """Which of this method's functions take no `sinks`, because they were written without; "" if all do."""
        names = []
        for name in ("take", "step"):
            parameters = inspect.signature(getattr(cls, name)).parameters.values()
            if not any(p.name == "sinks" or p.kind is p.VAR_KEYWORD for p in parameters):
                names.append(name)
        return ", ".join(names)

    @abc.abstractmethod
    def traffic(self, n: int, shape: Shape, dtype: torch.dtype) -> Traffic:
        """What one step moves with n cached tokens besides the current one, in closed form."""

    @abc.abstractmethod
    def bound(self, n: int, shape: Shape, dtype: torch.dtype) -> int:
        """An upper bound of `store.nbytes` after n tokens."""


def _needs_gradient(store: Store, *inputs: Tensor | None) -> bool:
    """Whether a result would depend on what requires a gradient, where gradients are enabled."""
    return any(x is not None and x.requires_grad for x in inputs) or store.requires_grad


@functools.cache
def _warn_of_missing_kernel(method: str, backend: str) -> None:
    warnings.warn(f"{method} has no kernel in backend {backend!r}: its slow reference computes", stacklevel=4)


@functools.cache
def _warn_of_codes(kv: str) -> None:
    warnings.warn(
        f"kv={kv!r} keeps keys and values as codes, which pass no gradient on: only the queries get one; use kv=None "
        "to train, or torch.no_grad()",
        stacklevel=4,
    )


@functools.cache
def _warn_of_gradients() -> None:
    warnings.warn(
        "skimkv decodes with its slow reference, because a gradient is needed and kernels have no backward pass; "
        "use torch.no_grad() or torch.inference_mode() to decode without gradients",
        stacklevel=4,
    )
