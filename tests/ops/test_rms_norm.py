"""Root-mean-square normalisation against float64, on every instruction set of this machine."""

from __future__ import annotations

import math
import re

import pytest
import torch

from skimkv import ops
from skimkv.ops.cpu import rms_norm as cpu
from support.kernels import EPS, ISAS, ISAS_AND_REFERENCE, NATIVE, on


@pytest.mark.parametrize("isa", ISAS_AND_REFERENCE)
@pytest.mark.parametrize("dtype", list(EPS), ids=str)
@pytest.mark.parametrize("adds_one", [False, True])
def test_against_the_formula(isa, dtype, adds_one):
    for size in (1, 7, 64, 100, 576, 4096):
        w = torch.randn(size).to(dtype)
        for n in (1, 3, 40):
            x = (torch.randn(n, size) * torch.logspace(-3, 3, n)[:, None]).to(dtype)
            exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (w.double() + adds_one)
            with on(isa):
                y = ops.rms_norm(x, w, eps=1e-5, adds_one=adds_one)
            assert y.dtype == dtype and y.shape == x.shape
            # one or two roundings to the type, and those of the mean in float32
            room = (1 if adds_one else 2.1) * EPS[dtype] + 2.0**-20
            assert ((y.double() - exact).abs() <= room * exact.abs() + 1e-7).all(), (size, n)


@pytest.mark.parametrize("isa", ISAS)
def test_a_token_sees_no_other_one_and_no_thread(isa):
    w, x = torch.randn(4096).bfloat16(), torch.randn(40, 4096).bfloat16()
    with on(isa):
        y = ops.rms_norm(x, w, eps=1e-6)
        assert torch.equal(torch.stack([ops.rms_norm(row, w, eps=1e-6) for row in x]), y)
        assert torch.equal(ops.rms_norm(x.view(2, 20, 4096), w, eps=1e-6).view_as(x), y)
        assert torch.equal(ops.rms_norm(x.T.contiguous().T, w, eps=1e-6), y)
        torch.set_num_threads(1)
        assert torch.equal(ops.rms_norm(x, w, eps=1e-6), y)
        torch.set_num_threads(2)


def test_zeros_no_tokens_and_bad_numbers():
    w = torch.ones(64)
    assert torch.equal(ops.rms_norm(torch.zeros(2, 64), w, eps=1e-6), torch.zeros(2, 64))
    assert ops.rms_norm(torch.zeros(0, 64), w, eps=1e-6).shape == (0, 64)
    for bad in (math.nan, math.inf):
        x = torch.ones(2, 64)
        x[0, 5] = bad
        y = ops.rms_norm(x, w, eps=1e-6)
        assert y[0, 5].isnan() and not y[1].isnan().any()


def test_weights_of_another_type_are_multiplied_by_pytorch():
    x, w = torch.randn(2, 64).bfloat16(), torch.randn(64)
    y = ops.rms_norm(x, w, eps=1e-6)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, ops.rms_norm(x, w.bfloat16(), eps=1e-6).float(), rtol=2.0**-7, atol=0)


def test_what_does_not_fit_is_refused():
    x, w = torch.randn(2, 64), torch.ones(64)
    for message, call in {
        "x is (2, 32) on cpu; must be (...,64) on cpu": lambda: ops.rms_norm(x[:, :32], w, eps=1e-6),
        "must be (...,64) on meta": lambda: ops.rms_norm(x, w.to("meta"), eps=1e-6),
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


@pytest.mark.skipif(not NATIVE, reason="the native library is not built")
def test_the_library_validates_before_it_follows_an_address():
    x, w = torch.randn(2, 64), torch.ones(64)
    with pytest.raises(ValueError, match="contiguous"):
        cpu.norm_matrix(x[:, :32], w[::2], 1e-6)
    with pytest.raises(ValueError, match="no CPU kernel for activations"):
        cpu.norm_matrix(x.double(), w.double(), 1e-6)
    for message, fields in {
        "w is NULL": {"w": None},
        "size must be at least 1": {"size": 0},
        "eps must be at least 0": {"eps": math.nan},
        "dtype is unknown": {"dtype": 9},
        "w is not aligned": {"w": w.data_ptr() + 1},
    }.items():
        matrix = cpu.norm_matrix(x, w, 1e-6)
        for name, value in fields.items():
            setattr(matrix.op, name, value)
        with pytest.raises(ValueError, match=re.escape(message)):
            matrix.multiply(x)
