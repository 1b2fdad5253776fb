"""One decode step of each kind as a function of its numbers, by the backend in use, or by its algorithm in PyTorch.

A store that was made by hand is decoded by the method that it belongs to. token None: it was appended before.
"""

from __future__ import annotations

from skimkv import ops
from skimkv.methods import LMInfinite, LowRank, SparQ, TopK
from skimkv.methods.dense import Dense
from skimkv.methods.h2o import H2O, attend_score_evict
from skimkv.ops import KernelStep, Token
from skimkv.ops.cpu.run import CpuBackend


def _token(token):
    return None if token is None else Token(*token)


def _attend(method, store, q, token, scale, softcap, reference=False):
    if reference:
        return method.step(store, q, _token(token), scale=scale, softcap=softcap)
    return method.attend(store, q, _token(token), scale=scale, softcap=softcap)


def by_kernel(method, store, q, token=None, **softmax):
    """A method's step by the C++ backend, of a store or of blocks."""
    return CpuBackend().run(method.kernel(store), store, q, _token(token), softmax)


def append(store, k, v):
    backend = ops.backend_for(store.device)
    if backend is None:
        store.append_token(k, v)
    else:
        backend.append(store, k, v)


def dense(store, q, scale, softcap, token=None, reference=False):
    return _attend(Dense(), store, q, token, scale, softcap, reference)


def sparq(store, q, scale, softcap, r, k, local, temperature, mean, token=None, reference=False):
    method = SparQ(1, 1, 0, mean)
    for name, value in (("r", r), ("k", k), ("local", local), ("temperature", temperature)):
        object.__setattr__(method, name, value)  # unchecked: the kernels must refuse a bad number themselves
    return _attend(method, store, q, token, scale, softcap, reference)


def topk(store, q, scale, softcap, k, oracle, token=None, reference=False):
    return _attend(TopK(k, oracle), store, q, token, scale, softcap, reference)


def lowrank(store, q, scale, softcap, k, token=None, reference=False):
    return _attend(LowRank(1, k), store, q, token, scale, softcap, reference)


def slots(store, q, k, v, scale, softcap, recent=None, reference=False):
    if store.score is None:
        return _attend(LMInfinite(99), store, q, (k, v), scale, softcap, reference)
    backend = None if reference else ops.backend_for(store.device)
    if backend is None:
        form, token = H2O(1), Token(k, v)
        return attend_score_evict(store, q, token, recent, form._rank, form._protected, scale=scale, softcap=softcap)
    kernel = KernelStep("scored_slots", recent=tuple(recent))
    return backend.run(kernel, store, q, Token(k, v), {"scale": scale, "softcap": softcap})
