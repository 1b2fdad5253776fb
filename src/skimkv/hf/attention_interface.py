"""The two functions that transformers calls for every layer: attention and mask.

Keys that a layer of ours has marked go to that layer; a sliding one may let the library attend. Keys without a mark
come from another cache: they get the model's own attention and its own mask, unchanged.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    sliding_window_overlay,
)

from ..ops import SoftmaxOptions
from .layer import MARK
from .masked_blocks import attend_in_blocks
from .sliding_layer import SlidingLayer

# Our names of attention functions -> the library's function for layers and caches that are not ours.
LIBRARY_ATTENTION = {"skimkv": "sdpa", "skimkv_eager": "eager"}

# Keywords of an attention call that `attention` passes on, or that cannot change its result.
KNOWN_KEYWORDS = {
    "scaling", "softcap", "s_aux", "position_ids", "cache_position", "use_cache", "output_hidden_states", "return_dict",
    "token_type_ids", "labels", "logits_to_keep", "num_items_in_batch", "tokenizer", "assistant_tokenizer", "streamer",
}  # fmt: skip

# What the library makes masks from: a sliding window is an intersection, blocks that images form are a union.
_SLIDING_OVERLAY, _BLOCK_OVERLAY = sliding_window_overlay(1), blockwise_overlay(torch.zeros(1, 1))
_AND_MASK = and_masks(_SLIDING_OVERLAY, causal_mask_function)
_OR_MASK = or_masks(causal_mask_function, _BLOCK_OVERLAY)


def attention(
    library_name: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that a model calls: query (B,Hq,n,D) · key, value (B,H,n,D) -> (B,n,Hq,D), no weights.

    A key that is marked with our layer goes to this layer; any other to the library's function of that name. PyTorch's,
    which says no weights, is called for a block of queries at a time where the mask hides most keys.
    Raises ValueError if the model passes a keyword that we do not support.
    """
    layer: Any = getattr(key, MARK, None)
    if layer is not None:
        slides = type(layer) is SlidingLayer
        for name, argument in kwargs.items():
            if argument is None or argument is False or name in KNOWN_KEYWORDS:
                continue
            if (name == "dropout" and not argument) or (name == "is_causal" and argument is True):
                continue
            if name == "sliding_window" and argument == layer.window:  # Cache.update refuses tokens beyond it
                continue
            if slides:
                break  # the library knows it
            raise ValueError(f"skimkv: {type(module).__name__} passes {name}, which is not supported")
        else:
            scale, sinks = kwargs.get("scaling"), kwargs.get("s_aux")
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            softmax: SoftmaxOptions = {"scale": scale, "softcap": kwargs.get("softcap")}
            if sinks is not None:
                if sinks.shape != query.shape[1:2]:
                    what = f"must be one sink for each of {query.shape[1]} heads"
                    raise ValueError(f"s_aux is {tuple(sinks.shape)}; {what}")
                softmax["sinks"] = sinks.float().view(key.shape[1], -1)
            elif module._parameters.get("sinks") is not None:  # getattr() of what a module lacks takes long
                raise ValueError(f"skimkv: {type(module).__name__} has attention sinks and does not pass them as s_aux")
            y = layer.attend(query, key, value, attention_mask, softmax)
            if y is not None:
                return y, None
        key, value = layer.take(key, value)
    if attention_mask is not None and attention_mask.ndim == 1:
        attention_mask = _library_mask(attention_mask)
    if library_name == "sdpa":
        return attend_in_blocks(module, query, key, value, attention_mask, **kwargs), None
    result: tuple[Tensor, Tensor | None] = _eager(module)(module, query, key, value, attention_mask, **kwargs)
    return result


def _eager(module: torch.nn.Module) -> Any:
    return sys.modules[type(module).__module__].eager_attention_forward


def mask(library_name: str, **kwargs: Any) -> Tensor | None:
    """The mask function that transformers calls once per forward pass and kind of mask.

    A plain causal mask becomes a tensor (B,) of left-padding counts, all that a layer needs to know; `attention` makes
    the library's mask of it for caches that are not ours. Any other kind of mask is the library's from the start.
    """
    make_library_mask = partial(ALL_MASK_ATTENTION_FUNCTIONS[library_name], **kwargs)
    given, n, start = kwargs.get("attention_mask"), kwargs["kv_length"], kwargs.get("q_offset", 0)
    mask_function = kwargs.get("mask_function", causal_mask_function)
    is_causal = _is_causal(mask_function, n)
    # without blocks of an image, their mask is as dispensable as the causal one
    allows_skip = kwargs.get("allow_is_causal_skip", True) or _has_blocks(mask_function)
    # the queries are the last tokens of the keys, as in a cache that grows and keeps every position
    is_growing = isinstance(start, int) and n == start + kwargs["q_length"] and not kwargs.get("kv_offset", 0)
    if not is_causal or not is_growing or not allows_skip:
        library_mask: Tensor | None = make_library_mask()
        return library_mask
    pads, error = left_padding(given, n, kwargs["batch_size"])
    counts: Any = padding_counts(pads, error, start, kwargs.get("device", "cpu"))
    counts.make_library_mask = make_library_mask
    return counts  # type: ignore[no-any-return]


def padding_counts(pads: list[int], error: str | None, start: int, device: Any = "cpu") -> Tensor:
    """The mask of a causal block that begins at a position, as a layer of ours knows it: the padding of every row.

    error: what is wrong with it, if anything is.
    """
    counts: Any = torch.tensor(pads, device=device)
    counts.pads, counts.error, counts.start = pads, error, start
    return counts  # type: ignore[no-any-return]


def left_padding(given: Tensor | None, n: int, rows: int) -> tuple[list[int], str | None]:
    """How many of n positions are padding in every row, by an attention mask (rows,n), and what is wrong with it."""
    pads = [0] * rows
    if given is None:
        return pads, None
    if given.shape[1] < n:
        return pads, f"the attention mask covers {given.shape[1]} of {n} positions"
    if given[:, :n].all():
        return pads, None
    real = given[:, :n].bool()
    pads = torch.where(real.any(1), real.int().argmax(1), n).tolist()
    gaps = ~real & (torch.arange(n, device=real.device) >= torch.tensor(pads, device=real.device)[:, None])
    if gaps.any():
        row, position = gaps.nonzero()[0].tolist()
        where = f"attention mask, row {row}, position {position}"
        without = "without an attention_mask, generate() masks every pad_token_id in the text"
        return pads, f"{where}: masked after a real token; pad on the left only ({without})"
    return pads, None


def _is_causal(mask_function: Any, n: int) -> bool:
    """Whether a mask function means plain causal attention over n tokens.

    A sliding window does if it is that wide, and so do blocks in which tokens see one another if there are none.
    """
    if mask_function is causal_mask_function:
        return True
    parts = _parts(mask_function)
    if _has_blocks(mask_function):
        no_block = not bool((inspect.getclosurevars(parts[1]).nonlocals["block_sequence_ids"] >= 0).any())
        return no_block and _is_causal(parts[0], n)
    if len(parts) != 2 or parts[1] is not causal_mask_function or not _is_made_by(mask_function, _AND_MASK):
        return False
    if not _is_made_by(parts[0], _SLIDING_OVERLAY):
        return False
    return bool(n <= inspect.getclosurevars(parts[0]).nonlocals["sliding_window"])


def _has_blocks(mask_function: Any) -> bool:
    """Whether a mask function is the union of another one and of blocks in which tokens see one another."""
    parts = _parts(mask_function)
    return len(parts) == 2 and _is_made_by(mask_function, _OR_MASK) and _is_made_by(parts[1], _BLOCK_OVERLAY)


def _parts(mask_function: Any) -> Sequence[Any]:
    cells = inspect.getclosurevars(mask_function).nonlocals if inspect.isfunction(mask_function) else {}
    parts: Sequence[Any] = cells.get("mask_functions", ())
    return parts


def _is_made_by(mask_function: Any, example: Any) -> bool:
    return getattr(mask_function, "__code__", None) is example.__code__


def _library_mask(counts: Any) -> Tensor | None:
    """The library's mask that a tensor of left-padding counts stands for; made once per forward pass."""
    if not hasattr(counts, "make_library_mask"):
        raise RuntimeError("skimkv: the mask lost its form between devices; detach(model) to use another cache")
    if not hasattr(counts, "library_mask"):
        counts.library_mask = counts.make_library_mask()
    mask: Tensor | None = counts.library_mask
    return mask
