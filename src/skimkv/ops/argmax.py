"""The largest number of every row: the token that greedy decoding takes."""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu import library
from .linear import is_native


def argmax(x: Tensor) -> Tensor:
    """Where the first of the largest numbers of each row of x (B,V) is, NaN being larger than any: (B,).

    It is torch.argmax; on the CPU the library looks at the numbers as they are. Raises ValueError if a row is empty.
    """
    if x.shape[1] == 0:
        raise ValueError(f"x is {tuple(x.shape)}; a row must have a number")
    start, size = x.data_ptr(), x.element_size()
    if x.dtype not in library.DTYPES or x.stride(1) != 1 or start % size or not is_native(x):
        return x.argmax(1)
    find, (rows, n), dtype = library.library().skimkv_argmax, x.shape, library.DTYPES[x.dtype]
    distance = x.stride(0) * size
    found = [find(start + row * distance, dtype, n) for row in range(rows)]
    return torch.tensor(found, dtype=torch.int64, device="cpu")
