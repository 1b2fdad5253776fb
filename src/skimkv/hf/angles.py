"""The angles by which a model turns the heads of queries and keys at a position, as cos and sin."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# How angles follow from positions, in the library's configurations, where those of one do not depend on the text.
OF_POSITIONS = {"default", "linear", "llama3", "yarn", "proportional"}


def angles(model: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The cos and sin of a model's layers at positions (B,n), (angles,B,n,D) each in the type of x.

    They are one of all layers, or one of each type of layers.
    """
    kinds = kinds_of_angles(model)
    if not kinds:
        cos, sin = model.rotary_emb(x, position_ids=positions)
        return cos[None], sin[None]
    each = [model.rotary_emb(x, positions, kind) for kind in kinds]
    cos, sin = (torch.stack(part) for part in zip(*each, strict=True))
    return cos, sin


def kinds_of_angles(model: Any) -> list[str]:
    """The types of layers of a model that turns the heads of each type in another way."""
    types = getattr(model.config, "layer_types", None)
    return sorted(set(types)) if types and _takes_type(type(model.rotary_emb).forward) else []


@functools.cache
def _takes_type(forward: Callable[..., Any]) -> bool:
    return "layer_type" in inspect.signature(forward).parameters


class AngleTable:
    """The angles of one position after the other, computed for several at once where they follow from positions.

    A step of one token then takes them as they lie, where a model's code makes a dozen small tensors.
    """

    AT_ONCE = 64  # positions

    def __init__(self, model: Any) -> None:
        self.model = model
        types = getattr(model.rotary_emb, "rope_type", None)
        self._is_fixed = {*types.values()} <= OF_POSITIONS if isinstance(types, dict) else types in OF_POSITIONS
        self._first, self._pairs = 0, list[tuple[Tensor, Tensor]]()

    def __call__(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Give what `angles` gives, at positions (B,1)."""
        if not self._is_fixed or positions.shape != (1, 1):
            return angles(self.model, x, positions)
        position = int(positions)
        if not self._first <= position < self._first + len(self._pairs) or self._pairs[0][0].dtype != x.dtype:
            expected = angles(self.model, x, positions)
            more = torch.arange(position, position + self.AT_ONCE, device=positions.device)[None]
            cos, sin = (part.permute(2, 0, 1, 3)[..., None, :].contiguous() for part in angles(self.model, x, more))
            self._first, self._pairs = position, list(zip(cos.unbind(), sin.unbind(), strict=True))
            self._is_fixed = all(map(torch.equal, self._pairs[0], expected))
            return expected
        return self._pairs[position - self._first]
