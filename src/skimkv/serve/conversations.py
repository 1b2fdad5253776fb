"""The caches of the last conversations, kept for their next turns.

A kept cache holds the tokens of a prompt and nothing else: what was generated after it is forgotten, and read again as
part of the next prompt. So every token of a prompt is read with dense attention, as it is without a kept cache.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from ..hf.cache import Cache
from ..hf.layer import Layer
from ..hf.states import keeps_states
from ..stores.full import Full

LEAST_READ = 2  # tokens of a prompt that are read anew at least: a single one would be decoded with the method
# Fewer tokens than these are not worth a copy of a cache.
FEW = 32


@dataclass(eq=False)
class Conversation:
    """A prompt, ids (n,), and the cache that holds its tokens.

    in_use: whether another thread reads the cache, or is about to: then it must not change.
    """

    ids: Tensor
    cache: Cache
    in_use: bool = False

    def usable(self, ids: Tensor) -> int:
        """How many tokens of a prompt, ids (n,), the cache can stand for."""
        return usable(self.ids, ids, can_crop(self.cache))


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

    def held(self, ids: Tensor) -> int:
        """How many tokens of a prompt, ids (n,), a kept cache can stand for."""
        return max((conversation.usable(ids) for conversation in self._kept), default=0)

    def take(self, ids: Tensor, stays: bool = False) -> Cache | None:
        """Find the kept cache that shares the longest beginning with a prompt, ids (n,), and cut it to that beginning.

        The caller may change the result. None if nothing that is kept helps. The conversation that the prompt continues
        is kept no longer; one that only begins like it stays, and a copy of its cache is the result. stays: any stays.
        """
        best = max(self._kept, key=lambda conversation: conversation.usable(ids), default=None)
        if best is None or (tokens := best.usable(ids)) < FEW:
            return None
        self._kept.remove(best)
        stays |= len(best.ids) - tokens > FEW
        if stays:
            self._kept.append(best)
        return cut(copy.deepcopy(best.cache) if best.in_use or stays else best.cache, tokens)

    def can_keep(self, cache: Cache) -> bool:
        """Whether a cache is worth keeping: there is room for it, and it can go on with a block of several tokens."""
        return self.count > 0 and cache.allocated <= self.limit and not keeps_states(cache)

    def keep(self, ids: Tensor, cache: Cache, is_alike: bool = False) -> Conversation | None:
        """Keep a cache that holds exactly the tokens ids (n,), and drop what then is too much; None if it cannot be.

        A conversation with whose tokens these begin, as one that was read anew does, is kept no longer. is_alike: nor
        is one that `take` would see as continued, if that had not been told to let it stay.
        """
        if not self.can_keep(cache):
            return None
        conversation = Conversation(ids, cache)
        crops = is_alike and can_crop(cache)
        self._kept = [other for other in self._kept if not continues(ids, crops, other.ids)]
        self._kept.append(conversation)
        while len(self._kept) > self.count or self.nbytes > self.limit:
            del self._kept[0]
        return conversation


def cut(cache: Cache, tokens: int) -> Cache:
    """Let a cache forget all but its first `tokens` tokens, and return it."""
    if forgotten := cache.get_seq_length() - tokens:
        cache.crop(-forgotten)
    return cache


def can_crop(cache: Cache) -> bool:
    """Whether a cache can forget its last tokens: every layer keeps every token."""
    return all(isinstance(x, Layer) and x.is_croppable and isinstance(x.store, Full) for x in cache.layers)


def usable(own: Tensor, ids: Tensor, can_crop: bool) -> int:
    """How many tokens of a prompt, ids (n,), a cache of the tokens own (m,) can stand for.

    One that cannot be cropped stands for all of its own, or for none.
    """
    n = min(shared(own, ids), len(ids) - LEAST_READ)
    return max(n, 0) if can_crop or n == len(own) else 0


def continues(ids: Tensor, can_crop: bool, older: Tensor) -> bool:
    """Whether the tokens ids (n,) are of a later turn of the conversation older (m,), as Conversations.take sees it.

    can_crop: whether their caches can be cropped.
    """
    least = max(len(older) - FEW, min(FEW, len(older))) if can_crop else len(older)
    return shared(ids, older) >= least


def shared(a: Tensor, b: Tensor) -> int:
    """How many tokens the texts a (m,) and b (n,) have in common at their beginning."""
    n = min(len(a), len(b))
    differs = torch.nonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
