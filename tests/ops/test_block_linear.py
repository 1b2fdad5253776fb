"""The products with a GGUF file's blocks against the package gguf in float64, on every set of this machine."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from skimkv import ops
from skimkv.ops import block_weights
from skimkv.ops.cpu import linear
from support.gguf_files import SCALES, random_blocks
from support.instruction_sets import ISAS, NATIVE, on

EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TYPES = block_weights.TYPES


def exact_weights(rows: torch.Tensor, type: str) -> torch.Tensor:
    """What rows of blocks stand for, by the package gguf, in float64."""
    return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), GGMLQuantizationType[type])).double()


def bound(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What may be lost: the rounding of inputs, half a step of their block's largest; float32 sums; the rounding of y.

    A weight is scale * code - minimum, and both parts may be far larger than the weight, so the sums are bounded by 64
    times the largest weight of the row.
    """
    largest = x.double().abs().unflatten(-1, (-1, 32)).amax(-1)
    steps = 127 if x.dtype == torch.bfloat16 else 16256
    inputs = (largest / (2 * steps)) @ w.abs().unflatten(-1, (-1, 32)).sum(-1).T
    sums = 2.0**-24 * 64 * x.double().abs().sum(-1, keepdim=True) * w.abs().amax(-1)
    return 1.01 * (inputs + sums + EPS[x.dtype] * y.abs()) + 1e-37


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("type", TYPES)
def test_product(isa, dtype, type):
    for out, inputs in [(1, 256), (7, 512), (70, 768)] + [(5, 32), (33, 160)] * (
        block_weights.block_size(type)[0] == 32
    ):
        rows = random_blocks(type, out, inputs)
        w, bias = exact_weights(rows, type), torch.randn(out).to(dtype)
        for n in (1, 7, 19, 40, 280):
            x = (torch.randn(n, inputs) * torch.rand(n, 1) * 5).to(dtype)
            with on(isa):
                y, with_bias = ops.linear(x, rows, type), ops.linear(x, rows, type, bias=bias)
            exact = x.double() @ w.T
            room = bound(x, w, exact)
            if n >= 32 and not isa.startswith("avx"):  # PyTorch multiplies with weights that were rounded to its type
                room = room + 2 * EPS[dtype] * (x.double().abs() @ w.abs().T)
            assert y.dtype == dtype and ((y.double() - exact).abs() <= room).all()
            exact = exact + bias.double()
            assert ((with_bias.double() - exact).abs() <= room + 2 * EPS[dtype] * (exact.abs() + bias.abs())).all()


@pytest.mark.parametrize("isa", ISAS[:-1])
@pytest.mark.parametrize("type", TYPES)
def test_the_weights_themselves(isa, type):
    rows = random_blocks(type, 9, 512)
    with on(isa):
        for dtype in EPS:
            weights = linear.expand(rows, type, 9, 512, dtype)
            exact = exact_weights(rows, type)
            assert ((weights.double() - exact).abs() <= EPS[dtype] * exact.abs() + 2.0**-22 * exact.abs().amax()).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("n", [1, 3, 40])
def test_rows_in_another_order(isa, type, n):
    rows, order = random_blocks(type, 48, 256), torch.randperm(48)
    x, bias = torch.randn(n, 256), torch.randn(48)
    with on(isa):
        y = ops.linear(x, rows, type, bias=bias, order=order.int())
        expected = ops.linear(x, rows[order.argsort()].contiguous(), type, bias=bias)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("isa", ISAS[:-1])
@pytest.mark.parametrize("type", TYPES)
def test_strides_threads_and_batch_change_nothing(isa, type):
    rows, wide = random_blocks(type, 300, 256), torch.randn(9, 3, 512)
    with on(isa):
        for x in (wide[:, 1, :256], wide[:, 1, 1:257], wide[:1, 1, :256].expand(9, 256)):
            y = ops.linear(x, rows, type)
            assert torch.equal(y, ops.linear(x.clone(), rows, type))
            assert torch.equal(y[4], ops.linear(x[4], rows, type))
            torch.set_num_threads(1)
            assert torch.equal(y, ops.linear(x, rows, type))
            torch.set_num_threads(2)
        assert ops.linear(torch.empty(0, 256), rows, type).shape == (0, 300)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_activation_shows(isa, type, bad):
    x = torch.randn(3, 256)
    x[1, 40] = bad
    with on(isa):
        y = ops.linear(x, random_blocks(type, 16, 256), type)
    assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type", TYPES)
def test_the_largest_codes_do_not_overflow(isa, type):
    """All bits of all codes and scales are set."""
    rows = torch.full((4, block_weights.row_bytes(type, 512)), 255, dtype=torch.uint8)
    size = block_weights.block_size(type)[1]
    scale = np.frombuffer(np.float16(1 / 64).tobytes(), dtype=np.uint8)
    for at in SCALES[type]:
        rows.unflatten(1, (-1, size))[:, :, at : at + 2] = torch.from_numpy(scale.copy())
    if type == "MXFP4":
        rows.unflatten(1, (-1, size))[:, :, 0] = 121
    w = exact_weights(rows, type)
    for dtype in EPS:
        x = torch.cat([torch.ones(1, 512), -torch.ones(1, 512)]).to(dtype)
        exact = x.double() @ w.T
        with on(isa):
            y = ops.linear(x, rows, type)
        assert ((y.double() - exact).abs() <= bound(x, w, exact)).all()


def test_four_bits_are_those_of_the_format():
    w = torch.randn(6, 96) * torch.rand(6, 1)
    rows = block_weights.quantise_int4(w)
    theirs = gguf.quants.quantize(w.numpy(), GGMLQuantizationType.Q4_0)
    mine, own = exact_weights(rows, "Q4_0"), exact_weights(torch.from_numpy(theirs), "Q4_0")
    assert rows.shape == theirs.shape
    assert (mine - w).pow(2).mean() <= (own - w).pow(2).mean() * 1.05  # no worse than the format's own quantiser
    assert torch.equal(block_weights.quantise_int4(torch.zeros(1, 32)), torch.tensor([[0, 0, *[0x88] * 16]]).byte())


def test_refusals():
    rows, x = random_blocks("Q4_K", 4, 512), torch.randn(2, 512)
    for call, reason in [
        (lambda: ops.linear(x, rows, "IQ1_S"), "blocks of IQ1_S are not supported; Q4_0, Q4_1"),
        (lambda: ops.linear(x[:, :256], rows, "Q4_K"), r"4 x 256 as Q4_K needs torch.uint8 \(4, 144\)"),
        (lambda: ops.linear(x[:, :100], rows, "Q4_K"), "inputs in blocks of 256, not 100"),
        (lambda: ops.linear(x, rows.int(), "Q4_K"), "weights are torch.int32"),
        (lambda: block_weights.quantise_int4(torch.full((1, 32), torch.nan)), "must be finite"),
    ]:
        with pytest.raises(ValueError, match=reason):
            call()
    if NATIVE:
        order = torch.arange(4, dtype=torch.int32)
        for call, reason in [
            (lambda: linear.matrix(x.double(), rows, "Q4_K", 4), "no CPU kernel for activations of torch.float64"),
            (lambda: linear.matrix(x, rows, "Q4_K", 4, torch.zeros(3)), "bias is"),
            (lambda: linear.matrix(x, rows, "Q4_K", 4, None, order.long()), "order is torch.int64"),
            (
                lambda: linear.matrix(x, rows, "Q4_K", 4, None, order + 1).multiply(x),
                "output that does not exist",
            ),
            (lambda: linear.matrix(x, rows.flip(0).T.contiguous().T, "Q4_K", 4), "must be contiguous"),
        ]:
            with pytest.raises(ValueError, match=reason):
                call()
