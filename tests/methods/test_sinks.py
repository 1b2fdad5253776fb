"""Attention sinks: a logit of every query head that joins the sum of each softmax and has no value."""

from __future__ import annotations

import pytest
import torch

from skimkv.methods import Dense, SparQ, SubGenStream, parse
from skimkv.stores.base import Shape
from skimkv.testing import Sequences
from support.hand_worked import output
from support.laws import FULL, close, run

pytestmark = pytest.mark.usefixtures("backend")


def some_sinks(H, G, size=2.0):
    return size * torch.randn(H, G, generator=torch.Generator().manual_seed(3)) + 3


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_dense_has_the_sink_in_the_denominator(softcap, has_sinks):
    """Prompt and steps, against the formula in float64; the soft cap does not bound the sinks."""
    s, sinks = Sequences.random(Shape(2, 2, 3, 16), 40), 3 * some_sinks(2, 3) if has_sinks else None
    store = Dense().store(s.shape, torch.float32)
    y = [Dense().prefill(store, *s.tokens(0, 33), scale=0.25, softcap=softcap, sinks=sinks)]
    for i in range(33, 40):
        token = s.q[..., i, :], s.k[:, :, i], s.v[:, :, i]
        y.append(Dense().decode(store, *token, scale=0.25, softcap=softcap, sinks=sinks)[..., None, :])
    logits = s.q.double() @ s.k.double()[:, :, None].mT / 4
    e = (logits if softcap is None else softcap * torch.tanh(logits / softcap)).exp().tril()
    of_sinks = 0 if sinks is None else sinks.double().exp()[..., None, None]
    weights = e / (e.sum(-1, keepdim=True) + of_sinks)
    close(torch.cat(y, 3), weights @ s.v.double()[:, :, None], torch.float32)


@pytest.mark.parametrize("spec", ["Dense()", *(spec for spec in FULL if "int" not in spec)])
def test_a_sink_is_a_token_without_a_value(spec):
    """One more token at the beginning, whose logit is that of the sinks and whose value is zero, does the same.

    Not where keys are quantised: there one more key changes the others.
    """
    s, method = Sequences.random(Shape(1, 2, 1, 16), 60), parse(spec)
    s.q[..., 0] = 1.0
    first_k, first_v = torch.zeros(2, 1, 2, 1, 16)
    first_k[..., 0] = 2.5 * 4  # the scale is 1/4
    more = Sequences(torch.cat([s.q[..., :1, :], s.q], 3), torch.cat([first_k, s.k], 2), torch.cat([first_v, s.v], 2))
    _, y = run(method, s, 50, sinks=torch.full((2, 1), 2.5))
    _, as_token = run(method, more, 51)
    close(y, as_token, torch.float32)


def test_the_mean_value_gets_nothing_of_the_sinks_mass():
    """Worked by hand: two positions and a sink of equal logits, one position chosen, so a third of the mass is left."""
    q, k, v = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 2, 2), torch.tensor([[[[6.0, 0.0], [0.0, 6.0]]]])
    q[..., 0] = 1.0
    k[..., 0, 1] = 5.0  # in the channel that is not read, and that q has nothing of
    method = SparQ(r=1, k=1, local=0, mean_value=True)
    three = output(method, q, k, v, sinks=torch.zeros(1, 1))
    torch.testing.assert_close(three, torch.full((1, 1, 1, 2), 2.0))  # k = 1 and the current one: all is read
    k, v = torch.zeros(1, 1, 3, 2), torch.tensor([[[[12.0, 0.0], [0.0, 12.0], [0.0, 0.0]]]])
    k[..., 0, 0] = -1e-6  # the first position is left out
    y = output(method, q, k, v, sinks=torch.zeros(1, 1))
    # s_hat is 1/4 for each of three positions and the sink; y = 3/4 (0, 12)/3 + 1/4 (4, 4)
    torch.testing.assert_close(y, torch.tensor([[[[1.0, 4.0]]]]), atol=1e-4, rtol=0)


def test_the_estimate_of_a_stream_adds_the_sink_to_tau():
    """Worked by hand: z is as without the sink, and tau is larger by exp(sink)."""
    s, sinks = Sequences.random(Shape(2, 2, 3, 16), 50), some_sinks(2, 3)
    method = SubGenStream(delta=0.0, t=1, s=8)  # every key is a cluster: tau is exact
    _, without = run(method, s, 49)
    _, y = run(method, s, 49, sinks=sinks)
    tau = (s.q[..., 49, :].double() @ s.k.double().mT / 4).exp().sum(-1)
    share = tau / (tau + sinks.double().exp())
    torch.testing.assert_close(y[0].double(), without[0].double() * share[..., None], rtol=1e-4, atol=1e-5)
