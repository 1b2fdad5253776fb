"""The column sums of a prompt's attention: what H2O's scores begin with; kernel against reference, and by hand."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skimkv import ops
from skimkv.ops.cpu import library
from skimkv.ops.cpu.key_scores import key_scores as fast
from skimkv.ops.cpu.structs import CColumns
from skimkv.ops.key_scores import reference
from support.kernels import ISAS, NATIVE, TYPES, on


def test_by_hand(backend):
    """Equal logits: query i spreads 1/(i+1) over keys 0..i; a history of one token is seen by both queries."""
    q, k = torch.zeros(1, 2, 3, 8), torch.randn(1, 3, 8)
    expected = torch.tensor([[1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3]])
    torch.testing.assert_close(ops.key_scores(q, k, 0.3, None), expected)
    torch.testing.assert_close(ops.key_scores(q[:, :, 1:], k, 0.3, 5.0), expected - torch.tensor([[1.0, 0, 0]]))


def close(got, want, q, k, scale):
    """float32 sums of D products in a logit, and of at most n weights of at most 1 in a column."""
    logit = scale * q.double().abs().sum(-1).max() * k.double().abs().max()
    bound = 2.0**-24 * (16 * logit + 8 + q.shape[2] ** 0.5) * want + 1e-6
    assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.skipif(not NATIVE, reason="the native library is not built")
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25)
@given(data=st.data())
def test_kernel_is_the_reference(isa, data):
    draw = data.draw
    H, G, D = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 576))
    n = draw(st.integers(1, 150))
    m, cap = n + draw(st.integers(0, 90)), draw(st.sampled_from([None, 4.0]))
    dtype, threads = TYPES[draw(st.sampled_from(list(TYPES)))], draw(st.integers(1, 3))
    torch.manual_seed(draw(st.integers(0, 99)))
    # rows anywhere: an offset, gaps, heads and tokens transposed; what lies between is NaN
    room = torch.full((n, G, H, D + 3), torch.nan, dtype=dtype)
    q = room[..., 2 : D + 2].permute(2, 1, 0, 3).copy_(torch.randn(H, G, n, D) * 2)
    k = torch.full((m, H, D + 1), torch.nan, dtype=dtype)[..., :D].transpose(0, 1).copy_(torch.randn(H, m, D))
    want = reference(q.double(), k.double(), D**-0.5, cap)
    with on(isa, threads):
        got = ops.key_scores(q, k, D**-0.5, cap)
    assert got.dtype == torch.float32
    close(got, want, q, k, D**-0.5)
    torch.testing.assert_close(got.sum(1), torch.full((H,), float(n)), rtol=1e-5, atol=0)


def test_bad_calls():
    q, k = torch.zeros(2, 1, 4, 8), torch.zeros(2, 4, 8)
    for wrong in (k[:1], k[:, :3], k[..., :7], k.half()):
        for columns in (reference, fast) if NATIVE else (reference,):
            with pytest.raises(ValueError, match=r"k is .* must be"):
                columns(q, wrong, 1.0, None)
    if NATIVE:
        with pytest.raises(ValueError, match="float64"):
            fast(q.double(), k.double(), 1.0, None)
        with pytest.raises(ValueError, match="softcap"):
            fast(q, k, 1.0, -1.0)
        with pytest.raises(ValueError, match="D must be from 1 to 576"):
            fast(torch.zeros(1, 1, 1, 577), torch.zeros(1, 1, 577), 1.0, None)
        assert b"NULL" in library.library().skimkv_columns_check(ctypes.byref(CColumns()))
