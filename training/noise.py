"""Training rows of random tokens: nothing but the same row can tell what follows. Copies, and keys with values."""

from __future__ import annotations

import random
from typing import NamedTuple

BOS, EOS = 0, 1
SHORT = 64  # tokens; rows up to this length are for a network that cannot look back yet


class Row(NamedTuple):
    """Tokens, and for each token how much its prediction weighs in the loss; 0 leaves it out."""

    ids: list[int]
    weights: list[float]


def copies(rng: random.Random, length: int, vocabulary: int) -> Row:
    """Make a row of at least `length` tokens: random tokens of a large or small alphabet, then copies of parts of them.

    With a small alphabet several tokens are needed to recognise a part, as in text; these lead tokens weigh nothing.
    Short rows have the large alphabet and copies of the whole: there a network first learns to look back.
    """
    is_short = length <= SHORT
    n = rng.randint(4 if is_short else 8, length // (3 if is_short else 2))
    is_large = is_short or rng.random() < 0.5
    size = vocabulary - 2 if is_large else round(4 * (vocabulary / 8) ** rng.random())
    alphabet = rng.sample(range(2, vocabulary), size)
    base = rng.choices(alphabet, k=n)
    ids, weights = [BOS, *base], [0.0] * (n + 1)
    if is_short or (size > 256 and rng.random() < 0.5):  # the whole, again and again
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
    """Make a row of at least `length` tokens: lines with a random key and a random value, then some lines again.

    A key has one to four tokens. Between key and value stand the same tokens in every line, the gap, and after the
    value perhaps one more. In the lines that come again the value weighs.
    """
    key_size, value_size, most = rng.randint(1, 4), rng.randint(1, 5), min(1000, vocabulary - 2)
    known = range(2, vocabulary)
    longest_gap = 3 if length <= 2 * SHORT or rng.random() < 0.5 else 16
    gap, end = rng.sample(known, rng.randint(0, longest_gap)), rng.sample(known, rng.randint(0, 1))
    size = rng.choice((4, 16, 64, most)) if key_size > 1 else most  # few letters: only all of a key's tokens tell it
    letters, digits = rng.sample(known, size), rng.sample(known, rng.choice((10, 100, most)))
    room = length / (key_size + len(gap) + value_size + len(end)) * rng.uniform(0.25, 0.6)
    values: dict[tuple[int, ...], list[int]] = {}
    while len(values) < max(2, min(int(room), size**key_size // 2)):
        values[tuple(rng.choices(letters, k=key_size))] = rng.choices(digits, k=value_size)
    ids = [BOS, *(i for key, value in values.items() for i in (*key, *gap, *value, *end))]
    weights = [0.0] * len(ids)
    keys = list(values)
    while len(ids) < length:
        key = rng.choice(keys)
        ids += [*key, *gap, *values[key], *end]
        weights += [0.0] * (key_size + len(gap)) + [1.0] * value_size + [0.0] * len(end)
    return Row(ids, weights)
