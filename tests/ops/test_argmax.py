"""The token that greedy decoding takes: where the first of the largest numbers of a row is, as torch.argmax says."""

from __future__ import annotations

import pytest
import torch

from skimkv import ops
from skimkv.ops.cpu import library
from support.kernels import NATIVE, TYPES, on

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")

CASES = {
    "random": lambda x: x,
    "many equal": lambda x: x.clamp(-0.5, 0.5),
    "zeros of both signs": lambda x: torch.where(x > 0, 0.0, -0.0).to(x.dtype),
    "below zero": lambda x: -x.abs() - 1,
    "minus infinity": lambda x: torch.full_like(x, -torch.inf),
    "infinity": lambda x: x.index_fill(1, torch.tensor([x.shape[1] // 2]), torch.inf),
    "NaN beside infinity": lambda x: x.where(x < 1, torch.inf).index_fill(1, torch.tensor([x.shape[1] - 1]), torch.nan),
    "NaN of both signs": lambda x: torch.where(x > 0, torch.nan, -torch.nan).to(x.dtype),
}


@pytest.mark.parametrize("computes", [None, "ref"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", TYPES)
def test_it_is_the_first_of_the_largest(computes, case, dtype):
    torch.manual_seed(0)
    for n in (1, 2, 1023, 1024, 1025, 5000):
        x = CASES[case](torch.randn(3, n).to(TYPES[dtype]))
        with on(computes):
            assert torch.equal(ops.argmax(x), x.float().argmax(1)), n


def test_rows_as_they_lie():
    x = torch.randn(4, 3, 50)
    for part in (x[:, -1], x[:1, 1], x[:, 0, 3:], x[0].T, x[:0, 0]):
        assert torch.equal(ops.argmax(part), part.argmax(1))
    with pytest.raises(ValueError, match=r"\(2, 0\); a row must have a number"):
        ops.argmax(torch.empty(2, 0))


def test_the_library_refuses_what_it_cannot_read():
    find, x = library.library().skimkv_argmax, torch.zeros(8)
    at = x.data_ptr()
    assert find(at, 0, 8) == 0
    bad = [(None, 0, 8), (at, 0, 0), (at, 0, -1), (at, 3, 8), (at, -1, 8), (at + 2, 0, 4), (at + 1, 1, 4)]
    assert [find(*arguments) for arguments in bad] == [-1] * len(bad)
