"""Rows of random tokens, which nothing but what stood before in the same row tells: copies, and keys with values."""

from __future__ import annotations

import random
from typing import NamedTuple

BOS, EOS = 0, 1
SHORT = 64  # tokens of a row for beginners


class Row(NamedTuple):
    ids: list[int]
    weights: list[float]  # of predicting this token


def copies(rng: random.Random, length: int, vocabulary: int) -> Row:
    """Random tokens of a large or small alphabet, then parts of them until the row is full.

    Of a small alphabet a part is known only by several tokens in a row, as in text; those weigh nothing. Short rows
    are of the large one and whole: there looking back appears first.
    """
    short = length <= SHORT
    n = rng.randint(4 if short else 8, length // (3 if short else 2))
    large = short or rng.random() < 0.5
    size = vocabulary - 2 if large else round(4 * (vocabulary / 8) ** rng.random())
    letters = rng.sample(range(2, vocabulary), size)
    base = rng.choices(letters, k=n)
    ids, weights = [BOS, *base], [0.0] * (n + 1)
    if short or (size > 256 and rng.random() < 0.5):  # the whole, again and again
        while len(ids) < length:
            ids, weights = ids + base, weights + [1.0] * n
        return Row(ids, weights)
    lead = next(m for m in range(1, 20) if size**m > 20 * n)
    while len(ids) < length:
        at = rng.randrange(n)
        part = base[at : at + rng.randint(lead + 4, max(lead + 5, n // 2))]
        ids, weights = ids + part, weights + ([0.0] * lead + [1.0] * len(part))[: len(part)]
    return Row(ids, weights)


def pairs(rng: random.Random, length: int, vocabulary: int) -> Row:
    """Keys of one to four tokens, a gap and an end that all lines share, values; then some again."""
    m, w, most = rng.randint(1, 4), rng.randint(1, 5), min(1000, vocabulary - 2)
    known = range(2, vocabulary)
    far = 3 if length <= 2 * SHORT or rng.random() < 0.5 else 16
    gap, end = rng.sample(known, rng.randint(0, far)), rng.sample(known, rng.randint(0, 1))
    size = rng.choice((4, 16, 64, most)) if m > 1 else most  # few letters: all of a key's tokens tell it
    letters, digits = rng.sample(known, size), rng.sample(known, rng.choice((10, 100, most)))
    room = length / (m + len(gap) + w + len(end)) * rng.uniform(0.25, 0.6)
    told: dict[tuple[int, ...], list[int]] = {}
    while len(told) < max(2, min(int(room), size**m // 2)):
        told[tuple(rng.choices(letters, k=m))] = rng.choices(digits, k=w)
    ids = [BOS, *(i for key, value in told.items() for i in (*key, *gap, *value, *end))]
    weights = [0.0] * len(ids)
    keys = list(told)
    while len(ids) < length:
        key = rng.choice(keys)
        ids += [*key, *gap, *told[key], *end]
        weights += [0.0] * (m + len(gap)) + [1.0] * w + [0.0] * len(end)
    return Row(ids, weights)
