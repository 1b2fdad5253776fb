"""Text in tokens, and in pieces of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skimkv.eval.generate import encode, encode_pieces


class Letters:
    """A tokenizer with a token for each character; bos begins every text if there is one."""

    def __init__(self, bos: int | None) -> None:
        self.bos_token_id = bos

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> Any:
        return SimpleNamespace(input_ids=[ord(character) for character in text])


def test_pieces_of_a_text() -> None:
    assert encode_pieces(Letters(1), "abcdefghijk", 4, 9) == [
        [1, *b"abc"],
        [1, *b"def"],
        [1, *b"ghi"],
    ]
    assert encode_pieces(Letters(None), "abcde", 2, 1) == [[*b"ab"]]
    assert encode_pieces(Letters(1), "a", 3, 1) == []


def test_an_empty_text() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        encode(Letters(1), " \n", chat=False)
