"""The layers of a model as one operation: equal to their formula, on every instruction set of this machine."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from skimkv import ops
from skimkv.methods import H2O, Dense
from skimkv.ops import block_weights, packed_weights
from skimkv.ops.cpu import linear
from skimkv.ops.cpu.run import CpuBackend
from skimkv.ops.cpu.structs import CAttend
from skimkv.stores.base import Shape
from support.kernels import EPS, ISAS, NATIVE, on

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")

HIDDEN, INNER, D, HEADS = 64, 96, 16, (4, 2, 2)


def weights(kind, out, inputs):
    """Random weights of a kind, and what makes the library's matrix of them for x and its like."""
    w = torch.randn(out, inputs) / inputs**0.5
    if kind == "packed":
        packed = torch.empty(packed_weights.packed_shape(out, inputs), dtype=torch.int16)
        packed_weights.pack(packed_weights.quantise(w), packed, 0)
        return lambda x, bias=None: linear.matrix(x, packed, "packed", out, bias)
    if kind == "blocks":
        rows = block_weights.quantise_int4(w)
        return lambda x, bias=None: linear.matrix(x, rows, "Q4_0", out, bias)
    floats = w.bfloat16() if kind == "bfloat16" else w
    return lambda x, bias=None: linear.matrix(x, floats, "floats", out, bias)


EMPTY = None, None
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
MIXTURES = {
    "packed": ("packed",),
    "blocks": ("blocks",),
    "bfloat16": ("bfloat16",),
    "float32": ("float32",),
    "several": ("blocks", "float32", "packed", "packed", "bfloat16", "float32", "blocks"),
}


def random_norm(size, dtype, adds_one=False):
    return ops.Norm((torch.rand(size) + 0.5 - int(adds_one)).to(dtype), 1e-5, adds_one)


def random_layer(dtype, kinds=("float32",), *, bias=False, head_norms=False, gemma=False, angles=0):
    """A layer with random weights of these kinds, in turn. gemma: with what Gemma has and Llama has not."""
    sizes = [*((h * D, HIDDEN) for h in HEADS), (HIDDEN, HEADS[0] * D), *((INNER, HIDDEN),) * 2, (HIDDEN, INNER)]
    matrices = []
    for i, (out, inputs) in enumerate(sizes):
        x = torch.ones(1, 1, inputs, dtype=dtype)
        matrices.append(weights(kinds[i % len(kinds)], out, inputs)(x, torch.randn(out).to(dtype) if bias else None))
    before, after, *of_sums = (random_norm(HIDDEN, dtype, gemma) for _ in range(4))
    of_heads = (random_norm(D, dtype, gemma), random_norm(D, dtype)) if head_norms else None
    more = (tuple(of_sums), "gelu_tanh") if gemma else (None, "silu")
    return ops.Layer(*matrices, before, after, D, of_heads, *more, angles)


def rotated(x, cos, sin):
    """Llama's formula, every operation rounded to the type."""
    half = torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)
    return x * cos + half * sin


def normed(norm, x):
    return x if norm is None else ops.rms_norm(x, norm.weight, eps=norm.eps, adds_one=norm.adds_one)


def formula(layer, x, cos, sin, attend):
    """A layer, product by product: attend(q, k, v) of (B,heads,1,D) gives (B,1,heads,D)."""
    u, (of_q, of_k), (of_o, of_down) = normed(layer.before, x), layer.head_norms or EMPTY, layer.sum_norms or EMPTY
    cos, sin = cos[layer.angles], sin[layer.angles]
    q, k, v = (m.multiply(u).unflatten(-1, (-1, D)).transpose(1, 2) for m in (layer.q, layer.k, layer.v))
    q, k = (rotated(normed(norm, y), cos[:, None], sin[:, None]) for norm, y in ((of_q, q), (of_k, k)))
    t = x + normed(of_o, layer.o.multiply(attend(q, k, v).flatten(2)))
    u, activation = normed(layer.after, t), ACTIVATIONS[layer.activation]
    return t + normed(of_down, layer.down.multiply(activation(layer.gate.multiply(u)) * layer.up.multiply(u)))


def random_tokens(B, dtype, rows=1, count=1):
    """Tokens, and `count` cos and sin of them."""
    angles = torch.randn(count, rows, 1, D)
    return torch.randn(B, 1, HIDDEN).to(dtype), angles.cos().to(dtype), angles.sin().to(dtype)


def first_values(q, k, v):
    """Attention that depends on all of its inputs."""
    return (q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], 1)).transpose(1, 2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("dtype", list(EPS), ids=str)
def test_a_layer_against_its_formula(isa, mixture, dtype):
    """With a function that attends. It gets what the formula computes, and its result goes on.

    79 and 260 tokens are more than one product takes.
    """
    for B, bias, head_norms, gemma in (
        (1, False, True, False), (3, True, True, True), (15, False, False, False), (79, False, True, False),
        (260, True, True, True),
    ):  # fmt: skip
        layer = random_layer(dtype, MIXTURES[mixture], bias=bias, head_norms=head_norms, gemma=gemma)
        norm = random_norm(HIDDEN, dtype, gemma)
        x, cos, sin = random_tokens(B, dtype, rows=B)
        asked = []

        def attend(i, *heads, asked=asked):
            assert i == 0
            asked.append(heads)
            return first_values(*heads)

        with on(isa):
            y = ops.Layers([layer], norm)(x, cos, sin, [None], attend)
            y0 = normed(norm, formula(layer, x, cos, sin, lambda *heads, attend=attend: attend(0, *heads)))
        assert len(asked) == 2
        for found, heads in zip(*asked, strict=True):
            most = 0 if dtype == torch.bfloat16 else 4 * EPS[dtype] * heads.abs().max()
            assert found.shape == heads.shape and (found - heads).abs().max() <= most
        # a value in the middle is one rounding away from PyTorch's, and the products may round it to other integers
        assert y.dtype == dtype and y.shape == x.shape
        assert (y - y0).abs().max() <= (2 * EPS[dtype] + 2.0**-13) * INNER**0.5 * y0.abs().max()


def test_the_gate_where_its_exponential_leaves_the_range():
    """For numbers beyond the range of e^x, and numbers that are not finite."""
    zero, eye, one = torch.zeros(32, 32), torch.eye(32), ops.Norm(torch.ones(32), 0.0)
    matrix, nothing = (linear.matrix(eye[:1], w, "floats", 32) for w in (eye, zero))
    scale = torch.tensor([-200.0, -90, -20, -1, -1e-3, 0, 1e-3, 1, 20, 90, 200, *torch.linspace(-9, 9, 21)])
    layer = ops.Layer(*[nothing] * 4, matrix, matrix, matrix, one, ops.Norm(scale, 0.0), 16)
    x, cos = torch.ones(1, 1, 32), torch.ones(1, 1, 1, 16)
    for activation, function in ACTIVATIONS.items():
        exact = 1 + function(scale.double()) * scale.double()
        exact = exact / exact.square().mean().sqrt()
        every = ops.Layers([layer._replace(activation=activation)], one)
        for isa in ISAS:
            with on(isa):
                y = every(x, cos, cos, None)
                assert ((y[0, 0].double() - exact).abs() <= 2e-6 * exact.abs() + 1e-9).all(), (isa, activation)
                for bad in (torch.nan, torch.inf):
                    x_bad = x.clone()
                    x_bad[0, 0, 3] = bad
                    assert not every(x_bad, cos, cos, None).isfinite().any()


def stores_of(B, dtype, method):
    """Stores of two layers that have taken two tokens, and can take their last step again."""
    shape = Shape(B, HEADS[1], HEADS[0] // HEADS[1], D)
    stores = [method.store(shape, dtype) for _ in range(2)]
    draw = torch.Generator().manual_seed(1)
    for store in stores:
        for _ in range(2):
            k, v = (torch.randn(B, HEADS[1], D, generator=draw).to(dtype) for _ in range(2))
            method.decode(store, torch.randn(tuple(shape), generator=draw).to(dtype), k, v, scale=0.25)
    return stores


def address_of(method, store):
    """The address of a method's step of the next token, which the library takes into the store."""
    return CpuBackend().prepare(method.kernel(store), store, store.dtype, 0.25, None)


def decoder(method, stores):
    """Attention by a method, as a function of the layer's number, and of q, k and v (B,heads,1,D)."""

    def attend(i, q, k, v):
        y = method.decode(stores[i], q.reshape(tuple(stores[i].shape)), k[:, :, 0], v[:, :, 0], scale=0.25)
        return y.reshape(y.shape[0], 1, -1, D)

    return attend


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["packed", "blocks", "float32"])
@pytest.mark.parametrize("dtype", list(EPS), ids=str)
def test_attention_inside(isa, kind, dtype):
    """By addresses of steps, by a function, by either in turn; and with zeros in its place."""
    layers = [random_layer(dtype, (kind,)), random_layer(dtype, (kind,), gemma=True, angles=1)]
    every = ops.Layers(layers, random_norm(HIDDEN, dtype))
    for B, method in ((1, Dense()), (3, Dense()), (3, H2O(k=2))):
        x, cos, sin = random_tokens(B, dtype, count=2)
        assert every.fits(B, cos, sin) and every.fits(B, cos.expand(-1, B, 1, D), sin.expand(-1, B, 1, D))
        with on(isa), torch.no_grad():
            results = []
            for repeated in ((0, 1), (0,), (1,), ()):
                stores = stores_of(B, dtype, method)
                addresses = [address_of(method, store) if i in repeated else None for i, store in enumerate(stores)]
                attend = None if len(repeated) == 2 else decoder(method, stores)
                results.append(every(x, cos, sin, addresses, attend))
            assert all(torch.equal(y, results[0]) for y in results)
            t, z, attend = x, x, decoder(method, stores_of(B, dtype, method))
            for i, layer in enumerate(every.layers):
                t = formula(layer, t, cos, sin, lambda *heads, i=i, attend=attend: attend(i, *heads))
                z = formula(layer, z, cos, sin, lambda q, k, v: 0 * q.transpose(1, 2))
            for found, expected in ((results[0], t), (every(x, cos, sin, None), z)):
                expected = normed(every.norm, expected)
                most = (4 * EPS[dtype] + 2.0**-12) * INNER**0.5 * expected.abs().max()
                assert (found - expected).abs().max() <= most


class _Interrupted(BaseException):
    pass


def test_what_a_function_that_attends_raises_or_returns():
    dtype = torch.float32
    every, (x, cos, sin) = (
        ops.Layers([random_layer(dtype) for _ in range(2)], random_norm(HIDDEN, dtype)),
        random_tokens(2, dtype),
    )
    called = []

    def attend(i, q, k, v):
        called.append(i)
        if i:
            raise _Interrupted
        return first_values(q, k, v)

    with pytest.raises(_Interrupted):
        every(x, cos, sin, [None, None], attend)
    assert called == [0, 1]
    for wrong in (lambda q: q, lambda q: q.transpose(1, 2).bfloat16(), lambda q: q.transpose(1, 2).to("meta")):
        with pytest.raises(ValueError, match=r"attention of layer 0 gave torch.*must be torch.float32 \(2, 1, 4, 16\)"):
            every(x, cos, sin, [None, None], lambda i, q, k, v, wrong=wrong: wrong(q))
    kept = []
    every(x, cos, sin, [None, None], lambda i, q, k, v: kept.append((q, k, v)) or q.transpose(1, 2))
    before = [tensor.clone() for heads in kept for tensor in heads]
    every(2 * x, cos, sin, [None, None], lambda i, q, k, v: q.transpose(1, 2))
    after = [tensor for heads in kept for tensor in heads]
    assert all(map(torch.equal, before, after)), "what attention keeps is its own"


def test_angles_that_do_not_fit_all_layers():
    every = ops.Layers([random_layer(torch.float32)], random_norm(HIDDEN, torch.float32))
    x, cos = torch.randn(2, 1, HIDDEN), torch.randn(1, 2, 1, D)
    half, more_angles, more_rows = cos[..., : D // 2], cos.repeat(2, 1, 1, 1), cos.repeat(1, 2, 1, 1)
    for bad in (half, more_angles, more_rows, cos.repeat(1, 1, 2, 1), cos[0], cos.bfloat16(), cos.to("meta")):
        assert not every.fits(len(x), bad, bad) and not every.fits(len(x), cos, bad)
        with pytest.raises(ValueError, match=r"cos is torch.*; must be torch.float32 \(1, 2 or 1, 1, 16\) on cpu"):
            every(x, cos, bad, None)


def test_the_library_validates_all_layers_before_the_first_runs():
    layers, norm = [random_layer(torch.float32) for _ in range(2)], random_norm(HIDDEN, torch.float32)
    others, wide = random_layer(torch.bfloat16), random_norm(D + 1, torch.float32)
    x, cos = torch.randn(2, 1, HIDDEN), torch.randn(1, 2, 1, D)
    stores = stores_of(2, torch.float32, Dense())
    addresses = [address_of(Dense(), store) for store in stores]
    first, changed = layers[0], layers[0]._replace
    for bad in (changed(before=wide), changed(after=wide), changed(head_norms=(wide, wide))):
        with pytest.raises(
            ValueError, match=r"weights of a normalisation are torch.float32 \(17,\); must be contiguous"
        ):
            ops.Layers([bad], norm)
    with pytest.raises(ValueError, match="there are 1 steps of attention for 2 layers"):
        ops.Layers(layers, norm)(x, cos, cos, addresses[:1])
    for message, bad in {
        "the matrices are not of one dtype": changed(up=others.up),
        "q, k and v do not fit each other": changed(k=first.q),
        "q and o do not fit each other": changed(o=first.down),
        "gate, up and down do not fit each other": changed(up=first.q),
        "the layers do not fit each other": changed(D=2 * D),
    }.items():
        with pytest.raises(ValueError, match=message):
            ops.Layers([first, bad], norm)(x, cos, cos, None)
    for D_bad, message in (
        (3, "D must be even and from 2 to 576"),
        (12, "the outputs of q, k and v must be heads of D"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.Layers([changed(D=D_bad)], norm)(x, cos[..., :D_bad], cos[..., :D_bad], None)
    misaligned = cos.data_ptr() + 1
    for message, change in {
        "there must be at least one layer": lambda every: setattr(every.op, "count", 0),
        "normalisation are NULL, or not aligned": lambda every: setattr(every.op.norm, "w", None),
        "are NULL, or not aligned": lambda every: setattr(every.list[1].before, "w", misaligned),
        "eps must be at least 0": lambda every: setattr(every.list[0].after, "eps", float("nan")),
        "q and k are normalised, or neither is": lambda every: setattr(every.list[1].of_k, "w", cos.data_ptr()),
        "there must be at least one cos and sin": lambda every: setattr(every.op, "angles", 0),
        "a layer has no cos and sin": lambda every: setattr(every.list[1], "angles", 1),
        "unknown activation": lambda every: setattr(every.list[1], "activation", 2),
    }.items():
        every = ops.Layers(layers, norm)
        change(every)
        with pytest.raises(ValueError, match=message):
            every(x, cos, cos, addresses)
    every = ops.Layers(layers, norm)
    y, pointers = torch.empty_like(x), [tensor.data_ptr() for tensor in (x, cos, cos)]
    for place, message in enumerate(("x or y is NULL", "cos or sin is NULL", "cos or sin is NULL")):
        broken = [None if i == place else pointer for i, pointer in enumerate(pointers)]
        error = every.run(every.address, None, 1, CAttend(), None, *broken, y.data_ptr(), 2, 1, None)
        assert message in error.decode()
    error = every.run(every.address, None, 1, CAttend(), None, *pointers, y.data_ptr(), 0, 1, None)
    assert "n must be at least 1" in error.decode()
    lengths = [list(store.lengths) for store in stores]
    of_one_row, of_halves = stores_of(1, torch.float32, Dense()), stores_of(2, torch.bfloat16, Dense())
    for message, wrong in {
        "a step is NULL, and there is no function that attends": None,
        "a cache does not fit its layer": address_of(Dense(), of_one_row[0]),
        "a cache is not of its layer's dtype": address_of(Dense(), of_halves[0]),
    }.items():
        with pytest.raises(ValueError, match=message):
            every(x, cos, cos, [addresses[0], wrong])
    op = stores[1].view.op
    for message, name in {
        "queries, outputs and new rows of a step must be contiguous": "q_h",
        "r must be from 1 to D": "method",
        "a step must keep its token": "keep",
    }.items():
        before = getattr(op, name)
        setattr(op, name, {"q_h": 3 * D, "method": 1, "keep": 0}[name])
        op.k = 1
        with pytest.raises(ValueError, match=message):
            every(x, cos, cos, addresses)
        setattr(op, name, before)
    assert [store.lengths for store in stores] == lengths


def test_results_do_not_depend_on_threads():
    size, inner = 256, 576
    x, norm = torch.randn(2, 1, size).bfloat16(), random_norm(size, torch.bfloat16)
    shapes = [(size, size)] * 4 + [(inner, size)] * 2 + [(size, inner)]
    matrices = [
        linear.matrix(x.new_empty(2, 1, inputs), torch.randn(out, inputs).bfloat16(), "floats", out)
        for out, inputs in shapes
    ]
    every, cos = ops.Layers([ops.Layer(*matrices, norm, norm, 32)], norm), torch.randn(1, 2, 1, 32).bfloat16()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(every(x, cos, cos, [None], lambda i, q, k, v: (q + k).transpose(1, 2)))
    assert torch.equal(*results)


def test_an_operation_keeps_the_tensors_whose_addresses_it_holds():
    x, angles = torch.randn(1, 1, HIDDEN), torch.randn(1, 1, 1, D)
    packed = torch.zeros(packed_weights.packed_shape(HIDDEN, HIDDEN), dtype=torch.int16)
    rows = block_weights.quantise_int4(torch.randn(HIDDEN, HIDDEN))
    tensors = [packed, rows, torch.arange(HIDDEN, dtype=torch.int32), torch.randn(HIDDEN, HIDDEN), torch.ones(HIDDEN)]
    arrays = [tensor.numpy().copy() for tensor in tensors]  # the memory of a tensor, as something that can be watched
    tensors, alive = [torch.from_numpy(array) for array in arrays], [weakref.ref(array) for array in arrays]
    matrices = [
        linear.matrix(x, tensors[0], "packed", HIDDEN),
        linear.matrix(x, tensors[1], "Q4_0", HIDDEN, order=tensors[2]),
        linear.matrix(x, tensors[3], "floats", HIDDEN),
    ]
    norm = ops.Norm(tensors[4], 1e-5)
    every = ops.Layers([ops.Layer(*matrices, *matrices, matrices[0], norm, norm, D)], norm)
    expected = every(x, angles, angles, None)
    del packed, rows, tensors, arrays, matrices, norm
    assert all(array() is not None for array in alive)
    assert torch.equal(expected, every(x, angles, angles, None))
    del every
    gc.collect()
    assert all(array() is None for array in alive)
