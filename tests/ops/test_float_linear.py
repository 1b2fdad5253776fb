"""The product with weights of 32 and 16 bits against float64, on every instruction set of this machine."""

from __future__ import annotations

import pickle
import re
from functools import partial

import pytest
import torch

from skimkv import ops
from skimkv.ops.cpu import library, linear
from support.instruction_sets import ISAS, NATIVE, on

EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TYPES = list(EPS)


def bound(x, w, bias, y):
    """What may be lost: the rounding of float32 sums and of y; in PyTorch, weights are rounded to x's type first."""
    size = x.double().abs() @ w.double().abs().T + (0 if bias is None else bias.double().abs())
    rounded = 0 if NATIVE and w.dtype == x.dtype else EPS[x.dtype]
    return (2.0**-24 * (w.shape[1] / 8 + 8) + rounded) * size + 2 * EPS[x.dtype] * y.abs() + 1e-7


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weights", TYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_product(isa, weights, dtype):
    for out, inputs in [(1, 32), (7, 96), (33, 160), (250, 416), (1100, 64)]:
        w = (torch.randn(out, inputs) * torch.rand(out, 1)).to(weights)
        bias = torch.randn(out).to(dtype)
        for n in (1, 2, 3, 5, 8, 9, 15, 17):
            x = torch.randn(n, inputs).to(dtype)
            for b in (None, bias):
                exact = x.double() @ w.double().T + (0 if b is None else b.double())
                with on(isa):
                    y = ops.linear(x, w, "floats", bias=b)
                assert y.dtype == dtype and y.shape == (n, out)
                assert ((y.double() - exact).abs() <= bound(x, w, b, exact)).all(), (out, inputs, n)


@pytest.mark.parametrize("isa", ISAS[:-1])
@pytest.mark.parametrize("weights", TYPES, ids=str)
def test_a_token_sees_no_other_one_and_no_thread(isa, weights):
    w, wide = torch.randn(600, 128).to(weights), torch.randn(13, 3, 256)
    with on(isa):
        for x in (wide[:, 1, :128], wide[:, 1, 1:129], wide.transpose(0, 2)[:128, 1].T):
            y = ops.linear(x, w, "floats")
            for t in range(13):
                assert torch.equal(y[t], ops.linear(x[t], w, "floats"))
            assert torch.equal(y[:5].view(5, 1, 600), ops.linear(x[:5].reshape(5, 1, 128), w, "floats"))
            torch.set_num_threads(1)
            assert torch.equal(y, ops.linear(x, w, "floats"))
            torch.set_num_threads(2)


def test_a_prompt_and_no_token_at_all():
    w, x = torch.randn(2100, 64).bfloat16(), torch.randn(60, 64)
    torch.testing.assert_close(ops.linear(x, w, "floats"), x @ w.float().T, rtol=1e-5, atol=1e-5)
    assert ops.linear(x[:0], w, "floats").shape == (0, 2100)
    odd = torch.randn(5, 33)
    assert torch.equal(
        ops.linear(odd[:, :33], odd, "floats"), odd @ odd.T
    )  # rows that are no blocks of 32 go to PyTorch


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa.startswith("avx")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_prompts_in_a_type_without_instructions(isa, dtype, monkeypatch):
    """The library multiplies them too."""
    x, w = torch.randn(150, 128).to(dtype), torch.randn(70, 128).to(dtype)
    exact = x.double() @ w.double().T
    monkeypatch.setattr(library, "has_matrix_units", lambda: False)
    for has_instructions in (True, False):
        monkeypatch.setattr(library, "has_instructions", lambda dtype, has=has_instructions: has)
        with on(isa):
            assert (ops.matrix(x, w, "floats") is None) == has_instructions
            assert ops.matrix(x[:64], w, "floats") is not None
            assert ((ops.linear(x, w, "floats").double() - exact).abs() <= bound(x, w, None, exact)).all()


@pytest.mark.skipif(not NATIVE, reason="the native library is not built")
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
    duplicate = pickle.loads(pickle.dumps(ops.Product(partial(ops.matrix, kind="floats"), compute)))
    assert torch.equal(duplicate(x, w), ops.linear(x, w, "floats"))
    with pytest.raises(ValueError, match="no gradient"):
        product(x.requires_grad_(), w)


WRONG = {
    "weights are torch.float32 (16, 64); 16 x 32 as floats needs": lambda x, w, b: (x[:, :32], w, b),
    "weights are torch.int8": lambda x, w, b: (x, w.to(torch.int8), b),
    "weights are torch.float32 (64,)": lambda x, w, b: (x, w[0], b),
    "on meta": lambda x, w, b: (x, w.to("meta"), b),
    "x is torch.float64": lambda x, w, b: (x.double(), w, b),
    r"bias is (15,) on cpu; must be (16,)": lambda x, w, b: (x, w, b[:15]),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_refused(message):
    x, w, b = torch.randn(2, 64), torch.randn(16, 64), torch.randn(16)
    x, w, b = WRONG[message](x, w, b)
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.linear(x, w, "floats", bias=b)


@pytest.mark.skipif(not NATIVE, reason="the native library is not built")
def test_the_library_validates_before_it_follows_an_address():
    w, x, narrow = torch.randn(16, 64), torch.randn(65, 64), torch.randn(16, 40)
    for message, call in {
        "contiguous": lambda: linear.matrix(x[:1, :32], w[:, :32], "floats", 16),
        "no CPU kernel for activations of torch.float64": lambda: linear.matrix(x.double(), w, "floats", 16),
        "columns must be a multiple of 32": lambda: linear.matrix(narrow, narrow, "floats", 16).multiply(narrow),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
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
