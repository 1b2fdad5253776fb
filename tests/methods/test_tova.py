"""TOVA: drop the token with the least weight of the last query, averaged over the heads of a layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from skimkv.methods import TOVA
from skimkv.stores.base import Shape
from support.hand_worked import given_weights, softmax

pytestmark = pytest.mark.usefixtures("backend")


def test_by_hand():
    q, k, v = given_weights(
        [
            [1],
            [0.5, 0.5],
            [0.2, 0.4, 0.4],
            [0.4, 0.1, 0.3, 0.2],
            [0.1, 0.9, 0.4, 0.2, 0.3],
            [9, 9, 0.3, 0.4, 0.25, 0.05],
        ]
    )
    method, store = TOVA(k=3), TOVA(k=3).store(Shape(1, 1, 1, 6), torch.float32)
    method.prefill(store, q[..., :4, :], k[:, :, :4], v[:, :, :4], scale=1.0)
    assert held(store) == [0, 2, 3]  # .4 .3 .2 of the last query; 1 had most of the one before
    y = method.decode(store, q[..., 4, :], k[:, :, 4], v[:, :, 4], scale=1.0)
    torch.testing.assert_close(y[0, 0, 0], torch.tensor([0.1, 0, 0.4, 0.2, 0.3, 0]))
    assert held(store) == [2, 3, 4]
    y = method.decode(store, q[..., 5, :], k[:, :, 5], v[:, :, 5], scale=1.0)
    torch.testing.assert_close(y[0, 0, 0], torch.tensor([0, 0, 0.3, 0.4, 0.25, 0.05]))
    assert held(store) == [2, 3, 4]  # the current token has the least weight, and is the one that goes
    assert store.lengths == [6]


def test_the_heads_of_a_layer_keep_the_same_tokens():
    """Averages .35 .3 .35: token 1 goes in both KV heads, though the second would keep it."""
    q, k, v = (
        torch.cat(pair, 1)
        for pair in zip(
            given_weights([[1], [0.5, 0.5], [0.6, 0.1, 0.3]]),
            given_weights([[1], [0.5, 0.5], [0.1, 0.5, 0.4]]),
            strict=True,
        )
    )
    method = TOVA(k=2)
    store = method.store(Shape(1, 2, 1, 3), torch.float32)
    method.prefill(store, q, k, v, scale=1.0)
    assert held(store, 0) == held(store, 1) == [0, 2]


def held(store, h=0):
    """The positions that a head of the first row holds; values are unit vectors."""
    return sorted(store.v[0, h, : store.filled[0]].argmax(-1).tolist())


class Plain:
    """One row of a layer, with its tokens in a list. q (H,G,D), keys and values (H,n,D) in float64."""

    def __init__(self, k, scale, keys, values, softcap):
        self.k, self.scale, self.keys, self.values, self.softcap, self.kept = k, scale, keys, values, softcap, []

    def weights(self, q, tokens):
        logits = np.einsum("hgd,hnd->hgn", q, self.keys[:, tokens]) * self.scale
        logits = logits if self.softcap is None else self.softcap * np.tanh(logits / self.softcap)
        return np.apply_along_axis(softmax, -1, logits)

    def block(self, last_query, tokens):
        tokens = [*self.kept, *tokens]
        w = self.weights(last_query, tokens).mean((0, 1))
        self.kept = sorted(sorted(tokens, key=lambda t: -w[tokens.index(t)])[: self.k])

    def step(self, q, now):
        tokens = [*self.kept, now]
        w = self.weights(q, tokens)
        if len(tokens) > self.k:
            tokens.pop(int(w.mean((0, 1)).argmin()))
        y = np.einsum("hgn,hnd->hgd", w, self.values[:, [*self.kept, now]])
        self.kept = tokens
        return y


@pytest.mark.parametrize(("method", "budgets"), [(TOVA(7), [7, 7, 7]), (TOVA(0.25), [10, 6, 1]), (TOVA(43), [43] * 3)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_agrees_with_plain_loops_on_ragged_rows_and_blocks(method, budgets, softcap):
    B, H, G, D, prompt, steps, scale, pad = 3, 2, 2, 8, 40, 12, 0.5, [0, 16, 37]
    q, k, v = torch.randn(B, H, G, prompt + steps, D), *torch.randn(2, B, H, prompt + steps, D)
    store, blocks = method.store(Shape(B, H, G, D), torch.float32), [(0, prompt)]
    if isinstance(method.k, int):  # a share grows from block to block
        blocks = [(0, 25), (25, prompt)]
    for a, b in blocks:
        pads = [min(max(p - a, 0), b - a) for p in pad]
        method.prefill(store, q[..., a:b, :], k[:, :, a:b], v[:, :, a:b], scale=scale, pad=pads, softcap=softcap)
    y = [
        method.decode(store, q[..., i, :], k[:, :, i], v[:, :, i], scale=scale, softcap=softcap)
        for i in range(prompt, prompt + steps)
    ]
    for row in range(B):
        Q, K, V = (x[row].double().numpy() for x in (q, k, v))
        plain = Plain(budgets[row], scale, K, V, softcap)
        for a, b in blocks:
            if max(a, pad[row]) < b:
                plain.block(Q[:, :, b - 1], range(max(a, pad[row]), b))
        for i, out in enumerate(y):
            expected = torch.from_numpy(plain.step(Q[:, :, prompt + i], prompt + i))
            torch.testing.assert_close(out[row].double(), expected, atol=1e-5, rtol=0)
