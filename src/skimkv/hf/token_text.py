"""The text of an answer whose tokens come one after the other."""

from __future__ import annotations

from typing import Any

UNFINISHED = "\ufffd"  # what bytes become that are not yet a whole character


class TokenText:
    """Makes text of tokens as soon as its characters are whole; each token takes the same time, however many came.

    skip_special_tokens: of the tokenizer's decode().
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.tokens: list[int] = []
        self._first, self._read = 0, 0  # the text of tokens[_first:_read] is known; tokens[:_first] do not matter

    def add(self, token: int) -> str:
        """Take the next token, and return the text that is new."""
        self.tokens.append(token)
        return self._new_text()

    def end(self) -> str:
        """The text that is left, whole or not, because no token follows."""
        return self._new_text(is_last=True)

    def _new_text(self, is_last: bool = False) -> str:
        """The text that is not yet known, without characters that are not yet whole.

        A few tokens before it are decoded too: some tokenizers begin a text in another way than they go on with it.
        """
        before, whole = self._decode(self._read), self._decode(None)
        if len(whole) <= len(before) or (whole.endswith(UNFINISHED) and not is_last):
            return ""
        self._first, self._read = self._read, len(self.tokens)
        return whole[len(before) :]

    def _decode(self, stop: int | None) -> str:
        tokens = self.tokens[self._first : stop]
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=self.skip_special_tokens)
        return text
