"""A decode step in all layers of a cache at once, for an operation that runs all layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .. import ops
from ..methods.base import Method
from ..ops import SoftmaxOptions
from .attention_interface import padding_counts
from .layer import Layer

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
LIBRARY_LAYERS = DynamicLayer, DynamicSlidingWindowLayer  # which a cache of ours leaves to the library


class CacheStep:
    """One token in every row, in all layers of a cache.

    A layer that only repeats a step of a kernel has its address in `addresses`, and its store is locked until
    `release`. The others (None) attend by themselves, as `attend_by` says. padding: of every row.
    """

    def __init__(self, cache: Any, form: Sequence[tuple[torch.dtype, SoftmaxOptions]], padding: list[int]) -> None:
        self.cache, self.form, self.padding = cache, form, padding
        self.seen: int = cache.get_seq_length()
        lengths = [self.seen - pad for pad in padding]
        pairs = zip(cache.layers, form, strict=True)
        self._steps = [_repeated_step(layer, self.seen, lengths, *one) for layer, one in pairs]
        self.addresses: list[int | None] = [None if step is None else step.address for step in self._steps]

    def attend_by(self, name: str, modules: Sequence[nn.Module]) -> Attend | None:
        """How a layer attends by itself, by its number: q (B,H*G,1,D) · k, v (B,H,1,D) -> (B,1,H*G,D).

        name: of the attention function. modules: the model's attention layers. None if none attends by itself.
        """
        if None not in self.addresses:
            return None
        function, cache = ALL_ATTENTION_FUNCTIONS[name], self.cache
        counts = padding_counts(self.padding, None, self.seen)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Take a token into layer i of the cache, and attend, as the model's own code does."""
            layer, options = cache.layers[i], self.form[i][1]
            k, v = cache.update(k, v, i)
            softcap = options.get("softcap")
            more = {} if softcap is None else {"softcap": softcap}
            y: Tensor = function(
                modules[i], q, k, v, counts if isinstance(layer, Layer) else None, scaling=options["scale"], **more
            )[0]
            return y

        return attend

    def take(self, run: Callable[[Sequence[int | None]], Tensor]) -> Tensor:
        """Let run(addresses) take the token in all layers, and note it in their stores; return what it returns.

        If it raises an exception, the cache is half updated, and the next step is refused.
        """
        repeating = [layer for layer, step in zip(self.cache.layers, self._steps, strict=True) if step is not None]
        for layer in repeating[:1]:
            layer.seen += 1  # beyond the others until the step is complete
        y = run(self.addresses)
        for layer in repeating[:1]:
            layer.seen -= 1
        for layer in repeating:
            layer.store.advance()
            layer.seen += 1
        return y

    def release(self) -> None:
        """Let go of the stores."""
        for step in self._steps:
            if step is not None:
                step.in_use.end()


def takes_steps(layers: Sequence[Any], is_padded: bool) -> bool:
    """Whether every layer is ours, or one of the library's whose attention needs no mask for one token."""
    return all(isinstance(layer, Layer) or (type(layer) in LIBRARY_LAYERS and not is_padded) for layer in layers)


def _repeated_step(layer: Any, seen: int, lengths: Sequence[int], dtype: torch.dtype, softmax: SoftmaxOptions) -> Any:
    """The step of a kernel that a layer can repeat, prepared, and its store locked; None if it attends by itself."""
    if type(layer) is not Layer or layer.store is None or layer.store.choice is None:
        return None
    store, choice = layer.store, layer.store.choice
    step = choice.again
    if (
        not isinstance(step, ops.RepeatedStep)
        or step.contiguous != (dtype, softmax["scale"])
        or softmax.get("softcap") is not None
        or layer.seen != seen
        or layer.pending is not None
        or layer.record_past
        or layer.prompt is not None
        or (layer.prompt_end is not None and layer.prompt_end > seen)
        or (layer.window is not None and layer.window <= seen)
        or store.lengths != lengths
        or choice.method is not layer.method
        or choice.forced != ops.forced_backend.get()
        or type(layer.method).decode is not Method.decode
        or not step.in_use.begin_if_free()
    ):
        return None
    if step.prepare(store):
        return step
    step.in_use.end()
    return None
