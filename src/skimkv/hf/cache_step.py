"""A decode step in all layers of a cache at once, for an operation that runs all layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..ops import KernelStep, SoftmaxOptions
from ..ops.cpu.run import CpuBackend
from ..stores.base import Store
from .attention_interface import padding_counts
from .layer import Layer, LayerAttention
from .sliding_layer import SlidingLayer

_Kernel = tuple[CpuBackend, KernelStep]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Decoding = Layer | SlidingLayer  # the kinds of layers whose token a kernel can take


class CacheStep:
    """One token in every row, in all layers of a cache.

    A layer whose method has a kernel of the library for this token has the address of its operation in `addresses`, and
    its store is locked until `release`. The others (None) attend by themselves, as `attend_by` says.
    attention: of every layer. padding: of every row.
    Raises ValueError if a kernel refuses a step.
    """

    def __init__(self, cache: Any, dtype: torch.dtype, attention: Sequence[LayerAttention], padding: list[int]) -> None:
        self.cache, self.attention, self.padding = cache, attention, padding
        self.seen: int = cache.get_seq_length()
        self.addresses: list[int | None] = []
        self._locked: list[tuple[Decoding, Store]] = []
        self._kernels: list[tuple[Decoding, Store, _Kernel]] = []
        self._lengths: list[list[int]] = []  # of the stores, as this step leaves them
        lengths = [self.seen - pad for pad in padding]
        try:
            kernels = [
                self._lock(layer, lengths, dtype, of_layer.G)
                for layer, of_layer in zip(cache.layers, attention, strict=True)
            ]
            self._prepare_stores()
            self.addresses += [
                None if kernel is None else prepare_step(layer.store, kernel, dtype, of_layer.softmax)
                for layer, kernel, of_layer in zip(cache.layers, kernels, attention, strict=True)
            ]
        except BaseException:
            self.release()
            raise

    def _lock(self, layer: Any, lengths: Sequence[int], dtype: torch.dtype, G: int) -> _Kernel | None:
        """The kernel of a layer, and its store locked; None if the layer attends by itself."""
        kernel = lock_kernel(layer, self.seen, lengths, dtype, G)
        if kernel is not None:
            self._locked.append((layer, layer.store))
            self._kernels.append((layer, layer.store, kernel))
        return kernel

    def _prepare_stores(self) -> None:
        """Tell the locked stores where their token stands, and let the methods prepare them, those of one together."""
        for method, kernels in groupby(self._kernels, key=lambda kernel: kernel[0].method):
            stores = list[Store]()
            for layer, store, _ in kernels:
                place_token(layer, self.cache.given)
                stores.append(store)
            method.prepare(stores)

    @property
    def needs_mask(self) -> bool:
        """Whether a layer of the library attends by itself, and some of its tokens are padding."""
        return any(self.padding) and any(type(layer) is SlidingLayer for layer in self._without_kernel())

    def begin_next(self) -> bool:
        """Begin the step of the next token with the same kernels, where only our steps used the cache since.

        False, and no store is locked, where a store has changed or has no room, or a layer of ours had no kernel.
        """
        if len(self._lengths) != len(self._kernels):  # the step was interrupted
            return False
        if None in self.addresses and any(isinstance(layer, Layer) for layer in self._without_kernel()):
            return False
        self.seen += 1
        for (layer, store, (backend, kernel)), lengths in zip(self._kernels, self._lengths, strict=True):
            if not store.exclusive().begin_if_free():
                break
            self._locked.append((layer, store))
            is_same = layer.seen == self.seen and layer.store is store and store.lengths is lengths
            if type(layer) is SlidingLayer:
                has_room = layer.has_room
            else:
                has_room = layer.window is None or layer.window > self.seen
            if not is_same or not has_room:
                break
            if not backend.prepare_next(kernel, store):
                break
        else:
            self._lengths = []
            try:
                self._prepare_stores()
            except BaseException:
                self.release()
                raise
            return True
        self.release()
        return False

    def _without_kernel(self) -> list[Any]:
        return [layer for layer, at in zip(self.cache.layers, self.addresses, strict=True) if at is None]

    def attend_by(self, name: str, modules: nn.ModuleList) -> Attend | None:
        """How a layer attends by itself, by its number: q (B,H*G,1,D) · k, v (B,H,1,D) -> (B,1,H*G,D).

        name: of the attention function. modules: the model's layers. None if none attends by itself.
        """
        if None not in self.addresses:
            return None
        return attend_as_model(self.cache, self.attention, padding_counts(self.padding, None, self.seen), name, modules)

    def take(self, run: Callable[[Sequence[int | None]], Tensor]) -> Tensor:
        """Let run(addresses) take the token in all layers, and note it in their stores; return what it returns.

        If it raises an exception, the cache is half updated, and the next step is refused.
        """
        for layer, _ in self._locked[:1]:
            layer.seen += 1  # beyond the others until the step is complete
        y = run(self.addresses)
        for layer, _ in self._locked[:1]:
            layer.seen -= 1
        for layer, store in self._locked:
            store.advance()
            layer.seen += 1
            self._lengths.append(store.lengths)
        return y

    def release(self) -> None:
        """Let go of the stores."""
        for _, store in self._locked:
            store.exclusive().end()
        self._locked = []


def attend_as_model(
    cache: Any, attention: Sequence[LayerAttention], counts: Tensor, name: str, modules: nn.ModuleList
) -> Attend:
    """How layers take tokens and attend, by their number, as the model's own code lets them.

    q (B,H*G,n,D) · k, v (B,H,n,D) -> (B,n,H*G,D). attention: of every layer. counts: of the padding of every row, as
    `padding_counts` makes them. name: of the attention function. modules: the model's layers.
    """
    function = ALL_ATTENTION_FUNCTIONS[name]

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Take tokens into layer i of the cache, and attend."""
        layer, options = cache.layers[i], attention[i].softmax
        k, v = cache.update(k, v, i)
        softcap = options.get("softcap")
        more = {} if softcap is None else {"softcap": softcap}
        padded = counts if isinstance(layer, Layer) else None
        y: Tensor = function(modules[i].self_attn, q, k, v, padded, scaling=options["scale"], **more)[0]
        return y

    return attend


def lock_kernel(layer: Any, seen: int, lengths: Sequence[int], dtype: torch.dtype, G: int) -> _Kernel | None:
    """The kernel of the library for a layer's next token, and the layer's store locked; None if there is none.

    The arguments are those of Layer.store_for_token.
    """
    store = layer.store_for_token(seen, lengths, dtype, G) if type(layer) in (Layer, SlidingLayer) else None
    if store is None or not store.exclusive().begin_if_free():
        return None
    backend, kernel = layer.method.kernel_of(store)
    if isinstance(backend, CpuBackend) and isinstance(kernel, KernelStep) and backend.runs_in_library(kernel):
        return backend, kernel
    store.exclusive().end()
    return None


def place_token(layer: Decoding, given: Any) -> None:
    """Tell the store of a layer that turns keys where its next token stands. given: the positions of the forward's."""
    if layer.rotation is not None:
        layer.given = given
        layer.place(1, None)


def prepare_step(store: Any, kernel: _Kernel, dtype: torch.dtype, softmax: SoftmaxOptions) -> int:
    """The address of the operation of a store's next token, for which its method has prepared it."""
    backend, step = kernel
    return backend.prepare(step, store, dtype, softmax["scale"], softmax.get("softcap"))


def takes_steps(layers: Sequence[Any]) -> bool:
    """Whether every layer is ours, or a sliding one of the library's."""
    return all(isinstance(layer, Layer) or type(layer) is SlidingLayer for layer in layers)
