"""Rows of a batch that answer at once, each with its own script: what it is fed, then what it says."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hf.attach import Cache
from ..methods import Dense
from ..methods.base import Method
from ..stores.base import Shape, Store
from ..stores.clusters import Clusters
from . import budgets
from . import shared_prompt as prompt

BLOCK = 64  # tokens fed at once: logits of all of them are held


class Ask(NamedTuple):
    """One row: tokens fed after the prompt, of which the last `scored` count for bits; then at most `new` tokens
    are said, to the first `stop` after some text, or to `chars` characters. 0 and "" are no bound, new = 0 is none.
    """

    feed: list[int]
    scored: int = 0
    new: int = 0
    stop: str = ""
    chars: int = 0

    def cut(self, text: str) -> tuple[str, bool]:
        """The text up to its end, and whether that was reached."""
        start = len(text) - len(text.lstrip())
        end = text.find(self.stop, start) if self.stop else -1
        if end < 0 and self.chars and len(text) >= self.chars:
            end = self.chars
        return (text, False) if end < 0 else (text[:end], True)


class Said(NamedTuple):
    """What came of it. likeliest: each scored token was. Traffic is summed over steps and layers, in closed form."""

    text: str
    tokens: int
    bits: float
    likeliest: bool
    steps: int
    elements: int
    bytes: int
    paper: int
    dense_elements: int
    dense_bytes: int


class _Row:
    def __init__(self, ask: Ask) -> None:
        self.ask, self.ids, self.text = ask, list[int](), ""
        self.bits, self.likeliest, self.steps, self.cost = 0.0, True, 0, [0] * 5
        self.done = not ask.new and not ask.feed

    def score(self, first: int, logits: Tensor) -> None:
        """Bits of the tokens first, first + 1, ... of the feed, of those that count; logits (m,V) stand before each."""
        feed = self.ask.feed
        for i in range(max(first, len(feed) - self.ask.scored), min(first + len(logits), len(feed))):
            self.bits -= float(logits[i - first].log_softmax(-1)[feed[i]]) / math.log(2)
            self.likeliest &= int(logits[i - first].argmax()) == feed[i]

    def next(self, step: int, n: int, logits: Tensor, tokenizer: Any, ends: set[int]) -> list[int]:
        """The n tokens to feed now, logits (V) being those before them; the last one of all need not be fed."""
        feed = self.ask.feed
        if self.done:
            return [0]
        if step < len(feed):
            self.done = step + 1 == len(feed) and not self.ask.new
            return feed[step : step + n]
        token = int(logits.argmax())
        if token in ends:
            self.done = True
            return [token]
        self.ids.append(token)
        self.text, self.done = self.ask.cut(tokenizer.decode(self.ids, skip_special_tokens=True))
        self.done |= len(self.ids) == self.ask.new
        return [token]

    def said(self) -> Said:
        return Said(self.text, len(self.ids), self.bits, self.likeliest, self.steps, *self.cost)


@functools.lru_cache(4096)
def _closed(method: Method, n: int, shape: Shape, dtype: torch.dtype, data: tuple[tuple[str, int], ...]) -> list[int]:
    own, dense = method.traffic(n, shape, dtype, **dict(data)), Dense().traffic(n, shape, dtype)
    return [own.elements, own.bytes, own.paper, dense.elements, dense.bytes]


def _step(method: Method, stores: Sequence[Store], row: int, later: int, known: dict[Any, list[int]]) -> list[int]:
    """The closed forms of the last step of that row, or of the `later`-th before, summed over layers.

    `known`: those of the same cache that are no more than functions of their length.
    """
    n = stores[0].lengths[row] - 1 - later if stores else 0
    if (found := known.get((method, n))) is not None:
        return found
    layers: Counter[Any] = Counter()  # many are alike
    steady = True
    for store in stores:
        data = (("clusters", int(store.m[row].sum())),) if isinstance(store, Clusters) else ()
        steady &= not data
        layers[n, store.shape._replace(B=1), store.dtype, data] += 1
    closed = [[times * x for x in _closed(method, *layer)] for layer, times in layers.items()]
    total = [sum(parts) for parts in zip(*closed, strict=True)] or [0] * 5
    if steady:
        known[method, n] = total
    return total


def ends(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end a text, by the model's generation config and by its tokenizer."""
    given = getattr(model.generation_config, "eos_token_id", None)
    found = given if isinstance(given, list) else [given]
    return {token for token in [*found, tokenizer.eos_token_id] if token is not None}


def uneven(cache: Cache) -> bool:
    """Whether a step's traffic depends on more than its length: its tokens are then fed one by one."""
    return any(isinstance(store, Clusters) for store in budgets.stores(cache))


def _together(asks: Sequence[Ask], cache: Cache, step: int) -> int:
    """How many tokens can be fed in one block, which each layer decodes token by token: what all rows still have
    but the last. 1 where traffic depends on what the steps between left, and at the end of the positions."""
    n = min(min(len(ask.feed) for ask in asks) - 1 - step, BLOCK)
    past = cache.positions is not None and cache.get_seq_length() + n > cache.positions
    return 1 if n < 2 or past or uneven(cache) else n


def answer(
    model: Any, tokenizer: Any, cache: Cache, logits: Tensor, asks: Sequence[Ask], mask: Tensor | None = None
) -> list[Said]:
    """Greedy. cache (of `fill` or `fork`) and logits (B,V) stand behind the prompts; mask (B,n) where padded.

    The rows go in step; one that is done is fed zeros until the last is, which is not counted.
    """
    rows, owners, stop = [_Row(ask) for ask in asks], prompt.owners(cache, len(asks)), ends(model, tokenizer)
    logits, step, known = logits[:, None], 0, dict[Any, list[int]]()
    while True:
        n = _together(asks, cache, step)
        for row, before in zip(rows, logits, strict=True):
            row.score(step, before[-1:])
        tokens = [row.next(step, n, before[-1], tokenizer, stop) for row, before in zip(rows, logits, strict=True)]
        if all(row.done for row in rows):
            return [row.said() for row in rows]
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(rows), n)], 1)
        logits = prompt.forward(model, cache, torch.tensor(tokens, device=logits.device), mask).float()
        for row, owner, after in zip(rows, owners, logits, strict=True):
            row.score(step + 1, after[:-1])
            if not row.done:
                row.steps += n
                for later in range(n):
                    row.cost = [a + b for a, b in zip(row.cost, _step(*owner, later, known), strict=True)]
        step += n
