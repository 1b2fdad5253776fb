"""The 8-bit product against its dequantised weights in float64, on every instruction set of this machine."""

from __future__ import annotations

import pytest
import torch
from gguf.quants import Q8_0
from hypothesis import given, settings
from hypothesis import strategies as st

from skimkv import ops
from skimkv.ops import packed_weights
from skimkv.ops.cpu import library, linear
from support.instruction_sets import ISAS, NATIVE, on

EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def packed(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """w (out,in) -> packed weights, and what they stand for in float64."""
    blocks = packed_weights.quantise(w)
    into = torch.full(packed_weights.packed_shape(*w.shape), 0x7C00, dtype=torch.int16)  # infinities, to be overwritten
    packed_weights.pack(blocks, into)
    return into, packed_weights.dequantise(blocks).double()


def bound(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What may be lost: activations to 2^-16 of their block's largest, float32 sums, and the rounding of y."""
    top = x.double().abs().unflatten(-1, (-1, 32)).amax(-1) / 65534  # (n, in/32)
    codes = top @ w.abs().unflatten(-1, (-1, 32)).sum(-1).T
    sums = 2.0**-24 * (w.shape[1] / 32 + 8) * (x.double().abs() @ w.abs().T)
    return 1.01 * (codes + sums + EPS[x.dtype] * y.abs()) + 1e-37


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize(("out", "inputs"), [(16, 32), (1, 64), (7, 96), (33, 128), (250, 416), (64, 4096)])
def test_product(isa, dtype, out, inputs):
    w, wd = packed(torch.randn(out, inputs) * torch.rand(out, 1) * 3)
    bias = torch.randn(out).to(dtype)
    for n in (1, 2, 3, 5, 8, 9, 13, 33):
        x = (torch.randn(n, inputs) * torch.rand(n, 1) * 5).to(dtype)
        with on(isa):
            y, with_bias = ops.linear(x, w, "packed", out), ops.linear(x, w, "packed", out, bias)
        exact = x.double() @ wd.T
        assert y.dtype == dtype
        assert ((y.double() - exact).abs() <= bound(x, wd, exact)).all()
        exact = exact + bias.double()
        assert ((with_bias.double() - exact).abs() <= bound(x, wd, exact) + EPS[torch.float32] * bias.abs()).all()


@pytest.mark.parametrize("isa", ISAS)
def test_prompt_longer_than_what_is_taken_at_once(isa):
    w, wd = packed(torch.randn(40, 64))
    x = torch.randn(2, 300, 64)
    with on(isa):
        y = ops.linear(x, w, "packed", 40)
    assert y.shape == (2, 300, 40)
    exact = x.flatten(0, 1).double() @ wd.T
    assert ((y.flatten(0, 1).double() - exact).abs() <= bound(x.flatten(0, 1), wd, exact)).all()


@pytest.mark.parametrize("isa", ISAS[:-1])
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_what_the_library_dequantises(isa, dtype):
    for out, inputs in ((16, 32), (7, 96), (33, 128)):
        w, wd = packed(torch.randn(out, inputs))
        with on(isa):
            assert torch.equal(linear.expand(w, "packed", out, inputs, dtype), wd.to(dtype))


@pytest.mark.parametrize("out", [40, 5000])
def test_prompts_where_pytorch_multiplies_tiles(out, monkeypatch):
    """With matrix units, which multiply bfloat16, the weights of a prompt are dequantised a part at a time."""
    w, wd = packed(torch.randn(out, 1024))
    expanded, expand = [], linear.expand
    monkeypatch.setattr(library, "has_matrix_units", lambda: True)
    monkeypatch.setattr(linear, "expand", lambda *args: expanded.append(args[2]) or expand(*args))
    bias = torch.randn(out).bfloat16()
    for n, dtype, parts in ((31, torch.bfloat16, 0), (32, torch.float32, 0), (50, torch.bfloat16, -(-out // 2048))):
        x = torch.randn(2, n, 1024)[:1].to(dtype)
        expanded.clear()
        y = ops.linear(x, w, "packed", out, bias)
        exact = x[0].double() @ wd.T + bias.double()
        limit = bound(x[0], wd, exact) + 2.0**-8 * (x[0].double().abs() @ wd.abs().T + bias.abs())
        assert ((y[0].double() - exact).abs() <= limit).all()
        assert len(expanded) == parts and sum(expanded) == (out if parts else 0)


@pytest.mark.parametrize("isa", ISAS[:-1])
def test_strides_threads_and_batch_change_nothing(isa):
    w, _ = packed(torch.randn(600, 128))
    wide = torch.randn(9, 3, 256)
    views = [wide[:, 1, :128], wide[:, 1, 1:129], wide.transpose(0, 2)[:128, 1].T, wide[:1, 1, :128].expand(9, 128)]
    with on(isa):
        for x in views:
            y = ops.linear(x, w, "packed", 600)
            assert torch.equal(y, ops.linear(x.clone(), w, "packed", 600))
            assert torch.equal(y[4], ops.linear(x[4], w, "packed", 600))  # a token does not see the others
            torch.set_num_threads(1)
            assert torch.equal(y, ops.linear(x, w, "packed", 600))
            torch.set_num_threads(2)
        assert ops.linear(torch.empty(0, 128), w, "packed", 600).shape == (0, 600)


@pytest.mark.parametrize("isa", ISAS)
def test_the_largest_codes_do_not_overflow(isa):
    blocks = torch.full((16, 1, 17), -0x7F80, dtype=torch.int16)  # codes of -128, as a foreign file may hold
    blocks[..., 0] = torch.ones((), dtype=torch.float16).view(torch.int16)
    w = torch.zeros(packed_weights.packed_shape(16, 32), dtype=torch.int16)
    packed_weights.pack(blocks, w)
    with on(isa):
        y = ops.linear(torch.tensor([[1.0] * 32, [-1.0] * 32]), w, "packed", 16)
    assert torch.equal(y, torch.tensor([[-4096.0] * 16, [4096.0] * 16]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-30, 1e-20, 1e20])
def test_activations_of_any_size(isa, scale):
    w, wd = packed(torch.randn(16, 64))
    x = torch.randn(3, 64) * scale
    with on(isa):
        y = ops.linear(x, w, "packed", 16)
    exact = x.double() @ wd.T
    assert ((y.double() - exact).abs() <= bound(x, wd, exact) + 1e-27).all()  # below 1e-30 activations are zero


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_activation_shows(isa, bad):
    w, _ = packed(torch.randn(16, 64))
    x = torch.randn(3, 64)
    x[1, 40] = bad
    with on(isa):
        y = ops.linear(x, w, "packed", 16)
    assert not y[1].isfinite().any()
    assert y[[0, 2]].isfinite().all()


def test_a_bad_weight_shows():
    w = torch.randn(16, 64)
    w[3, 5] = float("nan")
    y = ops.linear(torch.ones(1, 64), packed(w)[0], "packed", 16)
    assert y[0, 3].isnan() and y[0, :3].isfinite().all() and y[0, 4:].isfinite().all()


def test_blocks_are_those_of_the_format():
    w = torch.randn(5, 96)
    blocks = packed_weights.quantise(w)
    theirs = torch.from_numpy(Q8_0.dequantize(blocks.view(torch.uint8).flatten(1).numpy()))
    assert torch.equal(packed_weights.dequantise(blocks), theirs)
    own = torch.from_numpy(Q8_0.dequantize(Q8_0.quantize(w.numpy())))
    assert (theirs - w).abs().max() <= (own - w).abs().max() * 1.05  # no worse than the format's own quantiser
    into, _ = packed(w)
    index = torch.tensor([4, 0, 4, 2])
    assert torch.equal(packed_weights.rows_of(into, index), blocks[index])


@pytest.mark.skipif(not NATIVE, reason="no native library")
@settings(max_examples=40)
@given(st.integers(1, 70), st.integers(1, 6), st.integers(1, 20), st.sampled_from(list(EPS)), st.data())
def test_any_shape_and_stride(out, blocks, n, dtype, data):
    inputs, step = 32 * blocks, data.draw(st.sampled_from([0, 1, 3]))
    isa = data.draw(st.sampled_from(ISAS))
    w, wd = packed(torch.randn(out, inputs))
    x = torch.randn(n, inputs + step).to(dtype)[:, step:]
    with on(isa):
        y = ops.linear(x, w, "packed", out)
    exact = x.double() @ wd.T
    assert ((y.double() - exact).abs() <= bound(x, wd, exact)).all()


def test_refusals():
    w, _ = packed(torch.randn(20, 64))
    x = torch.randn(2, 64)
    for call, reason in [
        (lambda: ops.linear(x[:, :32], w, "packed", 20), "20 x 32 as packed needs"),
        (lambda: ops.linear(x, w, "packed", 40), "40 x 64 as packed needs"),
        (lambda: ops.linear(x, w.int(), "packed", 20), "weights are torch.int32"),
        (lambda: ops.linear(torch.randn(2, 65), w, "packed", 20), "blocks of 32"),
        (lambda: packed_weights.packed_shape(4, 40), "blocks of 32, not 4 x 40"),
    ]:
        with pytest.raises(ValueError, match=reason):
            call()
    if NATIVE:
        for call, reason in [
            (lambda: linear.matrix(x.double(), w, "packed", 20), "no CPU kernel for activations of torch.float64"),
            (lambda: linear.matrix(x, w.flip(0), "packed", 20, torch.zeros(3)), "bias is"),
            (lambda: linear.matrix(x, w.transpose(0, 1).contiguous().transpose(0, 1), "packed", 20), "contiguous"),
        ]:
            with pytest.raises(ValueError, match=reason):
                call()
