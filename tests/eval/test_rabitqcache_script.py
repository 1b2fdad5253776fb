"""benchmarks/rabitqcache.py: RaBitQCache, as the code of its authors chooses tokens."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from benchmarks import divergence
from benchmarks.rabitqcache import INTERVAL, RaBitQCache
from skimkv.methods import METHODS, Dense
from skimkv.stores.base import Shape
from skimkv.stores.signs import flips
from skimkv.testing import Sequences, decode, prompt
from support.hand_worked import softmax


def loops(q, k, v, centres, coded, p):
    """One KV head in float64: q (G,D), k and v (N,D), mean query (G,D) and key (D,) -> y (G,D) and the rows read."""
    (G, D), N = q.shape, len(k)
    hadamard = np.array([[1.0]])
    while len(hadamard) < D:
        hadamard = np.kron(hadamard, np.array([[1, 1], [1, -1]]) / 2**0.5)
    turn = hadamard * flips(D).numpy()  # a column for each channel
    rows = {*range(INTERVAL), *range(INTERVAL + coded, N)}
    for g in range(G):
        logits = []
        for i in range(INTERVAL, INTERVAL + coded):
            o = turn @ (k[i] - centres[1])
            norm = np.linalg.norm(o)
            o_bar = np.sign(o) / D**0.5
            unit = turn @ (q[g] - centres[0][g]) @ o_bar / (o_bar @ o / norm)
            logits.append(norm * unit + q[g] @ centres[1] + centres[0][g] @ k[i] - centres[0][g] @ centres[1])
        weights, held = softmax(np.array(logits)), 0.0
        for i in np.argsort(-weights):
            rows.add(INTERVAL + int(i))
            held += weights[i]
            if held >= p:
                break
    index = sorted(rows)
    return np.stack([softmax(k[index] @ q[g]) @ v[index] for g in range(G)]), index


@pytest.mark.parametrize("p", [0.3, 0.8])
def test_agrees_with_plain_loops(p):
    """The prompt's tokens are coded but for the first 128, and later ones when there are 128 of them."""
    H, G, D, n = 2, 3, 8, 300
    x = Sequences.random(Shape(1, H, G, D), n + INTERVAL + 2)
    method = RaBitQCache(p)
    store = method.store(x.shape, torch.float32)
    method.prefill(store, x.q[..., :n, :], x.k[:, :, :n], x.v[:, :, :n], scale=1.0)
    for i in range(n, x.k.shape[2]):
        y = method.decode(store, x.q[..., i, :], x.k[:, :, i], x.v[:, :, i], scale=1.0)
        coded = n - INTERVAL if i < n + INTERVAL - 1 else n
        assert store.coded == coded
        if i not in (n, n + INTERVAL - 2, n + INTERVAL - 1, n + INTERVAL + 1):
            continue
        read = 0
        for h in range(H):
            q, k, v = (t.double().numpy() for t in (x.q[0, h], x.k[0, h, : i + 1], x.v[0, h, : i + 1]))
            expected, rows = loops(q[:, i], k, v, (q[:, :n].mean(1), k[:n].mean(0)), coded, p)
            torch.testing.assert_close(y[0, h].double(), torch.from_numpy(expected), atol=1e-5, rtol=0)
            read += len(rows) - 1
        assert store.observed() == {"key_rows": read, "value_rows": read, "coded": coded}


def test_a_share_of_one_is_dense_attention():
    x = Sequences.random(Shape(2, 2, 2, 16), 290)
    everything, dense = (prompt(m, x.tokens(0, 280)) for m in (RaBitQCache(1), Dense()))
    tokens = x.tokens(280, 290)
    torch.testing.assert_close(decode(RaBitQCache(1), everything, tokens), decode(Dense(), dense, tokens))


def test_bytes_are_those_that_are_counted():
    x, method = Sequences.random(Shape(1, 2, 3, 24), 402, torch.float16), RaBitQCache(0.5)
    store = prompt(method, x.tokens(0, 400))
    for i in (400, 401):
        before = store.bytes
        decode(method, store, x.tokens(i, i + 1))
        assert store.bytes - before == method.traffic(i, x.shape, torch.float16, **store.observed()).bytes
    assert store.observed()["coded"] == 400 - INTERVAL and store.observed()["key_rows"] < 600


def test_other_rows_and_bad_input():
    x, method = Sequences.random(Shape(2, 1, 2, 8), 203), RaBitQCache(0.6)
    store = prompt(method, x.tokens(0, 200))
    twin = store.share([1, 0])
    expected = decode(method, store, x.tokens(200, 203))
    assert torch.equal(decode(method, twin, x.rows([1, 0]).tokens(200, 203)), expected[:, [1, 0]])
    with pytest.raises(ValueError, match="no second block"):
        prompt(method, x.tokens(0, 9), pad=[1, 0])
    with pytest.raises(ValueError, match="p = 0 must be a share"):
        RaBitQCache(0)


def test_a_small_run(tmp_path, monkeypatch):
    """divergence.py takes it as it takes the methods of the package: a larger share reads more and diverges less."""
    monkeypatch.setitem(METHODS, "RaBitQCache", RaBitQCache)
    rng, text, out = random.Random(0), tmp_path / "words.txt", tmp_path / "out"
    text.write_text(" ".join(rng.choice(["river", "mill", "stone", "of", "a", "king"]) for _ in range(2500)))
    argv = [str(text), "--out", str(out), "--context", "300", "--reference", "3", "--documents", "2", "--batch", "2",
            "--dtype", "float32", "--method", "RaBitQCache(p=[0.2, 0.95])", "--baseline", "RaBitQCache"]  # fmt: skip
    assert divergence.main(argv) == 0
    cheap, dear = json.loads((out / "divergence.json").read_text())["curves"]["RaBitQCache"]
    assert cheap["share"] < dear["share"] < 1.2 and cheap["kl_mean"] > dear["kl_mean"]
