"""The cache that decodes with a method."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as LibraryCache
from transformers.generation.configuration_utils import GenerationMode

from ..methods import parse
from ..methods.base import Method, check_whole
from ..stores.base import Store, Workspace
from ..stores.memory import ordinary_tensors
from ..stores.rotation import KeyRotation
from . import saved_cache
from .adapters import check_adapter, transformers_model
from .attention_interface import left_padding, padding_counts
from .cache_step import CacheStep, takes_steps
from .installation import install_for_cache
from .layer import AttentionLayer, Layer, LayerAttention
from .positions import GivenPositions, Positions, counts_in_cache, positions_of
from .rotary import key_rotations
from .sliding_layer import SlidingLayer
from .states import LayerWithStates, check_crop, has_slid, is_state_layer, repeated_rows, select_rows, state_tensors
from .supported import ModelLayer, model_layers, needed_max_tokens, supported_layers


class Cache(LibraryCache):
    """A key-value cache that decodes with `method`: give it to generate() or to forward as past_key_values.

    model: of transformers, or of PEFT. Layers of full attention use the method, and so do sliding layers whose window
    covers max_tokens tokens, which the cache then cannot exceed (None: as many as the model has positions). Other
    sliding layers, and layers of linear attention, state spaces and convolutions, keep the library's own cache; a
    warning then says, once for a model, how many layers the method decodes. Making a Cache sets the model up for it;
    `detach(model)` undoes that, and so does leaving the `with attach(...)` in which it was made. A copy.deepcopy of a
    cache is independent of it.

    generate() reads a prompt exactly, also in chunks (prefill_chunk_size): what the method drops is dropped after the
    last chunk. Where a prompt is fed by hand, in several calls of forward, each call counts as a prompt: the method
    drops tokens after every one.

    fast: as of `attach`, unless a method is attached, whose choice holds.

    Raises ValueError if the model is not supported, or if the method can decode none of its layers.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        method: Method | str,
        max_tokens: int | None = None,
        fast: bool | None = None,
    ) -> None:
        check_adapter(model)
        method, model = parse(method), transformers_model(model)
        if max_tokens is not None:
            check_whole("max_tokens", max_tokens, 1)
        self._set_up(method)
        self.make_layers(model, max_tokens)  # raises before anything is changed
        install_for_cache(model, fast)

    @classmethod
    def without_layers(cls, method: Method) -> Cache:
        """A cache for one call of generate(), which makes its layers when it knows how long the text can become."""
        cache = cls.__new__(cls)
        cache._set_up(method)
        return cache

    def empty_twin(self, model: PreTrainedModel) -> Cache:
        """A cache like this one, without tokens."""
        twin = type(self).without_layers(self.method)
        twin.make_layers(model, self.max_tokens)
        return twin

    def _set_up(self, method: Method) -> None:
        super().__init__(layers=[])
        self.method = method
        self.max_tokens: int | None = None
        self.positions: Positions | None = None  # of the model; None: going past them is somebody else's care
        self._model: weakref.ref[PreTrainedModel] | None = None
        self._updated: AttentionLayer | SlidingLayer | None = None  # the layer of the last update
        self._checked = 0  # the number of tokens whose positions were checked last
        self.given: GivenPositions | None = None  # the positions of the tokens of this forward

    def make_layers(self, model: PreTrainedModel, max_tokens: int | None, is_draft: bool = False) -> None:
        """Make the layers of a cache without any, for at most max_tokens tokens of this model.

        is_draft: the method need not decode any of them, as in the first layers of Gemma 3.
        """
        self._model = weakref.ref(model)
        self.max_tokens, self.positions, workspace = max_tokens, positions_of(model), Workspace()
        layers = (model_layers if is_draft else supported_layers)(model, max_tokens)
        self.layers = [_make_layer(layer, self.method, workspace) for layer in layers]
        for layer, rotation in zip(self.layers, _rotations(model, self.method), strict=False):
            if isinstance(layer, Layer):
                layer.rotation = rotation

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None}

    def __copy__(self) -> Cache:
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        twin = memo[id(self)] = type(self).__new__(type(self))
        with ordinary_tensors():
            vars(twin).update(copy.deepcopy(self.__getstate__(), memo), _model=self._model)
        return twin

    def save(self, path: str | Path, tokens: Sequence[int] | None = None) -> None:
        """Write the cache to a file of safetensors, which `load` reads again, in this process or another one.

        tokens: the ids of the cached tokens. The file keeps a digest of them, with which `load` can compare. An
        interrupted call never leaves an incomplete file.
        Raises ValueError if the cache is in the middle of a prompt, or if its model no longer exists; TypeError if the
        cache holds something that cannot be saved, such as the state of a custom method; OSError if writing fails.
        """
        if self._model is None:
            raise ValueError("a cache that was pickled does not know its model and cannot be saved: save the original")
        model = self._model()
        if model is None:
            raise ValueError("the model of this cache is not in memory any more; saving a cache needs it")
        saved_cache.save(self, path, model, tokens)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: torch.nn.Module,
        method: Method | str | None = None,
        tokens: Sequence[int] | None = None,
    ) -> Cache:
        """The cache that `save` wrote, for the same model; the next token continues the text that it holds.

        method: the method that the file must have been saved with; with None, the method is taken from the file.
        tokens: the ids of the tokens that the file must hold; with None, they are not compared.
        Raises ValueError, with one line that says what differs, if the file was saved with another model, method,
        number format, version or text, or if it is not a file of a saved cache.
        """
        check_adapter(model)
        model = transformers_model(model)
        method = saved_cache.contents(path)[0] if method is None else parse(method)
        check_method(model, method, None)
        cache = cls.without_layers(method)
        with ordinary_tensors():
            saved_cache.load(cache, path, model, tokens)
        install_for_cache(model, None)
        return cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model with the new keys and values (B,H,n,D) of a layer; its attention call reads the result.

        Warns, once for a model, past its positions. Raises ValueError if the tokens do not fit the layer's window, or
        where positions cannot be told apart, RuntimeError if the attention function never received the block of the
        update before.
        """
        if self._updated is not None and self._updated.pending is not None:
            raise RuntimeError(
                "skimkv: a cached block never reached the attention function: the model was detached or interrupted, "
                "or changes its keys after caching them; make a new cache"
            )
        layer: Any = self.layers[layer_idx]
        if getattr(layer, "attends", False):  # isinstance() of an abstract class takes several microseconds
            self._updated, layer.given = layer, self.given
            n = layer.seen + key_states.shape[2]
            if layer.window is not None and n > layer.window:
                raise ValueError(
                    f"{n} tokens exceed this cache: layer {layer_idx} sees only the last {layer.window}, and is "
                    "decoded as a layer of full attention"
                )
            in_chunks = getattr(layer, "prompt_end", None) is not None  # of a prompt that is kept whole
            self.check_positions(layer.seen, key_states.shape[2], in_chunks)
        elif type(layer) is SlidingLayer:
            self._updated = layer
        return layer.update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]

    def check_positions(self, seen: int, more: int, in_chunks: bool = False) -> None:
        """Check `more` tokens after `seen` others against the positions that the model was made for.

        in_chunks: of a prompt that is kept whole until its end. Warns and raises ValueError as `update` does.
        """
        if self.positions is not None and seen + more != self._checked:
            used = seen + more if in_chunks else self.method.positions_used(seen) + more - 1
            self.positions.check(seen + more, used)
            self._checked = seen + more

    def begin_step(
        self, attention_mask: Tensor | None, rows: int, dtype: torch.dtype, attention: Sequence[LayerAttention]
    ) -> CacheStep | None:
        """Begin a decode step of all layers at once, with one token of this type in each of `rows` rows.

        attention_mask: (rows,tokens), as a model's forward takes it. attention: of every layer.
        None where the mask is wrong, or the layers need more of it than counts of padding. Warns and raises ValueError
        as `update` does.
        """
        seen, updated = self.get_seq_length(), self._updated
        if not seen or (updated is not None and updated.pending is not None) or len(self.layers) != len(attention):
            return None
        if attention_mask is not None and attention_mask.shape[0] != rows:
            return None
        pads, error = left_padding(attention_mask, seen + 1, rows)
        if error or max(pads) > seen or not takes_steps(self.layers):
            return None
        self.check_positions(seen, 1)
        step = CacheStep(self, dtype, attention, pads)
        if step.needs_mask:
            step.release()
            return None
        return step

    def takes_block(
        self, attention_mask: Tensor | None, rows: int, n: int, attention: Sequence[LayerAttention]
    ) -> Tensor | None:
        """The counts of padding of a block of n tokens in each of `rows` rows, which has none, for our layers.

        Arguments as of begin_step. None where a row has padding, the mask is wrong, or a layer is not ours.
        """
        seen, updated = self.get_seq_length(), self._updated
        if (updated is not None and updated.pending is not None) or len(self.layers) != len(attention):
            return None
        if attention_mask is not None and attention_mask.shape[0] != rows:
            return None
        pads, error = left_padding(attention_mask, seen + n, rows)
        if error or any(pads) or not all(isinstance(layer, Layer) for layer in self.layers):
            return None
        return padding_counts(pads, None, seen)

    def continues(self, step: CacheStep, attention_mask: Tensor | None) -> bool:
        """Begin the next decode step after `step`, between which no code ran but ours; False: begin_step is needed.

        attention_mask: that of the step before, with a one more in every row. Warns and raises ValueError as `update`.
        """
        n = step.seen + 2  # tokens, with this one
        if step.cache is not self or (attention_mask is not None and attention_mask.shape[1] != n):
            return False
        self.check_positions(n - 1, 1)
        return step.begin_next()

    def begin_forward(self, position_ids: Tensor | None, n: int) -> None:
        """Note the positions (axes,B,n) or (B,n) that the model gives its next n tokens; None: it counts them."""
        self.given = GivenPositions(position_ids, self.get_seq_length(), n)

    def begin_generation(
        self, model: Any, config: Any, model_kwargs: dict[str, Any], mode: GenerationMode, longest: int
    ) -> None:
        """Prepare for a call of generate(), whose text has at most `longest` tokens.

        Raises ValueError if one of its arguments does not go with a cache of this kind.
        """
        if config.use_cache is False:
            raise ValueError(f"use_cache=False: {self.method} decodes from its cache; leave it out, or detach(model)")
        if not self.layers and config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={config.cache_implementation!r}: {self.method} is attached and brings a cache "
                "of its own; leave it out, or detach(model)"
            )
        if config.output_attentions:
            raise ValueError(
                "output_attentions=True is not supported: a method computes no matrix of attention weights"
            )
        seen, attention_mask = self.get_seq_length(), model_kwargs.get("attention_mask")
        user = getattr(model.prepare_inputs_for_generation, "__self__", model)  # PEFT's generate() puts its own there
        if user is not model:
            check_adapter(user, attention_mask, seen)
        if not self.layers:
            # a draft that is looked up in the prompt may reach beyond the text's greatest length
            most = needed_max_tokens(model, longest + (config.prompt_lookup_num_tokens or 0))
            self.make_layers(model, most, config.is_assistant)
            if config.is_assistant:
                self.activate_past_recording()  # type: ignore[no-untyped-call]
        # generate() drops a mask of ones and leaves its length behind
        prompt = getattr(config, "_mask_length", None) if attention_mask is None else attention_mask.shape[1]
        if prompt is not None and 0 < prompt <= seen:
            raise ValueError(
                f"the cache holds {seen} tokens and the prompt has {prompt}: give the whole text, which begins with "
                "what the cache holds, or a new cache"
            )
        prefill_until = None
        if mode == GenerationMode.ASSISTED_GENERATION:
            if seen:  # transformers would feed the whole text again, after what the cache already holds of it
                raise ValueError(f"assisted decoding needs a new cache: this one holds {seen} tokens")
            prefill_until = prompt  # drafts are verified in blocks of several tokens, which must be decoded one by one
        elif config.is_assistant and not seen and prompt is not None:
            prefill_until = prompt - 1  # a draft of one token that is rejected takes the prompt's last one with it
        layers: list[Any] = self.layers
        for layer in layers:
            if isinstance(layer, Layer):
                layer.prefill_until = prefill_until
                layer.prompt_end = None if config.prefill_chunk_size is None else prompt
            if not config.is_assistant and is_state_layer(layer) and layer.record_past:
                layer.crop(0)  # to what the next token needs
            if not config.is_assistant and hasattr(layer, "record_past"):
                layer.record_past = False

    def reset(self) -> None:
        """Forget all tokens."""
        self._updated = None
        super().reset()  # type: ignore[no-untyped-call]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens.

        Raises ValueError if a layer cannot do that, and then forgets nothing.
        """
        # assisted decoding before 5.18 gives a tensor, and a layer of the library would count in it, in place
        tokens_to_remove = int(tokens_to_remove)
        layers: list[Any] = self.layers
        for layer in layers:
            check_crop(layer, tokens_to_remove)
        for layer in layers:
            if not (is_state_layer(layer) or has_slid(layer)) or layer.record_past:
                layer.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row of the batch becomes `repeats` rows."""
        layers: list[Any] = self.layers
        for layer in layers:
            if not is_state_layer(layer):
                layer.batch_repeat_interleave(repeats)
            else:
                layer.reorder_cache(repeated_rows(layer, repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of the batch with these numbers, or where this tensor of booleans is true."""
        indices = torch.as_tensor(indices)
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        for layer in self.layers:
            select_rows(layer, rows)

    @property
    def stores(self) -> list[Store]:
        """The stores of the layers that the method decodes, in the layers' order; none before the first block."""
        stores = (layer.store for layer in self.layers if isinstance(layer, Layer))
        return [store for store in stores if store is not None]

    @property
    def nbytes(self) -> int:
        """Bytes that the cached tokens occupy, on all layers."""
        return sum(layer.nbytes for layer in self._own_layers) + self._library_bytes

    @property
    def allocated(self) -> int:
        """Bytes that are allocated on all layers, with room for growth."""
        return sum(layer.allocated for layer in self._own_layers) + self._library_bytes

    @property
    def elements(self) -> int:
        """Scalars that the stores read and wrote so far, as the reference backend counts them."""
        return sum(store.elements for store in self.stores)

    @property
    def bytes(self) -> int:
        """Bytes that the stores read and wrote so far, as the reference backend counts them."""
        return sum(store.bytes for store in self.stores)

    @property
    def _own_layers(self) -> list[AttentionLayer | SlidingLayer]:
        return [layer for layer in self.layers if isinstance(layer, AttentionLayer | SlidingLayer)]

    @property
    def _library_bytes(self) -> int:
        """Of the layers that are not ours, and of states."""
        layers: list[Any] = [layer for layer in self.layers if not isinstance(layer, AttentionLayer | SlidingLayer)]
        rows = [tensor for layer in layers for tensor in (_tensor(layer, "keys"), _tensor(layer, "values"))]
        states = [state for layer in self.layers for state in state_tensors(layer)]
        return sum(tensor.nbytes for tensor in [*rows, *states] if tensor is not None)


def _tensor(layer: Any, name: str) -> Tensor | None:
    tensor: Tensor | None = getattr(layer, name, None)
    return tensor


def _rotations(model: PreTrainedModel, method: Method) -> Sequence[KeyRotation | None]:
    """How the layers of the model turn their keys, for a method that turns them to positions in its cache; else none.

    Raises ValueError, in one line, if it is not known how.
    """
    return key_rotations(model) if counts_in_cache(method) else ()


def _make_layer(layer: ModelLayer, method: Method, workspace: Workspace) -> Any:
    """The layer of a cache for a layer of the model."""
    if not layer.supported:
        cache = layer.library_cache
        return SlidingLayer(cache.sliding_window, workspace) if layer.slides else cache
    if layer.has_states:
        return LayerWithStates(layer.library_cache.number_of_states, method, workspace, layer.window)
    return Layer(method, workspace, layer.window)


def check_method(model: PreTrainedModel, method: Method, max_tokens: int | None) -> None:
    """Raise ValueError if the model is not supported, or if the method can decode none of its layers."""
    supported_layers(model, max_tokens)
    _rotations(model, method)
