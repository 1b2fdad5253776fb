"""One dense prompt for every method: the model reads it once, and each method takes from it what it keeps.

This is exact because the prompt's attention is dense for all methods: `Method.prefill` is causal attention, then
`Method.take`. Caches of several methods can also decode in one batch: hf/joint.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from .. import ops
from ..hf.cache import Cache
from ..hf.layer import AttentionLayer, Layer
from ..hf.positions import positions_of
from ..hf.states import KeepsStates, LayerWithStates, copy_library_rows
from ..hf.supported import needed_max_tokens
from ..methods import Dense
from ..methods.base import Method
from ..ops import SoftmaxOptions
from ..stores.base import Shape, Workspace


class RecordedLayer(AttentionLayer):  # type: ignore[no-untyped-call]
    """A layer that computes dense attention of one prompt and keeps the prompt's queries, keys and values.

    q (B,H,G,n,D) · k, v (B,H,n,D), left padded by pad[b]. It takes one block: nothing can be decoded after it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pad: list[int] | None
    softmax: SoftmaxOptions

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        super().__init__()

    @property
    def shape(self) -> Shape:
        """Batch, KV heads, query heads per KV head, head size."""
        B, H, G, _, D = self.q.shape
        return Shape(B, H, G, D)

    @property
    def cached_tokens(self) -> list[int] | None:
        """How many tokens each row holds, padding not included; None before the prompt."""
        return [self.seen - p for p in self.pad or [0] * self.shape.B] if self.seen else None

    def attend_block(
        self, q: Tensor, k: Tensor, v: Tensor, *, pad: list[int] | None, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """Record the prompt and attend with it, densely. Raises RuntimeError at a second block."""
        if self.seen:
            raise RuntimeError("a recorded prompt is one block: fill a method's cache from it to go on")
        self.q, self.k, self.v, self.pad, self.softmax = q, k, v, pad, softmax
        self.seen = k.shape[2]
        no_history = Dense().store(self.shape, k.dtype, k.device)
        return ops.causal_attention(no_history, q, k, v, pad=pad, **softmax)

    @property
    def nbytes(self) -> int:
        """Bytes of the recorded queries, keys and values."""
        return self.q.nbytes + self.k.nbytes + self.v.nbytes if self.seen else 0

    @property
    def allocated(self) -> int:
        """The same as nbytes: a recorded prompt does not grow."""
        return self.nbytes


class RecordedPrompt(NamedTuple):
    """A batch of prompts that the model has read. logits (B,V) are those after the last token of each prompt."""

    model: Any
    layers: list[Any]  # a RecordedLayer for every layer that a method serves; the library's own layer for others
    logits: Tensor
    max_tokens: int | None = None  # of the caches that are made from it

    @property
    def recorded(self) -> dict[int, RecordedLayer]:
        """The layers that a method serves, by their numbers in the model."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, RecordedLayer)}

    def cache(self, method: Method) -> Cache:
        """Make the cache that `method` would have after these prompts; the model does not run.

        Every token that is fed to it afterwards is decoded, in blocks of any size.
        """
        cache = Cache(self.model, method, self.max_tokens)
        cache.positions = None  # a plan leaves out what is too long; a row that has ended may still go past them
        for i, layer in enumerate(self.layers):
            own = cache.layers[i]
            if isinstance(layer, RecordedLayer):
                assert isinstance(own, Layer)
                if isinstance(own, LayerWithStates):
                    own.take_states(layer)
                own.given = layer.given
                own.take_prompt(layer.q, layer.k, layer.v, pad=layer.pad, **layer.softmax)
            else:
                cache.layers[i] = copy.deepcopy(layer)
        return cache


def record_prompt(
    model: Any, ids: Tensor, mask: Tensor | None = None, new_tokens: int = 0, reader: Any = None
) -> RecordedPrompt:
    """Run the model on prompts: ids (B,n), mask (B,n) where rows are padded on the left.

    new_tokens: how many are at most fed after them, which decides whether a model's sliding layers see all of them.
    reader: the same model in another number format, which reads the prompts in its place; what it gives is rounded to
    the model's format. Raises ValueError if a reader is given and the model has a layer that no method serves.
    """
    if reader is not None:
        prompt = record_prompt(reader, ids, mask, new_tokens)
        if not all(type(layer) is RecordedLayer for layer in prompt.layers):
            raise ValueError("prompts can be read in another number format only where methods serve all layers")
        for layer in prompt.layers:
            layer.q, layer.k, layer.v = (x.to(model.dtype) for x in (layer.q, layer.k, layer.v))
        return prompt._replace(model=model)
    max_tokens = needed_max_tokens(model, ids.shape[1] + new_tokens)
    cache = Cache(model, Dense(), max_tokens)
    layers: list[Any] = []
    for layer in cache.layers:  # each with one that records in its place
        if isinstance(layer, LayerWithStates):
            layers.append(_RecordedLayerWithStates(layer.number_of_states, layer.window))
        else:
            layers.append(RecordedLayer(layer.window) if isinstance(layer, Layer) else layer)
    cache = _with_layers(cache, layers)
    options: dict[str, Any] = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    logits = forward(model, cache, ids, mask, **options)
    return RecordedPrompt(model, cache.layers, logits[:, -1].float(), max_tokens)


def forward(model: Any, cache: Cache, ids: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """Run the model on the next tokens, ids (B,n); return logits (B,n,V).

    mask (B, positions seen and these n) where rows are padded on the left, else None.
    """
    if mask is not None:  # else a model counts the padding; rows that have ended may be past the end of a table
        table = positions_of(model).table
        positions = (mask.cumsum(1) - 1).clamp(0, None if table is None else table - 1)[:, -ids.shape[1] :]
        options |= {"attention_mask": mask, "position_ids": positions}
    logits: Tensor = model(ids, past_key_values=cache, use_cache=True, **options).logits
    return logits


def copy_rows(cache: Cache, rows: Sequence[int]) -> Cache:
    """Copy these rows of the batch, in this order, into a cache of their own; a row may come more than once."""
    layers, workspace = [], Workspace()
    for layer in cache.layers:
        if isinstance(layer, Layer):
            layers.append(layer.copy_rows(rows, workspace))
        else:
            layers.append(copy_library_rows(layer, torch.tensor(rows)))
    return _with_layers(cache, layers)


class _RecordedLayerWithStates(KeepsStates, RecordedLayer):  # type: ignore[no-untyped-call]
    """A recorded layer that keeps states besides."""


def _with_layers(cache: Cache, layers: list[Any]) -> Cache:
    """A cache of the same model with other layers."""
    twin = copy.copy(cache)
    twin.layers = layers
    return twin


def layer_shapes(model: Any) -> list[tuple[Shape, torch.dtype]]:
    """The different shapes and dtypes of the layers that a method serves, in the layers' order.

    They are found by running the model on one token.
    """
    prompt = record_prompt(model, torch.zeros(1, 1, dtype=torch.int64, device=model.device))
    return list(dict.fromkeys((layer.shape, layer.k.dtype) for layer in prompt.recorded.values()))
