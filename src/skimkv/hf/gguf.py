"""What skimkv reads of a GGUF file: metadata, and tensors of floats or Q8_0 blocks.

The file is neither mapped nor held: a mapping would stay resident beside the packed weights. Lists of strings (the
vocabulary, of which the tokenizer takes care) are skipped: as objects they would cost more than some models.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from ..ops import linear

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, LIST = 8, 9


class Entry(NamedTuple):
    """Where a tensor is in the file. shape is (rows, columns), or (columns,)."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class File:
    """An open GGUF file: `meta` (without lists of strings) and `tensors`, by name.

    Raises ValueError if it is damaged, shorter than its tensors, or of a version other than 2 and 3.
    """

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")
        try:
            self.size = os.fstat(self.file.fileno()).st_size
            if self._bytes(4) != b"GGUF":
                raise ValueError("not a GGUF file")
            if (version := self._number("I")) not in (2, 3):
                raise ValueError(f"GGUF version {version} is not supported; only 2 and 3 are")
            n_tensors, n_meta = self._number("Q"), self._number("Q")
            pairs = (self._pair() for _ in range(n_meta))
            self.meta: dict[str, Any] = {key: value for key, value in pairs if value is not None}
            entries = [self._entry() for _ in range(n_tensors)]
            alignment = self.meta.get("general.alignment", 32)
            if not isinstance(alignment, int) or alignment < 1:
                raise ValueError(f"general.alignment = {alignment} is damaged")
            start = -(-self.file.tell() // alignment) * alignment
            self.tensors = {e.name: e._replace(offset=start + e.offset) for e in entries}
            for e in self.tensors.values():
                if e.offset + e.nbytes > self.size:
                    raise ValueError(f"truncated: {e.name} ends at byte {e.offset + e.nbytes} of {self.size}")
        except BaseException:
            self.file.close()
            raise

    def __enter__(self) -> File:
        return self

    def __exit__(self, *exc: object) -> None:
        self.file.close()

    def _bytes(self, n: int) -> bytearray:
        """The next n bytes. Checked first: a damaged length asks for more memory than there is."""
        if n > self.size - self.file.tell():
            raise ValueError(f"truncated or damaged: {n} bytes wanted at byte {self.file.tell()} of {self.size}")
        held = bytearray(n)
        if self.file.readinto(held) != n:
            raise ValueError(f"truncated at byte {self.file.tell()}")
        return held

    def _number(self, form: str) -> Any:
        return struct.unpack("<" + form, self._bytes(struct.calcsize("<" + form)))[0]

    def _string(self) -> str:
        return self._bytes(self._number("Q")).decode("utf-8", "replace")

    def _pair(self) -> tuple[str, Any]:
        return self._string(), self._value(self._number("I"))

    def _value(self, kind: int) -> Any:
        """A value of the metadata; None for a list of strings."""
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind != LIST:
            raise ValueError(f"damaged: {kind} is no type of metadata")
        kind, n = self._number("I"), self._number("Q")
        if kind in SCALARS:
            each = struct.calcsize(SCALARS[kind])
            return list(struct.unpack(f"<{n}{SCALARS[kind]}", self._bytes(n * each)))
        for _ in range(n):
            if kind == STRING:
                self._bytes(self._number("Q"))
            else:
                self._value(kind)
        return None

    def _entry(self) -> Entry:
        name = self._string()
        if (dimensions := self._number("I")) > 4:
            raise ValueError(f"damaged: {name} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        number, offset = self._number("I"), self._number("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ValueError(f"{name} is of unknown type {number}") from None
        elements = 1
        for n in shape:
            elements *= n
        block, each = GGML_QUANT_SIZES[kind]
        if not elements or shape[-1] % block:
            raise ValueError(f"damaged: {name} is {shape} in blocks of {block}")
        return Entry(name, kind.name, shape, offset, elements // block * each)

    def _read(self, t: Entry, first: int, last: int) -> bytearray:
        """Bytes first .. last-1 of a tensor."""
        self.file.seek(t.offset + first)
        return self._bytes(last - first)

    def floats(self, t: Entry) -> Tensor:
        """A tensor of floats as float32."""
        return torch.frombuffer(self._read(t, 0, t.nbytes), dtype=FLOATS[t.kind]).float().view(t.shape)

    def blocks(self, t: Entry) -> Callable[[int, int], Tensor]:
        """For weights.fill: rows first .. last-1 of a Q8_0 matrix as (n, in/32, 17) int16."""
        per_row = t.shape[-1] // linear.BLOCK
        each = per_row * linear.WORDS * 2

        def read(first: int, last: int) -> Tensor:
            held = self._read(t, first * each, last * each)
            return torch.frombuffer(held, dtype=torch.int16).view(-1, per_row, linear.WORDS)

        return read
