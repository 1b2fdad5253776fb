"""Steps for the examples that are worked by hand: one decode step, SparQ's algorithm 1 in numpy, and which positions
a method attends to."""

from __future__ import annotations

import math

import numpy as np
import torch

from skimkv.stores.base import Shape


def step(method, q, k, v, pad=None, scale=None, softcap=None, sinks=None):
    """Append all tokens but the last, decode the last. q (B,H,G,D), k and v (B,H,N,D) -> y and the store."""
    B, H, G, D = q.shape
    store = method.store(Shape(B, H, G, D), k.dtype)
    store.append(k[:, :, :-1], v[:, :, :-1], pad)
    scale = D**-0.5 if scale is None else scale
    return method.decode(store, q, k[:, :, -1], v[:, :, -1], scale=scale, softcap=softcap, sinks=sinks), store


def output(method, q, k, v, pad=None, scale=1.0, softcap=None, sinks=None):
    """What `step` gives, without the store."""
    return step(method, q, k, v, pad, scale, softcap, sinks)[0]


def softmax(x):
    """The weights of x (n,)."""
    e = np.exp(x - x.max())
    return e / e.sum()


def algorithm1(q, K, V, r, k, local, K1):
    """One KV head in float64: q (G,D), K and V (N,D), the last position current; step 1 reads K1, at 1 / sqrt(D)."""
    (G, D), N = q.shape, len(K)
    i1 = sorted(range(D), key=lambda d: -sum(abs(q[g, d]) for g in range(G)))[:r]
    s_hat = np.zeros((G, N))
    for g in range(G):
        coverage = sum(abs(q[g, d]) for d in i1) / sum(abs(q[g]))
        tau = math.sqrt(D * coverage)
        s_hat[g] = softmax(np.array([sum(q[g, d] * K1[n, d] for d in i1) / tau for n in range(N)]))
    recent = [n for n in range(N - 1) if n >= N - 1 - local]
    others = sorted(set(range(N - 1)) - set(recent), key=lambda n: -s_hat[:, n].sum())
    i2 = [*(recent + others)[:k], N - 1]
    y = np.zeros((G, D))
    for g in range(G):
        left_out = np.delete(s_hat[g], i2).sum()
        y[g] = (1 - left_out) * softmax(K[i2] @ q[g] / math.sqrt(D)) @ V[i2] + left_out * V.mean(0)
    return y


def given_weights(rows):
    """q, k, v of one head whose query i gives the weights rows[i], in proportion, to the positions it attends to.

    rows[i] has i + 1 positive numbers. k = v = I, q = ln(rows): (1,1,1,n,n) and (1,1,n,n) twice, for scale 1.
    """
    n = len(rows)
    q = torch.zeros(n, n)
    for i, row in enumerate(rows):
        q[i, : i + 1] = torch.tensor([float(x) for x in row]).log()
    return q[None, None, None], torch.eye(n)[None, None], torch.eye(n)[None, None]


D = 32  # room for 32 positions


def probe(tokens):
    """k and v (1,1,n,D) of these positions."""
    return torch.zeros(1, 1, len(tokens), D), torch.eye(D)[None, None, list(tokens)]


def attended(y):
    """Positions of a row with equal weights: y (D,)."""
    found = y.nonzero()[:, 0]
    torch.testing.assert_close(y[found], torch.full((len(found),), 1 / len(found)))
    return found.tolist()


def run(method, blocks, steps):
    """Prompt blocks, then `steps` single tokens: the store and what each step attended to."""
    store, p, seen = method.store(Shape(1, 1, 1, D), torch.float32), 0, []
    for n in blocks:
        k, v = probe(range(p, p + n))
        y = method.prefill(store, k[:, :, None], k, v, scale=1.0)
        seen += [attended(row) for row in y[0, 0, 0]]
        p += n
    for now in range(p, p + steps):
        k, v = probe([now])
        seen.append(attended(method.decode(store, k, k[:, :, 0], v[:, :, 0], scale=1.0)[0, 0, 0]))
    return store, seen
