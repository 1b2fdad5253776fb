"""H2O against a plain quadratic re-computation of algorithm 1 in float64, by hand, and what its prompt allocates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skimkv import ops
from skimkv.methods import H2O
from skimkv.methods.sparse_transformer import fixed, strided
from skimkv.stores.base import Shape
from skimkv.testing import Sequences, decode, prompt

pytestmark = pytest.mark.usefixtures("backend")


class Quadratic:
    """One KV head: every score of every query, kept as dictionaries by position. q (G,n,D), k and v (n,D) float64."""

    def __init__(self, k, v, budget, local, scale, softcap=None, sinks=None, mean=False):
        self.k, self.v, self.budget, self.local, self.scale, self.softcap = k, v, budget, local, scale, softcap
        self.sinks = np.full(1, -np.inf) if sinks is None else sinks
        self.score: dict[int, float] = {}
        self.mean = mean

    def weights(self, q, positions):
        """softmax over the positions, (G,m)."""
        logits = q @ self.k[positions].T * self.scale
        logits = logits if self.softcap is None else self.softcap * np.tanh(logits / self.softcap)
        return np.exp(logits) / (np.exp(logits).sum(1) + np.exp(self.sinks))[:, None]

    def evict(self, now):
        """Down to the budget: the lowest score outside the `local` most recent of 0 .. now."""
        while len(self.score) > self.budget:
            old = [p for p in self.score if p <= now - self.local]
            del self.score[min(old, key=lambda p: self.score[p] / (now + 1 - p if self.mean else 1))]

    def block(self, q, start, stop):
        """Add up the causal attention matrix over what is held and the block, mean over the group; then evict."""
        positions = [*self.score, *range(start, stop)]
        m, n = len(self.score), stop - start
        A = np.zeros((len(q), n, m + n))
        for i in range(n):
            A[:, i, : m + i + 1] = self.weights(q[:, start + i], positions[: m + i + 1])
        for p, x in zip(positions, A.sum(1).mean(0), strict=True):
            self.score[p] = self.score.get(p, 0.0) + x
        self.evict(stop - 1)
        return A @ self.v[positions]

    def step(self, q, now):
        positions = [*self.score, now]
        w = self.weights(q, positions)
        self.score[now] = 0.0
        for p, x in zip(positions, w.mean(0), strict=True):
            self.score[p] += x
        self.evict(now)
        return w @ self.v[positions]


def held(store, b, h):
    """{position: score} of one head."""
    c = store.filled[b]
    return dict(zip(store.pos[b, h, :c].tolist(), store.score[b, h, :c].tolist(), strict=True))


@pytest.mark.parametrize(("softcap", "sinks"), [(None, None), (1.5, None), (None, 2.0)])
@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize(
    ("method", "budgets", "locals_"),
    [
        (H2O(k=12), [12, 12, 12], [3, 3, 3]),  # local = k//4
        (H2O(k=9, local=9), [9, 9, 9], [9, 9, 9]),  # nothing but recent
        (H2O(k=10, local=0), [10, 10, 10], [0, 0, 0]),  # nothing but heavy
        (H2O(k=3), [3, 3, 3], [0, 0, 0]),
        (H2O(k=0.25), [10, 6, 1], [5, 3, 1]),  # of prompts of 40, 24, 4: half heavy and half recent
        (H2O(k=0.5, local=0.125), [20, 12, 2], [5, 3, 1]),
        (H2O(k=12, score="mean"), [12, 12, 12], [3, 3, 3]),
        (H2O(k=10, local=0, score="mean"), [10, 10, 10], [0, 0, 0]),
        (H2O(k=45), [45, 45, 45], [11, 11, 11]),  # longer than the prompt: fills up, then evicts
    ],
    ids=repr,
)
def test_agrees_with_quadratic_recomputation(method, budgets, locals_, G, softcap, sinks):
    B, H, D, prompt, steps, scale = 3, 2, 8, 40, 20, 8**-0.5
    N, pad = prompt + steps, [0, 16, 36]
    q, k, v = torch.randn(B, H, G, N, D) * 2, torch.randn(B, H, N, D), torch.randn(B, H, N, D)
    options = {"scale": scale, "softcap": softcap}
    if sinks is not None:  # the size of the sinks
        options["sinks"] = sinks * torch.randn(H, G)
    store = method.store(Shape(B, H, G, D), torch.float32)
    first = (q[..., :prompt, :], k[:, :, :prompt], v[:, :, :prompt])
    y = [method.prefill(store, *first, pad=pad, **options)]
    for i in range(prompt, N):
        y.append(method.decode(store, q[..., i, :], k[:, :, i], v[:, :, i], **options)[..., None, :])
    outputs = torch.cat(y, 3).double()
    for b in range(B):
        for h in range(H):
            Q, K, V = (x[b, h, ..., pad[b] :, :].double().numpy() for x in (q, k, v))
            own = None if sinks is None else options["sinks"][h].double().numpy()
            plain = Quadratic(K, V, budgets[b], locals_[b], scale, softcap, own, method.score == "mean")
            n = prompt - pad[b]
            expected = [plain.block(Q, 0, n)]
            expected += [plain.step(Q[:, i], i)[:, None] for i in range(n, n + steps)]
            got = outputs[b, h, :, pad[b] :]
            torch.testing.assert_close(got, torch.from_numpy(np.concatenate(expected, 1)), atol=2e-5, rtol=0)
            kept = held(store, b, h)
            assert sorted(kept) == sorted(plain.score)
            np.testing.assert_allclose([kept[p] for p in plain.score], list(plain.score.values()), atol=1e-4)


def test_a_prompt_in_blocks():
    """A later block sees what was kept and itself, and adds to the scores that are held; a fraction is of all seen."""
    N, D, sizes = 70, 8, [30, 1, 25]
    q, k, v = torch.randn(1, 2, 2, N, D) * 2, torch.randn(1, 2, N, D), torch.randn(1, 2, N, D)
    for method, budgets in ((H2O(k=12), [12, 12, 12]), (H2O(k=0.25), [8, 8, 14])):
        store = method.store(Shape(1, 2, 2, D), torch.float32)
        plain = [Quadratic(k[0, h].double().numpy(), v[0, h].double().numpy(), 0, 0, 0.35) for h in range(2)]
        at = 0
        for n, budget in zip(sizes, budgets, strict=True):
            part = slice(at, at + n)
            y = method.prefill(store, q[..., part, :], k[:, :, part], v[:, :, part], scale=0.35)
            for h in range(2):
                plain[h].budget, plain[h].local = budget, budget // (4 if method.k == 12 else 2)
                expected = torch.from_numpy(plain[h].block(q[0, h].double().numpy(), at, at + n))
                torch.testing.assert_close(y[0, h].double(), expected, atol=2e-5, rtol=0)
                assert held(store, 0, h) == pytest.approx(plain[h].score, abs=1e-4)
            at += n
        for i in range(at, N):
            y = method.decode(store, q[..., i, :], k[:, :, i], v[:, :, i], scale=0.35)
            for h in range(2):
                expected = torch.from_numpy(plain[h].step(q[0, h, :, i].double().numpy(), i))
                torch.testing.assert_close(y[0, h].double(), expected, atol=2e-5, rtol=0)


def designed(rows, D=6):
    """q, k, v (1,1,n,D) whose attention rows are given: K = I, q_i = ln of row i, scale 1; V = I."""
    n = len(rows)
    q = torch.full((1, 1, 1, n, D), -torch.inf)
    for i, row in enumerate(rows):
        for p, w in row.items():
            q[0, 0, 0, i, p] = math.log(w)
    return q.clamp_min(-80), torch.eye(D)[None, None, :n], torch.eye(D)[None, None, :n]


FIGURE_3 = [  # budget 3; the attention of each step over what is held
    {0: 1.0},
    {0: 0.5, 1: 0.5},
    {0: 0.5, 1: 0.4, 2: 0.1},  # prompt of three: scores 2, .9, .1
    {0: 0.2, 1: 0.2, 2: 0.2, 3: 0.4},  # fourth step: 2.2, 1.1, .3, .4
]


@pytest.mark.parametrize(
    ("local", "last", "kept"),
    [
        (1, {0: 0.2, 1: 0.2, 2: 0.2, 3: 0.4}, {0: 2.2, 1: 1.1, 3: 0.4}),  # as in figure 3, the third token goes
        (2, {0: 0.2, 1: 0.2, 2: 0.2, 3: 0.4}, {0: 2.2, 2: 0.3, 3: 0.4}),  # 2 is recent: the next lowest, 1, goes
        (3, {0: 0.2, 1: 0.2, 2: 0.2, 3: 0.4}, {1: 1.1, 2: 0.3, 3: 0.4}),  # 0 is all that is not recent
        (0, {0: 0.2, 1: 0.2, 2: 0.2, 3: 0.4}, {0: 2.2, 1: 1.1, 3: 0.4}),
        (0, {0: 0.3, 1: 0.3, 2: 0.3, 3: 0.1}, {0: 2.3, 1: 1.2, 2: 0.4}),  # u is of S + {i}: the new token itself
        (1, {0: 0.3, 1: 0.3, 2: 0.3, 3: 0.1}, {0: 2.3, 1: 1.2, 3: 0.1}),  # unless it is recent
    ],
)
def test_by_hand(local, last, kept):
    method = H2O(k=3, local=local)
    q, k, v = designed([*FIGURE_3[:3], last])
    store = method.store(Shape(1, 1, 1, 6), torch.float32)
    method.prefill(store, q[..., :3, :], k[:, :, :3], v[:, :, :3], scale=1.0)
    assert held(store, 0, 0) == pytest.approx({0: 2.0, 1: 0.9, 2: 0.1}, abs=1e-5)
    y = method.decode(store, q[..., 3, :], k[:, :, 3], v[:, :, 3], scale=1.0)
    torch.testing.assert_close(y[0, 0, 0, :4], torch.tensor([last[p] for p in range(4)]))
    assert held(store, 0, 0) == pytest.approx(kept, abs=1e-5)
    for slot, p in enumerate(store.pos[0, 0].tolist()):  # keys and values went with their positions
        assert torch.equal(store.k[0, 0, slot], k[0, 0, p]) and torch.equal(store.v[0, 0, slot], v[0, 0, p])


FRACTIONS = [(0.2, 40, 8), (0.07, 100, 7), (0.1, 30, 3), (0.29, 100, 29), (1.0, 7, 7)]


@pytest.mark.parametrize(("k", "prompt", "tokens"), FRACTIONS)
def test_a_fraction_of_the_prompt(k, prompt, tokens):
    assert H2O(k=k).budget(prompt) == tokens
    assert H2O(k=k).recent(tokens) == math.ceil(tokens / 2)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.numel = max([self.numel, *(t.untyped_storage().nbytes() // t.element_size() for t in made)])
        return out


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("pad", [None, [64]])
def test_nothing_quadratic_is_allocated_and_the_prompt_is_freed(pad, softcap):
    n, D, method = 1536, 2, H2O(k=64)
    q, k, v = torch.randn(1, 1, 2, n, D), torch.randn(1, 1, n, D), torch.randn(1, 1, n, D)
    store = method.store(Shape(1, 1, 2, D), torch.float32)
    with Largest() as largest:
        method.prefill(store, q, k, v, scale=0.5, pad=pad, softcap=softcap)
    assert largest.numel <= 2 * 512 * n < n * n  # at most 512 queries of a group by all keys
    held_bytes = sum(t.untyped_storage().nbytes() for t in (store.k, store.v, store.score, store.pos))
    assert held_bytes == store.allocated == store.nbytes == 64 * (2 * D * 4 + 8)


def test_of_equal_scores_a_prompt_keeps_the_newer_tokens(monkeypatch):
    monkeypatch.setattr(ops, "key_scores", lambda q, k, scale: torch.ones(k.shape[:2]))
    method, shape = H2O(k=5, local=2), Shape(1, 2, 1, 8)
    store = method.store(shape, torch.float32)
    for start, stop in ((0, 9), (9, 14)):
        n = stop - start
        method.take(store, torch.randn(1, 2, 1, n, 8), *torch.randn(2, 1, 2, n, 8), scale=1.0)
        if start == 0:
            assert store.pos[0].tolist() == [[4, 5, 6, 7, 8]] * 2
            store.score.zero_()
    assert store.pos[0].tolist() == [[9, 10, 11, 12, 13]] * 2


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_half_of_the_budget_is_a_pattern_and_the_others_are_heavy(pattern):
    """Of 20 prompt tokens and each of 40 after it: the pattern's are all there, in every head."""
    method, x = H2O(k=12, pattern=pattern), Sequences.random(Shape(1, 2, 2, 16), 60)
    order = strided(6, 3) if pattern == "strided" else fixed(6, 3, 1)
    store, scores = prompt(method, x.tokens(0, 20)), prompt(H2O(k=60), x.tokens(0, 20))
    for h in range(2):
        others = [p for p in range(20) if p not in order.kept(20)]
        heavy = sorted(others, key=lambda p: -float(scores.score[0, h, p]))[:6]
        assert sorted(store.pos[0, h].tolist()) == sorted([*order.kept(20), *heavy])
    for n in range(20, 60):
        decode(method, store, x.tokens(n, n + 1))
        assert all(set(order.kept(n + 1)) <= set(store.pos[0, h].tolist()) for h in range(2)) and store.filled == [12]


def test_half_of_the_budget_is_what_the_last_query_attended_to_most():
    """Values do not matter; the current key is most like its query, and old keys differ in their scores only."""
    shape = Shape(1, 1, 1, 4)
    k, q = torch.zeros(1, 1, 9, 4), torch.zeros(1, 1, 1, 9, 4)
    k[0, 0, :, 0] = torch.tensor([5.0, 5, 0, 0, 0, 0, 0, 0, 0])
    k[0, 0, :, 1] = torch.tensor([0.0, 0, 9, 8, 0, 0, 0, 0, 0])
    q[0, 0, 0, :7, 0], q[0, 0, 0, 7:, 1] = 1, 1  # the first queries like tokens 0 and 1, the last ones 2 and 3
    method, store = H2O(k=4, pattern="top"), H2O(k=4, pattern="top").store(shape, torch.float32)
    method.prefill(store, q[..., :8, :], k[:, :, :8], k[:, :, :8], scale=1.0)
    assert sorted(store.pos[0, 0].tolist()) == [0, 1, 2, 3]
    method.decode(store, q[..., 8, :], k[:, :, 8], k[:, :, 8], scale=1.0)
    assert {2, 3, 8} < set(store.pos[0, 0].tolist()), "of the heavy ones one goes for the current token"


def test_patterns_have_no_kernel_and_wrong_ones_are_named():
    assert H2O(k=8).has_kernel("cpu") and not H2O(k=8, pattern="top").has_kernel("cpu")
    with pytest.raises(ValueError, match="pattern = 'best' must be one of recent, strided, fixed, top"):
        H2O(k=8, pattern="best")
    with pytest.raises(ValueError, match="local = 0"):
        H2O(k=8, local=0, pattern="strided")
