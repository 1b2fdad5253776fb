"""The kernels that read and write rows of K and V in 8 and 4 bits, against the reference, on every instruction set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from skimkv.stores.base import Shape
from skimkv.stores.full import Full
from support import steps
from support.kernels import ISAS, NATIVE, TYPES, compare, exact, filled, held, on

pytestmark = [
    pytest.mark.skipif(not NATIVE, reason="the native library is not built"),
    pytest.mark.parametrize("kv", ["int8", "int4"]),
]
every_isa = pytest.mark.parametrize("isa", ISAS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("span", [0, 64, 128])
def test_rows_of_odd_width(span, dtype, kv):
    """Odd head sizes in 8 bits, and those of 2 mod 4 in 4 bits: a row starts anywhere between two words."""
    for D in (span + 2, span + 6) if kv == "int4" else (span + 1, span + 7):
        q, store = filled(D, [300, 17], TYPES[dtype], 3, "none", 1, kv=kv)
        compare("dense", ISAS, q, store, D**-0.5, None)
        compare("sparq", ISAS, q, store, D**-0.5, None, 1, 301, 5, "coverage", True)
        compare("topk", ISAS, q, store, D**-0.5, None, 301, False)


@every_isa
@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e4])
def test_low_rank_and_numbers_of_any_size(isa, scale, kv):
    """K of 1e-5 to 1e4; where all numbers of a row are equal there is no step."""
    normal = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(1))
    store = Full(
        Shape(1, 2, 2, 64),
        torch.float32,
        "cpu",
        "copy",
        projection=torch.linalg.qr(normal).Q[..., :8].contiguous(),
        kv=kv,
    )
    k, v = torch.randn(2, 1, 2, 40, 64)
    k[:, :, 7], v[:, :, 9] = 0.5, -1.0
    twin = store.fork()
    store.append(k * scale, v)
    with on(isa):
        for i in range(40):
            steps.append(twin, k[:, :, i] * scale, v[:, :, i])
    held(store, twin)
    compare("lowrank", isa, torch.randn(1, 2, 2, 64) / scale, twin, 0.1, None, 40)


@every_isa
def test_a_nan_in_a_key_is_a_nan_in_the_result(isa, kv):
    for bad in (torch.nan, torch.inf):
        store = Full(Shape(1, 2, 1, 64), torch.float32, kv=kv)
        with on(isa):
            for i in range(5):
                k, v = torch.randn(2, 1, 2, 64)
                if i == 2:
                    k[0, 0, 33] = bad
                steps.append(store, k, v)
            y = steps.dense(store, torch.randn(1, 2, 1, 64), 0.125, None)
        assert y[0, 0].isnan().all() and y[0, 1].isfinite().all()


@every_isa
@pytest.mark.parametrize("D", [80, 128])
def test_the_rounding_of_a_query(isa, D, kv):
    """One channel of the query is 1000 times as large as the others, whose products must not drown in its rounding.

    The values of the two tokens are 1 and 0, so the result is the sigmoid of the difference of their logits.
    """
    draw = torch.Generator().manual_seed(3)
    store, scale = Full(Shape(1, 2, 3, D), torch.float32, kv=kv), 0.001
    store.append(torch.randn(1, 2, 2, D, generator=draw), torch.tensor([1.0, 0.0])[:, None].expand(1, 2, 2, D))
    q = torch.randn(1, 2, 3, D, generator=draw)
    q[..., 5] = 1000.0
    keys = exact(store).uncounted("k")
    difference = (keys[:, :, 0] - keys[:, :, 1])[:, :, None]  # (1,H,1,D)
    with on(isa):
        got = torch.logit(steps.dense(store, q, scale, None)[..., 0].double())
    want = scale * (q.double() * difference).sum(-1)
    bound = 1000 * scale * (2.0**-22 * difference.abs().sum(-1) + 2.0**-20 * keys.abs().max())
    assert want.abs().max() < 6, "the sigmoid must not saturate"
    assert ((got - want).abs() <= bound).all()


@every_isa
def test_the_rounding_of_weights(isa, kv):
    """One token has most of the weight, and a value as large as the others'."""
    draw = torch.Generator().manual_seed(4)
    store, n = Full(Shape(1, 2, 3, 128), torch.float32, kv=kv), 150
    k, v = torch.randn(2, 1, 2, n, 128, generator=draw)
    k[:, :, 70] = 0.5
    store.append(k, v)
    q = torch.full((1, 2, 3, 128), 1.0)
    with on(isa):
        got = steps.dense(store, q, 0.125, None)
    want = steps.dense(exact(store), q.double(), 0.125, None, reference=True)
    assert (got.double() - want).abs().max() <= 2.0**-18 * exact(store).uncounted("v").abs().max()


def test_what_the_library_refuses(kv):
    q, store = filled(16, [300, 20], torch.float32, 2, "copy", kv=kv)
    with on(None):
        steps.dense(store, q, 0.25, None)
        cache = store.view.cache
        for bits, D, says in ((5, 16, "0 .as they are., 8 or 4"), (4, 15, "even D")):
            cache.bits, cache.D = bits, D
            with pytest.raises(ValueError, match=says):
                steps.dense(store, q, 0.25, None)
        cache.bits, cache.D = store.row_format.bits, 16
        store.chunks = (replace(store.chunks[0], k=store.chunks[0].k[..., 1:]),)
        with pytest.raises(ValueError, match=r"k is torch\.uint8"):
            steps.dense(store, q, 0.25, None)
