"""Products with weights of every kind against float64, on every instruction set of this machine."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import Q8_0
from hypothesis import given, settings
from hypothesis import strategies as st

from skimkv import ops
from skimkv.ops import block_weights, fastest_product, packed_weights
from skimkv.ops.cpu import library, linear
from support.gguf_files import SCALES, random_blocks
from support.kernels import EPS, ISAS, ISAS_AND_REFERENCE, NATIVE, TYPES, on

BLOCKS = block_weights.TYPES
KINDS = ["packed", *BLOCKS, *TYPES]  # packed 8-bit weights, blocks of a GGUF file, and floats


def packed(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """w (out,in) -> packed weights, and what they stand for in float64."""
    blocks = packed_weights.quantise(w)
    into = torch.full(packed_weights.packed_shape(*w.shape), 0x7C00, dtype=torch.int16)  # infinities, to be overwritten
    packed_weights.pack(blocks, into)
    return into, packed_weights.dequantise(blocks).double()


def exact_weights(rows: torch.Tensor, type: str) -> torch.Tensor:
    """What rows of blocks stand for, by the package gguf, in float64."""
    return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), GGMLQuantizationType[type])).double()


class Weights:
    """Random weights (out,in) of a kind, their products, and what these may lose. exact: the weights in float64."""

    def __init__(self, kind: str, out: int, inputs: int) -> None:
        self.kind, self.out = "floats" if kind in TYPES else kind, out
        if kind in BLOCKS:
            self.stored = random_blocks(kind, out, inputs)
            self.exact = exact_weights(self.stored, kind)
            return
        w = torch.randn(out, inputs) * torch.rand(out, 1) * 3
        self.stored, self.exact = packed(w) if kind == "packed" else (w.to(TYPES[kind]), w.to(TYPES[kind]).double())

    def times(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.linear(x, self.stored, self.kind, self.out, bias)

    def bound(self, x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """What may be lost of x (n,in) times the weights and a bias, which are y: rounded inputs, float32 sums, and y.

        A weight of a block is scale * code - minimum, and both parts may be far larger than it, so the sums are bounded
        by 64 times the largest weight of the row. PyTorch, which multiplies where the library does not, rounds the
        weights to the type of x first.
        """
        x, w, inputs, dtype = x.double().abs(), self.exact.abs(), self.exact.shape[1], x.dtype
        products, bias = x @ w.T, bias.abs()
        if self.kind == "floats":
            rounded = 0 if NATIVE and self.stored.dtype == dtype else EPS[dtype]
            return (2.0**-24 * (inputs / 8 + 8) + rounded) * (products + bias) + 2 * EPS[dtype] * y.abs() + 1e-7
        largest, of_blocks = (t.unflatten(-1, (-1, 32)) for t in (x, w))
        steps = 65534 if self.kind == "packed" else 254 if dtype == torch.bfloat16 else 32512
        lost = largest.amax(-1) / steps @ of_blocks.sum(-1).T
        if self.kind == "packed":
            sums = 2.0**-24 * (inputs / 32 + 8) * products
            return 1.01 * (lost + sums + EPS[dtype] * y.abs()) + 2.0**-24 * bias + 1e-37
        sums = 2.0**-24 * 64 * x.sum(-1, keepdim=True) * w.amax(-1)
        is_ours = ops.select_backend()[0] == "cpu" and library.isa().startswith("avx")
        is_ours = is_ours and not (dtype == torch.bfloat16 and library.has_matrix_units())
        prompt = 2 * EPS[dtype] * products if len(x) >= 32 and not is_ours else 0
        added = 2 * EPS[dtype] * (y.abs() + bias) * (bias > 0)
        return 1.01 * (lost + sums + EPS[dtype] * y.abs()) + prompt + added + 1e-37

    def check(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, more: float | torch.Tensor = 0.0, y=None
    ) -> None:
        """Assert that the product, or y, is the exact one but for what may be lost, and `more`: x (...,in)."""
        y, flat = self.times(x, bias) if y is None else y, x.reshape(-1, x.shape[-1])
        assert y.dtype == x.dtype and y.shape == (*x.shape[:-1], self.out)
        b = torch.zeros(self.out).double() if bias is None else bias.double()
        exact = flat.double() @ self.exact.T + b
        excess = (y.view(len(flat), -1).double() - exact).abs() - self.bound(flat, exact, b) - more
        assert excess.max() <= 0, f"{tuple(self.exact.shape)} times {len(flat)} tokens: {excess.max():.3g} too much"


def shapes(kind: str) -> list[tuple[int, int]]:
    """Outputs and inputs: few and many rows, rows that fill no panel, and one or many blocks."""
    if kind not in BLOCKS:
        return [(16, 32), (1, 64), (7, 96), (33, 160), (250, 416), (64, 4096)]
    return [(1, 256), (7, 512), (70, 768), *[(5, 32), (33, 160)] * (block_weights.block_size(kind)[0] == 32)]


@pytest.mark.parametrize("isa", ISAS_AND_REFERENCE)
@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_product(isa, dtype, kind):
    for out, inputs in shapes(kind):
        w, bias = Weights(kind, out, inputs), torch.randn(out).to(dtype)
        for n in (1, 7, 19, 40, 280) if kind in BLOCKS else (1, 2, 3, 5, 8, 9, 13, 17, 33):
            x = (torch.randn(n, inputs) * torch.rand(n, 1) * 5).to(dtype)
            with on(isa):
                w.check(x), w.check(x, bias)


@pytest.mark.skipif(not NATIVE, reason="no native library")
@settings(max_examples=60)
@given(st.sampled_from(KINDS), st.integers(1, 70), st.integers(1, 6), st.integers(1, 20), st.data())
def test_any_shape_and_stride(kind, out, blocks, n, data):
    step, isa, dtype = (data.draw(st.sampled_from(choices)) for choices in ([0, 1, 3], ISAS_AND_REFERENCE, list(EPS)))
    inputs = blocks * (block_weights.block_size(kind)[0] if kind in BLOCKS else 32)
    with on(isa):
        Weights(kind, out, inputs).check(torch.randn(n, inputs + step).to(dtype)[:, step:])


@pytest.mark.parametrize("isa", ISAS_AND_REFERENCE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_longer_than_what_is_taken_at_once_and_no_token_at_all(isa, kind):
    w = Weights(kind, 40, 256)
    with on(isa):
        w.check(torch.randn(2, 300, 256))
        assert w.times(torch.empty(0, 256)).shape == (0, 40)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_strides_threads_and_other_tokens_change_nothing(isa, kind):
    w, wide = Weights(kind, 600, 256), torch.randn(9, 3, 512)
    views = [wide[:, 1, :256], wide[:, 1, 1:257], wide.transpose(0, 2)[:256, 1].T, wide[:1, 1, :256].expand(9, 256)]
    with on(isa):
        for x in views:
            y = w.times(x)
            assert torch.equal(y, w.times(x.clone()))
            assert torch.equal(y, torch.stack([w.times(token) for token in x]))
            torch.set_num_threads(1)
            assert torch.equal(y, w.times(x))
            torch.set_num_threads(2)
        for n in (1, 3):  # more rows than are written together
            w.check(wide[:n, 0, :256], torch.randn(600))


@pytest.mark.parametrize("isa", ISAS_AND_REFERENCE)
@pytest.mark.parametrize("kind", KINDS)
def test_activations_of_any_size(isa, kind):
    w = Weights(kind, 16, 256)
    with on(isa):
        for scale in (0.0, 1e-38, 1e-30, 1e-20, 1e20):
            w.check(torch.randn(3, 256) * scale, more=1e-27)  # below 1e-30 activations may be zero


@pytest.mark.parametrize("isa", ISAS_AND_REFERENCE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_activation_shows(isa, kind):
    w, x = Weights(kind, 16, 256), torch.randn(3, 256)
    with on(isa):
        for bad in (torch.nan, torch.inf, -torch.inf):
            x[1, 40] = bad
            y = w.times(x)
            assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all(), bad


def test_a_bad_weight_shows():
    w = torch.randn(16, 64)
    w[3, 5] = float("nan")
    y = ops.linear(torch.ones(1, 64), packed(w)[0], "packed", 16)
    assert y[0, 3].isnan() and y[0, :3].isfinite().all() and y[0, 4:].isfinite().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["packed", *BLOCKS])
def test_what_the_library_dequantises(isa, kind):
    for out, inputs in shapes(kind)[:3]:
        w = Weights(kind, out, inputs)
        for dtype in EPS:
            with on(isa):
                found = linear.expand(w.stored, kind, out, inputs, dtype)
            error = 0.0 if kind == "packed" else 2.0**-22 * w.exact.abs().amax()
            assert ((found.double() - w.exact).abs() <= EPS[dtype] * w.exact.abs() + error).all()
            assert kind != "packed" or torch.equal(found, w.exact.to(dtype))


@pytest.mark.parametrize("isa", ISAS_AND_REFERENCE)
@pytest.mark.parametrize("kind", ["packed", *BLOCKS])
def test_rows_that_are_looked_up(isa, kind):
    for out, inputs in shapes(kind)[:3]:
        w, rows = Weights(kind, out, inputs), ops.Rows(kind, inputs)
        for dtype in EPS:
            for index in ([out - 1], [0, out // 2, 0], [*range(out)]):
                with on(isa):
                    found = rows(w.stored, index, dtype)
                error = 0.0 if kind == "packed" else 2.0**-22 * w.exact.abs().amax()
                expected = w.exact[index]
                assert found.shape == (len(index), inputs) and found.dtype == dtype
                assert ((found.double() - expected).abs() <= EPS[dtype] * expected.abs() + error).all()
        with on(isa), pytest.raises((ValueError, IndexError)):
            rows(w.stored, [16 * out], torch.float32)


def test_rows_of_weights_that_move():
    """They are looked up where the weights are now, also by a copy."""
    w, rows = Weights("Q4_0", 5, 64), ops.Rows("Q4_0", 64)
    first = rows(w.stored, [1], torch.float32)
    other = w.stored.flip(0).contiguous()
    assert torch.equal(rows(other, [3], torch.float32), first)
    assert torch.equal(copy.deepcopy(rows)(w.stored, [1], torch.float32), first)
    wide = torch.cat([w.stored, w.stored], 1)[:, : w.stored.shape[1]]
    assert torch.equal(rows(wide, [1], torch.float32), first)  # not contiguous: PyTorch
    with pytest.raises(ValueError, match="row -1 is not one of 5"):
        rows(w.stored, [-1], torch.float32)
    with pytest.raises(ValueError, match="must be contiguous"):
        linear.Rows(wide, "Q4_0", 64, torch.float32)


@pytest.mark.parametrize("out", [40, 5000])
def test_prompts_where_pytorch_multiplies_tiles(out, monkeypatch):
    """With matrix units, which multiply bfloat16, the weights of a prompt are dequantised a part at a time."""
    w, bias = Weights("packed", out, 1024), torch.randn(out).bfloat16()
    expanded, expand = [], linear.expand
    monkeypatch.setattr(library, "has_matrix_units", lambda: True)
    monkeypatch.setattr(linear, "expand", lambda *args: expanded.append(args[2]) or expand(*args))
    for n, dtype, parts in ((31, torch.bfloat16, 0), (32, torch.float32, 0), (50, torch.bfloat16, -(-out // 2048))):
        x = torch.randn(2, n, 1024)[:1].to(dtype)
        expanded.clear()
        w.check(x, bias, more=2.0**-8 * (x[0].double().abs() @ w.exact.abs().T + bias.abs()))
        assert len(expanded) == parts and sum(expanded) == (out if parts else 0)


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa.startswith("avx")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("way", [fastest_product.PYTORCH, fastest_product.FLOAT32, fastest_product.LIBRARY])
def test_prompts_in_a_type_of_16_bits(way, isa, dtype, monkeypatch):
    """By PyTorch, in the type or converted to float32 a part at a time, or by the library: whichever is the fastest."""
    x, w, blocks = torch.randn(400, 128).to(TYPES[dtype]), Weights(dtype, 70, 128), Weights("Q4_0", 70, 128)
    bias = torch.randn(70).to(TYPES[dtype])
    monkeypatch.setattr(library, "has_matrix_units", lambda: False)
    monkeypatch.setattr(fastest_product, "fastest", lambda dtype: way)
    with on(isa):
        assert (ops.matrix(x, w.stored, "floats") is None) == (way != fastest_product.LIBRARY)
        assert (ops.matrix(x[:80], w.stored, "floats") is None) == (way == fastest_product.FLOAT32)
        assert ops.matrix(x[:64], w.stored, "floats") is not None
        assert ops.matrix(x[:300], blocks.stored, "Q4_0") is not None
        assert (ops.matrix(x, blocks.stored, "Q4_0") is None) == (way == fastest_product.PYTORCH)
        for at_once in (fastest_product.AT_ONCE, 30 * 128):
            monkeypatch.setattr(fastest_product, "AT_ONCE", at_once)
            w.check(x, bias)
        blocks.check(x, more=2 * EPS[TYPES[dtype]] * (x.double().abs() @ blocks.exact.abs().T))


@pytest.mark.parametrize("has_instructions", [True, False])
@pytest.mark.parametrize("faster", [True, False])
def test_the_fastest_product_is_found_by_the_clock(has_instructions, faster, monkeypatch):
    """Products of converted numbers are taken where they took clearly less time than the usual ones."""
    now, usual = [0.0], fastest_product.PYTORCH if has_instructions else fastest_product.LIBRARY

    def multiply(x, w, bias, way):
        of_type = usual if x.dtype == torch.bfloat16 else fastest_product.LIBRARY
        now[0] += {of_type: 1.0, fastest_product.FLOAT32: 0.8 if faster else 0.95}[way]

    monkeypatch.setattr(library, "isa", lambda: "avx2")
    monkeypatch.setattr(library, "has_matrix_units", lambda: False)
    monkeypatch.setattr(library, "has_bfloat16_instructions", lambda: has_instructions)
    monkeypatch.setattr(fastest_product, "multiply", multiply)
    monkeypatch.setattr(fastest_product, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    find = fastest_product.fastest.__wrapped__
    assert find(torch.bfloat16) == (fastest_product.FLOAT32 if faster else usual)
    assert find(torch.float16) == (fastest_product.FLOAT32 if faster else fastest_product.LIBRARY)
    assert find(torch.float32) == fastest_product.PYTORCH
    monkeypatch.setattr(library, "has_matrix_units", lambda: True)
    assert find(torch.bfloat16) == fastest_product.PYTORCH


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa.startswith("avx")])
def test_a_piece_of_a_prompt_is_multiplied_as_the_prompt_is(isa):
    """Floats: by PyTorch where that multiplies all; not the last token alone, whose logits are wanted, nor blocks."""
    floats, blocks = Weights("float32", 64, 128), Weights("Q4_0", 64, 128)
    with on(isa):
        for tokens, by_pytorch in ((300, True), (64, False), (0, False)):
            ops.tokens_of_prompt.set(tokens)
            try:
                assert (ops.matrix(torch.randn(16, 128), floats.stored, "floats") is None) == by_pytorch
                assert ops.matrix(torch.randn(1, 128), floats.stored, "floats") is not None
                assert ops.matrix(torch.randn(16, 128), blocks.stored, "Q4_0") is not None
            finally:
                ops.tokens_of_prompt.set(0)


@pytest.mark.parametrize("isa", ISAS)
def test_a_product_of_many_tokens_has_one_form_for_all(isa):
    """Few tokens of bfloat16 are rounded to 8 bits; the last ones of many are not."""
    x, w = torch.randn(260, 128).bfloat16(), Weights("Q4_0", 70, 128)
    with on(isa):
        assert torch.equal(ops.linear(x, w.stored, "Q4_0")[-8:], ops.linear(x[-40:], w.stored, "Q4_0")[-8:])


@pytest.mark.parametrize("inputs", [128, 40])
@pytest.mark.parametrize("way", [fastest_product.PYTORCH, fastest_product.FLOAT32])
def test_no_number_depends_on_how_a_prompt_was_cut(way, inputs, monkeypatch):
    """A piece of a prompt is converted to float32 where the whole prompt is."""
    x, w, ways = torch.randn(130, inputs).bfloat16(), torch.randn(24, inputs).bfloat16(), []
    multiply = fastest_product.multiply
    monkeypatch.setattr(library, "has_matrix_units", lambda: False)
    monkeypatch.setattr(fastest_product, "fastest", lambda dtype: way)
    monkeypatch.setattr(fastest_product, "multiply", lambda *args: ways.append(args[3]) or multiply(*args))
    for piece in (x, x[:20]):
        ops.tokens_of_prompt.set(len(x))
        try:
            ops.linear(piece, w, "floats")
        finally:
            ops.tokens_of_prompt.set(0)
    is_native = ops.select_backend()[0] == "cpu"
    assert ways == [way if is_native else fastest_product.PYTORCH] * 2


def test_floats_in_rows_that_are_no_blocks_of_32_go_to_pytorch():
    odd = torch.randn(5, 33)
    assert torch.equal(ops.linear(odd, odd, "floats"), odd @ odd.T)
    assert torch.equal(ops.linear(odd[:, :0], odd[:, :0].contiguous(), "floats"), torch.zeros(5, 5))


@pytest.mark.parametrize("isa", ISAS_AND_REFERENCE)
@pytest.mark.parametrize("type", BLOCKS)
def test_rows_in_another_order(isa, type):
    rows, order, bias = random_blocks(type, 300, 256), torch.randperm(300), torch.randn(300)
    for n in (1, 3, 40):
        x = torch.randn(n, 256)
        with on(isa):
            y = ops.linear(x, rows, type, bias=bias, order=order.int())
            expected = ops.linear(x, rows[order.argsort()].contiguous(), type, bias=bias)
        assert torch.equal(y, expected)


@pytest.mark.parametrize("isa", ISAS_AND_REFERENCE)
def test_the_largest_packed_codes_do_not_overflow(isa):
    blocks = torch.full((16, 1, 17), -0x7F80, dtype=torch.int16)  # codes of -128, as a foreign file may hold
    blocks[..., 0] = torch.ones((), dtype=torch.float16).view(torch.int16)
    w = torch.zeros(packed_weights.packed_shape(16, 32), dtype=torch.int16)
    packed_weights.pack(blocks, w)
    with on(isa):
        y = ops.linear(torch.tensor([[1.0] * 32, [-1.0] * 32]), w, "packed", 16)
    assert torch.equal(y, torch.tensor([[-4096.0] * 16, [4096.0] * 16]))


@pytest.mark.parametrize("isa", ISAS_AND_REFERENCE)
@pytest.mark.parametrize("type", BLOCKS)
def test_the_largest_codes_of_blocks_do_not_overflow(isa, type):
    """All bits of all codes and scales are set."""
    w, size = Weights(type, 4, 512), block_weights.block_size(type)[1]
    blocks = w.stored.fill_(255).unflatten(1, (-1, size))
    for at in SCALES[type]:
        blocks[:, :, at : at + 2] = torch.from_numpy(np.float16([1 / 64]).view(np.uint8))
    if type == "MXFP4":
        blocks[:, :, 0] = 121
    w.exact = exact_weights(w.stored, type)
    for dtype in EPS:
        with on(isa):
            w.check(torch.cat([torch.ones(1, 512), -torch.ones(1, 512)]).to(dtype))


def test_packed_blocks_are_those_of_the_format():
    w = torch.randn(5, 96)
    blocks = packed_weights.quantise(w)
    theirs = torch.from_numpy(Q8_0.dequantize(blocks.view(torch.uint8).flatten(1).numpy()))
    assert torch.equal(packed_weights.dequantise(blocks), theirs)
    own = torch.from_numpy(Q8_0.dequantize(Q8_0.quantize(w.numpy())))
    assert (theirs - w).abs().max() <= (own - w).abs().max() * 1.05  # no worse than the format's own quantiser
    into, _ = packed(w)
    index = torch.tensor([4, 0, 4, 2])
    assert torch.equal(packed_weights.rows_of(into, index), blocks[index])


def test_four_bits_are_those_of_the_format():
    w = torch.randn(6, 96) * torch.rand(6, 1)
    rows = block_weights.quantise_int4(w)
    theirs = gguf.quants.quantize(w.numpy(), GGMLQuantizationType.Q4_0)
    mine, own = exact_weights(rows, "Q4_0"), exact_weights(torch.from_numpy(theirs), "Q4_0")
    assert rows.shape == theirs.shape
    assert (mine - w).pow(2).mean() <= (own - w).pow(2).mean() * 1.05  # no worse than the format's own quantiser
    assert torch.equal(block_weights.quantise_int4(torch.zeros(1, 32)), torch.tensor([[0, 0, *[0x88] * 16]]).byte())


def test_refusals():
    x, w = torch.randn(2, 512), torch.randn(16, 512)
    q8, q4 = packed(w)[0], random_blocks("Q4_K", 16, 512)
    for message, call in {
        "16 x 32 as packed needs": lambda: ops.linear(x[:, :32], q8, "packed", 16),
        "40 x 512 as packed needs": lambda: ops.linear(x, q8, "packed", 40),
        "weights are torch.int32 (1, 16": lambda: ops.linear(x, q8.int(), "packed", 16),
        "blocks of 32, not 16 x 65": lambda: ops.linear(torch.randn(2, 65), q8, "packed", 16),
        "blocks of 32, not 4 x 40": lambda: packed_weights.packed_shape(4, 40),
        "blocks of IQ1_S are not supported; Q4_0, Q4_1": lambda: ops.linear(x, q4, "IQ1_S"),
        "16 x 256 as Q4_K needs torch.uint8 (16, 144)": lambda: ops.linear(x[:, :256], q4, "Q4_K"),
        "inputs in blocks of 256, not 100": lambda: ops.linear(x[:, :100], q4, "Q4_K"),
        "weights are torch.int32 (16, 288)": lambda: ops.linear(x, q4.int(), "Q4_K"),
        "must be finite": lambda: block_weights.quantise_int4(torch.full((1, 32), torch.nan)),
        "weights are torch.float32 (16, 512); 16 x 32 as floats needs": lambda: ops.linear(x[:, :32], w, "floats"),
        "weights are torch.int8": lambda: ops.linear(x, w.to(torch.int8), "floats"),
        "weights are torch.float32 (512,)": lambda: ops.linear(x, w[0], "floats"),
        "on meta": lambda: ops.linear(x, w.to("meta"), "floats"),
        "x is torch.float64": lambda: ops.linear(x.double(), w, "floats"),
        "bias is (15,) on cpu; must be (16,)": lambda: ops.linear(x, w, "floats", bias=torch.zeros(15)),
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


@pytest.mark.skipif(not NATIVE, reason="no native library")
@pytest.mark.parametrize("kind", ["packed", "Q4_K", "float32"])
def test_the_library_refuses_what_does_not_fit(kind):
    w, x, order = Weights(kind, 16, 512), torch.randn(2, 512), torch.arange(16, dtype=torch.int32)
    for message, call in {
        "no CPU kernel for activations of torch.float64": lambda: linear.matrix(x.double(), w.stored, w.kind, 16),
        "bias is (3,) on cpu; must be (16,)": lambda: linear.matrix(x, w.stored, w.kind, 16, torch.zeros(3)),
        "contiguous": lambda: linear.matrix(x, w.stored.mT.contiguous().mT, w.kind, 16),
        "order is torch.int64": lambda: linear.matrix(x, w.stored, w.kind, 16, None, order.long()),
        "output that does not exist" if kind == "Q4_K" else "only a matrix of blocks has an order": lambda: (
            linear.matrix(x, w.stored, w.kind, 16, None, order + 1).multiply(x)
        ),
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_tokens_that_do_not_fit_a_matrix_are_refused():
    """Before a pointer is passed: of another type, size or device."""
    matrix = ops.matrix(torch.ones(1, 64), torch.randn(8, 64), "floats")
    assert matrix.multiply(torch.ones(3, 64)).shape == (3, 8)
    for bad in (torch.ones(1, 64).bfloat16(), torch.ones(1, 32), torch.ones(1, 64, device="meta")):
        with pytest.raises(ValueError, match=r"x is torch.*; must be torch.float32 \(\.\.\., 64\) on cpu"):
            matrix.multiply(bad)


def test_weights_that_get_other_memory_while_they_are_multiplied():
    """As model.to() does in another thread: a matrix keeps the memory that it reads."""
    weight = torch.nn.Parameter(torch.randn(64, 64), requires_grad=False)
    x, norm = torch.randn(1, 64), torch.nn.Parameter(torch.rand(64), requires_grad=False)
    matrix, of_norm = ops.matrix(x, weight, "floats"), ops.norm_matrix(x, norm, eps=1e-5)
    expected, normed = matrix.multiply(x), of_norm.multiply(x)
    weight.data, norm.data = torch.full((64, 64), torch.nan), torch.full((64,), torch.nan)
    memory = [torch.full((64, 64), torch.nan) for _ in range(50)]  # which would take the place of what is freed
    assert torch.equal(matrix.multiply(x), expected) and torch.equal(of_norm.multiply(x), normed)
    assert len(memory) == 50
