"""Several caches as one batch: a model reads its weights once for all of them, and each takes its own rows.

A layer of a joint cache has the layers of the caches as its parts, so no bytes are copied when a cache joins or leaves:
that is a new joint cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typing_extensions import Unpack

from ..ops import SoftmaxOptions
from ..stores.base import Store
from .attention_interface import left_padding
from .cache import Cache
from .cache_step import Attend, Decoding, lock_kernel, place_token, prepare_step
from .layer import AttentionLayer, Layer, LayerAttention
from .positions import GivenPositions
from .sliding_layer import SlidingLayer
from .states import KeepsStates, LayerWithStates, copy_library_rows


class JointLayer(AttentionLayer):  # type: ignore[no-untyped-call]
    """The same layer of several caches as one layer: their rows follow one another in the batch.

    Every part decodes its own rows, with its own method and store. Where the parts have seen different numbers of
    tokens no row has padding, and `seen` is the greatest of these numbers.
    """

    def __init__(self, parts: Sequence[Layer]) -> None:
        self.parts: list[Layer] = []
        super().__init__()
        self.parts, self.window = list(parts), parts[0].window
        self.seen = max(part.seen for part in parts)
        self.is_uneven = any(part.seen < self.seen for part in parts)
        self.rows = list(_rows(len(part.cached_tokens or ()) for part in parts))

    def reset(self) -> None:
        """Forget all tokens, in every part."""
        super().reset()
        for part in self.parts:
            part.reset()

    @property
    def cached_tokens(self) -> list[int] | None:
        """How many tokens each row holds, padding not included, part after part."""
        return [n for part in self.parts for n in part.cached_tokens or ()]

    def attend_block(
        self, q: Tensor, k: Tensor, v: Tensor, *, pad: list[int] | None, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """Let every part attend with its rows of the block. Shapes as in AttentionLayer.attend_block."""
        y = []
        for part, rows in zip(self.parts, self.rows, strict=True):
            own_pad = None if pad is None else pad[rows]
            part.given = None if self.given is None else self.given.part(rows)
            y.append(part.attend_block(q[rows], k[rows], v[rows], pad=own_pad, **softmax))
        self.seen += k.shape[2]
        return torch.cat(y)

    def attend_token(self, q: Tensor, k: Tensor, v: Tensor, softmax: SoftmaxOptions) -> Tensor:
        """Let every part attend with the new token of its rows. Shapes as in AttentionLayer.attend_token."""
        y = []
        for part, rows in zip(self.parts, self.rows, strict=True):
            part.given = None if self.given is None else self.given.part(rows)
            own = q[rows], k[rows], v[rows]
            answer = part.attend_token(*own, softmax)
            if answer is None:
                answer = part.attend_block(*(x[..., None, :] for x in own), pad=None, **softmax)[..., 0, :]
            y.append(answer)
        self.seen += 1
        return torch.cat(y)

    def _padding(self, mask: Tensor | None, n: int) -> list[int] | None:
        """As of AttentionLayer. Rows of different lengths have no padding: the model gives every row its positions."""
        if not self.is_uneven:
            return super()._padding(mask, n)
        if mask is None or mask.ndim != 1 or mask.any():
            raise ValueError("rows of different lengths take no attention mask: give the model their position_ids")
        return None

    @property
    def nbytes(self) -> int:
        """Bytes that the cached tokens of all parts occupy."""
        return sum(part.nbytes for part in self.parts)

    @property
    def allocated(self) -> int:
        """Bytes that are allocated for all parts, with room for growth."""
        return sum(part.allocated for part in self.parts)


class _JointLayerWithStates(KeepsStates, JointLayer):  # type: ignore[no-untyped-call]
    """A joint layer that keeps states besides, one for each of its rows."""


class JointSlidingLayer(JointLayer):  # type: ignore[no-untyped-call]
    """The same sliding layer of several caches of one row: each row attends to what its own part keeps."""

    parts: list[Any]  # each a SlidingLayer

    def attend_block(
        self, q: Tensor, k: Tensor, v: Tensor, *, pad: list[int] | None, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """Raise ValueError: rows that are joined take one token each."""
        raise ValueError(f"{k.shape[2]} tokens a row: rows that are joined take one token each")

    def attend_token(self, q: Tensor, k: Tensor, v: Tensor, softmax: SoftmaxOptions) -> Tensor:
        """Let every part attend with the new token of its row. Shapes as in AttentionLayer.attend_token."""
        y = []
        for part, rows in zip(self.parts, self.rows, strict=True):
            own, token = q[rows], part.update(k[rows, :, None], v[rows, :, None])
            answer = part.attend(own.flatten(1, 2)[:, :, None], *token, None, softmax)
            if answer is None:
                keys, values = part.take(*token)
                answer = _library_attention(own[..., None, :], keys, values, softmax)
            y.append(answer.reshape(own.shape))
        self.seen += 1
        return torch.cat(y)

    def _padding(self, mask: Tensor | None, n: int) -> list[int] | None:
        return None  # the mask is for rows of one length; each row's own keys are what it sees


def _library_attention(q: Tensor, keys: Tensor, values: Tensor, softmax: SoftmaxOptions) -> Tensor:
    """One token's attention to all keys as the library computes it: q (1,H,G,1,D) · keys, values (1,H,n,D) -> as q."""
    scale, softcap, sinks = softmax["scale"], softmax.get("softcap"), softmax.get("sinks")
    if softcap is None and sinks is None:
        module = SimpleNamespace(num_key_value_groups=q.shape[2], is_causal=True)
        y, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, q.flatten(1, 2), keys, values, None, scaling=scale)
        return y.transpose(1, 2).reshape(q.shape)  # type: ignore[no-any-return]
    logits = q @ keys[:, :, None].mT * scale  # (1,H,G,1,n)
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(logits.dtype)[None, :, :, None, None]], -1)
    weights = logits.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : keys.shape[2]]
    return weights @ values[:, :, None]


class JointCache(Cache):
    """Several caches as one, whose rows follow one another. `joint_cache` and `joint_requests` make it."""

    caches: Sequence[Cache]

    @classmethod
    def of(cls, caches: Sequence[Cache], layers: list[Any]) -> JointCache:
        """The joint cache of these caches with these layers."""
        joint = cls.__new__(cls)
        vars(joint).update(vars(caches[0]), caches=caches, layers=layers, given=None, _updated=None)
        return joint

    def begin_forward(self, position_ids: Tensor | None, n: int) -> None:
        """Note the positions of the next n tokens, as Cache does, and check them for every cache.

        Raises ValueError if rows have different lengths and the model counts their positions itself.
        """
        layers: list[Any] = self.layers
        if position_ids is None and any(getattr(layer, "is_uneven", False) for layer in layers):
            raise ValueError("rows of different lengths need position_ids: the model cannot count them")
        for cache in self.caches:
            cache.check_positions(cache.get_seq_length(), n)
        self.given = GivenPositions(position_ids, self.get_seq_length(), n)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model with the new keys and values (B,H,n,D) of a layer; its attention call reads the result.

        Raises ValueError if the tokens do not fit a layer's window.
        """
        layer: Any = self.layers[layer_idx]
        if isinstance(layer, JointSlidingLayer):
            return layer.update(key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def begin_step(
        self, attention_mask: Tensor | None, rows: int, dtype: torch.dtype, attention: Sequence[LayerAttention]
    ) -> Any:
        """Begin a decode step of all layers at once, as Cache does; None where the mask does not fit the rows."""
        layers: list[Any] = self.layers
        if not layers or len(layers) != len(attention):
            return None
        if any(type(layer) not in (JointLayer, JointSlidingLayer) or layer.pending is not None for layer in layers):
            return None
        first = layers[0]
        if len(first.cached_tokens) != rows:
            return None
        if attention_mask is not None:
            pads, error = left_padding(attention_mask, first.seen + 1, rows)
            if error or any(type(layer) is JointSlidingLayer or layer.is_uneven for layer in layers):
                return None
            if [first.seen - pad for pad in pads] != first.cached_tokens:
                return None
        return _JointStep(self, dtype, attention)

    def continues(self, step: Any, attention_mask: Tensor | None) -> bool:
        """False: a step of several caches is prepared as a whole."""
        return False


class _JointStep:
    """One token in every row, in all layers of a joint cache: as CacheStep, with the steps of all parts of a layer.

    A layer attends by itself if one of its parts has no kernel for its token.
    """

    def __init__(self, cache: JointCache, dtype: torch.dtype, attention: Sequence[LayerAttention]) -> None:
        self.cache, self.attention = cache, attention
        self.addresses: list[int | None] = []
        self._locked: list[tuple[JointLayer, Sequence[Store]]] = []
        self._given: list[GivenPositions | None] = []  # of the rows of every part, the same in all layers
        layers: list[Any] = cache.layers
        try:
            for layer, of_layer in zip(layers, attention, strict=True):
                self.addresses += self._operations(layer, dtype, of_layer) or [None] * len(layer.parts)
        except BaseException:
            self.release()
            raise

    def _operations(self, layer: JointLayer, dtype: torch.dtype, attention: LayerAttention) -> list[int] | None:
        """The addresses of the operations of a layer's parts, whose stores are locked; None if one has none."""
        kernels, stores, parts = list[Any](), list[Store](), list[Decoding](layer.parts)
        for part in parts:
            kernel = lock_kernel(part, part.seen, part.cached_tokens or (), dtype, attention.G)
            if kernel is None:
                for store in stores:
                    store.exclusive().end()
                return None
            assert part.store is not None
            kernels.append(kernel)
            stores.append(part.store)
        self._locked.append((layer, stores))
        if not self._given:
            given = self.cache.given
            self._given = [None if given is None else given.part(rows) for rows in layer.rows]
        for part, given, store in zip(parts, self._given, stores, strict=True):
            place_token(part, given)
            part.method.prepare([store])  # type: ignore[list-item]
        softmax = attention.softmax
        return [prepare_step(store, kernel, dtype, softmax) for store, kernel in zip(stores, kernels, strict=True)]

    def attend_by(self, name: str, modules: nn.ModuleList) -> Attend | None:
        """How a layer attends by itself, by its number: q (B,H*G,1,D) · k, v (B,H,1,D) -> (B,1,H*G,D)."""
        if None not in self.addresses:
            return None
        layers: list[Any] = self.cache.layers

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Take a token into layer i of every cache, and attend."""
            layer, softmax = layers[i], self.attention[i].softmax
            layer.given = self.cache.given
            tokens = q.view(*k.shape[:2], -1, k.shape[3]), k[:, :, 0], v[:, :, 0]
            y: Tensor = layer.attend_token(*tokens, softmax)
            return y.reshape(q.shape).transpose(1, 2)

        return attend

    def take(self, run: Callable[[Sequence[int | None]], Tensor]) -> Tensor:
        """Let run(addresses) take the token in all layers, and note it in their stores; return what it returns.

        If it raises an exception, the caches are half updated, and their next step is refused.
        """
        y = run(self.addresses)
        for layer, stores in self._locked:
            layer.seen += 1
            parts = list[Decoding](layer.parts)
            for part, store in zip(parts, stores, strict=True):
                store.advance()
                part.seen += 1
        return y

    def release(self) -> None:
        """Let go of the stores."""
        for _, stores in self._locked:
            for store in stores:
                store.exclusive().end()
        self._locked = []


def joint_cache(caches: Sequence[Cache]) -> Cache:
    """Put caches that have read the same prompts into one batch, which holds the rows of the first, then the second's.

    The caches' own stores take the new tokens, so that afterwards each cache can be looked at; feed them no more.
    """
    if len(caches) == 1:
        return caches[0]
    layers, rows = list[Any](), max((store.shape.B for store in caches[0].stores), default=0)
    repeated = torch.arange(rows).repeat(len(caches))
    for parts in zip(*(cache.layers for cache in caches), strict=True):
        first: Any = parts[0]
        if isinstance(first, LayerWithStates):
            joint = _JointLayerWithStates(first.number_of_states, parts)
            joint.take_states(first, repeated)
            layers.append(joint)
        elif isinstance(first, Layer):
            layers.append(JointLayer(parts))
        else:
            layers.append(copy_library_rows(first, repeated))
    return JointCache.of(caches, layers)


def joint_requests(caches: Sequence[Cache]) -> Cache:
    """Put caches of one row each, whose prompts have been read, into one batch for the next token of every row.

    Their texts may differ in everything. The caches themselves take the tokens, so each may go on alone or in another
    batch afterwards. The model must be given the rows' position_ids, and no mask. Raises ValueError for a model with
    layers that cannot be joined; see `can_join`.
    """
    if len(caches) == 1:
        return caches[0]
    if not can_join(caches[0]):
        raise ValueError(
            "this model has layers that keep states, or see a chunk of the text alone: their rows cannot join and "
            "leave a batch"
        )
    columns: Iterator[Any] = zip(*(cache.layers for cache in caches), strict=True)
    return JointCache.of(
        caches, [JointLayer(parts) if type(parts[0]) is Layer else JointSlidingLayer(parts) for parts in columns]
    )


def can_join(cache: Cache) -> bool:
    """Whether `joint_requests` takes caches like this one.

    So it is if every layer keeps keys and values and nothing else, all of which the next token sees: not so chunks.
    """
    return all(type(layer) in (Layer, SlidingLayer) for layer in cache.layers)


def _rows(counts: Iterator[int]) -> Iterator[slice]:
    """The rows of parts that follow one another, with these numbers of rows."""
    start = 0
    for count in counts:
        yield slice(start, start + count)
        start += count
