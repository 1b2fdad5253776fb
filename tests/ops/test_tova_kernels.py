"""TOVA's C++ step against its algorithm in float64, on every instruction set: the result, and which token goes."""

from __future__ import annotations

import pytest
import torch

from skimkv.methods import TOVA
from skimkv.methods.slots import attend_slots
from skimkv.methods.tova import layer_mean
from skimkv.ops import Token
from skimkv.ops.cpu import library
from skimkv.ops.cpu.memory import memory_of
from skimkv.stores.base import Shape
from support.kernels import EPS, ISAS, NATIVE, TYPES, exact, on

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")

# D, H, G, k, prompt of each row, type, rows of K and V
CASES = [
    (64, 3, 1, 7, [12], "float32", None), (128, 2, 4, 100, [300, 90], "bfloat16", None),
    (24, 2, 3, 70, [69, 5, 200], "float16", None), (80, 1, 2, 1, [3], "float32", None),
    (64, 4, 2, 65, [100, 66], "bfloat16", "int8"), (33, 2, 1, 0.3, [100, 40], "float32", None),
    (64, 2, 1, 300, [400], "float32", "int4"), (256, 2, 5, 20, [50], "float16", None),
]  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("D", "H", "G", "k", "lengths", "dtype", "kv"), CASES)
def test_kernel_is_the_algorithm(isa, threads, D, H, G, k, lengths, dtype, kv):
    """Free slots first; then the token that goes is that of float64, unless rounding may exchange it with another."""
    B, n, method, dtype = len(lengths), max(lengths), TOVA(k, kv=kv), TYPES[dtype]
    draw = torch.Generator().manual_seed(D)
    q = torch.randn(B, H, G, n + 8, D, generator=draw).to(dtype)
    keys, values = torch.randn(2, B, H, n + 8, D, generator=draw).to(dtype)
    softmax = {
        "scale": D**-0.5, "softcap": 30.0 if G == 4 else None, "sinks": torch.linspace(-1, 2, H * G).view(H, G),
    }  # fmt: skip
    pad = [n - length for length in lengths]
    store, compared = method.store(Shape(B, H, G, D), dtype), 0
    method.prefill(store, q[..., :n, :], keys[:, :, :n], values[:, :, :n], pad=pad, **softmax)
    for i in range(n, n + 8):
        token, twin = Token(keys[:, :, i], values[:, :, i]), exact(store)
        query, exact_token = q[..., i, :], Token(*(x[:, :, i].double() for x in (keys, values)))
        clear = is_choice_clear(exact(store), query.double(), exact_token, softmax)
        want = method.step(twin, query.double(), exact_token, **softmax)
        with on(isa, threads):
            assert method.kernel_of(store)[1] is not None
            got = method.attend(store, query, token, **softmax)
        bound = 1e-4 + 2 * EPS[dtype] * want.abs() + (0.02 if kv else 0) * EPS[dtype]
        assert ((got.double() - want).abs() <= bound).all()
        assert (store.lengths, store.filled) == (twin.lengths, twin.filled)
        for b in range(B):
            if clear[b]:
                assert all(torch.equal(x.to(y.dtype), y) for x, y in zip(store.stored(b), twin.stored(b), strict=True))
        compared += sum(clear)
    assert compared >= 0.8 * 8 * B


def is_choice_clear(store, q, token, softmax):
    """For each row, whether the least weight differs from the next one by a thousandth of a percent."""
    _, weights = attend_slots(store, q, token, **softmax)
    weight = layer_mean(weights.mean(2).transpose(0, 1))
    clear = []
    for b, (filled, budget) in enumerate(zip(store.filled, store.budget, strict=True)):
        least = torch.cat([weight[b, :filled], weight[b, -1:]]).sort().values[:2]
        clear.append(filled < budget or bool(least[1] - least[0] > 1e-5 * least[0]))
    return clear


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_counts_as_no_weight(isa):
    """All weights of a head whose query is NaN are NaN: the other head chooses."""
    method, shape = TOVA(9), Shape(1, 2, 1, 16)
    q, (k, v) = torch.randn(1, 2, 1, 12, 16), torch.randn(2, 1, 2, 12, 16)
    store = method.store(shape, torch.float32)
    method.prefill(store, q[..., :11, :], k[:, :, :11], v[:, :, :11], scale=0.25)
    q[0, 0, 0, 11, 3] = torch.nan
    twin = store.fork()
    method.step(twin, q[..., 11, :], Token(k[:, :, 11], v[:, :, 11]), scale=0.25)
    with on(isa, 2):
        y = method.decode(store, q[..., 11, :], k[:, :, 11], v[:, :, 11], scale=0.25)
    assert y[0, 0].isnan().all() and not y[0, 1].isnan().any()
    assert torch.equal(store.k, twin.k) and torch.equal(store.v, twin.v)


def test_the_library_validates_slots():
    method, shape = TOVA(9), Shape(1, 2, 1, 16)
    x = torch.randn(1, 2, 1, 16)
    store = method.store(shape, torch.float32)
    with on(ISAS[0]):
        method.decode(store, x, x[:, :, 0], x[:, :, 0], scale=0.25)
    memory = memory_of(store)
    memory.op.keep = 0
    assert b"TOVA needs slots" in library.library().skimkv_check(memory.address)
    memory.op.keep = 2
    memory.numbers[1] = -2
    assert b"a slot is beyond" in library.library().skimkv_check(memory.address)
