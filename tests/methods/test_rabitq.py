"""RaBitQ: the rows that look best by the signs of rotated keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from skimkv.methods import RaBitQ
from skimkv.stores.base import Shape
from skimkv.stores.quantise import rotate_span
from skimkv.stores.signs import INTERVAL, SignIndexed, flips, pack_signs, rotate, unpack_signs
from skimkv.testing import Sequences
from support.hand_worked import output, softmax


def turned_back(x):
    """The vectors whose rotation is x."""
    return rotate_span(x) * flips(x.shape[-1])


def test_by_hand():
    """Rotated keys of c + (3, 1, -1, 1) and c - (3, 1, -1, 1): the centre is c, |x|^2 / |x|_1 = 12 / 6 = 2.

    Of a query that is (1, 0, 0, 0) after the rotation the products are estimated as q.c + 2 and q.c - 2.
    """
    c, x = torch.tensor([4.0, 0, 0, 0]), torch.tensor([3.0, 1, -1, 1])
    k = turned_back(torch.stack([c + x, c - x]).repeat(INTERVAL // 2, 1))[None, None]
    store = SignIndexed(Shape(1, 1, 1, 4), torch.float32)
    store.append(k, k)
    store.append_token(k[:, :, 0], k[:, :, 0])
    signs, scales, centres = store.read_signs()
    torch.testing.assert_close(rotate(centres[0, 0, 0]), c)
    torch.testing.assert_close(scales, torch.full((1, 1, INTERVAL), 2.0))
    assert signs[0, 0, :2].tolist() == [[1, 1, -1, 1], [-1, -1, 1, -1]]
    assert store.codes[0][0, 0, 0, :2, 0].tolist() == [0b1011, 0b0100]
    estimate = (turned_back(torch.tensor([1.0, 0, 0, 0])) @ centres[0, 0, 0]) + signs[0, 0, :2, 0] * scales[0, 0, :2]
    torch.testing.assert_close(estimate, torch.tensor([6.0, 2.0]))


def test_bits_of_a_head_size_that_is_no_multiple_of_eight():
    x = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    codes = pack_signs(x)
    assert codes.shape == (3, 2)
    assert torch.equal(unpack_signs(codes, 11), x.sign().to(torch.int8))


def test_the_error_of_an_estimate_is_that_of_theorem_3_2():
    """<o_bar, q> / <o_bar, o> errs by sqrt((1 - <o_bar, o>^2) / <o_bar, o>^2 / (D - 1)), and on average by nothing."""
    D, generator = 64, torch.Generator().manual_seed(1)
    k, q = (torch.randn(1, 1, n, D, generator=generator) for n in (8 * INTERVAL, 50))
    store = SignIndexed(Shape(1, 1, 1, D), torch.float32)
    store.append(k, k)
    signs, scales, centres = store.read_signs()
    x = k - centres.repeat_interleave(INTERVAL, 2)
    estimate, exact = rotate(q) @ signs.mT * scales[:, :, None], q @ x.mT
    error = (estimate - exact) / (q.norm(dim=-1)[..., None] * x.norm(dim=-1)[:, :, None])
    cosine = x.norm(dim=-1) / scales / D**0.5  # <o_bar, o>
    predicted = ((1 - cosine.square()) / cosine.square() / (D - 1)).mean().sqrt().item()
    assert abs(error.mean().item()) < 0.02 * predicted
    assert error.square().mean().sqrt().item() == pytest.approx(predicted, rel=0.03)


@pytest.mark.parametrize("n", [2 * INTERVAL + 44, 2 * INTERVAL, INTERVAL - 1])
def test_agrees_with_plain_loops(n):
    """Tokens without a code, the current one among them, are all read; of the others the k that look best."""
    H, G, D, k = 2, 3, 8, 20
    x = Sequences.random(Shape(1, H, G, D), n)
    y = output(RaBitQ(k), x.q[..., -1, :], x.k, x.v)
    hadamard = np.array([[1.0]])
    while len(hadamard) < D:
        hadamard = np.kron(hadamard, np.array([[1, 1], [1, -1]]) / 2**0.5)
    turn = hadamard * flips(D).numpy()  # a column for each channel
    coded = min(n // INTERVAL * INTERVAL, n - 1)
    for h in range(H):
        keys, q = x.k[0, h].double().numpy(), x.q[0, h, :, -1].double().numpy()
        score = np.zeros(coded)
        for g in range(G):
            logits = np.empty(coded)
            for i in range(coded):
                start = i // INTERVAL * INTERVAL
                centre = keys[start : start + INTERVAL].mean(0)
                o = turn @ (keys[i] - centre)
                o_bar = np.sign(o) / D**0.5
                norm = np.linalg.norm(o)
                logits[i] = q[g] @ centre + norm * (turn @ q[g]) @ o_bar / (o_bar @ o / norm)
            score += softmax(logits) if coded else 0
        rows = sorted([*np.argsort(-score)[:k], *range(coded, n)])
        for g in range(G):
            expected = softmax(keys[rows] @ q[g]) @ x.v[0, h, rows].double().numpy()
            torch.testing.assert_close(y[0, h, g].double(), torch.from_numpy(expected), atol=1e-5, rtol=0)


def test_bytes_in_closed_form():
    """D = 16 in float32, n = 300 cached tokens: 256 in one bit, with 256 scales and 2 centres; 44 rows and 10 are read.

    At n = 383 the current token closes the third group: 128 keys are read, and their codes written.
    """
    index = 256 * 16 // 8 + 256 * 4 + 2 * 16 * 4
    assert RaBitQ(10).traffic(300, Shape(1, 1, 4, 16), torch.float32).bytes == index + (2 * 54 + 2) * 16 * 4
    index = 383 * 16 // 8 + 383 * 4 + 3 * 16 * 4 + 128 * 16 // 8 + 128 * 4 + 16 * 4
    assert RaBitQ(10).traffic(383, Shape(1, 1, 4, 16), torch.float32).bytes == index + (2 * 10 + 2 + 128) * 16 * 4
