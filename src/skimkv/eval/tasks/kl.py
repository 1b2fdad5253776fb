"""KL(dense ‖ method): how far a method moves the distribution of the next token, over any text.

The first `context` tokens of a document are read at once, the next `reference` tokens are given one at a time, so that
a method decodes each of them; after each, the whole distribution is compared with dense attention's. Task scores
saturate where methods still differ; this does not, and it needs no questions.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from . import bpc, source
from .base import Example, check_whole

LOWER, UNIT, GREATEST, DOCUMENTS = True, "nats a token", math.inf, True  # a method can exclude any token
TOKEN_CHARACTERS = 8  # more than the mean token of any usual tokenizer: a piece is cut so long
LONGEST_TOKEN = 64  # characters; of a document no more than this for each token is looked at


def examples(
    *, data: Path | None = None, seed: int = 0, context: int = 2048, reference: int = 256
) -> Iterator[Example]:
    """Give documents in random order; those with too few tokens are passed over when they are tokenized.

    data: a file or a folder of *.txt. The articles of a file in WikiText's form are documents; another file is cut into
    consecutive pieces, each of which counts as a document. Without data the text is WikiText's, from the Hub.
    """
    check_whole("context", context, 1)
    check_whole("reference", reference, 1)
    if data is None:
        texts = [("wikitext", bpc.load_wikitext("kl", "*.txt"))]
    else:
        texts = [(path.stem, source.read_text(path)) for path in source.find_texts(data)]
    n = context + reference
    documents = [
        (f"{name}:{start}", document[: LONGEST_TOKEN * n])
        for name, text in texts
        for start, document in _split(text, TOKEN_CHARACTERS * n)
        if document.strip()
    ]
    if not documents:
        raise ValueError(f"kl: {data or 'the Hub'} holds no text")
    random.Random(seed).shuffle(documents)
    for name, document in documents:
        yield Example(name, document, "", (), 0, tokens=(context, reference))


def _split(text: str, size: int) -> list[tuple[int, str]]:
    """The articles of a text, or pieces of `size` characters and up to the end of a word, each with its position."""
    if bpc.TITLE.search(text):
        return bpc.split_articles(text)
    return [(piece.start(), piece[0]) for piece in re.finditer(rf".{{1,{size}}}\S*", text, flags=re.DOTALL)]


def score(divergences: Sequence[float], example: Example) -> float:
    """Return the mean over the forced tokens."""
    return fmean(divergences)
