"""The caches of the last conversations, kept for their next turns.

A kept cache holds the tokens of a prompt and nothing else: what was generated after it is forgotten, and read again as
part of the next prompt. So every token of a prompt is read with dense attention, as it is without a kept cache.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor

from ..hf.cache import Cache
from ..hf.layer import Layer
from ..hf.states import keeps_states
from ..stores.full import Full

LEAST_READ = 2  # tokens of a prompt that are read anew at least: a single one would be decoded with the method
# Fewer tokens than these are not worth a copy of a cache.
FEW = 32


class Conversation(NamedTuple):
    """A prompt, ids (n,), and the cache that holds its tokens."""

    ids: Tensor
    cache: Cache


class Conversations:
    """Keeps at most `count` conversations, in at most `nbytes` bytes of caches; the one used longest ago goes first.

    One thread uses it.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self.count, self.limit = count, nbytes
        self._kept: list[Conversation] = []  # the one used last comes last

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes that the kept caches have allocated."""
        return sum(conversation.cache.allocated for conversation in self._kept)

    def take(self, ids: Tensor) -> Cache | None:
        """Find the kept cache that shares the longest beginning with a prompt, ids (n,), and cut it to that beginning.

        The caller may change the result. None if nothing that is kept helps. The conversation that the prompt continues
        is kept no longer; one that only begins like it stays, and a copy of its cache is the result.
        """
        usable = [_usable(conversation, ids) for conversation in self._kept]
        best = max(range(len(usable)), key=usable.__getitem__, default=None)
        if best is None or usable[best] < FEW:
            return None
        conversation, shared = self._kept[best], usable[best]
        forgotten = len(conversation.ids) - shared
        if forgotten <= FEW:
            del self._kept[best]
            cache = conversation.cache
        else:
            self._kept.append(self._kept.pop(best))
            cache = copy.deepcopy(conversation.cache)
        if forgotten:
            cache.crop(-forgotten)
        return cache

    def can_keep(self, cache: Cache) -> bool:
        """Whether a cache is worth keeping: there is room for it, and it can go on with a block of several tokens."""
        return self.count > 0 and cache.allocated <= self.limit and not keeps_states(cache)

    def keep(self, ids: Tensor, cache: Cache) -> None:
        """Keep a cache that holds exactly the tokens ids (n,), and drop what then is too much."""
        if not self.can_keep(cache):
            return
        self._kept.append(Conversation(ids, cache))
        while len(self._kept) > self.count or self.nbytes > self.limit:
            del self._kept[0]


def can_crop(cache: Cache) -> bool:
    """Whether a cache can forget its last tokens: every layer keeps every token."""
    return all(isinstance(x, Layer) and x.is_croppable and isinstance(x.store, Full) for x in cache.layers)


def _usable(conversation: Conversation, ids: Tensor) -> int:
    """How many tokens of a prompt a kept cache can stand for. One that cannot be cropped: all of its own, or none."""
    own = conversation.ids
    n = min(len(own), len(ids) - LEAST_READ)
    if n <= 0:
        return 0
    differs = torch.nonzero(own[:n] != ids[:n])
    shared = int(differs[0]) if len(differs) else n
    return shared if shared == len(own) or can_crop(conversation.cache) else 0
