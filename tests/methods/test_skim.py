"""Skim: a step worked out by hand, the statistics of its samples, and what may not change which rows are drawn."""

from __future__ import annotations

import math

import pytest
import torch

from skimkv import ops
from skimkv.methods import Dense, Skim, SparQ
from skimkv.methods.skim import (
    KEYS,
    LOCAL,
    SINKS,
    VALUES,
    draw,
    estimated_logits,
    key_probability,
    rows_for_error,
    shrink,
    value_probability,
)
from skimkv.ops.hashing import hash_words
from skimkv.stores.base import Shape
from skimkv.stores.quantise import GROUP
from skimkv.testing import Sequences, decode, prompt

STEPS = 4000  # independent draws of one set of rows: what a test averages over


def lengths(*n: int) -> torch.Tensor:
    return torch.tensor(n)[:, None, None]


def mix(h: int) -> int:
    """The finaliser in Python's whole numbers."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
    h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
    return h ^ (h >> 16)


def test_the_hash_is_the_one_of_the_docstring() -> None:
    def word(*parts: int) -> int:
        h = mix(parts[0])
        for part in parts[1:]:
            h = mix((h * 0x9E3779B1 + part) % 2**32)
        return h

    position = torch.arange(50)
    words = hash_words(1, torch.tensor([[300], [70000]]), position)
    assert words.tolist() == [[word(1, n, i) for i in range(50)] for n in (300, 70000)]
    assert words.unique().numel() == 100
    assert hash_words(VALUES, 4096, 7, 4095).item() == word(1, 4096, 7, 4095)


def test_probabilities_of_keys_by_hand() -> None:
    n, k = 40, 2
    score = torch.full((1, 1, 45), 0.01)
    score[0, 0, [10, 12, 14]] = torch.tensor([0.3, 0.2, 0.4])
    score[0, 0, 20] = 0.25
    p = key_probability(score, lengths(n), k)[0, 0]
    certain = {*range(SINKS), *range(n - 1 - LOCAL, n), 10, 14}
    expected = [1.0 if i in certain else 0.02 if i < n else 0.0 for i in range(45)]
    expected[12], expected[20] = 0.4, 0.5
    torch.testing.assert_close(p, torch.tensor(expected))


def test_probabilities_of_values_by_hand() -> None:
    weights = torch.tensor([[[[0.1, 0.6, 0.2, 0.1], [0.05, 0.05, 0.1, 0.8]]]])
    rows = torch.tensor([[[3, 5, 9, 11]]])
    p = value_probability(weights, rows, lengths(13), k=1)
    torch.testing.assert_close(p[0, 0], torch.tensor([0.2, 1.0, 0.4, 1.0]))
    assert value_probability(weights, rows, lengths(12), k=1)[0, 0, 3] == 1, "the current token"
    assert bool((value_probability(weights, rows, lengths(13), k=13) == 1).all()), "a context of k tokens"


def test_inclusion_frequencies_fit_the_probabilities() -> None:
    """Pearson's chi-square over 300 rows of each stream, at a level of about one in a million."""
    probability = torch.linspace(0.01, 0.99, 300).expand(STEPS, 1, -1)
    position = torch.arange(300).expand_as(probability)
    steps = torch.arange(1000, 1000 + STEPS)[:, None, None]
    for stream in (KEYS, VALUES):
        drawn = draw(probability, position, steps, stream)
        p = probability[0, 0].double()
        expected = STEPS * p
        chi = ((drawn.sum((0, 1)) - expected).square() / (expected * (1 - p))).sum()
        assert abs(float(chi) - 300) < 4.9 * math.sqrt(2 * 300)
        together = (drawn[:, 0, :-1] & drawn[:, 0, 1:]).double().mean(0) - p[:-1] * p[1:]
        assert float(together.abs().max()) < 5 * 0.5 / math.sqrt(STEPS), "neighbours are drawn independently"
    both = draw(probability, position, steps, KEYS) & draw(probability, position, steps, VALUES)
    assert abs(float(both.double().mean() - probability.square().mean())) < 0.002, "the streams are independent"


def test_numerator_and_denominator_are_unbiased() -> None:
    """Over many draws sum exp(l) v / (p_key p_value) and sum exp(l) / p_key average to dense attention's sums."""
    x = Sequences.random(Shape(1, 8, 1, 16), 200)
    logits = x.q[..., -1, :] @ x.k.transpose(-1, -2)[0][None] / 4  # (1,H,G,n)
    score = logits.softmax(-1).amax(2)
    p_key = key_probability(score, lengths(200), 6).expand(STEPS, -1, -1)
    steps = torch.arange(500, 500 + STEPS)[:, None, None]
    drawn = draw(p_key, torch.arange(200).expand_as(p_key), steps, KEYS)
    weights = logits.exp() * (drawn / p_key)[:, :, None]  # (STEPS,H,G,n)
    p_value = (6 * (weights / weights.sum(-1, keepdim=True)).amax(2)).clamp(max=1)
    kept = drawn & draw(p_value, torch.arange(200).expand_as(p_key), steps, VALUES)
    numerator = (weights * (kept / p_value.clamp_min(1e-9))[:, :, None]) @ x.v
    for estimate, exact in ((weights.sum(-1), logits.exp().sum(-1)), (numerator, logits.exp() @ x.v)):
        error = (estimate.mean(0) - exact[0]) / (estimate.std(0) / STEPS**0.5)
        assert float(error.abs().max()) < 4.5, "standard errors of the mean"
        assert float(error.square().mean()) < 1.6


def test_it_reads_what_it_says() -> None:
    """At most SINKS + LOCAL + k + G k rows of K are expected, and fewer values than keys."""
    x = Sequences.random(Shape(2, 2, 2, 32), 900)
    method = Skim(k=20)
    store = prompt(method, x.tokens(0, 899))
    assert store.observed() == {}
    decode(method, store, x.tokens(899, 900))
    keys, values = (store.observed()[name] for name in ("key_rows", "value_rows"))
    assert 4 * (SINKS + LOCAL + 20) < keys < 4 * (SINKS + LOCAL + 3 * 20 + 15)
    assert 0 < values < keys
    rows = [store.observed(row) for row in (0, 1)]
    assert sum(row["key_rows"] for row in rows) == keys
    exact, expected = method.traffic(899, x.shape, x.k.dtype, keys, values), method.traffic(899, x.shape, x.k.dtype)
    assert exact.bytes < 1.1 * expected.bytes


def test_estimated_logits_of_keys_that_the_index_holds_exactly() -> None:
    """Keys of 16 even levels a channel have no error in 4 bits, and group means replace the channels left out."""
    shape = Shape(1, 1, 2, 4)
    method, generator = Skim(k=4, r=2), torch.Generator().manual_seed(0)
    k = torch.randint(0, 16, (1, 1, 2 * GROUP + 9, 4), generator=generator).float()
    k[:, :, ::GROUP], k[:, :, 1::GROUP] = 0, 15
    store = method.store(shape, torch.float32)
    store.append(k, k)
    q = torch.tensor([[[[1.0, 0.1, 2.0, 0.2], [1.0, 0.1, 2.0, -0.2]]]])
    means = [k[0, 0, g * GROUP : (g + 1) * GROUP].mean(0) for g in (0, 1)]
    mean = torch.stack([means[min(i // GROUP, 1)] for i in range(k.shape[2])])
    read = k[0, 0].clone()
    read[:, [1, 3]] = mean[:, [1, 3]]
    torch.testing.assert_close(estimated_logits(q, store, 2, 0.5)[0, 0], q[0, 0] @ read.T * 0.5)


def test_channels_are_chosen_by_the_range_of_keys() -> None:
    """A channel in which all keys are equal tells nothing, however large the query is there."""
    shape = Shape(1, 1, 1, 4)
    k = torch.randn(1, 1, GROUP, 4)
    k[..., 0] = 100.0
    store = Skim(k=4, r=1).store(shape, torch.float32)
    store.append(k, k)
    q = torch.tensor([[[[5.0, 0.0, 1.0, 0.0]]]])
    exact = q[0, 0] @ k[0, 0].T
    error = (estimated_logits(q, store, 1, 1.0)[0, 0] - exact).abs().max()
    assert float(error) < 0.3


def test_the_open_group_is_coded_by_the_scale_before_it() -> None:
    """Its channels are read in 4 bits: within half a step where the range is that of the group before."""
    shape = Shape(1, 2, 1, 16)
    k = torch.randn(1, 2, GROUP + 100, 16).clamp(-2, 2)
    k[:, :, 0], k[:, :, 1] = -2, 2
    store = Skim(k=4).store(shape, torch.float32)
    for block in (k[:, :, :GROUP], k[:, :, GROUP : GROUP + 70], k[:, :, GROUP + 70 :]):
        store.append(block, block)
    every = torch.arange(16).expand(1, 2, -1)
    read = store.read_channels(every)
    assert float((read - k.transpose(-1, -2)).abs().max()) <= 0.5 * 4 / 15 + 1e-5
    assert float((read - k.transpose(-1, -2))[..., GROUP:].abs().max()) > 0.1, "not in full precision"
    store.crop(120)  # the first group is open again, and has no scale before it
    torch.testing.assert_close(store.read_channels(every), k[:, :, : GROUP - 20].transpose(-1, -2))


def test_a_replay_draws_the_same_rows_and_another_step_others() -> None:
    probability = torch.full((1, 2, 500), 0.3)
    position = torch.arange(500).expand_as(probability)
    a, b, later = (draw(probability, position, lengths(n), KEYS) for n in (600, 600, 601))
    assert torch.equal(a, b)
    assert not torch.equal(a, later) and not torch.equal(a[:, 0], a[:, 1])


def test_shrink_by_hand() -> None:
    """One certain row and one drawn with probability 1/4: d = 0.5 (4 - 1), s = 0.25 0.75 9; d^2 = 2.25."""
    weights, values = torch.tensor([[[[0.5, 0.5]]]]), torch.tensor([[[[2.0], [4.0]]]])
    y = shrink(weights, values, torch.tensor([[[1.0, 0.25]]]), torch.tensor([[[1.0]]]))
    lost = 0.25 * 0.75 * 9 / 2.25
    assert y.item() == pytest.approx(0.5 * 2 + 0.5 * 4 - lost * 1.5)
    certain = shrink(weights, values, torch.ones(1, 1, 2), torch.tensor([[[1.0]]]))
    assert certain.item() == 3.0, "nothing is drawn at random"


def test_shrink_where_squares_overflow() -> None:
    """What is lost is the mean value's share: all of the random part where its noise is not smaller than itself."""
    weights, values = torch.tensor([[[[0.5, 0.5]]]]), torch.tensor([[[[2e30], [4e30]]]])
    y = shrink(weights, values, torch.tensor([[[1.0, 0.25]]]), torch.tensor([[[1e30]]]))
    assert y.item() == pytest.approx(0.5 * 2e30 + 0.5 * 1e30)
    nothing = shrink(weights, torch.ones(1, 1, 2, 1), torch.tensor([[[1.0, 0.25]]]), torch.ones(1, 1, 1))
    assert nothing.item() == 1.0, "without noise, and without a deviation"


@pytest.mark.parametrize("sink", [5.0, 110.0, 120.0, 1000.0])
def test_a_sink_that_takes_all_of_a_query_makes_no_row_certain(sink: float) -> None:
    """The other query of the group reads what it reads without that one, in the reference and in the kernel."""
    x, read, outputs = Sequences.random(Shape(1, 1, 2, 16), 601), [], []
    sinks = torch.tensor([[sink, 0.0]])
    for name in ("ref", "cpu"):
        with ops.backend(name):
            store = prompt(Skim(k=4), x.tokens(0, 600))
            y = Skim(k=4).decode(store, x.q[..., 600, :], x.k[:, :, 600], x.v[:, :, 600], scale=0.25, sinks=sinks)
        outputs.append(y[:, :, 1])
        read.append(store.observed())
    assert read[0]["value_rows"] < read[0]["key_rows"]
    assert read[0] == read[1]
    torch.testing.assert_close(*outputs, rtol=0.01, atol=1e-3)  # the kernel rounds the weights of the index


def test_shrink_lowers_the_error_of_diffuse_heads() -> None:
    x = Sequences.random(Shape(1, 4, 2, 64), 1000)
    flat = x._replace(q=0.2 * x.q)
    dense = decode(Dense(), prompt(Dense(), flat.tokens(0, 980)), flat.tokens(980, 1000))
    skim = Skim(k=16)
    y = decode(skim, prompt(skim, flat.tokens(0, 980)), flat.tokens(980, 1000))
    top = SparQ(16, 60, mean_value=False, channels="int4")
    best = decode(top, prompt(top, flat.tokens(0, 980)), flat.tokens(980, 1000))
    assert float((y - dense).norm()) < 0.5 * float((best - dense).norm())


def test_each_head_has_a_k_of_its_own() -> None:
    """k larger for one head: its probabilities rise, so that the smaller sample is contained in the larger."""
    score = torch.rand(2, 3, 300, generator=torch.Generator().manual_seed(0)).pow(9)
    score /= score.sum(-1, keepdim=True)
    k = torch.tensor([4, 9, 300]).expand(2, 3)[..., None]
    n = lengths(300, 280)
    p = key_probability(score, n, k)
    for h, each in enumerate((4, 9, 300)):
        assert torch.equal(p[:, h], key_probability(score, n, each)[:, h])
    assert bool((p >= key_probability(score, n, 4)).all()) and bool((p[0, 2] == 1).all())


def test_of_equal_scores_the_first_rows_are_read_for_certain() -> None:
    """So what one row of the batch reads does not depend on the k of another."""
    score = torch.full((1, 2, 300), 1 / 300)
    k = torch.tensor([[[5], [150]]])
    p = key_probability(score, lengths(300), k)
    for h, each in enumerate((5, 150)):
        expected = torch.full((300,), each / 300)
        expected[: 4 + each] = expected[300 - 17 :] = 1
        assert torch.allclose(p[0, h], expected)


def test_rows_for_an_error_by_hand() -> None:
    """Row 0 is read for certain, rows 30 and 31 with k / 20 and k / 80, unless they are among the k best.

    With k = 10, V = .2^2 .5 (1 / pi' - 1) 3^2 + .1^2 .125 (1 / pi' - 1) 4^2, pi' being those of another k.
    """
    weights, y = torch.tensor([[[[0.7, 0.2, 0.1]]]]), torch.tensor([[[[1.0]]]])
    values, probability = torch.tensor([[[[0.0], [4.0], [5.0]]]]), torch.tensor([[[1.0, 0.5, 0.125]]])
    score = torch.zeros(1, 1, 1000)
    score[..., 30], score[..., 31], score[..., 100:200] = 1 / 20, 1 / 80, 1.0

    def variance(k: int) -> float:
        return 0.04 * 0.5 * 9 * max(0, 20 / k - 1) + 0.01 * 0.125 * 16 * max(0, 80 / k - 1)

    def needed(error: float, n: int = 1000, scale: float = 1, score: torch.Tensor = score) -> int:
        rows = torch.tensor([[[0, 30, 31]]])
        sample = scale * weights, values, probability, rows, scale * y
        return int(rows_for_error(*sample, score[..., :n], lengths(n), 10, error))

    for k, more in ((10, 15), (15, 20), (20, 30), (30, 40), (40, 60), (60, 80)):
        just = 1.959964 * variance(k) ** 0.5
        assert (needed(just * 1.001), needed(just * 0.999)) == (k, more)
    assert needed(1e-9) == 80 and needed(0.1, scale=0) == 10, "nothing to err by"
    assert needed(1e-9, n=50) == 40, "there row 31 is among the ten best, and its value is read with 2k .0125"


@pytest.mark.slow
@pytest.mark.parametrize("error", [0.1, 0.4])
@pytest.mark.parametrize("heads", ["flat", "peaked", "outlier"])
def test_errors_exceed_the_one_asked_for_as_seldom_as_promised(heads: str, error: float) -> None:
    """512 query heads over 900 tokens; values do not cancel. Flat heads attend to all, peaked ones to few.

    In the last case two channels of K are ten times as large, and the query is small there.
    """
    x = Sequences.random(Shape(1, 256, 2, 16), 901, seed=3)
    size, scale = {"flat": 0.2, "peaked": 2.5, "outlier": 1.0}[heads], torch.ones(16)
    if heads == "outlier":
        scale[[2, 9]] = 10
    x = x._replace(q=size * x.q / scale, k=x.k * scale, v=x.v + 1)
    last = x.tokens(900, 901)
    dense = decode(Dense(), prompt(Dense(), x.tokens(0, 900)), last)
    method = Skim(error=error)
    store = prompt(method, x.tokens(0, 900))
    relative = (decode(method, store, last) - dense).norm(dim=-1) / dense.norm(dim=-1)
    assert float((relative > error).double().mean()) <= 0.05
    assert store.observed()["key_rows"] < 0.7 * 900 * 256
