"""The kernels as a custom operation of a ggml graph, which the threads of ggml run, as llama.cpp would use them."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from skimkv import ops
from skimkv.ops.cpu import library as native
from skimkv.ops.cpu.run import OPERATIONS
from skimkv.ops.cpu.structs import CCache, CChunk, COp
from skimkv.stores.base import Shape
from skimkv.stores.full import Full
from support import steps
from support.kernels import ISAS, NATIVE, on

ggml = pytest.importorskip("ggml", reason="ggml-python is not installed")
pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")
E, H, G, D, N = 96, 2, 4, 64, 700
TYPES = {torch.float32: ggml.GGML_TYPE_F32, torch.float16: ggml.GGML_TYPE_F16}


def tensor(context, values):
    """Make a ggml tensor with these values. ggml names the dimension with stride 1 first."""
    sizes = (ctypes.c_int64 * values.dim())(*reversed(values.shape))
    copy = ggml.ggml_new_tensor(context, TYPES[values.dtype], values.dim(), sizes)
    ctypes.memmove(ggml.ggml_get_data(copy), values.contiguous().data_ptr(), values.nbytes)
    return copy


class Attention:
    """The custom operation on y and q [D,H*G] and K and V [D,N,H], whose addresses and strides ggml gives."""

    def __init__(self, method: int, index: torch.Tensor | None = None, **hyper: int) -> None:
        self.method, self.index, self.hyper = method, index, hyper
        self.work, self.calls = None, []
        self.function = ggml.ggml_custom3_op_t(self)

    def describe(self, y, q, k, v) -> COp:
        chunk, cache, op = CChunk(), CCache(), COp()
        chunk.start, chunk.cap, chunk.k, chunk.v = 0, k.ne[1], k.data, v.data
        (_, chunk.k_n, chunk.k_h, chunk.k_b), (_, chunk.v_n, chunk.v_h, chunk.v_b) = (
            [stride // 2 for stride in t.nb] for t in (k, v)
        )
        if self.index is not None:  # [H,D,N], channel-major
            chunk.index, (chunk.x_h, chunk.x_r, _) = self.index.data_ptr(), self.index.stride()
        lengths = ctypes.c_int64(k.ne[1])
        cache.B, cache.H, cache.G, cache.D, cache.R = 1, k.ne[2], q.ne[1] // k.ne[2], k.ne[0], k.ne[0]
        cache.dtype, cache.n_chunks, cache.channels = 2, 1, int(self.index is not None)
        cache.chunks, cache.lengths = ctypes.addressof(chunk), ctypes.addressof(lengths)
        op.cache, op.q, op.y, op.scale, op.method = ctypes.addressof(cache), q.data, y.data, D**-0.5, self.method
        op.q_g, op.q_h = q.nb[1] // 4, q.nb[1] // 4 * cache.G
        op.y_g, op.y_h = y.nb[1] // 4, y.nb[1] // 4 * cache.G
        for name, value in self.hyper.items():
            setattr(op, name, value)
        op.parents = chunk, cache, lengths  # they must live as long as the operation does
        return op

    def __call__(self, y, q, k, v, ith, nth, _) -> None:
        op = self.describe(*(t.contents for t in (y, q, k, v)))
        native.library().skimkv_share(ctypes.byref(op), self.work, ith, nth)
        self.calls.append((ith, nth))


def computed(x, wq, wo, k, v, attention=None, threads=1):
    """Compute Wo attention(Wq x) (E) in a ggml graph: with the custom operation, or with the operations of ggml."""
    context = ggml.ggml_init(ggml.ggml_init_params(mem_size=64 << 20, mem_buffer=None, no_alloc=False))
    x, wq, wo, k, v = (tensor(context, t) for t in (x, wq, wo, k, v))
    q = ggml.ggml_reshape_2d(context, ggml.ggml_mul_mat(context, wq, x), D, H * G)
    if attention:
        lib = native.library()
        lib.skimkv_work.restype = ctypes.c_size_t
        op = attention.describe(*(t.contents for t in (q, q, k, v)))
        op.q = op.y = 64  # validation does not read them
        error = lib.skimkv_check(ctypes.byref(op))
        assert error is None, error
        attention.work = ctypes.create_string_buffer(lib.skimkv_work(ctypes.byref(op), threads))
        y = ggml.ggml_map_custom3(context, q, k, v, attention.function, threads, None)
    else:
        rows = ggml.ggml_reshape_3d(context, q, D, G, H)
        weights = ggml.ggml_soft_max_ext(context, ggml.ggml_mul_mat(context, k, rows), None, D**-0.5, 0.0)
        y = ggml.ggml_mul_mat(context, ggml.ggml_cont(context, ggml.ggml_transpose(context, v)), weights)
    out = ggml.ggml_mul_mat(context, wo, ggml.ggml_reshape_1d(context, y, H * G * D))
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, out)
    assert ggml.ggml_graph_compute_with_ctx(context, graph, threads) == 0
    got = torch.empty(E)
    ctypes.memmove(got.data_ptr(), ggml.ggml_get_data(out), got.nbytes)
    ggml.ggml_free(context)
    return got


@pytest.fixture
def layer():
    wide = torch.full((D,), 0.3)
    wide[:: D // 8] = 1.5  # few channels carry most of a query, as r wants it
    wq = torch.randn(H * G, D, E) * wide[:, None] / math.sqrt(E)
    k, v = torch.randn(2, H, N, D).half()
    return torch.randn(E), wq.reshape(-1, E), torch.randn(E, H * G * D) / math.sqrt(H * G * D), k, v


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("isa", ISAS)
def test_dense_is_what_ggml_computes_itself(layer, isa, threads):
    attention = Attention(OPERATIONS["dense"].method)
    with on(isa):
        got = computed(*layer, attention, threads)
    assert sorted(attention.calls) == [(i, threads) for i in range(threads)]
    torch.testing.assert_close(got, computed(*layer), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("channels", ["none", "copy"])
@pytest.mark.parametrize("threads", [1, 2])
def test_sparq_is_the_reference(layer, channels, threads):
    x, wq, wo, k, v = layer
    store = Full(Shape(1, H, G, D), torch.float16, "cpu", channels=channels)
    with ops.backend("ref"):
        store.append(k[None], v[None])
    q = (wq @ x).reshape(1, H, G, D)
    want = wo @ steps.sparq(store, q, D**-0.5, None, 16, 64, 8, "coverage", False, reference=True).reshape(-1)
    index = k.transpose(1, 2).contiguous() if channels == "copy" else None
    attention = Attention(OPERATIONS["sparq"].method, index, r=16, k=64, local=8)
    got = computed(x, wq, wo, k, v, attention, threads)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)
    assert (got - computed(*layer)).abs().max() > 4e-3  # and not dense attention's
