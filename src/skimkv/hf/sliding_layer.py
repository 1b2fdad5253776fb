"""A sliding layer that no method decodes: it keeps the library's cache, and a kernel can take its next token.

The library keeps the last tokens of the window in the order of the text, and copies all of them for every new one. A
kernel reads them in any order, and puts a new token into the place of the one that leaves the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from .. import ops
from ..methods import LMInfinite
from ..ops import SoftmaxOptions
from ..ops.cpu.library import DTYPES
from ..stores.base import Shape, Workspace
from ..stores.memory import ordinary_tensors
from ..stores.slots import Slots
from .layer import MARK

LEAST_SLOTS = 128  # of a store whose text is shorter than the window
HIDES = "_skimkv_hides"  # the attribute of a mask that says whether it hides anything


class _InOrder:
    """The keys or the values of a layer: those (B,H,n,D) of its last n tokens, in the order of the text.

    Whoever reads or replaces them finds them as the library keeps them: what stands in the store leaves it.
    """

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type[Any]) -> Any:
        if layer is None:
            return self
        layer._leave_store()
        return vars(layer)[self.name]

    def __set__(self, layer: Any, tensor: Tensor | None) -> None:
        layer._leave_store()
        vars(layer)[self.name] = tensor


class SlidingLayer(DynamicSlidingWindowLayer):
    """The library's layer of a sliding window, whose keys and values are its tensors, or stand in a store meanwhile.

    A store takes their place when a kernel is to take a token, and they are tensors again as soon as anything reads
    `keys` or `values`, as all of the library's code does. workspace: as of Layer.
    """

    keys, values = _InOrder(), _InOrder()
    rotation = None  # of keys, which this layer never turns: as of Layer

    def __init__(self, window: int, workspace: Workspace) -> None:
        self.store: Slots | None = None
        self._pads: list[int] = []  # how many of the first tokens of the store's rows were padding
        self._dropped = 0  # how many tokens the layer had dropped when it made the store
        self.workspace = workspace
        self.pending: Tensor | None = None  # the values of an update that no attention call has consumed yet
        super().__init__(window)  # type: ignore[no-untyped-call]
        self.method = LMInfinite(k=max(window - 1, 1), initial=0)  # how a kernel attends to the window

    def __getstate__(self) -> dict[str, Any]:
        self._leave_store()
        return vars(self)

    @property
    def seen(self) -> int:
        """How many tokens the layer has seen, those that it has dropped included."""
        seen: int = self.cumulative_length
        return seen

    @seen.setter
    def seen(self, seen: int) -> None:
        """Set the number, after a step that a kernel took."""
        self.cumulative_length = seen

    @property
    def cached_tokens(self) -> list[int]:
        """How many tokens each row has seen, padding included."""
        return [self.cumulative_length] * self.kept[0]

    @property
    def kept(self) -> torch.Size:
        """The shape (B,H,n,D) of the keys that the layer keeps, and of its values."""
        store = self.store
        if store is None:
            return torch.Size([0] * 4) if self.keys is None else self.keys.shape
        B, H, _, D = store.shape
        return torch.Size((B, H, self._kept_tokens(store), D))

    @property
    def has_room(self) -> bool:
        """Whether the store takes another token without dropping one that it sees."""
        store = self.store
        return store is not None and (store.capacity == self.sliding_window - 1 or max(store.filled) < store.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes that the tokens occupy that it keeps."""
        return 2 * self.kept.numel() * self.dtype.itemsize if self.is_initialized else 0

    @property
    def allocated(self) -> int:
        """Bytes that are allocated for them."""
        return self.nbytes if self.store is None else self.store.allocated

    @property
    def window(self) -> int:
        """How many tokens a token sees, itself included."""
        window: int = self.sliding_window
        return window

    def reset(self) -> None:
        """Forget all tokens. Older versions of the library keep zeros in their place, which later tokens would see."""
        self.pending = self.keys = self.values = None
        self.is_initialized = False
        super().reset()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Called by the model with new keys and values (B,H,n,D); what it returns goes to its attention function.

        One token waits for that call, since only it knows the mask: the call goes to `attend`, or takes the token by
        `take`. A block is the library's.
        """
        if key_states.shape[2] != 1 or not key_states.is_cpu or not self.is_initialized:
            return self.take(key_states, value_states)
        setattr(key_states, MARK, self)
        self.pending = value_states
        return key_states, value_states

    def take(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take new keys and values (B,H,n,D) as the library does; return all that the n tokens see, and the masked."""
        self.pending = None
        keys, values = super().update(k, v)
        return keys, values

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, softmax: SoftmaxOptions) -> Tensor | None:
        """Take a token and attend with a kernel: q (B,H*G,1,D) · k, v (B,H,1,D) -> (B,1,H*G,D).

        None, and nothing was done, where the library's function has to attend: with a mask that hides tokens, or if a
        gradient may be needed, or without a kernel. Raises RuntimeError if the token is not that of the last `update`.
        """
        if self.pending is not v:
            raise RuntimeError("the model changes its values between cache and attention, which is not supported")
        B, H, _, D = k.shape
        changes = q.requires_grad or k.requires_grad or v.requires_grad or torch.is_autocast_enabled("cpu")
        if changes or _hides(mask):
            return None
        seen = self.cumulative_length
        store = self.store_for_token(seen, [seen] * B, q.dtype, q.shape[1] // H)
        if store is None:
            return None
        y = self.method.decode(store, q.reshape(B, H, -1, D), k[:, :, 0], v[:, :, 0], **softmax)
        self.pending, self.cumulative_length = None, seen + 1
        return y.reshape(B, 1, -1, D)

    def store_for_token(self, seen: int, lengths: Sequence[int], dtype: torch.dtype, G: int) -> Slots | None:
        """The store in which a kernel finds the window, for the next token: see Layer.store_for_token."""
        if self.cumulative_length != seen or self.sliding_window < 2 or self.record_past:
            return None
        pads = [seen - n for n in lengths]
        if self.store is None or self._pads != pads or not self.has_room:
            self.store = self._new_store(pads, G)
            self._pads = pads
        store = self.store
        return store if store is not None and store.dtype == dtype else None

    def _new_store(self, pads: Sequence[int], G: int) -> Slots | None:
        """A store of the tokens that the layer has, in which the first pads[b] of row b were padding."""
        keys, values = self.keys, self.values
        if keys is None or values is None or not keys.is_cpu or keys.requires_grad or values.requires_grad:
            return None
        B, H, n, D = keys.shape
        if len(pads) != B or keys.dtype not in DTYPES or ops.backend_for(keys.device, D) is None:
            return None
        most = self.sliding_window - 1
        slots = most if 2 * n > most else min(most, max(2 * n, LEAST_SLOTS))  # a short text has no use for the others
        with ordinary_tensors():
            store = LMInfinite(k=slots, initial=0).store(Shape(B, H, G, D), keys.dtype, keys.device)
        self._dropped = self.cumulative_length - n
        store.append(keys, values, [max(0, pad - self._dropped) for pad in pads])
        store.workspace = self.workspace
        self.__dict__.update(keys=None, values=None)
        return store

    def _kept_tokens(self, store: Slots) -> int:
        """How many tokens of the window there are, padding included. The library counts a new one before it comes."""
        return min(store.lengths[0] + max(0, self._pads[0] - self._dropped), self.sliding_window - 1)

    def _leave_store(self) -> None:
        """Make tensors of what stands in the store, with zeros for padding.

        Raises RuntimeError if another thread uses it.
        """
        store = self.store
        if store is None:
            return
        B, H, _, D = store.shape
        n = self._kept_tokens(store)
        with store.exclusive():
            self.store = None
            for name, slots in (("keys", store.k), ("values", store.v)):
                x = slots.new_zeros(B, H, n, D)
                for b, kept in enumerate(store.filled):
                    oldest = store.slot_of(store.lengths[b], store.budget[b]) if kept == store.budget[b] else 0
                    x[b, :, n - kept :] = torch.cat([slots[b, :, oldest:kept], slots[b, :, :oldest]], 1)
                self.__dict__[name] = x


def _hides(mask: Any) -> bool:
    """Whether a mask hides a token of the window from the newest one, which it is asked once, or is of another kind.

    mask: counts of padding (B,), or the library's: (B,1,1,n), False or below zero where a token is hidden.
    """
    if mask is None:
        return False
    if not isinstance(mask, Tensor) or getattr(mask, "error", None):
        return True
    found: bool | None = getattr(mask, HIDES, None)
    if found is None:
        found = bool((~mask if mask.dtype == torch.bool else mask).any())
        setattr(mask, HIDES, found)
    return found
