"""Several products as one operation: equal to the layers one by one, on every instruction set of this machine."""

from __future__ import annotations

import re
import weakref

import pytest
import torch
import torch.nn.functional as F

from skimkv import ops
from skimkv.methods import H2O, Dense
from skimkv.ops import block_weights, packed_weights
from skimkv.ops.cpu import linear
from skimkv.stores.base import Shape
from support.instruction_sets import ISAS, NATIVE, on
from support.kernels import EPS

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


MIXTURES = {
    "packed": ("packed",) * 3,
    "blocks": ("blocks",) * 3,
    "bfloat16": ("bfloat16",) * 3,
    "all of them": ("blocks", "float32", "packed"),
    "two of floats": ("bfloat16", "float32", "bfloat16"),
}


def of_floats(x, w):
    return linear.matrix(x, w, "floats", w.shape[0])


def rotated(x, cos, sin):
    """Llama's formula, every operation rounded to the type."""
    half = torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)
    return x * cos + half * sin


@pytest.mark.parametrize("isa", ISAS[:-1])
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("dtype", list(EPS), ids=str)
def test_the_feed_forward_layer(isa, mixture, dtype):
    kinds = MIXTURES[mixture]
    sizes = (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    make = [weights(kind, *size) for kind, size in zip(kinds, sizes, strict=True)]
    bias = torch.randn(INNER).to(dtype)
    for n in (1, 3, 15, 64):
        x = (3 * torch.randn(n, HIDDEN)).to(dtype)
        with on(isa):
            gate, up = make[0](x, bias), make[1](x)
            middle = F.silu(gate.multiply(x)) * up.multiply(x)
            down = make[2](middle)
            expected = down.multiply(middle)
            y = ops.GatedMLP(gate, up, down)(x)
            assert torch.equal(ops.GatedMLP(gate, up, down)(x.view(1, n, HIDDEN))[0], y)
            assert torch.equal(ops.GatedMLP(gate, up, down)(x.T.contiguous().T), y)
        assert y.dtype == dtype and y.shape == expected.shape
        # a value in the middle is one rounding away from PyTorch's, and the products may round it to other integers
        size = middle.abs().float().amax(-1, keepdim=True)
        assert ((y - expected).abs() <= (2 * EPS[dtype] + 2.0**-13) * INNER**0.5 * size).all(), (n, y, expected)


def test_the_gate_against_its_formula():
    """Also where e^-x is beyond the range of floats, and what is not finite is not lost."""
    eye = torch.eye(32)
    matrix = of_floats(eye[:1], eye)
    x = torch.tensor([-200.0, -90, -20, -1, -1e-3, 0, 1e-3, 1, 20, 90, 200, *torch.linspace(-9, 9, 21)])[None]
    exact = F.silu(x.double()) * x.double()
    for isa in ISAS[:-1]:
        with on(isa):
            y = ops.GatedMLP(matrix, matrix, matrix)(x)
            assert ((y.double() - exact).abs() <= 1e-6 * exact.abs() + 1e-30).all(), isa
            bad = x.clone()
            bad[0, 3], bad[0, 4] = torch.nan, torch.inf
            assert not ops.GatedMLP(matrix, matrix, matrix)(bad).isfinite().any(), "0 * inf in every sum"


@pytest.mark.parametrize("isa", ISAS[:-1])
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("dtype", list(EPS), ids=str)
def test_projections(isa, mixture, dtype):
    make = [weights(kind, h * D, HIDDEN) for kind, h in zip(MIXTURES[mixture], HEADS, strict=True)]
    bias = torch.randn(HEADS[0] * D).to(dtype)
    norms = tuple(ops.Norm((torch.rand(D) + 0.5).to(dtype), 1e-5) for _ in range(2))
    for B, n in ((1, 1), (3, 1), (1, 5), (2, 4)):
        x, angles = torch.randn(B, n, HIDDEN).to(dtype), torch.randn(B, n, D)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        with on(isa):
            matrices = make[0](x, bias), make[1](x), make[2](x)
            heads = [m.multiply(x).view(B, n, h, D) for m, h in zip(matrices, HEADS, strict=True)]
            normed = [ops.rms_norm(y, w, eps=eps) for y, (w, eps) in zip(heads, norms, strict=False)]
            for pair, (q0, k0) in ((None, heads[:2]), (norms, normed)):
                q, k, v = ops.Projections(*matrices, D, pair)(x, cos, sin)
                assert torch.equal(v, heads[2].transpose(1, 2))
                for y, y0 in ((q, q0), (k, k0)):
                    expected = rotated(y0.transpose(1, 2), cos[:, None], sin[:, None])
                    assert y.shape == expected.shape and y.dtype == dtype
                    most = 0 if dtype == torch.bfloat16 else 4 * EPS[dtype] * y0.abs().max()
                    assert (y - expected).abs().max() <= most


@pytest.mark.parametrize("isa", ISAS[:-1])
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("dtype", list(EPS), ids=str)
def test_before_and_after_attention(isa, mixture, dtype):
    """With the normalisation of the tokens, and the residual sums: every value is rounded as one by one."""
    kinds = MIXTURES[mixture]
    make = [weights(kind, h * D, HIDDEN) for kind, h in zip(kinds, HEADS, strict=True)]
    make_o = weights(kinds[0], HIDDEN, INNER)
    sizes = (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    make_mlp = [weights(kind, *size) for kind, size in zip(kinds, sizes, strict=True)]
    norm = ops.Norm((torch.rand(HIDDEN) + 0.5).to(dtype), 1e-5)
    for B, n in ((1, 1), (2, 3)):
        x, y = torch.randn(B, n, HIDDEN).to(dtype), torch.randn(B, n, INNER).to(dtype)
        cos = torch.ones(B, n, D).to(dtype)
        with on(isa):
            q, k, v = (m(x) for m in make)
            normed = ops.rms_norm(x, norm.weight, eps=norm.eps)
            found = ops.Projections(q, k, v, D, None, norm)(x, cos, 0 * cos)
            for heads, one in zip(found, ops.Projections(q, k, v, D)(normed, cos, 0 * cos), strict=True):
                assert torch.equal(heads, one)
            o, mlp = make_o(y), ops.GatedMLP(make_mlp[0](x), make_mlp[1](x), make_mlp[2](y))
            t = x + o.multiply(y)
            expected = t + mlp(ops.rms_norm(t, norm.weight, eps=norm.eps))
            assert torch.equal(ops.LayerEnd(o, norm, mlp)(y, x), expected)
            assert torch.equal(ops.LayerEnd(o, norm, mlp)(y.mT.contiguous().mT, x.mT.contiguous().mT), expected)


def two_layers(dtype, kind="float32"):
    """Two layers of a model, prepared, with the normalisation after them."""
    norms = [ops.Norm((torch.rand(HIDDEN) + 0.5).to(dtype), 1e-5) for _ in range(5)]
    x, y, middle = (torch.ones(1, 1, size, dtype=dtype) for size in (HIDDEN, HEADS[0] * D, INNER))
    layers = []
    for i in range(2):
        q, k, v = (weights(kind, h * D, HIDDEN)(x) for h in HEADS)
        gate, up = (weights(kind, INNER, HIDDEN)(x) for _ in range(2))
        mlp = ops.GatedMLP(gate, up, weights(kind, HIDDEN, INNER)(middle))
        before = ops.Projections(q, k, v, D, None, norms[2 * i])
        layers.append((before, ops.LayerEnd(weights(kind, HIDDEN, HEADS[0] * D)(y), norms[2 * i + 1], mlp)))
    return layers, norms[4]


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


@pytest.mark.parametrize("isa", ISAS[:-1])
@pytest.mark.parametrize("kind", ["packed", "blocks", "float32"])
@pytest.mark.parametrize("dtype", list(EPS), ids=str)
def test_all_layers_of_a_model(isa, kind, dtype):
    """With attention inside, and with zeros in its place."""
    layers, norm = two_layers(dtype, kind)
    every = ops.Layers(layers, norm)
    for B, method in ((1, Dense()), (3, Dense()), (3, H2O(k=2))):
        x, angles = torch.randn(B, 1, HIDDEN).to(dtype), torch.randn(1, 1, D)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        assert every.fits(x, cos, sin) and every.fits(x, cos.expand(B, 1, D), sin.expand(B, 1, D))
        with on(isa), torch.no_grad():
            mine, theirs = stores_of(B, dtype, method), stores_of(B, dtype, method)
            steps = [store.choice.again for store in mine]
            assert all(step.contiguous == (dtype, 0.25) for step in steps)
            assert all(step.prepare(store) for step, store in zip(steps, mine, strict=True))
            y = every(x, cos, sin, [step.address for step in steps])
            with_zeros, t, z = every(x, cos, sin, None), x, x
            for (before, after), store in zip(layers, theirs, strict=True):
                q, k, v = before(t, cos, sin)
                token = k.view(B, HEADS[1], D), v.view(B, HEADS[1], D)
                attended = method.decode(store, q.view(tuple(store.shape)), *token, scale=0.25)
                t, z = after(attended.view(B, 1, -1), t), after(0 * attended.view(B, 1, -1), z)
            assert torch.equal(y, ops.rms_norm(t, norm.weight, eps=norm.eps))
            assert torch.equal(with_zeros, ops.rms_norm(z, norm.weight, eps=norm.eps))


def test_angles_that_do_not_fit_all_layers():
    every, x, cos = ops.Layers(*two_layers(torch.float32)), torch.randn(2, 1, HIDDEN), torch.randn(2, 1, D)
    for bad in (cos[..., : D // 2], cos.repeat(2, 1, 1), cos.repeat(1, 2, 1), cos.bfloat16(), cos.to("meta")):
        assert not every.fits(x, bad, bad) and not every.fits(x, cos, bad)


def test_the_library_validates_all_layers_before_the_first_runs():
    layers, norm = two_layers(torch.float32)
    others, _ = two_layers(torch.bfloat16)
    x, cos = torch.randn(2, 1, HIDDEN), torch.randn(2, 1, D)
    stores = stores_of(2, torch.float32, Dense())
    addresses = [store.choice.again.address for store in stores]
    with pytest.raises(ValueError, match=r"weights of a normalisation are torch.float32 \(16,\)"):
        ops.Layers(layers, ops.Norm(torch.ones(16), 1e-5))
    with pytest.raises(ValueError, match="there are 1 steps of attention for 2 layers"):
        ops.Layers(layers, norm)(x, cos, cos, addresses[:1])
    for message, change in {
        "there must be at least one layer": {"count": 0},
        "norm is NULL, or not aligned": {"norm": None},
        "eps must be at least 0": {"eps": -1.0},
    }.items():
        every = ops.Layers(layers, norm)
        for name, value in change.items():
            setattr(every.op, name, value)
        with pytest.raises(ValueError, match=message):
            every(x, cos, cos, addresses)
    with pytest.raises(ValueError, match="the layers do not fit each other"):
        ops.Layers([layers[0], others[1]], norm)(x, cos, cos, None)
    every = ops.Layers(layers, norm)
    every.list[1].after = None
    with pytest.raises(ValueError, match="operation is NULL"):
        every(x, cos, cos, None)
    every = ops.Layers(layers, norm)
    lengths = [list(store.lengths) for store in stores]
    of_one_row, of_halves = stores_of(1, torch.float32, Dense()), stores_of(2, torch.bfloat16, Dense())
    for message, wrong in {
        "a step is NULL": None,
        "a cache does not fit its layer": of_one_row[0].choice.again.address,
        "a cache is not of its layer's dtype": of_halves[0].choice.again.address,
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
    x = torch.randn(2, 1, 256).bfloat16()
    w = [torch.randn(out, inputs).bfloat16() for out, inputs in ((600, 256), (600, 256), (256, 600 // 32 * 32))]
    gate, up = (of_floats(x, part[: 600 // 32 * 32]) for part in w[:2])
    down = of_floats(x.new_empty(2, 1, 576), w[2])
    cos = torch.randn(2, 1, 32).bfloat16()
    project = ops.Projections(gate, up, up, 32)
    torch.set_num_threads(1)
    one = ops.GatedMLP(gate, up, down)(x), *project(x, cos, cos)
    torch.set_num_threads(2)
    two = ops.GatedMLP(gate, up, down)(x), *project(x, cos, cos)
    assert all(map(torch.equal, one, two))


def test_an_operation_keeps_the_tensors_whose_addresses_it_holds():
    x, angles = torch.randn(1, 1, HIDDEN), torch.randn(1, 1, D)
    packed = torch.zeros(packed_weights.packed_shape(HIDDEN, HIDDEN), dtype=torch.int16)
    rows = block_weights.quantise_int4(torch.randn(HIDDEN, HIDDEN))
    tensors = [packed, rows, torch.arange(HIDDEN, dtype=torch.int32), torch.randn(HIDDEN, HIDDEN), torch.ones(HIDDEN)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    matrices = [
        linear.matrix(x, tensors[0], "packed", HIDDEN),
        linear.matrix(x, tensors[1], "Q4_0", HIDDEN, order=tensors[2]),
        linear.matrix(x, tensors[3], "floats", HIDDEN),
    ]
    norm = ops.Norm(tensors[4], 1e-5)
    end, project = ops.LayerEnd(matrices[0], norm, ops.GatedMLP(*matrices)), ops.Projections(*matrices, D, None, norm)
    expected = end(x, x), *project(x, angles, angles)
    del packed, rows, tensors, matrices, norm
    assert all(tensor() is not None for tensor in alive)
    assert all(map(torch.equal, expected, (end(x, x), *project(x, angles, angles))))
    del end, project
    assert all(tensor() is None for tensor in alive)


def test_angles_of_another_shape_type_or_device_give_none():
    x = torch.randn(2, 3, HIDDEN)
    matrix = of_floats(x, torch.randn(2 * D, HIDDEN))
    cos = torch.randn(2, 3, D)
    project = ops.Projections(matrix, matrix, matrix, D)
    assert project(x, cos, cos) is not None
    one = project(x, cos[1:], cos[1:])
    both = project(x, cos[1:].repeat(2, 1, 1), cos[1:].repeat(2, 1, 1))
    assert all(map(torch.equal, one, both)), "rows may have their angles in common"
    for bad in (cos[:, :1], torch.cat([cos, cos]), cos[..., : D // 2], cos.bfloat16(), cos.to("meta")):
        assert project(x, bad, bad) is None and project(x, cos, bad) is None


def test_the_library_validates_before_it_follows_an_address():
    x = torch.randn(2, HIDDEN)
    wide, narrow = (of_floats(x, torch.randn(out, HIDDEN)) for out in (INNER, HIDDEN))
    back = of_floats(torch.randn(2, INNER), torch.randn(HIDDEN, INNER))
    half = of_floats(x.bfloat16(), torch.randn(INNER, HIDDEN))
    y = torch.empty(2, INNER)
    for message, matrices, n in (
        ("gate, up and down do not fit", (wide, narrow, back), 2),
        ("gate, up and down do not fit", (wide, wide, wide), 2),
        ("gate, up and down do not fit", (wide, half, back), 2),
        ("n must be from 1 to 64", (wide, wide, back), 65),
        ("n must be at least 1", (wide, wide, back), 0),
    ):
        layer = ops.GatedMLP(*matrices)
        error = layer.run(layer.address, x.data_ptr(), y.data_ptr(), n, 1, None)
        assert message in error.decode()
    layer = ops.GatedMLP(wide, wide, back)
    layer.op.up.kind = 9
    with pytest.raises(ValueError, match="the kind of a matrix is unknown"):
        layer(x)
    layer.op.up.kind, layer.op.up.data = 0, None
    with pytest.raises(ValueError, match="the data of a matrix are NULL"):
        layer(x)
    cos = torch.randn(2, 1, D)
    for message, change in {
        "the outputs of q, k and v must be heads of D": {"D": 10},
        "D must be even and from 2 to 576": {"D": 3},
        "q and k are normalised, or neither is": {"q_norm": cos.data_ptr()},
        "are not aligned": {"q_norm": cos.data_ptr() + 1, "k_norm": cos.data_ptr()},
        "eps must be at least 0": {"q_norm": cos.data_ptr(), "k_norm": cos.data_ptr(), "q_eps": -1.0},
    }.items():
        project = ops.Projections(narrow, narrow, narrow, D)
        for name, value in change.items():
            setattr(project.op, name, value)
        with pytest.raises(ValueError, match=re.escape(message)):
            project(x.view(2, 1, HIDDEN), cos, cos)
    project = ops.Projections(narrow, narrow, narrow, D)
    pointers = [t.data_ptr() for t in (x, cos, cos, y, y, y)]
    for place, message in enumerate(("x or y is NULL", "cos or sin is NULL", "cos or sin is NULL", *["x or y"] * 3)):
        broken = [None if i == place else pointer for i, pointer in enumerate(pointers)]
        assert message in project.run(project.address, *broken, 2, 1, None).decode()
    end = ops.LayerEnd(back, ops.Norm(torch.ones(HIDDEN), 1e-5), ops.GatedMLP(wide, wide, back))
    inner, state = torch.randn(2, INNER), torch.randn(2, HIDDEN)
    with pytest.raises(ValueError, match=r"residual is torch.float32 \(3, 64\); must be 2 times 64"):
        end(inner, torch.randn(3, HIDDEN))
    with pytest.raises(ValueError, match=r"residual is torch.bfloat16 \(2, 64\); must be 2 times 64"):
        end(inner, state.bfloat16())
    for message, name, value in (
        ("norm or residual is NULL", "norm", None),
        ("norm or residual is not aligned", "norm", cos.data_ptr() + 1),
        ("eps must be at least 0", "eps", float("nan")),
        ("o and mlp do not fit", "o", wide.op),
    ):
        end = ops.LayerEnd(back, ops.Norm(torch.ones(HIDDEN), 1e-5), ops.GatedMLP(wide, wide, back))
        setattr(end.op, name, value)
        assert message in end.run(end.address, inner.data_ptr(), state.data_ptr(), y.data_ptr(), 2, 1, None).decode()
    norm = ops.Norm(torch.ones(D + 1), 1e-5)
    with pytest.raises(ValueError, match=r"must be contiguous \(64,\)"):
        ops.LayerEnd(back, norm, ops.GatedMLP(wide, wide, back))
    with pytest.raises(ValueError, match=r"must be contiguous \(64,\)"):
        ops.Projections(narrow, narrow, narrow, D, None, norm)
    with pytest.raises(ValueError, match=r"weights of a normalisation are torch.float32 \(17,\); must be contiguous"):
        ops.Projections(narrow, narrow, narrow, D, (norm, norm))
