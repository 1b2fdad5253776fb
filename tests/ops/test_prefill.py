"""The CPU's library puts a block of tokens into a store as PyTorch does."""

from __future__ import annotations

import pytest
import torch

from skimkv import ops
from skimkv.methods import Dense, SnapKV
from skimkv.stores.base import Shape
from skimkv.stores.full import Full
from support.kernels import NATIVE, held

SHAPE = Shape(2, 2, 2, 64)
KINDS = (  # the index, whether a mean is kept, the form of rows
    ("none", True, None), ("none", True, "int8"), ("none", True, "int4"), ("copy", True, None), ("copy", False, "int8"),
    ("int8", True, None), ("int4", False, None),
)  # fmt: skip
LARGEST = 5  # of the numbers that `tokens` draws
native = pytest.mark.skipif(not NATIVE, reason="the native library is not built")


def tokens(n, dtype=torch.float32):
    draw = torch.Generator().manual_seed(n)
    k, v = torch.randn(2, 2, n, 2, 64, generator=draw).transpose(2, 3).to(dtype)  # as a model gives them: (B,n,H,D)
    return k, v


def compare(one, other):
    """All that two stores hold is the same, apart from the rounding of means, and of quantised rows that are read."""
    held(one, other)
    assert one.nbytes == other.nbytes and one.allocated == other.allocated
    for a, b in zip(one.chunks, other.chunks, strict=True):
        for row, n in enumerate(one.lengths if a.means is not None else ()):
            closed = min(max(n // 256 * 256 - a.start, 0), a.cap) // 256
            means = (x.means[row, :, :closed].float() for x in (a, b))
            torch.testing.assert_close(*means, rtol=1e-2 if one.dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    if one.v_mean is not None:
        # A number of a row in 4 bits is step * whole number / 8, but for the first: 2% lie halfway between two of
        # bfloat16, and are rounded to either of them by the order in which they were summed.
        ties = 0.01 * torch.finfo(one.dtype).eps * LARGEST if one.row_format.bits == 4 else 0
        torch.testing.assert_close(one.v_mean, other.v_mean, rtol=1e-4, atol=1e-6 + ties)


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("channels", "mean", "kv"), KINDS)
def test_blocks_become_the_same_store(channels, mean, kv, dtype):
    """Blocks that end within a group, at its end, and in another chunk; the second one has padding in one row."""
    stores = [Full(SHAPE, dtype, "cpu", channels, mean, kv=kv, group_means=channels == "int4") for _ in range(2)]
    for n, pad in ((300, None), (250, [0, 37]), (1, None), (249, [0, 249])):
        k, v = tokens(n, dtype)
        ops.append_block(stores[0], k, v, pad)
        stores[1].append(k, v, pad)
    assert (stores[0].elements, stores[1].elements > 0) == (0, True), "the library took it, and counts no traffic"
    compare(*stores)


@native
def test_who_appends():
    """PyTorch where it was asked for, for a gradient, and for a type that the library does not have."""
    k, v = tokens(3)

    def counted(store, *block):
        ops.append_block(store, *block)
        return store.elements > 0

    assert not counted(Full(SHAPE, torch.float32), k, v)
    assert counted(Full(SHAPE, torch.float64), k.double(), v.double())
    assert not counted(Full(SHAPE, torch.float32, page=16), k, v), "bounds of pages"
    assert counted(Full(SHAPE, torch.float32), k.clone().requires_grad_(), v)
    with ops.backend("ref"):
        assert counted(Full(SHAPE, torch.float32), k, v)


@native
def test_wrong_blocks_are_refused():
    k, v = tokens(3)
    store = Dense().store(SHAPE, torch.float32)
    with pytest.raises(ValueError, match=r"both must be torch\.float32"):
        ops.append_block(store, k.half(), v.half())
    with pytest.raises(ValueError, match=r"pad \[0, 4\] must be 2 numbers from 0 to 3"):
        ops.append_block(store, k, v, [0, 4])
    assert store.lengths == [0, 0] and not store.chunks


@pytest.mark.usefixtures("backend")
def test_a_scale_of_zero():
    """Every token is the mean of those before it and itself."""
    q, k, v = torch.randn(2, 2, 2, 9, 16), *torch.randn(2, 2, 2, 9, 16)
    y = Dense().prefill(Full(Shape(2, 2, 2, 16), torch.float32), q, k, v, scale=0.0)
    means = v.cumsum(2) / torch.arange(1, 10)[:, None]
    torch.testing.assert_close(y, means[:, :, None].expand_as(y))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("pad", [None, [0, 2]], ids=str)
def test_a_scale_below_zero(pad):
    """It is that of queries with the other sign; PyTorch's attention may take its root."""
    k, v = tokens(5)
    q = torch.randn(2, 2, 2, 5, 64)
    store = Full(SHAPE, torch.float32)
    store.append(k, v)
    for softmax in ({}, {"softcap": 3.0}):
        y = ops.causal_attention(store, q, k, v, scale=-0.2, pad=pad, **softmax)
        torch.testing.assert_close(y, ops.causal_attention(store, -q, k, v, scale=0.2, pad=pad, **softmax))
        empty = Full(SHAPE, torch.float32)
        y = ops.causal_attention(empty, q, k, v, scale=-0.2, pad=pad, **softmax)
        torch.testing.assert_close(y, ops.causal_attention(empty, -q, k, v, scale=0.2, pad=pad, **softmax))


@pytest.mark.usefixtures("backend")
def test_rows_that_keep_other_numbers_of_tokens():
    """Both rows have seen ten tokens, of which they keep six and four: each attends to its own alone."""
    draw = torch.Generator().manual_seed(0)
    method, scale = SnapKV(k=4), 0.125
    k, v, *q = torch.randn(4, 2, 2, 21, 64, generator=draw)
    q = torch.stack(q, 2)
    store, alone = method.store(SHAPE, torch.float32), method.store(SHAPE._replace(B=1), torch.float32)

    def prefill(start, stop, pad):
        block = q[..., start:stop, :], k[:, :, start:stop], v[:, :, start:stop]
        y = method.prefill(store, *block, scale=scale, pad=pad)
        if pad is None or not pad[1]:
            return y[1:], method.prefill(alone, *(x[1:] for x in block), scale=scale)
        return None

    prefill(0, 8, [0, 8])
    for i in (8, 9):
        token = q[..., i, :], k[:, :, i], v[:, :, i]
        method.decode(store, *token, scale=scale)
        method.decode(alone, *(x[1:] for x in token), scale=scale)
    prefill(10, 18, [8, 0])
    assert (store.lengths, store.filled) == ([10, 10], [6, 4])
    torch.testing.assert_close(*prefill(18, 21, None))
