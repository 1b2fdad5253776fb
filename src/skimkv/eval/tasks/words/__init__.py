"""English words that tasks draw from: each list is a file of this folder."""

from __future__ import annotations

from pathlib import Path


def _read(name: str) -> list[str]:
    return Path(__file__).with_name(name).read_text(encoding="utf-8").split()


NOUNS = _read("nouns.txt")
ADJECTIVES = _read("adjectives.txt")
# so that a list of 32k tokens has enough words
ALL = sorted({*NOUNS, *ADJECTIVES, *_read("more_nouns.txt"), *_read("verbs.txt")})
