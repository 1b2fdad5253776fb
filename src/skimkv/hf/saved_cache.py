"""Caches in files: a prompt that was read once is not read again, by this process or by another one.

A file is of safetensors. Its header names what the cache belongs to: the model, with the numbers of its weights, the
method, the type of the numbers, and the versions of this package and of transformers. Where anything differs, the file
is refused by name. It is written beside its place and then moved there, so that half a file never loads, and it has a
digest of all that it holds, so that a damaged file does not load either.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..methods import parse
from ..methods.base import Method
from ..stores.base import Shape
from ..stores.saved import pack_fields, unpack_fields
from ..stores.slots import Slots
from . import fingerprint
from .layer import Layer
from .states import is_state_layer

FORMAT = "4"
# Of a layer of ours: its store is saved by itself; the others belong to the cache, or to one call of the model.
OF_THE_CACHE = frozenset(
    ("method", "workspace", "window", "rotation", "given", "softmax", "snapshot", "log", "prompt", "pending", "_store")
)


def save(
    cache: Any,
    path: str | Path,
    model: Any,
    tokens: Sequence[int] | None,
    more: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a cache of this model to a file: see Cache.save. more: what the file's header says besides."""
    path, tensors, layers = Path(path), list[Tensor](), []
    seen = [layer.get_seq_length() for layer in cache.layers if not is_state_layer(layer)]
    if len(set(seen)) > 1:
        raise ValueError(
            f"a call of the model was interrupted: its layers have seen {min(seen)} to {max(seen)} tokens; read the "
            "prompt again, or crop the cache to an earlier length of all layers"
        )
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, Layer):
            if layer.pending is not None or layer.prompt is not None or layer.log or layer.snapshot is not None:
                raise ValueError(
                    f"layer {number} is in the middle of a prompt, or of a draft that is verified: save the cache when "
                    "the model's call has ended"
                )
            store = layer.store
            shape = None if store is None else list(store.shape)
            fields = None if store is None else pack_fields(store, tensors)
            own = pack_fields(layer, tensors, OF_THE_CACHE)
            layers.append({"own": own, "shape": shape, "store": fields})
        else:
            twin = copy.copy(layer)  # whose keys and values are tensors
            layers.append({"own": pack_fields(twin, tensors, OF_THE_CACHE)})
    tensors, described = _apart(tensors), json.dumps(layers)
    header = {
        **belongs_to(cache, model), "tokens": digest_of_tokens(tokens), "count": str(cache.get_seq_length()),
        "max_tokens": json.dumps(cache.max_tokens), "layers": described, "contents": _contents(described, tensors),
        **more,
    }  # fmt: skip
    # safetensors writes a file of another name first: what a kill leaves is in this folder
    try:
        new = Path(tempfile.mkdtemp(prefix=f"{path.name}.", suffix=".new", dir=path.parent))
    except OSError as error:
        raise OSError(f"{path}: it cannot be written: {error.strerror}") from None
    try:
        save_file({str(i): tensor for i, tensor in enumerate(tensors)}, new / path.name, header)
        with open(new / path.name, "rb") as file:
            os.fsync(file.fileno())
        (new / path.name).replace(path)
    except SafetensorError as error:  # whatever the system answered
        raise OSError(f"{path}: it cannot be written: {error}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """These tensors, of which no two share memory, as a file of safetensors needs them; few of them are copied."""
    seen, apart = set[int](), []
    for tensor in tensors:
        own = tensor.contiguous()
        address = own.untyped_storage().data_ptr()
        apart.append(own.clone() if address in seen else own)
        seen.add(address)
    return apart


def load(cache: Any, path: str | Path, model: Any, tokens: Sequence[int] | None) -> None:
    """Fill a new cache of this model, without layers, from a file: see Cache.load."""
    header = read_header(path)
    expected = belongs_to(cache, model) | ({} if tokens is None else {"tokens": digest_of_tokens(tokens)})
    if differs := difference(header, expected):
        raise ValueError(f"{path}: a cache of another use: {differs}")
    try:
        with safe_open(path, "pt") as file:
            tensors = [file.get_tensor(str(i)) for i in range(len(file.keys()))]
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a saved cache: {error}") from None
    if header["contents"] != _contents(header["layers"], tensors):
        raise ValueError(f"{path}: damaged: it does not hold what was written to it; read the prompt again")
    cache.make_layers(model, json.loads(header["max_tokens"]))
    saved = json.loads(header["layers"])
    if len(saved) != len(cache.layers):
        raise ValueError(f"{path}: it has {len(saved)} layers, and the model {len(cache.layers)}")
    try:
        _fill(cache, saved, tensors, model.device)
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a saved cache: {error}") from None


def _fill(cache: Any, saved: Sequence[dict[str, Any]], tensors: list[Tensor], device: torch.device) -> None:
    """Give the layers of a new cache what was saved of others."""
    layers: list[Any] = cache.layers
    for layer, fields in zip(layers, saved, strict=True):
        unpack_fields(layer, fields["own"], tensors, device)
        if isinstance(layer, Layer) and fields["store"] is not None:
            dtype = getattr(torch, fields["store"]["dtype"]["dtype"])
            store = layer.method.store(Shape(*fields["shape"]), dtype, device)
            if isinstance(store, Slots):
                store.rotation = layer.rotation
            unpack_fields(store, fields["store"], tensors, device)
            layer.store = store


def contents(path: str | Path) -> tuple[Method, int]:
    """The method whose cache is in a file, and how many tokens it holds. Raises ValueError if it is none."""
    header = read_header(path)
    return parse(header["method"]), int(header["count"])


def read_header(path: str | Path) -> dict[str, str]:
    """What the header of a file says; none of its tensors is read. Raises ValueError if it is no saved cache."""
    try:
        with safe_open(path, "pt") as file:
            header: dict[str, str] = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a saved cache: {error}") from None
    if missing := [
        name for name in ("method", "count", "tokens", "max_tokens", "layers", "contents") if name not in header
    ]:
        raise ValueError(f"{path}: not a saved cache: its header has no {missing[0]}")
    return header


def difference(header: Mapping[str, str], expected: Mapping[str, str]) -> str | None:
    """What a header says otherwise than expected, in words; None if there is nothing."""
    for name, value in expected.items():
        if header.get(name) != value:
            return f"its {name} is {header.get(name)!r}, not {value!r}"
    return None


def belongs_to(cache: Any, model: Any) -> dict[str, str]:
    """What a file must name to be a cache of this model and method."""
    from .. import __version__

    return {
        "format": FORMAT, "skimkv": __version__, "transformers": transformers.__version__,
        "method": repr(cache.method), "dtype": str(model.dtype), "model": type(model).__name__,
        "weights": fingerprint.of_numbers(model),
    }  # fmt: skip


def _contents(layers: str, tensors: Sequence[Tensor]) -> str:
    """The digest of what a file says of its layers, and of the bytes of their tensors."""
    digest = hashlib.sha256(layers.encode())
    for tensor in tensors:
        digest.update(tensor.flatten().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()[:32]


def digest_of_tokens(tokens: Sequence[int] | None) -> str:
    """The digest of the tokens' ids; "" where nobody said them."""
    if tokens is None:
        return ""
    return hashlib.sha256(json.dumps([int(token) for token in tokens]).encode()).hexdigest()[:16]
