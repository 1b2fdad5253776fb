"""Memory for what is streamed: in huge pages, where the system has them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGES_FROM = 1 << 22  # bytes of a tensor from which huge pages are requested


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Allocate like torch.empty; on the CPU, from 4 MiB on, in memory of its own that requests huge pages.

    A stream over pages of 4 KiB stops the prefetcher at every page and looks up its address in a cold table.
    Raises RuntimeError if there is not enough memory.
    """
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < HUGE_PAGES_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(*shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(f"{size} bytes do not fit in memory") from error
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
