"""The GGUF file format: metadata, and tensors of floats or of blocks. A model may be split over several files.

Floats and Q8_0 blocks, which get another layout, are read piece by piece: a mapping would stay resident beside them.
The other blocks are used as they stand in the file, through a mapping, and never copied. Lists of strings (the
vocabulary) are skipped unless they are asked for: as Python objects they take more memory than some models.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from ..ops import block_weights, packed_weights

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Metadata: the number of a type -> its format for struct, and the numbers of the two types that are no scalars.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, LIST = 8, 9
MOST_DEPTH = 8  # of lists in lists, of which no file that is known has any


class TensorEntry(NamedTuple):
    """Where a tensor is in the file, and in which type. The shape is (rows, columns), or (columns,).

    offset: of its first byte, from the start of the file. quantisation: "F32", "Q8_0" or another name of GGUF's types.
    stream: the open file that it is in.
    """

    name: str
    quantisation: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    stream: BinaryIO

    def rows(self, first: int, count: int) -> TensorEntry:
        """The rows first .. first + count - 1 of this matrix (rows, columns)."""
        size = self.nbytes // self.shape[0]
        return self._replace(shape=(count, *self.shape[1:]), offset=self.offset + first * size, nbytes=count * size)

    def one(self, i: int) -> TensorEntry:
        """The i-th of these matrices (n, rows, columns)."""
        return self.rows(i, 1)._replace(shape=self.shape[1:])


class GGUFFile:
    """An open GGUF file. `metadata` by key, and `tensors` by name, of all parts.

    lists: the keys of those lists of strings that metadata contains; the others are skipped.

    The first part of a model that is split over several files opens the others. Raises ValueError if a file is damaged,
    shorter than its tensors, big-endian, of a version other than 2 and 3, or if a part is missing. So it does for two
    tensors of one name, and for one that does not begin at a multiple of general.alignment, which must be a power of
    two.
    """

    def __init__(self, path: Path, lists: Container[str] = ()) -> None:
        self.parts: list[GGUFFile] = []
        self._lists = lists
        self.file = path.open("rb")
        try:
            self.size = os.fstat(self.file.fileno()).st_size
            if self._bytes(4) != b"GGUF":
                raise ValueError("not a GGUF file")
            version = self._number("I")
            if version and version % 2**16 == 0:  # as in llama.cpp: its bytes stand in the other order
                raise ValueError("it is a big-endian GGUF file, which is not supported; only little-endian ones are")
            if version not in (2, 3):
                raise ValueError(f"GGUF version {version} is not supported; only 2 and 3 are")
            n_tensors, n_metadata = self._number("Q"), self._number("Q")
            pairs = (self._pair() for _ in range(n_metadata))
            self.metadata: dict[str, Any] = {key: value for key, value in pairs if value is not None}
            entries = [self._entry() for _ in range(n_tensors)]
            alignment = self.metadata.get("general.alignment", 32)
            if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
                raise ValueError(f"damaged: general.alignment = {alignment!r} must be a power of two")
            start = -(-self.file.tell() // alignment) * alignment
            _check_places(entries, alignment)
            self.tensors = {entry.name: entry._replace(offset=start + entry.offset) for entry in entries}
            for entry in self.tensors.values():
                end = entry.offset + entry.nbytes
                if end > self.size:
                    raise ValueError(f"truncated: {entry.name} ends at byte {end} of {self.size}")
            self._open_parts(path)
        except BaseException:
            self.close()
            raise

    def _open_parts(self, path: Path) -> None:
        """Open the other parts of a model whose first part this is, and add their tensors."""
        number, count = self.metadata.get("split.no", 0), self.metadata.get("split.count", 0)
        match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
        if number or not isinstance(count, int) or count < 2:
            return
        if match is None or int(match[2]) != 1 or int(match[3]) != count:
            raise ValueError(f"it is the first of {count} parts, so its name must end in -00001-of-{count:05}.gguf")
        for i in range(2, count + 1):
            other = path.with_name(f"{match[1]}-{i:05}-of-{count:05}.gguf")
            if not other.is_file():
                raise ValueError(f"{other.name} is missing, part {i} of {count}")
            part = GGUFFile(other)
            self.parts.append(part)
            if part.metadata.get("split.no") != i - 1:
                raise ValueError(f"{other.name} is not part {i}: its split.no is {part.metadata.get('split.no')}")
            if twice := self.tensors.keys() & part.tensors.keys():
                raise ValueError(f"{min(twice)} is in several parts")
            self.tensors |= part.tensors

    def close(self) -> None:
        """Close all files. Tensors of blocks stay valid."""
        for file in (self, *self.parts):
            file.file.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _bytes(self, n: int) -> bytearray:
        """The next n bytes. n is checked first: a damaged length could ask for more memory than there is."""
        if n > self.size - self.file.tell():
            raise ValueError(f"truncated or damaged: {n} bytes wanted at byte {self.file.tell()} of {self.size}")
        data = bytearray(n)
        if self.file.readinto(data) != n:
            raise ValueError(f"truncated at byte {self.file.tell()}")
        return data

    def _number(self, format: str) -> Any:
        return struct.unpack("<" + format, self._bytes(struct.calcsize("<" + format)))[0]

    def _string(self) -> str:
        return self._bytes(self._number("Q")).decode("utf-8", "replace")

    def _pair(self) -> tuple[str, Any]:
        key = self._string()
        return key, self._value(self._number("I"), key in self._lists)

    def _value(self, kind: int, keep: bool = False, depth: int = 0) -> Any:
        """A value of the metadata; None for a list of strings, unless they are to be kept. depth: lists around it."""
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind != LIST:
            raise ValueError(f"damaged: {kind} is no type of metadata")
        kind, n = self._number("I"), self._number("Q")
        if kind in SCALARS:
            itemsize = struct.calcsize(SCALARS[kind])
            return list(struct.unpack(f"<{n}{SCALARS[kind]}", self._bytes(n * itemsize)))
        if kind == STRING:
            return self._strings(n, keep)
        if depth == MOST_DEPTH:
            raise ValueError(f"damaged: lists of metadata are nested more than {MOST_DEPTH} deep")
        for _ in range(n):
            self._value(kind, depth=depth + 1)
        return None

    def _strings(self, n: int, keep: bool) -> list[str] | None:
        """The next n strings, or None without `keep`. A tokenizer has some hundred thousand of them."""
        found, at, number = list[str](), self.file.tell(), struct.Struct("<Q")
        with mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for _ in range(n):
                start = at + number.size
                end = start + (number.unpack_from(data, at)[0] if start <= self.size else 0)
                if end > self.size:
                    raise ValueError(f"truncated or damaged: a string at byte {at} of {self.size} ends at byte {end}")
                if keep:
                    found.append(data[start:end].decode("utf-8", "replace"))
                at = end
        self.file.seek(at)
        return found if keep else None

    def _entry(self) -> TensorEntry:
        name = self._string()
        if not 1 <= (dimensions := self._number("I")) <= 4:
            raise ValueError(f"damaged: {name} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        number, offset = self._number("I"), self._number("Q")
        try:
            quantisation = GGMLQuantizationType(number)
        except ValueError:
            raise ValueError(f"{name} is of unknown type {number}") from None
        elements = 1
        for n in shape:
            elements *= n
        block, block_bytes = GGML_QUANT_SIZES[quantisation]
        if not elements or shape[-1] % block:
            raise ValueError(f"damaged: {name} is {shape} in blocks of {block}")
        return TensorEntry(name, quantisation.name, shape, offset, elements // block * block_bytes, self.file)

    def floats(self, entry: TensorEntry) -> Tensor:
        """A tensor of any type as float32: blocks are dequantised by the package gguf."""
        data = _read(entry, 0, entry.nbytes)
        if entry.quantisation in FLOATS:
            return torch.frombuffer(data, dtype=FLOATS[entry.quantisation]).float().view(entry.shape)
        blocks = np.frombuffer(data, dtype=np.uint8).reshape(*entry.shape[:-1], -1)
        return torch.from_numpy(gguf.quants.dequantize(blocks, GGMLQuantizationType[entry.quantisation]))

    def blocks(self, entry: TensorEntry) -> Callable[[int, int], Tensor]:
        """A function read(first, last) that returns rows first .. last-1 of a Q8_0 matrix as (n, in/32, 17) int16."""
        row_blocks = entry.shape[-1] // packed_weights.BLOCK
        row_bytes = row_blocks * packed_weights.WORDS * 2

        def read(first: int, last: int) -> Tensor:
            """Return the packed rows from block `first` to block `last`."""
            data = _read(entry, first * row_bytes, last * row_bytes)
            return torch.frombuffer(data, dtype=torch.int16).view(-1, row_blocks, packed_weights.WORDS)

        return read

    def rows(self, entry: TensorEntry) -> Tensor:
        """The rows of a matrix in one of block_weights.TYPES, mapped from the file: (rows, row_bytes) uint8.

        The file must not be changed while the tensor is in use.
        """
        return _mapped(entry, torch.uint8).view(-1, block_weights.row_bytes(entry.quantisation, entry.shape[-1]))

    def mapped_floats(self, entry: TensorEntry) -> Tensor:
        """A tensor of one of the types in FLOATS, mapped from the file as it is there.

        The file must not be changed while the tensor is in use.
        """
        return _mapped(entry, FLOATS[entry.quantisation]).view(entry.shape)


def check_types(entries: Iterable[TensorEntry]) -> None:
    """Raises ValueError for a tensor of a type that nothing dequantises."""
    sample = {entry.quantisation: entry for entry in entries if entry.quantisation not in FLOATS}
    for name, entry in sample.items():
        try:
            gguf.quants.dequantize(
                np.zeros((1, GGML_QUANT_SIZES[kind := GGMLQuantizationType[name]][1]), np.uint8), kind
            )
        except NotImplementedError:
            raise ValueError(f"{entry.name} is of type {name}, which the package gguf does not dequantise") from None


def _check_places(entries: Iterable[TensorEntry], alignment: int) -> None:
    """Raises ValueError for two tensors of one name, or one whose offset is no multiple of the alignment."""
    names = set[str]()
    for entry in entries:
        if entry.name in names:
            raise ValueError(f"damaged: two tensors have the name {entry.name}")
        if entry.offset % alignment:
            raise ValueError(
                f"damaged: {entry.name} begins at byte {entry.offset} of the data, no multiple of {alignment}"
            )
        names.add(entry.name)


def _mapped(entry: TensorEntry, dtype: torch.dtype) -> Tensor:
    """The bytes of a tensor as elements of a type, mapped from the file."""
    # A private mapping can be written to, which PyTorch asks for; nothing writes to it.
    mapping = mmap.mmap(entry.stream.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapping, dtype=dtype, count=entry.nbytes // dtype.itemsize, offset=entry.offset)


def _read(entry: TensorEntry, first: int, last: int) -> bytearray:
    """Bytes first .. last-1 of a tensor. Raises ValueError if the file has become shorter since it was opened."""
    entry.stream.seek(entry.offset + first)
    data = bytearray(entry.stream.read(last - first))
    if len(data) != last - first:
        raise ValueError(f"truncated: {entry.name} ends after {first + len(data)} bytes")
    return data
