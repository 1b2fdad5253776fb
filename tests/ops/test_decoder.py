"""A model from tokens to logits as one operation: what its parts give, one after the other, to the last bit."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from skimkv import ops
from skimkv.ops import block_weights, packed_weights
from skimkv.ops.cpu import linear
from skimkv.ops.cpu.structs import CAttend
from support.kernels import EPS, ISAS, NATIVE, on

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")

SIZE, VOCABULARY, D = 64, 75, 16  # of which the last panel is no whole one
KINDS = {"packed": "packed", "blocks": "Q4_0", "floats": "floats"}


def matrix(kind, rows, dtype, columns=SIZE, bias=None):
    """Random weights of a kind as an ops.Matrix for tokens of a type, and what they are."""
    w = torch.randn(rows, columns) / columns**0.5
    if kind == "packed":
        stored = torch.empty(packed_weights.packed_shape(rows, columns), dtype=torch.int16)
        packed_weights.pack(packed_weights.quantise(w), stored, 0)
    else:
        stored = block_weights.quantise_int4(w) if kind == "blocks" else w.to(dtype)
    return linear.matrix(torch.ones(1, 1, columns, dtype=dtype), stored, KINDS[kind], rows, bias), stored


def layers_of(dtype, count=2):
    """Layers with random weights."""
    norm = ops.Norm((torch.rand(SIZE) + 0.5).to(dtype), 1e-5)
    shapes = (SIZE, SIZE), (32, SIZE), (32, SIZE), (SIZE, SIZE), (96, SIZE), (96, SIZE), (SIZE, 96)
    layers = [
        ops.Layer(*(matrix("floats", out, dtype, inputs)[0] for out, inputs in shapes), norm, norm, D)
        for _ in range(count)
    ]
    return ops.Layers(layers, norm)


def angles_of(rows, dtype):
    """The cos and sin of random angles."""
    angles = torch.randn(1, rows, 1, D)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def attend(i, q, k, v):
    """Attention that depends on all of its inputs."""
    return (q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], 1)).transpose(1, 2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("dtype", list(EPS), ids=str)
def test_it_is_its_parts_one_after_the_other(isa, kind, dtype):
    layers = layers_of(dtype)
    embed, stored = matrix(kind, VOCABULARY, dtype)
    head, _ = matrix(kind, VOCABULARY, dtype, bias=torch.randn(VOCABULARY).to(dtype))
    for B in (1, 3, 16):
        ids, (cos, sin) = torch.randint(0, VOCABULARY, (B, 1)), angles_of(1, dtype)
        ids[0] = VOCABULARY - 1
        rows = ops.Rows(KINDS[kind], SIZE)
        with on(isa), torch.no_grad():
            x = stored[ids] if kind == "floats" else rows(stored, ids.flatten().tolist(), dtype)[:, None]
            expected = head.multiply(layers(x, cos, sin, [None, None], attend))[:, 0]
            for tokens, first in ((ids, embed), (ids.int(), embed), (x, None)):
                logits, largest = ops.Decoder(layers, head, first)(tokens, cos, sin, [None, None], attend)
                assert torch.equal(logits, expected) and logits.dtype == dtype
                assert torch.equal(largest, expected.argmax(1, keepdim=True))


def test_the_embedding_of_another_matrix_has_no_bias_and_no_order():
    """A tied matrix may be that of the logits, whose bias and order are of outputs."""
    dtype, order = torch.float32, torch.randperm(VOCABULARY, dtype=torch.int32)
    rows = block_weights.quantise_int4(torch.randn(VOCABULARY, SIZE))
    x = torch.ones(1, 1, SIZE)
    plain = linear.matrix(x, rows, "Q4_0", VOCABULARY)
    other = linear.matrix(x, rows, "Q4_0", VOCABULARY, torch.randn(VOCABULARY), order)
    layers, ids, (cos, sin) = layers_of(dtype), torch.tensor([[7]]), angles_of(1, dtype)
    found = [ops.Decoder(layers, plain, one)(ids, cos, sin, [None, None], attend) for one in (plain, other)]
    assert all(map(torch.equal, *found))


def test_bad_operations_are_refused():
    dtype = torch.float32
    layers, (cos, sin), ids = layers_of(dtype), angles_of(1, dtype), torch.tensor([[3], [5]])
    (embed, _), (head, _) = (matrix("floats", VOCABULARY, dtype) for _ in range(2))
    called = []

    def noted(i, q, k, v):
        called.append(i)
        return attend(i, q, k, v)

    for token in (-1, VOCABULARY, 2**40):
        with pytest.raises(ValueError, match="a token is not one of the embedding"):
            ops.Decoder(layers, head, embed)(torch.tensor([[3], [token]]), cos, sin, [None, None], noted)
    wide, _ = matrix("floats", VOCABULARY, dtype, 2 * SIZE)
    halves, _ = matrix("floats", VOCABULARY, torch.bfloat16)
    mixed = linear.matrix(torch.ones(1, 1, SIZE), torch.randn(VOCABULARY, SIZE).bfloat16(), "floats", VOCABULARY)
    for message, ends in {
        "the matrix of logits does not fit the layers": (wide, embed),
        "the matrix of logits does not fit the layer": (halves, embed),
        "the embedding does not fit the layers": (head, wide),
        "the embedding does not fit the layer": (head, halves),
        "an embedding of floats must be of its own dtype": (head, mixed),
    }.items():
        with pytest.raises(ValueError, match=message):
            ops.Decoder(layers, *ends)(ids, cos, sin, [None, None], noted)
    decoder, x = ops.Decoder(layers, head), torch.zeros(2, 1, SIZE)
    for bad in (x.bfloat16(), x[..., :32], x[:, 0], x.to("meta")):
        with pytest.raises(ValueError, match=r"tokens are torch.*; must be torch.float32 \(B, 1, 64\) on cpu"):
            decoder(bad, cos, sin, [None, None], noted)
    for bad in (ids[:, 0], ids.repeat(1, 2), ids.float(), ids.to("meta")):
        with pytest.raises(ValueError, match=r"tokens are torch.*; must be ids \(B, 1\)"):
            ops.Decoder(layers, head, embed)(bad, cos, sin, [None, None], noted)
    assert not called
    right = ops.Decoder(layers, head, embed)
    cos, sin = (x.expand(-1, 2, 1, D).contiguous() for x in (cos, sin))
    logits, largest = torch.empty(2, VOCABULARY), torch.empty(2, 1, dtype=torch.int64)
    places = [tensor.data_ptr() for tensor in (ids, cos, cos, sin, logits, largest)]

    def error(n=2, **changes):
        named = dict(zip(("ids", "x", "cos", "sin", "logits", "largest"), places, strict=True)) | changes
        return right.run(right.address, None, 1, CAttend(), None, *named.values(), n, 1, None)

    assert error() is None
    for message, changes in {
        b"tokens, or the place of the largest logits, are NULL": {"largest": None},
        b"tokens, or the place": {"ids": None, "x": None},
        b"x or y is NULL": {"logits": None},
        b"cos or sin is NULL": {"cos": None},
        b"n must be at least 1": {"n": 0},
    }.items():
        assert message in (error(**changes) or b""), changes
    right.op.layers.count = 0
    assert b"at least one layer" in error()


def test_results_do_not_depend_on_threads():
    dtype = torch.bfloat16
    layers, (cos, sin), ids = layers_of(dtype), angles_of(1, dtype), torch.tensor([[3]])
    decoder = ops.Decoder(layers, matrix("blocks", 9000, dtype)[0], matrix("packed", VOCABULARY, dtype)[0])
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(decoder(ids, cos, sin, None))
    assert all(map(torch.equal, *results))


def test_it_keeps_the_memory_whose_addresses_it_holds():
    x, arrays = torch.ones(1, 1, SIZE), [torch.randn(VOCABULARY, SIZE).numpy() for _ in range(2)]
    alive = [weakref.ref(array) for array in arrays]
    head, embed = (linear.matrix(x, torch.from_numpy(array), "floats", VOCABULARY) for array in arrays)
    decoder = ops.Decoder(layers_of(torch.float32), head, embed)
    del arrays, head, embed
    gc.collect()
    assert all(array() is not None for array in alive)
    del decoder
    gc.collect()
    assert all(array() is None for array in alive)
