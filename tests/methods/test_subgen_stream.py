"""SubGenStream against algorithm 1: lemma 1, lemma 2, theorem 1, and exp() in range."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skimkv.methods import SubGenStream
from skimkv.methods.subgen import founding_keys
from skimkv.stores.base import Shape
from support import steps

pytestmark = pytest.mark.usefixtures("backend")


def stored(k, v, delta, t, s, seed=0, blocks=None):
    """k, v (B,H,n,D) through the store, in one block or several; blocks=1 goes through the backend, as in decoding."""
    B, H, n, D = k.shape
    store = SubGenStream(delta, t, s, seed).store(Shape(B, H, 1, D), k.dtype)
    for part in zip(k.split(blocks or n, 2), v.split(blocks or n, 2), strict=True):
        if blocks == 1:
            steps.append(store, *(x[:, :, 0] for x in part))
        else:
            store.append(*part)
    return store


def clusters(store, b, h):
    """D of algorithm 1: [(x_i, S_i (t,D), n_i)]."""
    rep, samples, size = (torch.cat([getattr(x, name) for x in store.blocks], 2) for name in ("rep", "samples", "size"))
    m = int(store.m[b, h])
    assert (size[b, h, m:] == 0).all()
    return [(rep[b, h, i], samples[b, h, i], int(size[b, h, i])) for i in range(m)]


def p_value(counts, expected):
    """Pearson's chi-square: the probability of at least this much scatter."""
    counts, expected = counts.double().flatten(), expected.double().flatten()
    assert (expected >= 20).all()
    x = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), x / 2).item()


def numbered(n, H=1, D=2):
    """Keys that tell their position in channel 0."""
    k = torch.zeros(1, H, n, D)
    k[..., 0] = torch.arange(n)
    return k


@pytest.mark.parametrize("blocks", [None, 1, 3])
@pytest.mark.parametrize("seed", [0, 1, 77])
def test_reservoir_samples_by_squared_norm_of_values(seed, blocks):
    """Lemma 1: Pr[M(j) = (k_i, v_i)] = |v_i|^2 / sum |v|^2; here 1 2 3 4 0 10 of 20; and k_i travels with v_i."""
    weight, s = torch.tensor([1.0, 2, 3, 4, 0, 10]), 20000
    k = numbered(6)
    v = torch.stack([weight.sqrt() * 0.6, weight.sqrt() * 0.8], -1)[None, None]
    store = stored(k, v, 0.0, 1, s, seed, blocks)
    assert store.mu.item() == pytest.approx(20.0, rel=1e-6)
    index = store.k[0, 0, :, 0].long()
    assert torch.equal(store.v[0, 0], v[0, 0, index])
    counts = index.bincount(minlength=6)
    assert counts[4] == 0
    kept = weight > 0
    assert p_value(counts[kept], (weight / 20 * s)[kept]) > 1e-3


@pytest.mark.parametrize("seed", [0, 1, 77])
def test_cluster_samples_are_uniform(seed):
    """Lemma 2 (5): two clusters, of the even and the odd tokens of 13; every entry of S_i is uniform in C_i."""
    k, t = numbered(13), 20000
    k[..., 1] = 1000.0 * (torch.arange(13) % 2)
    even, odd = clusters(stored(k, k, 50.0, t, 1, seed), 0, 0)
    for (_, samples, n), members in ((even, range(0, 13, 2)), (odd, range(1, 13, 2))):
        counts = samples[:, 0].long().bincount(minlength=13)
        assert counts.sum() == t and counts[list(members)].sum() == t and n == len(members)
        assert p_value(counts[list(members)], torch.full((n,), t / n)) > 1e-3


def test_samples_are_independent():
    """Between slots, heads, seeds and the two structures: joint counts of pairs factor into uniform cells."""
    H, n, slots = 6000, 4, 3
    k, v = numbered(n, H), torch.ones(1, H, n, 2)
    stores = [stored(k, v, 100.0, slots, slots, seed) for seed in (0, 1)]
    M = [x.k[0, :, :, 0].long() for x in stores]  # (H,slots)
    S = [x.blocks[0].samples[0, :, 0, :, 0].long() for x in stores]
    pairs = {
        "slots of M": (M[0][:, 0], M[0][:, 1]),
        "distant slots of M": (M[0][:, 0], M[0][:, 2]),
        "slots of S": (S[0][:, 0], S[0][:, 1]),
        "heads": (M[0][:-1, 0], M[0][1:, 0]),
        "head and slot": (M[0][:-1, 1], M[0][1:, 0]),
        "seeds": (M[0][:, 0], M[1][:, 0]),
        "seed and head": (S[0][1:, 0], S[1][:-1, 0]),
        "M and S": (M[0][:, 0], S[0][:, 0]),
    }
    for name, (a, b) in pairs.items():
        counts = (a * n + b).bincount(minlength=n * n)
        assert p_value(counts, torch.full((n * n,), len(a) / n**2)) > 1e-4, name


POINTS = st.tuples(st.integers(-3, 3), st.integers(-3, 3))
SHUFFLED = st.integers(0, 10**9).map(lambda n: torch.randint(-3, 4, (30, 2), generator=torch.manual_seed(n)).tolist())
STREAMS = st.lists(POINTS, min_size=1, max_size=9) | SHUFFLED


@settings(max_examples=80)
@example([(0, 0), (3, 0), (2, 0)], 2.0, 1, None)  # near both: the nearest takes it
@given(STREAMS, st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.7, 100.0]), st.integers(1, 4), st.sampled_from([None, 1]))
def test_lemma_2(points, delta, t, blocks):
    """Invariants 1 to 5, for the partition of algorithm 1 played by hand: the nearest representative within delta."""
    k = torch.tensor(points, dtype=torch.float32)[None, None]
    found = clusters(stored(k, k, delta, t, 1, blocks=blocks), 0, 0)
    reps, members = [], []
    for p in map(tuple, points):
        distance = [math.dist(p, x) for x in reps]
        if reps and min(distance) <= delta:
            members[distance.index(min(distance))].append(p)
        else:
            reps.append(p)
            members.append([p])
    assert [tuple(x.tolist()) for x, _, _ in found] == reps  # 1: x_i is the first of C_i
    assert [n for _, _, n in found] == [len(c) for c in members]  # 2
    for x, (_, samples, _), c in zip(reps, found, members, strict=True):
        assert all(math.dist(x, p) <= delta for p in c)  # 3
        assert samples.shape == (t, 2) and {tuple(p) for p in samples.tolist()} <= set(c)  # 5, its support
    assert all(math.dist(x, z) > delta for i, x in enumerate(reps) for z in reps[:i])  # 4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("blocks", [1, 7, 256, [300, 1, 99], [255, 145]])
def test_blocks_equal_one_by_one(blocks, dtype):
    """State is a function of the stream and the seed alone, whatever the cut: nothing differs by a bit."""
    k, v = torch.randn(2, 2, 400, 3).to(dtype), torch.randn(2, 2, 400, 3).to(dtype)
    k[:, :, 100:110] = k[:, :, 90:100]
    a, b = stored(k, v, 1.2, 3, 5), stored(k, v, 1.2, 3, 5, blocks=blocks)
    assert torch.equal(a.m, b.m) and torch.equal(a.k, b.k) and torch.equal(a.v, b.v) and torch.equal(a.mu, b.mu)
    for i in range(4):
        for x, y in zip(clusters(a, i // 2, i % 2), clusters(b, i // 2, i % 2), strict=True):
            assert torch.equal(x[0], y[0]) and torch.equal(x[1], y[1]) and x[2] == y[2]


@pytest.mark.parametrize("G", [1, 3])
def test_estimator_by_the_formula(G):
    k, v, q = torch.randn(2, 2, 60, 4), torch.randn(2, 2, 60, 4), torch.randn(2, 2, G, 4)
    method = SubGenStream(1.5, 3, 9)
    store = method.store(Shape(2, 2, G, 4), torch.float32)
    store.append(k[:, :, 1:], v[:, :, 1:])
    y = method.decode(store, q, k[:, :, 0], v[:, :, 0], scale=0.5)
    for b in range(2):
        for h in range(2):
            for g in range(G):
                x = q[b, h, g].double() * 0.5
                z = torch.zeros(4, dtype=torch.float64)
                for key, value in zip(store.k[b, h].double(), store.v[b, h].double(), strict=True):
                    z += store.mu[b, h] / (9 * value @ value) * (x @ key).exp() * value
                tau = sum(n / 3 * (S.double() @ x).exp().sum() for _, S, n in clusters(store, b, h))
                torch.testing.assert_close(y[b, h, g].double(), z / tau, atol=1e-5, rtol=1e-5)


def test_theorem_1():
    """|y - dense| <= eps |softmax|_2 |V|_op in at least 99% of trials, one head each, on (m, delta)-clusterable keys.

    t = 2 e^(2 delta r) log n / eps^2 and s = 16 D / eps^2: z has a mean squared error of D/s |exp|^2 |V|_op^2 or less.
    """
    eps, trials, n, D, m, delta = 0.4, 300, 60, 4, 6, 0.4
    centres = torch.randn(m, D) * 3
    k = (centres[torch.arange(n) % m] + torch.randn(n, D).clamp(-2, 2) * delta / 8)[None, None].expand(1, trials, n, D)
    v = torch.randn(n, D).expand(1, trials, n, D)
    q = torch.nn.functional.normalize(torch.randn(D), dim=0) * 1.5  # r = 1.5
    t, s = (math.ceil(x / eps**2) for x in (2 * math.exp(2 * delta * 1.5) * math.log(n), 16 * D))
    method = SubGenStream(delta, t, s, seed=3)
    store = method.store(Shape(1, trials, 1, D), torch.float32)
    store.append(k[:, :, :-1], v[:, :, :-1])
    y = method.decode(store, q.expand(1, trials, 1, D), k[:, :, -1], v[:, :, -1], scale=1.0)[0, :, 0]
    assert (store.m <= m).all()
    p = (k[0, 0] @ q).softmax(-1)
    bound = eps * p.norm() * torch.linalg.matrix_norm(v[0, 0], 2)
    error = (y - p @ v[0, 0]).norm(dim=1)
    assert (error <= bound).double().mean() >= 0.99 and (error > bound / 8).any()  # and the bound is not idle
    assert (y.mean(0) - p @ v[0, 0]).norm() <= 4 * error.square().mean().sqrt() / trials**0.5  # and no bias


@pytest.mark.parametrize("shift", [-500.0, 0.0, 500.0])
def test_exp_stays_in_range(shift):
    """A constant added to all logits changes no softmax: channel 1 of every key is 1, and q carries the shift."""
    k, v = torch.randn(1, 2, 50, 3), torch.randn(1, 2, 50, 3)
    k[..., 1] = 1
    q = torch.tensor([0.7, 0, -0.4]).expand(1, 2, 1, 3)
    method, y = SubGenStream(0.8, 4, 16), []
    for offset in (0.0, shift):
        store = method.store(Shape(1, 2, 1, 3), torch.float32)
        store.append(k[:, :, 1:], v[:, :, 1:])
        moved = q + torch.tensor([0, offset, 0])
        y.append(method.decode(store, moved, k[:, :, 0], v[:, :, 0], scale=1.0))
    torch.testing.assert_close(y[1], y[0], atol=1e-3, rtol=1e-3)  # eps * 500 in the logits


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 2.0**63), (torch.bfloat16, 2.0**63), (torch.float16, 65504)]
)
def test_an_estimate_without_bound_is_finite(dtype, limit):
    """One cluster whose one sample has a logit 1000 below that of the key in M: z / tau = e^1000 v."""
    k = torch.tensor([[0.0, 0], [10, 0]], dtype=dtype)[None, None]
    v = torch.tensor([[1e-2, 0], [-4, 0]], dtype=dtype)[None, None]
    store = next(
        store
        for store in (stored(k, v, 20.0, 1, 1, seed) for seed in range(100))
        if not store.blocks[0].samples[0, 0, 0].any() and torch.equal(store.k[0, 0], k[0, 0, 1:])
    )
    y = SubGenStream(1.0, 1, 1).attend(store, torch.tensor([[[[100.0, 0]]]], dtype=dtype), None, scale=1.0)
    assert y.flatten().tolist() == [-limit, 0]


@pytest.mark.parametrize("shift", [-500.0, 0.0, 500.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_of_zero(dtype, shift):
    k, zero = torch.ones(1, 1, 9, 2).to(dtype), torch.zeros(1, 1, 9, 2).to(dtype)
    method = SubGenStream(0.5, 2, 3)
    store = method.store(Shape(1, 1, 1, 2), dtype)
    store.append(k[:, :, 1:], zero[:, :, 1:])
    q = torch.tensor([[[[shift / 2, shift / 2]]]]).to(dtype)
    assert torch.equal(method.decode(store, q, k[:, :, 0], zero[:, :, 0], scale=1.0), zero[:, :, :1])
    y = method.decode(store, q, k[:, :, 0], zero[:, :, 0] + 5, scale=1.0)  # a tenth token: M is full of it, 50 = mu
    torch.testing.assert_close(y, zero[:, :, :1] + 0.5)


def test_writes_are_counted_on_acceptance_and_expected_in_closed_form():
    """Keys in three far groups: the counted acceptances over 400 tokens are near their expected number."""
    method, shape, n = SubGenStream(delta=3.0, t=4, s=16), Shape(1, 2, 1, 8), 500
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(1, 2, n, 8, generator=generator) * 0.1
    k[..., 0] += 50.0 * torch.randint(3, (1, 2, n), generator=generator)
    v = torch.nn.functional.normalize(torch.randn(1, 2, n, 8, generator=generator), dim=-1)
    store = method.store(shape, torch.float32)
    store.append(k[:, :, :100], v[:, :, :100])
    expected, counted = 0.0, 0
    for i in range(100, n):
        store.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        counted += store.accepted_rows
        expected += (method.t * int(store.m.sum()) + 2 * method.s * 2) / (i + 1)
    assert int(store.m.sum()) == 6 and counted > 0
    assert abs(counted - expected) <= 5 * expected**0.5, (counted, expected)
    worst = method.traffic(n, shape, torch.float32, clusters=6, accepted_rows=2 * (method.t + 2 * method.s))
    usual = method.traffic(n, shape, torch.float32, clusters=6)
    assert usual.bytes < worst.bytes


def test_keys_that_are_not_finite_found_clusters_of_their_own():
    near = torch.eye(5, dtype=torch.bool)
    near[2, 2] = False  # a NaN key is not even near itself
    near[3, 4] = near[4, 3] = True
    assert founding_keys(near).tolist() == [True, True, True, True, False]
