"""The layers of a model keep their threads together: with the same result, whenever these come, and however many."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from skimkv import ops
from skimkv.methods import Dense
from skimkv.ops.cpu import layers as native_layers
from skimkv.ops.cpu import linear
from skimkv.ops.cpu.run import CpuBackend
from skimkv.stores.base import Shape
from support.kernels import NATIVE, on
from support.pools import Crowd, Pool, in_a_new_thread

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")

SIZE, INNER, D, THREADS = 256, 576, 32, 4  # large enough that each product is worth several threads


@cache
def layers():
    """Two layers, and a token of two rows with its angles."""
    torch.manual_seed(5)
    x = torch.randn(2, 1, SIZE).bfloat16()
    norm = ops.Norm(torch.rand(SIZE).bfloat16(), 1e-5)
    sizes = [(SIZE, SIZE)] * 4 + [(INNER, SIZE)] * 2 + [(SIZE, INNER)]

    def layer():
        weights = [torch.randn(size).bfloat16() / size[1] ** 0.5 for size in sizes]
        return ops.Layer(
            *(linear.matrix(x.new_empty(2, 1, w.shape[1]), w, "floats", len(w)) for w in weights), norm, norm, D
        )

    return [layer(), layer()], norm, x, torch.randn(1, 2, 1, D).bfloat16()


def tokens(pool, monkeypatch, threads, count=20):
    """What the layers make of the same token, after 100 and more others, again and again."""
    monkeypatch.setattr(native_layers.library, "thread_pool", lambda: pool.address if pool else None)
    parts, norm, x, angles = layers()
    every, method, draw = ops.Layers(parts, norm), Dense(), torch.Generator().manual_seed(2)
    stores = [method.store(Shape(2, SIZE // D, 1, D), torch.bfloat16) for _ in parts]
    with on(None, threads), torch.no_grad():
        for store in stores:
            store.append(*torch.randn(2, 2, SIZE // D, 100, D, generator=draw).bfloat16())
            q, k, v = torch.randn(3, 2, SIZE // D, D, generator=draw).bfloat16()
            method.decode(store, q[:, :, None], k, v, scale=0.2)
        results = []
        for _ in range(count):
            steps = [CpuBackend().prepare(method.kernel(s), s, s.dtype, 0.2, None) for s in stores]
            results.append(every(x, angles, angles, steps))
    return results


@pytest.mark.parametrize(("takes_part", "more"), [(1, 0), (1, 2), (0, 0)])
def test_threads_may_come_late_and_in_any_number(takes_part, more, monkeypatch):
    want = tokens(None, monkeypatch, 1)
    pool = Crowd(takes_part, more)
    got = in_a_new_thread(lambda: tokens(pool, monkeypatch, THREADS))
    assert all(map(torch.equal, got, want)) and len(want) == len(got) == 20
    assert pool.asked[0] == THREADS


def test_the_layers_ask_once_for_their_threads(monkeypatch):
    pool = Pool()
    got = in_a_new_thread(lambda: tokens(pool, monkeypatch, THREADS, 1))
    alone = len(pool.asked)
    both = in_a_new_thread(lambda: tokens(pool, monkeypatch, THREADS, 2))
    assert torch.equal(got[0], both[0]) and len(pool.asked) - alone == alone + 1


def test_the_next_token_uses_fewer_threads_while_one_is_late(monkeypatch):
    pool = Pool()
    pool.late = 0.01
    got = in_a_new_thread(lambda: tokens(pool, monkeypatch, THREADS))
    assert all(map(torch.equal, got, tokens(None, monkeypatch, 1)))
    assert len(pool.asked) < len(got) and pool.asked[0] == THREADS > min(pool.asked)
