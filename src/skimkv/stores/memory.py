"""Memory for what is streamed: in huge pages, where the system has them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

HUGE_PAGE = 1 << 21  # bytes


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make tensors that can be written to at any time: those that torch.inference_mode() makes only inside of it."""
    has_gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(has_gradients):
        yield


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", least: int = HUGE_PAGE
) -> Tensor:
    """Allocate like torch.empty; on the CPU, from `least` bytes on, in memory of its own that requests huge pages.

    A stream over pages of 4 KiB stops the prefetcher at every page and looks up its address in a cold table, as every
    row does that is read alone. The tensor begins with a huge page; what follows its last whole one is in small pages.
    Raises RuntimeError if there is not enough memory.
    """
    numbers = math.prod(shape)
    size = numbers * dtype.itemsize
    if torch.device(device).type != "cpu" or size < least or not hasattr(mmap, "MADV_HUGEPAGE"):
        with ordinary_tensors():
            return torch.empty(tuple(shape), dtype=dtype, device=device)
    try:  # with addresses before the first huge page, which take no memory
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(f"{size} bytes do not fit in memory") from error
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
    memory.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE_PAGE * HUGE_PAGE)  # the rest would take a whole page too
    with ordinary_tensors():
        return torch.frombuffer(memory, dtype=dtype, count=numbers, offset=start).view(*shape)


COLLAPSE = 25  # MADV_COLLAPSE of Linux, from 6.1 on: memory that is in use already is moved to huge pages at once


@functools.cache
def _madvise() -> Callable[..., int] | None:
    """The system's madvise, for memory that this process did not map itself; None where there is none."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function: Callable[..., int] = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]  # type: ignore[attr-defined]
    return function


def request_huge_pages(tensor: Tensor) -> bool:
    """Ask the system for huge pages for a tensor on the CPU that another program part allocated; its numbers stay.

    The whole pages are meant between its first and its last number. Returns whether the system takes the request.
    """
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    page, start = mmap.PAGESIZE, tensor.data_ptr()
    stop = (start + (last + 1) * tensor.element_size()) // page * page
    start = -(-start // page) * page
    madvise = _madvise()
    if madvise is None or tensor.device.type != "cpu" or stop - start < 2 * HUGE_PAGE:
        return False
    taken = madvise(start, stop - start, mmap.MADV_HUGEPAGE) == 0
    madvise(start, stop - start, COLLAPSE)  # an older system moves the memory in its own time
    return taken
