"""A model's positions: how many it was made for, what happens past them, and which ones it gives the tokens."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..methods.base import Method
from ..stores.slots import Slots
from ..stores.text_positions import Run, runs
from .supported import max_positions

# float32, in which models compute the angles of rotary embeddings, has no whole numbers of its own past this one.
GREATEST_POSITION = 2**24


class Positions:
    """The positions of one model; all its caches share this object.

    limit: how many the model was made for, None if its configuration does not say. table: how many a learned table of
    the model has, which no token can go past; None for models that compute their positions.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.name, self.limit, self.table = type(model).__name__, max_positions(model), _table_size(model)
        self._warned = False

    def __deepcopy__(self, memo: object) -> Positions:
        return self

    def check(self, n: int, used: int) -> None:
        """Check a text of n tokens, of which attention uses `used` positions.

        Past the model's positions this warns, once for each model. Raises ValueError, in one line, where fewer
        positions are used than the text has tokens, past GREATEST_POSITION.
        """
        if used < n and n > GREATEST_POSITION:
            raise ValueError(
                f"{n} tokens: past {GREATEST_POSITION} the model's own arithmetic cannot tell positions apart; begin a "
                "new cache"
            )
        if self.limit is not None and used > self.limit and not self._warned:
            self._warned = True
            warnings.warn(
                f"{used} tokens go past the {self.limit} positions that {self.name} was made for: expect worse answers "
                "from there on, with every method but StreamingLLM(k=...) with k below them",
                stacklevel=2,
            )

    def check_table(self, n: int, ids: Tensor | None) -> None:
        """Check that the positions of tokens up to the n-th are in a learned table of the model, if it has one.

        ids: the positions that the newest tokens get; None: the model counts them. Raises ValueError, in one line, if
        they go past it: the model would raise IndexError, and a GPU would stop for good.
        """
        if self.table is None or n <= self.table:
            return
        n = n if ids is None else int(ids.max()) + 1  # without padding, and by a text that begins anew
        if n > self.table:
            raise ValueError(
                f"{n} tokens exceed the {self.table} positions of {self.name}: each has a learned embedding, so no "
                "method can go past them; shorten the text or begin a new cache"
            )


_known: weakref.WeakKeyDictionary[PreTrainedModel, Positions] = weakref.WeakKeyDictionary()


def positions_of(model: PreTrainedModel) -> Positions:
    """The positions of a model: the same object at every call."""
    if model not in _known:
        _known.setdefault(model, Positions(model))
    return _known[model]


def _table_size(model: PreTrainedModel) -> int | None:
    """How many positions a learned table of the model has; None if it has no such table."""
    for name, module in list[tuple[str, Any]](model.named_modules()):
        last = name.rsplit(".", 1)[-1]
        if isinstance(module, torch.nn.Embedding) and (last == "wpe" or "position" in last):
            size = int(module.num_embeddings) - int(getattr(module, "offset", 0))
            if size == max_positions(model):  # and not the table of a model of images beside it
                return size
    return None


def counts_in_cache(method: Method) -> bool:
    """Whether the method counts positions in its cache: it uses at most as many as it keeps tokens, and one more."""
    return method.counts_in_cache


class GivenPositions:
    """The positions that a model gives the n tokens of one forward.

    ids: (B,n) or, of a model with several axes, (axes,B,n), where B may be 1 for all rows; four axes are those of the
    text, which count tokens, and three others. None: the model counts on from `seen`.
    """

    def __init__(self, ids: Tensor | None, seen: int, n: int) -> None:
        ids = torch.arange(seen, seen + n)[None] if ids is None else ids
        self.ids, self.n = ids[1:] if ids.ndim == 3 and ids.shape[0] == 4 else ids, n
        self._rows: list[tuple[list[Run], list[int]]] = []  # of every row, without padding: as `place` needs them
        self._asked: tuple[int, int] | None = None  # of how many rows and tokens they were asked for last

    def part(self, rows: slice) -> GivenPositions:
        """Those of these rows of the batch."""
        return self if self.ids.shape[-2] == 1 else GivenPositions(self.ids[..., rows, :], 0, self.n)

    def place(self, store: Slots, starts: Sequence[int], n: int, pad: Sequence[int] | None) -> None:
        """Tell the store where the n tokens stand that come after `starts` others; the first pad[b] are padding.

        Raises RuntimeError if these are the positions of other tokens.
        """
        if self._asked != (len(starts), n):  # the layers of a model ask in turn
            axes = self.ids.reshape(-1, *self.ids.shape[-2:])
            if axes.shape[2] != n or axes.shape[1] not in (1, len(starts)):
                raise RuntimeError(
                    f"skimkv: the model gives {tuple(self.ids.shape)} positions to {len(starts)} rows of {n} tokens"
                )
            pads = [0] * len(starts) if pad is None else pad
            least, greatest = (x.expand(len(starts), -1).tolist() for x in (axes.amin(0), axes.amax(0)))
            self._rows = [(runs(low[p:]), high[p:]) for low, high, p in zip(least, greatest, pads, strict=True)]
            self._asked = len(starts), n
        for b, (start, (low_runs, high)) in enumerate(zip(starts, self._rows, strict=True)):
            store.places.place(b, start, low_runs, high[: max(store.fixed - start, 0)])


def check_length(model: PreTrainedModel, n_tokens: int) -> None:
    """Raises ValueError if a text of n_tokens, by which methods are judged, goes past the model's positions."""
    positions = positions_of(model)
    if positions.limit is not None and n_tokens > positions.limit:
        raise ValueError(
            f"{n_tokens} tokens do not fit the {positions.limit} positions of {positions.name}; past them its answers "
            "say nothing about a method"
        )
