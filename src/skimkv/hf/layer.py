"""One layer of a cache.

A model calls `cache.update(k, v, layer_idx)`, then its attention function (attention_interface.py) with what `update`
returned. Our layer returns the new keys and values themselves and marks the key tensor with itself: the state belongs
to the cache, and two models can run at the same time. The attention function finds the layer by that mark and calls its
`attend`.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import Unpack

from ..methods import Dense
from ..methods.base import Method
from ..ops import SoftmaxOptions
from ..stores.base import Shape, Store, Workspace
from ..stores.full import Full
from ..stores.memory import ordinary_tensors
from ..stores.rotation import KeyRotation
from ..stores.slots import Slots
from .autocast import with_autocast
from .positions import GivenPositions

MARK = "_skimkv_layer"  # the attribute of a key tensor that names its layer


class LayerAttention(NamedTuple):
    """How a layer of a model attends: the options of its softmax, and how many query heads share a KV head (G)."""

    softmax: SoftmaxOptions
    G: int


class AttentionLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer of a cache that receives the model's blocks of new tokens from our attention function.

    A subclass defines what happens with a block (`attend_block`) and how many tokens each row holds
    (`cached_tokens`). `seen` counts positions, padding included. attends: by it a cache tells such a layer from the
    library's.
    """

    attends = True
    is_sliding = False
    is_compileable = False
    supports_early_init = False
    window: int | None = None  # of a sliding layer, in tokens: it is full attention until it has seen as many
    given: GivenPositions | None = None  # the positions of the block's tokens

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self.seen = 0
        self.pending: Tensor | None = None  # the values of an update that no attention call has consumed yet
        self.is_initialized = False

    @property
    @abc.abstractmethod
    def cached_tokens(self) -> list[int] | None:
        """How many tokens each row of the batch holds, padding not included; None before the first block."""

    @abc.abstractmethod
    def attend_block(
        self, q: Tensor, k: Tensor, v: Tensor, *, pad: list[int] | None, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """Take n new tokens and attend with them: q (B,H,G,n,D) · k, v (B,H,n,D) -> (B,H,G,n,D).

        The first pad[b] tokens of row b are padding. `seen` grows by n.
        """

    def attend_token(self, q: Tensor, k: Tensor, v: Tensor, softmax: SoftmaxOptions) -> Tensor | None:
        """Decode one new token of every row, as `attend_block` would: q (B,H,G,D) · k, v (B,H,D) -> (B,H,G,D).

        None, and nothing was done, where a token is a block like any other.
        """
        return None

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes that the cached tokens occupy."""

    @property
    @abc.abstractmethod
    def allocated(self) -> int:
        """Bytes that are allocated, with room for growth."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse to initialise the layer: only the attention call knows how many query heads share a KV head.

        Transformers calls it for caches that it makes itself. Raises RuntimeError.
        """
        raise RuntimeError(
            "skimkv: a cache cannot be initialised before the model's first attention call; run a prompt"
        )

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Called by the model with new keys and values (B,H,n,D), which it passes on to its attention function.

        Raises ValueError if the two differ in shape.
        """
        if key_states.shape != value_states.shape:
            raise ValueError(
                f"keys {tuple(key_states.shape)} and values {tuple(value_states.shape)} must have the same shape"
            )
        setattr(key_states, MARK, self)
        self.pending = value_states
        return key_states, value_states

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, softmax: SoftmaxOptions) -> Tensor:
        """Attend with one block of the model: q (B,H*G,n,D) · k, v (B,H,n,D) -> (B,n,H*G,D).

        mask: the tensor of left-padding counts that the function `mask` makes. Raises ValueError for any other mask,
        RuntimeError if the block or the mask is not the one that belongs to the last `update`.
        """
        if self.pending is not v:
            raise RuntimeError("the model changes its values between cache and attention, which is not supported")
        pad = self._padding(mask, k.shape[2])
        # is_autocast without a call, which takes a microsecond; the library's attention, too, computes in this type
        if torch.is_autocast_enabled("cpu" if q.is_cpu else q.device.type):
            y = with_autocast(lambda q, k, v: self._attend(q, k, v, pad, softmax), q, k, v)
        else:
            y = self._attend(q, k, v, pad, softmax)
        self.pending, self.is_initialized = None, True
        return y.contiguous()  # as the library's functions return it

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, pad: list[int] | None, softmax: SoftmaxOptions) -> Tensor:
        """The same without the checks."""
        B, H, n, D = k.shape
        if n == 1 and pad is None:
            y = self.attend_token(q.reshape(B, H, -1, D), k.reshape(B, H, D), v.reshape(B, H, D), softmax)
            if y is not None:
                return y.reshape(B, 1, -1, D)
        y = self.attend_block(q.unflatten(1, (H, -1)), k, v, pad=pad, **softmax)
        return y.permute(0, 3, 1, 2, 4).reshape(B, n, -1, D)

    def _padding(self, mask: Tensor | None, n: int) -> list[int] | None:
        """How many leading tokens of this block of n are padding, per row; None if there is no padding."""
        if mask is None or mask.ndim != 1:
            kind = "no mask" if mask is None else f"a mask of shape {tuple(mask.shape)}"
            raise ValueError(f"skimkv supports causal attention with left padding; the model made {kind}")
        if error := getattr(mask, "error", None):
            raise ValueError(error)
        if getattr(mask, "start", self.seen) != self.seen:
            raise RuntimeError("a forward pass was interrupted and left this cache half updated: make a new cache")
        # a move to another device drops the tensor's attributes and keeps its numbers
        pads: list[int] = mask.pads if hasattr(mask, "pads") else mask.tolist()
        cached, is_padded = self.cached_tokens, any(pads)
        if cached is not None and len(pads) != len(cached):
            raise ValueError(
                f"{len(pads)} rows came, and the cache has {len(cached)}: cache.batch_repeat_interleave(n) repeats "
                "each row n times"
            )
        if cached is not None:
            masked = [self.seen - min(p, self.seen) for p in pads] if is_padded else [self.seen] * len(pads)
            if masked != cached:
                raise ValueError(f"the attention mask says the cache holds {masked} tokens per row, it holds {cached}")
        if not is_padded:
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
        """Return -1, which means that the layer has no greatest length."""
        return -1


class _PromptInChunks:
    """The chunks of a prompt whose end has not come: its attention is dense, and a method takes it as a whole.

    past: what the method had kept before the prompt, and the chunks (`Full`); chunks: q (B,H,G,n,D) · k, v (B,H,n,D) of
    each, of which the first pads[b] tokens of row b are padding, counted over all chunks.
    """

    def __init__(self, method: Method, store: Store) -> None:
        self.method, self.store = method, store
        self.past = Dense().store(store.shape, store.dtype, store.device)
        self.chunks: list[tuple[Tensor, Tensor, Tensor]] = []
        self.pads = [0] * store.shape.B
        if any(store.lengths):
            rows = [store.history(slice(b, b + 1)) for b in range(store.shape.B)]
            n = max(k.shape[2] for k, _ in rows)
            pads = [n - k.shape[2] for k, _ in rows]
            k, v = (
                torch.cat([F.pad(row[i], (0, 0, pad, 0)) for row, pad in zip(rows, pads, strict=True)]) for i in (0, 1)
            )
            self.past.append(k, v, pads)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, pad: list[int] | None, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """Dense causal attention of one more chunk: q (B,H,G,n,D) · k, v (B,H,n,D) -> (B,H,G,n,D)."""
        y = Dense().prefill(self.past, q, k, v, pad=pad, **softmax)
        self.chunks.append((q, k, v))
        self.pads = [all_pad + p for all_pad, p in zip(self.pads, pad or [0] * len(self.pads), strict=True)]
        return y

    def finish(self, **softmax: Unpack[SoftmaxOptions]) -> None:
        """Let the method take what it keeps of the whole prompt into its store."""
        q, k, v = (torch.cat(parts, -2) for parts in zip(*self.chunks, strict=True))
        pad = self.pads if any(self.pads) else None
        with self.store.exclusive():
            self.method.take(self.store, q, k, v, pad=pad, **softmax)

    @property
    def n_tokens(self) -> int:
        """Tokens of the chunks, padding included."""
        return sum(k.shape[2] for _, k, _ in self.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks, and of the keys and values that they attend to."""
        return self.past.nbytes + self._chunk_bytes

    @property
    def allocated(self) -> int:
        """The same with room for growth."""
        return self.past.allocated + self._chunk_bytes

    @property
    def _chunk_bytes(self) -> int:
        return sum(tensor.nbytes for chunk in self.chunks for tensor in chunk)


def _takes_chunks(method: Method, store: Store) -> bool:
    """Whether a prompt may come in chunks to a method with what it keeps of them: then it forgets and rounds nothing.

    Where a store keeps no history, which a dense prompt would attend to, a method reads later blocks token by token.
    """
    if any(store.lengths) and type(store).history is Store.history:
        return True
    return isinstance(store, Full) and method.kv is None and type(method).take is Method.take


class Layer(AttentionLayer):  # type: ignore[no-untyped-call]
    """An attention layer whose tokens a method reads from its store, which is made at the first block.

    workspace: scratch memory of the kernels, one for all layers of a cache. window: as of AttentionLayer. rotation: of
    the model's keys in this layer, for methods that turn keys to other positions.
    """

    is_croppable = True
    rotation: KeyRotation | None = None

    def __init__(self, method: Method, workspace: Workspace, window: int | None = None) -> None:
        self.method, self.workspace, self.window = method, workspace, window
        self.record_past = False  # whether `crop` must be able to take tokens back
        # positions before this one are read in a block, later ones are decoded one by one; None: a block is read
        self.prefill_until: int | None = None
        # where the prompt ends that generate() reads in chunks; None: a block is a whole prompt, or one is decoded
        self.prompt_end: int | None = None
        super().__init__()

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.store = None
        # Since the last crop, for stores that cannot forget: the store as it was, and each (q, k, v) decoded.
        self.snapshot: Store | None = None
        self.log: list[tuple[Tensor, Tensor, Tensor]] = []
        self.prompt: _PromptInChunks | None = None

    @property
    def store(self) -> Store | None:
        """The cached tokens; None before the first block."""
        return self._store

    @store.setter
    def store(self, store: Store | None) -> None:
        """Put a store here; it uses this cache's workspace from now on."""
        self._store = store
        self._share_workspace()

    def _share_workspace(self) -> None:
        if self._store is not None:
            self._store.workspace = self.workspace

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._share_workspace()  # a copied store comes with a workspace of its own

    @property
    def cached_tokens(self) -> list[int] | None:
        """How many tokens each row of the batch holds, padding not included; None before the first block."""
        store = self._store
        if store is None or self.prompt is None:
            return None if store is None else store.lengths
        n = self.prompt.n_tokens
        return [length + n - pad for length, pad in zip(store.lengths, self.prompt.pads, strict=True)]

    def attend_block(
        self, q: Tensor, k: Tensor, v: Tensor, *, pad: list[int] | None, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """Prefill with the leading tokens of the block and decode the others one by one. Shapes: AttentionLayer."""
        if self.store is None:
            self.store = self._new_store(q, k)
        self.softmax = softmax
        n, store, outputs = k.shape[2], self.store, list[Tensor]()
        self.place(n, pad)
        prefilled = self._prefill_tokens(n, pad)
        if prefilled:
            block = q[..., :prefilled, :], k[:, :, :prefilled], v[:, :, :prefilled]
            outputs.append(self._prefill(store, *block, pad=pad, **softmax))
        for t in range(prefilled, n):
            token = q[..., t, :], k[:, :, t], v[:, :, t]
            if self.record_past and not isinstance(store, Full):
                if self.snapshot is None:
                    self.snapshot = store.fork()
                self.log.append(token)
            outputs.append(self.method.decode(store, *token, **softmax)[..., None, :])
        self.seen += n
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 3)

    def attend_token(self, q: Tensor, k: Tensor, v: Tensor, softmax: SoftmaxOptions) -> Tensor | None:
        """Decode one new token, as `attend_block` would, in fewer calls: None where it may belong to a prompt or draft.

        Shapes: AttentionLayer.
        """
        if not self.seen or self.record_past or self.prompt is not None or self._prefill_tokens(1, None):
            return None
        self.place(1, None)
        y: Tensor = self.method.decode(self._store, q, k, v, **softmax)
        self.seen += 1
        return y

    def store_for_token(self, seen: int, lengths: Sequence[int], dtype: torch.dtype, G: int) -> Store | None:
        """The store of the next token, if a kernel may take it; None where the layer has to attend itself.

        seen, lengths: how many tokens the layer has seen, and those that its rows hold. dtype: of the token. G: how
        many query heads share a KV head.
        """
        store = self._store
        if store is None or store.lengths != lengths or store.dtype != dtype or self.seen != seen:
            return None
        is_decoded = (
            self.pending is None
            and not self.record_past
            and self.prompt is None
            and (self.prompt_end is None or self.prompt_end <= seen)
            and (self.window is None or self.window > seen)
            and type(self.method).decode is Method.decode
            and type(self.method).attend is Method.attend
        )
        return store if is_decoded else None

    def place(self, n: int, pad: list[int] | None) -> None:
        """Tell a store that counts positions in the cache where the next n tokens stand in the text."""
        if self.rotation is not None and isinstance(self._store, Slots) and self.given is not None:
            self.given.place(self._store, self.cached_tokens or (), n, pad)

    def _prefill(
        self,
        store: Store,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        pad: list[int] | None,
        **softmax: Unpack[SoftmaxOptions],
    ) -> Tensor:
        """Read a block of a prompt, which the method takes when its last block has come. Shapes: AttentionLayer."""
        is_last = self.prompt_end is None or self.seen + k.shape[2] >= self.prompt_end
        if is_last:
            self.prompt_end = None
        if self.prompt is None:
            if is_last or _takes_chunks(self.method, store):
                return self.method.prefill(store, q, k, v, pad=pad, **softmax)
            self.prompt = _PromptInChunks(self.method, store)
        y = self.prompt.attend(q, k, v, pad=pad, **softmax)
        if is_last:
            self.prompt.finish(**softmax)
            self.prompt = None
        return y

    def _new_store(self, q: Tensor, k: Tensor) -> Store:
        B, H, _, D = k.shape
        with ordinary_tensors():
            store: Store = self.method.store(Shape(B, H, q.shape[2], D), k.dtype, k.device)
        if isinstance(store, Slots):
            store.rotation = self.rotation
        return store

    def _prefill_tokens(self, n: int, pad: list[int] | None) -> int:
        """How many leading tokens of a block of n are read together; the others are decoded one by one."""
        if self.prompt_end is not None:
            return min(max(self.prompt_end - self.seen, 0), n)
        if self.prompt is not None:
            return n  # the rest of a prompt that was interrupted
        if self.prefill_until is not None:
            prefilled = min(max(self.prefill_until - self.seen, 0), n)
        elif self.record_past and self.seen:
            prefilled = 0  # a draft that is verified: each token as if it came alone
        else:
            prefilled = n
        if pad is not None:
            return max(prefilled, *pad)  # only a prefill knows padding
        return 0 if prefilled == 1 and self.seen else prefilled

    def take_prompt(
        self, q: Tensor, k: Tensor, v: Tensor, *, pad: list[int] | None, **softmax: Unpack[SoftmaxOptions]
    ) -> None:
        """Take a prompt whose attention was computed elsewhere; every later token is decoded. Shapes: attend_block."""
        self.store = self._new_store(q, k)
        self.place(k.shape[2], pad)
        self.method.take(self.store, q, k, v, pad=pad, **softmax)
        self.seen, self.is_initialized, self.prefill_until = k.shape[2], True, 0

    def take_store(self, store: Store) -> None:
        """Hold a store that was filled elsewhere, whose rows all have one length; every later token is decoded."""
        self.store, self.seen, self.is_initialized = store, max(store.lengths), True

    def copy_rows(self, rows: Sequence[int], workspace: Workspace) -> Layer:
        """A layer of these rows of the batch, in this order, independent of this one; a row may come repeatedly.

        Whole groups of a `Full` store are shared memory until one of the two layers writes there.
        workspace: that of the cache which the copy belongs to.
        """
        twin = copy.copy(self)
        twin.workspace = workspace
        if isinstance(self.store, Full):
            twin.store = self.store.share(rows)
        elif self.store is not None:
            twin.store, twin.snapshot = copy.copy(self.store), copy.copy(self.snapshot)
            twin._select(torch.tensor(rows))  # makes new tensors and leaves the old
        return twin

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError if `crop` would."""
        n, store = -tokens_to_remove, self.store
        if n < 0:
            raise ValueError(f"crop({tokens_to_remove}): give minus the number of tokens to forget")
        if n and (store is None or n > self.seen):
            raise ValueError(f"cannot forget {n} tokens of {self.seen}")
        if n and self.prompt is not None:
            raise ValueError(f"cannot forget {n} tokens of a prompt whose last chunk has not been read")
        if isinstance(store, Full) and n > min(store.lengths):
            raise ValueError(f"cannot forget {n} tokens of rows that have {store.lengths}")
        if n and not isinstance(store, Full) and n > len(self.log):
            raise ValueError(
                f"{self.method} drops tokens; {n} cannot be forgotten, {len(self.log)} are on record "
                "(call activate_past_recording() first)"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens of every row.

        A `Full` store forgets them itself. Any other store goes back to the snapshot that was taken after the last
        crop and decodes again what stays, which is exact: a method's answers depend on its tokens only.

        Raises ValueError if the number is positive, or if the layer recorded fewer tokens than it shall forget.
        """
        self.check_crop(tokens_to_remove)
        n, store = -tokens_to_remove, self.store
        log, snapshot, self.log, self.snapshot = self.log, self.snapshot, [], None
        if not n or store is None:
            return
        if isinstance(store, Full):
            store.crop(n)
        else:
            assert snapshot is not None
            snapshot.elements, snapshot.bytes = store.elements, store.bytes  # traffic of forgotten tokens counts too
            if isinstance(snapshot, Slots) and isinstance(store, Slots):
                snapshot.places = store.places  # of the tokens that are decoded again too
            self.store = snapshot
            for token in log[: len(log) - n]:
                self.method.decode(snapshot, *token, **self.softmax)
        self.seen -= n

    def activate_past_recording(self) -> None:
        """Let `crop` take tokens back from now on; assisted decoding calls this."""
        self.record_past = True

    def _select(self, index: Tensor) -> None:
        if self.store is None:
            return
        if self.prompt is not None:
            raise ValueError("the rows of a cache cannot change before the last chunk of a prompt has been read")
        for store in (self.store, self.snapshot):
            if store is not None:
                store.select(index)
        self._share_workspace()
        index = index.to(self.store.device)
        self.log = [(q[index], k[index], v[index]) for q, k, v in self.log]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i of the batch becomes row beam_idx[i]."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row of the batch becomes `repeats` rows."""
        if self.store is not None:
            self._select(torch.arange(self.store.shape.B).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of the batch with these numbers, or where this tensor of booleans is true."""
        if self.store is not None:
            self._select(torch.arange(self.store.shape.B)[torch.as_tensor(indices).cpu()])

    @property
    def nbytes(self) -> int:
        """Bytes of the cached tokens, of what is kept to go back from a draft, and of a prompt's chunks."""
        parts = sum(part.nbytes for part in (self.store, self.snapshot, self.prompt) if part is not None)
        return parts + sum(tensor.nbytes for token in self.log for tensor in token)

    @property
    def allocated(self) -> int:
        """Bytes that are allocated for all this, with room for growth."""
        return sum(part.allocated for part in (self.store, self.snapshot, self.prompt) if part is not None)
