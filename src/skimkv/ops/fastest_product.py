"""How numbers of 16 bits in a prompt are multiplied fastest on this processor, which is measured once.

What a processor has instructions for is no answer: an Intel without matrix units takes longer for a product of bfloat16
than for one of float32.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import matrices
from .cpu import library
from .cpu import linear as cpu

PYTORCH, FLOAT32, LIBRARY = "pytorch", "float32", "library"  # FLOAT32: PyTorch's product of converted numbers
AT_ONCE = 1 << 21  # weights that are converted or dequantised at once: they stay in the caches of a processor
TOKENS, ROWS, COLUMNS, ROUNDS = 512, 1024, 512, 9  # of the products that are timed: some 50 ms in all
MARGIN = 0.9  # of the usual way's time, below which another one is taken: no choice hangs on a busy moment


@functools.cache
def fastest(dtype: torch.dtype) -> str:
    """Return how a product of this type is computed in the least time on this processor, by this library if need be.

    The usual way for bfloat16 is PyTorch's where the processor has instructions for it, and else, as for float16, the
    library's: with instructions for float16 PyTorch adds up in float16. The other way is to convert to float32, and the
    clock decides. For float32 and for matrix units it is PyTorch's.
    """
    if not (library.isa() or "").startswith("avx"):
        return PYTORCH
    if dtype not in (torch.bfloat16, torch.float16) or (dtype == torch.bfloat16 and library.has_matrix_units()):
        return PYTORCH
    usual = PYTORCH if dtype == torch.bfloat16 and library.has_bfloat16_instructions() else LIBRARY
    draw = torch.Generator().manual_seed(0)
    kind: Any = {"generator": draw, "dtype": torch.float32, "device": "cpu"}
    x, w = (torch.randn(n, COLUMNS, **kind).to(dtype) for n in (TOKENS, ROWS))
    seconds: dict[str, list[float]] = {usual: [], FLOAT32: []}
    for _ in range(ROUNDS):
        for way, of_way in seconds.items():
            start = time.perf_counter()
            multiply(x, w, None, way)
            of_way.append(time.perf_counter() - start)
    return FLOAT32 if min(seconds[FLOAT32]) < MARGIN * min(seconds[usual]) else usual


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, way: str) -> Tensor:
    """Multiply x (...,in) with weights (rows,in) of its type on the CPU, and add a bias of any type: (...,rows)."""
    rows = weight.shape[0]
    if way == LIBRARY:
        return cpu.matrix(x, weight, matrices.FLOATS, rows, bias).multiply(x)
    if way == PYTORCH:
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    wide, bias, step = x.float(), None if bias is None else bias.float(), max(1, AT_ONCE // x.shape[-1])
    if rows <= step:
        return F.linear(wide, weight.float(), bias).to(x.dtype)
    y = x.new_empty(*x.shape[:-1], rows)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        y[..., part] = F.linear(wide, weight[part].float(), None if bias is None else bias[part])
    return y
