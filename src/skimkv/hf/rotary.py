"""The rotation of a model's keys by its rotary position embeddings: read from the model, and verified by running it."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..stores.rotation import KeyRotation
from .supported import decoder_of, max_positions

# Kinds of rotary embeddings whose frequencies depend on how long the text is.
CHANGING_FREQUENCIES = {"dynamic", "longrope"}

TOKENS = 4  # different tokens that a model is verified with
UNKNOWN_POSITIONS = 4096  # how far it is verified where its configuration does not name its positions

_known: weakref.WeakKeyDictionary[PreTrainedModel, tuple[list[Tensor], list[KeyRotation | None]]] = (
    weakref.WeakKeyDictionary()
)


@torch.no_grad()
def key_rotations(model: PreTrainedModel) -> list[KeyRotation | None]:
    """How each layer of the model turns its keys when their position grows; None for a layer that has no keys.

    The frequencies are those that the model's own modules hold, so scaling is included. The layout in which they turn
    channels is found by running the model on single tokens at several positions: the keys at one of them, turned on by
    the difference, must be those at another. A token alone attends to itself, so its keys differ in nothing else.

    Raises ValueError, in one line, if the model has no rotary embeddings, if they change with the length of the text,
    if queries are scaled by their position, or if the keys are not those that the frequencies give.
    """
    frequencies = _frequencies(model)
    if model in _known:
        before, rotations = _known[model]
        if len(before) == len(frequencies) and all(map(torch.equal, before, frequencies)):
            return rotations
    no_positions = KeyRotation([])
    candidates = [no_positions, *(KeyRotation(f, interleaved) for f in frequencies for interleaved in (False, True))]
    positions = _probed_positions(model)
    rotations = [
        None if keys is None else _matching(model, i, keys, positions, candidates)
        for i, keys in enumerate(_keys_at(model, positions))
    ]
    _known[model] = frequencies, rotations
    return rotations


def _frequencies(model: PreTrainedModel) -> list[Tensor]:
    """The different tensors of frequencies that the model's modules hold, in float64 on the CPU."""
    name, frequencies = type(model).__name__, list[Tensor]()
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    for module in list[Any](model.modules()):
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if kind in CHANGING_FREQUENCIES:
                raise _refusal(name, f"its rotary embeddings ({kind!r}) change with the length of the text")
        for buffer_name, buffer in module.named_buffers(recurse=False):
            if buffer_name.endswith("inv_freq") and "original" not in buffer_name and buffer.ndim == 1:
                frequencies.append(buffer.double().cpu())
    if not frequencies:
        raise _refusal(name, "it has no rotary position embeddings")
    if "position_ids" not in inspect.signature(type(decoder_of(model)).forward).parameters:
        raise _refusal(name, "its decoder takes no positions")
    if "llama_4_scaling_beta" in parameters or getattr(config, "attn_temperature_tuning", None):
        raise _refusal(name, "it scales its queries by their positions")
    return [
        values
        for i, values in enumerate(frequencies)
        if not any(torch.equal(values, other) for other in frequencies[:i])
    ]


def _refusal(name: str, reason: str) -> ValueError:
    return ValueError(f"positions in the cache are not possible with {name}: {reason}; use LMInfinite(k=...)")


def _probed_positions(model: PreTrainedModel) -> list[int]:
    """Near and far positions, also one past the last that the model was made for."""
    last = max_positions(model) or UNKNOWN_POSITIONS
    return [0, 1, last // 3, last - 1, last + 1]


def _keys_at(model: PreTrainedModel, positions: list[int]) -> list[Tensor | None]:
    """The keys of some tokens at these positions, each token alone: (positions, tokens, H, D) for each layer.

    They are of the model's own type: autocast would give them more digits than the angles have.
    """
    n = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.tensor([n * (2 * i + 1) // (2 * TOKENS) for i in range(TOKENS)])
    ids = tokens.repeat(len(positions))[:, None].to(model.device)
    places = torch.tensor(positions).repeat_interleave(TOKENS)[:, None].to(model.device)
    cache: Any = DynamicCache(config=model.config)
    cache.begin_forward = lambda positions, n: None  # which an attached model takes for a cache of ours
    try:
        with torch.autocast(model.device.type, enabled=False):
            model(input_ids=ids, position_ids=places, past_key_values=cache, use_cache=True)
    except TypeError as error:
        raise _refusal(type(model).__name__, f"it takes no positions ({error})") from None
    keys: list[Tensor | None] = [getattr(layer, "keys", None) for layer in cache.layers]
    return [None if k is None or not k.numel() else k[:, :, 0].unflatten(0, (len(positions), TOKENS)) for k in keys]


def _matching(
    model: PreTrainedModel, layer: int, keys: Tensor, positions: list[int], candidates: list[KeyRotation]
) -> KeyRotation:
    """The candidate that turns the keys (P,n,H,D) of the first position into those of all the others.

    Raises ValueError if none does, up to the rounding of the keys and of the model's angles, which are float32.
    """
    keys, eps = keys.double().cpu(), max(torch.finfo(keys.dtype).eps, torch.finfo(torch.float32).eps)
    first = keys[:1].expand(len(positions), -1, -1, -1)
    allowed = [8 * eps + position * 2.0**-22 for position in positions]
    distances = [position - positions[0] for position in positions]
    for candidate in candidates:
        error = (candidate(first, distances) - keys).flatten(1).norm(dim=1) / first.flatten(1).norm(dim=1)
        if all(e <= bound for e, bound in zip(error.tolist(), allowed, strict=True)):
            return candidate
    hint = " (it is in training mode: call model.eval())" if model.training else ""
    raise _refusal(type(model).__name__, f"the keys of layer {layer} are not turned as its frequencies say{hint}")
