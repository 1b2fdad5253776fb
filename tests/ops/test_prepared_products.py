"""Products that are prepared once: what they notice, and what the library validates of a matrix."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch

from skimkv import ops
from skimkv.ops.cpu import linear
from support.kernels import NATIVE

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")


def test_a_prepared_product_notices_what_changes():
    """After a module got other weights, or its weights moved or changed their type, the product is that of the new."""
    calls = []

    def prepare(x, w, bias):
        calls.append(bias)
        return ops.matrix(x, w, "floats", bias=bias)

    compute = partial(ops.linear, kind="floats")
    product, x = ops.Product(prepare, compute), torch.randn(2, 64)
    w, bias = torch.nn.Parameter(torch.randn(16, 64), requires_grad=False), torch.randn(16)

    def agrees(w, bias, x, prepared):
        known = len(calls)
        y = product(x, w, bias)
        exact = x.float() @ w.float().T + (0 if bias is None else bias.float())
        torch.testing.assert_close(y.float(), exact, rtol=1e-2 if y.dtype == torch.bfloat16 else 1e-4, atol=1e-3)
        assert len(calls) - known == prepared

    agrees(w, bias, x, 1)
    agrees(w, bias, torch.randn(2, 64), 0)
    agrees(w, bias, torch.randn(64, 2).T, 0)
    agrees(w, bias, torch.randn(3, 64), 1)
    other = torch.nn.Parameter(torch.randn(16, 64), requires_grad=False)
    agrees(other, bias, x, 1)
    other.data = torch.randn(16, 64).bfloat16()
    agrees(other, bias, x, 1)
    agrees(other, None, x, 1)
    agrees(other, torch.randn(16), x, 1)
    agrees(other, bias.bfloat16(), x, 1)
    agrees(other, bias.bfloat16(), x, 1)  # a converted bias is not kept, for its numbers may change
    other.data = torch.randn(24, 64).bfloat16()
    agrees(other, None, x, 1)
    agrees(other, None, x.bfloat16(), 1)
    with ops.backend("ref"):
        agrees(other, None, x, 1)
    ops.tokens_of_prompt.set(300)
    agrees(other, None, x, 1)
    ops.tokens_of_prompt.set(0)
    duplicate = pickle.loads(pickle.dumps(ops.Product(partial(ops.matrix, kind="floats"), compute)))
    assert torch.equal(duplicate(x, w), ops.linear(x, w, "floats"))
    with pytest.raises(ValueError, match="no gradient"):
        product(x.requires_grad_(), w)


def test_the_library_validates_before_it_follows_an_address():
    w, x = torch.randn(16, 64), torch.randn(65, 64)
    matrix = linear.matrix(x, w, "floats", 16)
    matrix.op.data = None
    for message, fields in {
        "the data of a matrix are NULL": {},
        "rows must be at least 1": {"data": w.data_ptr(), "rows": 0},
        "columns must be a multiple of 32": {"rows": 16, "columns": 33},
        "dtype is unknown": {"columns": 64, "dtype": 3},
        "the kind of a matrix is unknown": {"dtype": 0, "kind": -1},
        "not aligned to their elements": {"kind": 0, "data": w.data_ptr() + 2},
        "bias is not aligned": {"data": w.data_ptr(), "bias": 1},
        "only a matrix of blocks has an order": {"bias": None, "order": x.data_ptr()},
    }.items():
        for name, value in fields.items():
            setattr(matrix.op, name, value)
        with pytest.raises(ValueError, match=message):
            matrix.multiply(x[:1])
    matrix.op.order = None
    assert torch.allclose(matrix.multiply(x[:1]), x[:1] @ w.T, atol=1e-4)
