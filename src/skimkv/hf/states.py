"""Layers of a cache that keep states: of linear attention, a state space or a convolution.

Such a state has one size however long the text is, no method touches it, and it stays in the library's own layer. A
model may also run a state space beside the attention of the same layer: then our layer keeps those states as well.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from ..stores.base import Workspace
from .layer import AttentionLayer, Layer


class KeepsStates(LinearAttentionLayer):
    """What an attention layer has besides where its model runs a state space beside it: the library's states.

    In a class it stands before the kind of AttentionLayer that it is added to. number_of_states: of each kind.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, number_of_states: int, *args: Any, **kwargs: Any) -> None:
        LinearAttentionLayer.__init__(self, number_of_states)
        super(LinearAttentionCacheLayerMixin, self).__init__(*args, **kwargs)

    def reset(self) -> None:
        """Forget all tokens."""
        LinearAttentionLayer.reset(self)
        super(LinearAttentionCacheLayerMixin, self).reset()  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i of the batch becomes row beam_idx[i]."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        super(LinearAttentionCacheLayerMixin, self).reorder_cache(beam_idx)  # type: ignore[misc]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row of the batch becomes `repeats` rows."""
        LinearAttentionLayer.reorder_cache(self, repeated_rows(self, repeats))  # type: ignore[arg-type]
        super(LinearAttentionCacheLayerMixin, self).batch_repeat_interleave(repeats)  # type: ignore[misc]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of the batch with these numbers."""
        LinearAttentionLayer.reorder_cache(self, indices)  # type: ignore[arg-type]
        super(LinearAttentionCacheLayerMixin, self).batch_select_indices(indices)  # type: ignore[misc]

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError unless tokens_to_remove is 0: a state cannot forget single tokens."""
        refuse_crop(tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing for 0. Raises ValueError otherwise."""
        self.check_crop(tokens_to_remove)

    def take_states(self, other: Any, rows: Tensor | None = None) -> None:
        """Make the states a copy of those of another layer; rows: of its batch, None for all of them."""
        for name, states in _copy_states(other).items():
            setattr(self, name, states)
        if rows is not None:
            LinearAttentionLayer.reorder_cache(self, rows)  # type: ignore[arg-type]


class LayerWithStates(KeepsStates, Layer):  # type: ignore[no-untyped-call]
    """A layer whose attention a method decodes, and which keeps states besides."""

    def copy_rows(self, rows: Sequence[int], workspace: Workspace) -> LayerWithStates:
        """Copy these rows of the batch, as Layer.copy_rows does, with their states."""
        twin = super().copy_rows(rows, workspace)
        assert isinstance(twin, LayerWithStates)
        twin.take_states(self, torch.tensor(rows))
        return twin


def refuse_crop(tokens_to_remove: int) -> None:
    """Raise ValueError unless tokens_to_remove is 0: what a layer that keeps states says to `crop`."""
    if tokens_to_remove:
        raise ValueError(
            f"cannot forget {-tokens_to_remove} tokens: this model has layers of linear attention or a state "
            "space, whose states cannot go back"
        )


def check_crop(layer: Any, tokens_to_remove: int) -> None:
    """Raise ValueError if a layer, ours or the library's, cannot forget the last -tokens_to_remove tokens."""
    if isinstance(layer, Layer):
        layer.check_crop(tokens_to_remove)
    elif is_state_layer(layer):
        if not (layer.is_croppable and layer.record_past):
            refuse_crop(tokens_to_remove)
    elif has_slid(layer) and tokens_to_remove:
        n, held, seen = -tokens_to_remove, int(layer.keys.shape[-2]), layer.get_seq_length()
        on_record = held - (layer.sliding_window - 1 if held < seen else 0) if layer.record_past else 0
        if n > on_record:
            raise ValueError(
                f"a sliding layer has dropped tokens; {n} cannot be forgotten, {on_record} are on record "
                "(call activate_past_recording() first)"
            )


def has_slid(layer: Any) -> bool:
    """Whether a layer of a cache is the library's and has seen more tokens than its window lets it keep."""
    return isinstance(layer, DynamicSlidingWindowLayer) and layer.get_seq_length() >= layer.sliding_window


def is_state_layer(layer: Any) -> bool:
    """Whether a layer of a cache is the library's and keeps states and nothing else."""
    return isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, AttentionLayer)


def state_tensors(layer: Any) -> list[Tensor]:
    """The states (B,...) that a layer keeps; none before the first token, or if it is no layer of this kind."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return []
    states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [state for state in states if state is not None]


def keeps_states(cache: Any) -> bool:
    """Whether a layer of a cache keeps states: then tokens after the prompt come one at a time.

    Some models of the library begin their states anew in a block of several tokens, whatever is cached.
    """
    return any(state_tensors(layer) for layer in cache.layers)


def repeated_rows(layer: Any, repeats: int) -> Tensor:
    """The numbers of a layer's rows, each of them `repeats` times."""
    states = state_tensors(layer)
    return torch.arange(states[0].shape[0] if states else 0).repeat_interleave(repeats)


def _copy_states(layer: Any) -> dict[str, Any]:
    """What a layer knows of its states, in new tensors."""
    return {name: copy.deepcopy(getattr(layer, name)) for name in _STATE_ATTRIBUTES}


_STATE_ATTRIBUTES = vars(LinearAttentionLayer()).keys() - {"record_past"}


def select_rows(layer: Any, rows: Tensor) -> None:
    """Keep these rows of the batch, in this order, of a layer of the library: rows is a tensor of numbers."""
    if is_state_layer(layer):  # which has no batch_select_indices
        layer.reorder_cache(rows)
    else:
        layer.batch_select_indices(rows)


def copy_library_rows(layer: Any, rows: Tensor) -> Any:
    """A layer of the library with these rows of the batch, in this order; it shares nothing with the one it is of."""
    twin = copy.copy(layer)
    if is_state_layer(layer):
        vars(twin).update(_copy_states(layer))
    select_rows(twin, rows)
    return twin
