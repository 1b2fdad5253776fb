"""Huge pages are requested for whole pages of a tensor, whose numbers stay."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from skimkv.stores.memory import HUGE_PAGE, empty, request_huge_pages


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages to request")
def test_the_numbers_of_a_tensor_in_huge_pages_stay():
    memory = torch.arange(2 * HUGE_PAGE, dtype=torch.int32)  # four times the least size
    before = memory.clone()
    view = memory.view(4, -1, 2)[:, 3:]  # a view with gaps that begins within a page
    request_huge_pages(view)
    assert torch.equal(memory, before)
    view.fill_(-1)
    assert int((memory == -1).sum()) == view.numel()


def test_a_small_tensor_is_left_alone():
    assert not request_huge_pages(torch.zeros(1000))


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages to request")
@pytest.mark.parametrize("numbers", [HUGE_PAGE // 2 + 3, HUGE_PAGE * 2])
def test_a_tensor_begins_with_a_huge_page_and_owns_no_more_than_its_numbers(numbers):
    tensor = empty((1, numbers), torch.bfloat16)
    assert tensor.data_ptr() % HUGE_PAGE == 0
    assert tensor.shape == (1, numbers) and tensor.untyped_storage().nbytes() == 2 * numbers
    assert torch.equal(tensor.fill_(1).sum(dtype=torch.float64), torch.tensor(numbers, dtype=torch.float64))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_tensors_in_huge_pages_take_no_more_memory_than_their_numbers():
    size = HUGE_PAGE * 5 // 4
    before = resident_bytes()
    tensors = [empty((size,), torch.uint8).fill_(1) for _ in range(24)]
    assert resident_bytes() - before < 1.1 * size * len(tensors)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
