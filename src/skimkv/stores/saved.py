"""What an object of a cache holds, as tensors and as values that JSON can write, and the way back.

Nothing but the classes named here is ever made from a file, and none of their code runs while it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import ExclusiveUse, Shape, Workspace
from .channel_index import ChannelIndex, IndexFormat
from .chunks import Chunk
from .clusters import Block
from .mean_value import MeanValue
from .memory import empty
from .pages import PageBounds
from .quantise import RowFormat
from .rotation import KeyRotation
from .text_positions import Run, TextPositions

KINDS = {kind.__name__: kind for kind in (Block, ChannelIndex, Chunk, MeanValue, PageBounds, TextPositions)}
TUPLES: dict[str, Any] = {"IndexFormat": IndexFormat, "Run": Run, "Shape": Shape}
ANEW = ExclusiveUse, KeyRotation, RowFormat, Workspace  # what a new object has as the saved one had it
ANEW_NAMES = {"view"}  # likewise


def pack_fields(holder: object, tensors: list[Tensor], leave_out: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The fields of an object as JSON has them; their tensors are added to `tensors`, and numbered.

    leave_out: names of fields that are not saved. Functions, and what every new object has alike, are not either.
    Raises TypeError if a field holds something that cannot be saved.
    """
    return {
        name: pack(value, tensors)
        for name, value in vars(holder).items()
        if name not in leave_out and name not in ANEW_NAMES and not isinstance(value, ANEW) and not callable(value)
    }


def pack(value: Any, tensors: list[Tensor]) -> Any:
    """One value of a field. Raises TypeError if it cannot be saved."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": None}
    kind = type(value).__name__
    if type(value) is TUPLES.get(kind):
        return {"named": kind, "items": [pack(item, tensors) for item in value]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [pack(item, tensors) for item in value]}
    if type(value) is dict:
        return {"dict": [[pack(key, tensors), pack(item, tensors)] for key, item in value.items()]}
    if type(value) is KINDS.get(kind):
        return {"kind": kind, "fields": pack_fields(value, tensors)}
    raise TypeError(f"a {kind} cannot be saved")


def unpack_fields(holder: Any, fields: dict[str, Any], tensors: list[Tensor], device: torch.device) -> None:
    """Give an object the fields that `pack_fields` made, with their tensors on this device."""
    vars(holder).update({name: unpack(value, tensors, device) for name, value in fields.items()})


def unpack(value: Any, tensors: list[Tensor], device: torch.device) -> Any:
    """The value that `pack` was given. Raises KeyError, IndexError or TypeError for what it never makes."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        saved = tensors[value["tensor"]]
        return empty(saved.shape, saved.dtype, device).copy_(saved)
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    if "device" in value:
        return device
    if "named" in value:
        return TUPLES[value["named"]](*(unpack(item, tensors, device) for item in value["items"]))
    if "list" in value or "tuple" in value:
        items = [unpack(item, tensors, device) for item in value["list" if "list" in value else "tuple"]]
        return items if "list" in value else tuple(items)
    if "dict" in value:
        return {unpack(key, tensors, device): unpack(item, tensors, device) for key, item in value["dict"]}
    kind = KINDS[value["kind"]]
    made = object.__new__(kind)
    unpack_fields(made, value["fields"], tensors, device)
    return made
