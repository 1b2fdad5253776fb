"""The transformers seam, inner half: one layer of a cache, and the attention and mask functions that serve it.

A model calls `cache.update(k, v, layer)`, then its attention function with what update returned. Our layer returns
the block itself, tagged: the layer is an attribute of the key tensor, so the state is per cache and re-entrant.
Our attention function finds the tag and hands the block to the method. Any other layer or cache gets the model's
own attention and its own mask, unchanged.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..methods.base import Method
from ..stores.base import Shape, Store
from ..stores.full import Full

# What a model's config says while the seam is set -> what serves the layers and caches that are not ours.
BASES = {"skimkv": "sdpa", "skimkv_eager": "eager"}

# Keywords of an attention call that change nothing, whatever they say; scaling and softcap are passed on.
HARMLESS = {"scaling", "softcap", "position_ids", "cache_position", "use_cache", "output_hidden_states", "return_dict"}
HARMLESS |= {"token_type_ids", "labels", "logits_to_keep", "num_items_in_batch"}


class AttentionLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer of a cache that our attention function hands the model's blocks of new tokens to.

    A subclass says what becomes of a block (`attend_block`) and how many tokens each row holds (`cached_tokens`).
    `seen` counts positions, padding included.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self.seen = 0
        self.pending: Tensor | None = None  # the values of an update that no attention call has consumed yet
        self.is_initialized = False

    @property
    def cached_tokens(self) -> list[int] | None:
        """How many tokens each row of the batch holds, padding not included; None before the first block."""
        raise NotImplementedError

    def attend_block(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, pad: list[int] | None, softcap: float | None
    ) -> Tensor:
        """Take n new tokens and attend with them: q (B,H,G,n,D) · k, v (B,H,n,D) -> (B,H,G,n,D).

        The first pad[b] tokens of row b are padding. `seen` grows by n.
        """
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes that the cached tokens occupy."""
        raise NotImplementedError

    @property
    def allocated(self) -> int:
        """Bytes that are allocated, with room for growth."""
        raise NotImplementedError

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("a store is made by the first attention call")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if key_states.shape != value_states.shape:
            raise ValueError(
                f"keys {tuple(key_states.shape)} and values {tuple(value_states.shape)} differ in shape: not served"
            )
        key_states._skimkv = self  # type: ignore[attr-defined]
        self.pending = value_states
        return key_states, value_states

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None
    ) -> Tensor:
        """Attend with one block of the model: q (B,H*G,n,D) · k, v (B,H,n,D) -> (B,n,H*G,D)."""
        if self.pending is not v:
            raise RuntimeError("the model changed its values between cache and attention: it cannot be served")
        B, H, n, D = k.shape
        pad = self._padding(mask, B, n)
        y = self.attend_block(q.unflatten(1, (H, -1)), k, v, scale=scale, pad=pad, softcap=softcap)
        self.pending, self.is_initialized = None, True
        return y.permute(0, 3, 1, 2, 4).reshape(B, n, -1, D)

    def _padding(self, mask: Tensor | None, B: int, n: int) -> list[int] | None:
        """How many leading tokens of this block are padding, per row; None if none is."""
        if mask is None or mask.ndim != 1:
            kind = "no mask" if mask is None else f"a mask of shape {tuple(mask.shape)}"
            raise ValueError(f"skimkv serves causal attention with left padding; the model made {kind}")
        if error := getattr(mask, "error", None):
            raise ValueError(error)
        if getattr(mask, "start", self.seen) != self.seen:
            raise RuntimeError("this cache is half updated, by a forward pass that was interrupted: make a new one")
        pads: list[int] = mask.pads if hasattr(mask, "pads") else mask.tolist()  # a move between devices drops it
        cached = self.cached_tokens
        if cached is not None:
            masked = [self.seen - min(p, self.seen) for p in pads]
            if masked != cached:
                raise ValueError(f"the attention mask says the cache holds {masked} tokens per row, it holds {cached}")
        if not any(pads):
            return None
        pads = [min(max(p - self.seen, 0), n) for p in pads]
        return pads if any(pads) else None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """What transformers sizes its mask by: (length of keys, offset of the first key)."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Positions seen, padding included."""
        return self.seen

    def get_max_length(self) -> int:
        """-1: the layer has no greatest length."""
        return -1


class Layer(AttentionLayer):  # type: ignore[no-untyped-call]
    """An attention layer whose tokens a method reads from its store, which is made at the first block."""

    is_croppable = True

    def __init__(self, method: Method) -> None:
        self.method = method
        self.record_past = False
        self.prompt: int | None = None  # in assisted decoding: positions before this one are read, not verified
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.store: Store | None = None
        # Since the last crop, for stores that cannot forget: the store as it was, and each (q, k, v) decoded.
        self.snapshot: Store | None = None
        self.log: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def cached_tokens(self) -> list[int] | None:
        return None if self.store is None else self.store.lengths

    def attend_block(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, pad: list[int] | None, softcap: float | None
    ) -> Tensor:
        (B, H, n, D), seen = k.shape, self.seen
        if self.store is None:
            self.store = self.method.store(Shape(B, H, q.shape[2], D), k.dtype, k.device)
        dense = n  # leading tokens of the block that are read; the rest is decoded token by token
        if self.prompt is not None:
            dense = min(max(self.prompt - seen, 0), n)
        elif self.record_past and seen:
            dense = 0
        if pad is not None:
            dense = max(dense, *pad)
        elif dense == 1 and seen:
            dense = 0
        self.scale, self.softcap, y = scale, softcap, []
        if dense:
            block = q[..., :dense, :], k[:, :, :dense], v[:, :, :dense]
            y = [self.method.prefill(self.store, *block, scale=scale, pad=pad, softcap=softcap)]
        for t in range(dense, n):
            token = q[..., t, :], k[:, :, t], v[:, :, t]
            if self.record_past and not isinstance(self.store, Full):
                if self.snapshot is None:
                    self.snapshot = self.store.fork()
                self.log.append(token)
            y.append(self.method.decode(self.store, *token, scale=scale, softcap=softcap)[..., None, :])
        self.seen += n
        return y[0] if len(y) == 1 else torch.cat(y, 3)

    def take_prompt(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, pad: list[int] | None, softcap: float | None
    ) -> None:
        """Take a prompt whose attention was computed elsewhere; every later token is decoded. Shapes: attend_block."""
        B, H, n, D = k.shape
        self.store = self.method.store(Shape(B, H, q.shape[2], D), k.dtype, k.device)
        self.method.take(self.store, q, k, v, scale=scale, pad=pad, softcap=softcap)
        self.seen, self.is_initialized, self.prompt = n, True, 0

    def copy_rows(self, rows: Sequence[int]) -> Layer:
        """A layer of these rows of the batch, in this order, independent of this one; a row may come repeatedly.

        Whole groups of a `Full` store are shared memory until one of the two layers writes there.
        """
        twin = copy.copy(self)
        if isinstance(self.store, Full):
            twin.store = self.store.share(rows)
        elif self.store is not None:
            twin.store = copy.copy(self.store)
            twin._select(torch.tensor(rows))  # makes new tensors and leaves the old
        return twin

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens. Full does it itself; other stores go back to the snapshot
        of the last crop and decode again what stays, which is exact: a method is a function of its tokens."""
        n, store = -int(tokens_to_remove), self.store  # a tensor from assisted decoding before 5.18
        if n < 0:
            raise ValueError(f"crop({tokens_to_remove}): give minus the number of tokens to forget")
        if n and (store is None or n > self.seen):
            raise ValueError(f"cannot forget {n} tokens of {self.seen}")
        if n and not isinstance(store, Full) and n > len(self.log):
            raise ValueError(
                f"{self.method} has dropped tokens; {n} cannot be forgotten, {len(self.log)} are on record "
                "(call activate_past_recording() first)"
            )
        log, snapshot, self.log, self.snapshot = self.log, self.snapshot, [], None
        if not n or store is None:
            return
        if isinstance(store, Full):
            store.crop(n)
        else:
            assert snapshot is not None
            snapshot.elements, snapshot.bytes = store.elements, store.bytes  # what was moved was moved
            self.store = snapshot
            for token in log[: len(log) - n]:
                self.method.decode(snapshot, *token, scale=self.scale, softcap=self.softcap)
        self.seen -= n

    def activate_past_recording(self) -> None:
        self.record_past = True

    def _select(self, index: Tensor) -> None:
        if self.store is None:
            return
        for store in (self.store, self.snapshot):
            if store is not None:
                store.select(index)
        index = index.to(self.store.device)
        self.log = [(q[index], k[index], v[index]) for q, k, v in self.log]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store is not None:
            self._select(torch.arange(self.store.shape.B).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.store is not None:
            self._select(torch.arange(self.store.shape.B)[torch.as_tensor(indices).cpu()])

    @property
    def nbytes(self) -> int:
        """What is held: the store, and while a draft is being verified what it takes to go back."""
        held = sum(store.nbytes for store in (self.store, self.snapshot) if store is not None)
        return held + sum(t.nbytes for token in self.log for t in token)

    @property
    def allocated(self) -> int:
        return sum(store.allocated for store in (self.store, self.snapshot) if store is not None)


def attention(
    base: str, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """query (B,Hq,n,D) · key, value (B,H,n,D) of a tagged block -> (B,n,Hq,D); anything else: the base."""
    layer: AttentionLayer | None = getattr(key, "_skimkv", None)
    if layer is not None:
        for name, given in kwargs.items():
            if given is not None and given is not False and name not in HARMLESS:
                if (name == "dropout" and not given) or (name == "is_causal" and given is True):
                    continue
                raise ValueError(f"skimkv: {type(module).__name__} passes {name}, which is not served")
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return layer.attend(query, key, value, attention_mask, scale, kwargs.get("softcap")), None
    if attention_mask is not None and attention_mask.ndim == 1:
        if not hasattr(attention_mask, "rebuild"):
            raise RuntimeError("skimkv: the mask lost its form between devices; detach(model) to use another cache")
        if not hasattr(attention_mask, "full"):
            attention_mask.full = attention_mask.rebuild()
        attention_mask = attention_mask.full
    own = ALL_ATTENTION_FUNCTIONS[base] if base == "sdpa" else _eager(module)
    result: tuple[Tensor, Tensor | None] = own(module, query, key, value, attention_mask, **kwargs)
    return result


def _eager(module: torch.nn.Module) -> Any:
    return sys.modules[type(module).__module__].eager_attention_forward


def mask(base: str, **kwargs: Any) -> Tensor | None:
    """Once per forward and mask kind. Plain causal: a tensor (B,) of left-padding counts that says all a layer
    needs; a cache that is not ours rebuilds the library's mask from it. Any other kind: the library's mask."""
    rebuild = partial(ALL_MASK_ATTENTION_FUNCTIONS[base], **kwargs)
    given, n, start = kwargs.get("attention_mask"), kwargs["kv_length"], kwargs.get("q_offset", 0)
    plain = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
    grows = isinstance(start, int) and n == start + kwargs["q_length"] and not kwargs.get("kv_offset", 0)
    if not plain or not grows or not kwargs.get("allow_is_causal_skip", True):
        full: Tensor | None = rebuild()
        return full
    pads, error = [0] * kwargs["batch_size"], None
    if given is not None and given.shape[1] < n:
        error = f"the attention mask covers {given.shape[1]} of {n} positions"
    elif given is not None and not given[:, :n].all():
        real = given[:, :n].bool()
        pads = torch.where(real.any(1), real.int().argmax(1), n).tolist()
        gaps = ~real & (torch.arange(n, device=real.device) >= torch.tensor(pads, device=real.device)[:, None])
        if gaps.any():
            row, position = gaps.nonzero()[0].tolist()
            error = f"attention mask, row {row}, position {position}: masked after a real token; pad on the left only"
    mask: Any = torch.tensor(pads, device=kwargs.get("device", "cpu"))
    mask.pads, mask.error, mask.start, mask.rebuild = pads, error, start, rebuild
    return mask  # type: ignore[no-any-return]
