"""The scan of an index of 4 bits in integers, against the same codes evaluated in floating point.

Weights are rounded to 8 bits, so scores err a little more than by the rounding of the codes. The tests hold this error
under its closed form, and far below that of the codes, on random keys and on keys of the bundled model.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from skimkv.eval.shared_prompt import record_prompt
from skimkv.methods import SparQ
from skimkv.methods.sparq import inverse_temperature, top_channels
from skimkv.ops.blocks import take
from skimkv.stores.base import Shape
from skimkv.stores.full import Full
from support.evaluation import builtin
from support.kernels import ISAS, NATIVE, exact, on

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")
N = 1025  # four groups, and the current token in full precision
STEPS = 24  # queries of every head, as rows of a batch
CHOSEN = 64  # positions besides the current one, where mass is measured
SOURCES = ("random", "outliers", "captured")


@functools.cache
def heads(source):
    """Queries (STEPS,H,G,D) and keys (H,N,D)."""
    draw = torch.Generator().manual_seed(3)
    if source != "captured":
        k = torch.randn(2, N, 128, generator=draw)
        if source == "outliers":  # two channels of large keys, as trained models have them
            k[..., [5, 70]] = 4 * k[..., [5, 70]] + 15
        return 2 * torch.randn(STEPS, 2, 3, 128, generator=draw), k
    model, tokenizer = builtin()
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    layer = record_prompt(model, torch.tensor([tokenizer(text)["input_ids"][:N]])).recorded[3]  # its heads are diffuse
    return layer.q.detach()[0, :, :, -STEPS:].permute(2, 0, 1, 3), layer.k.detach()[0]


def filled_store(source, channels, v):
    """A store of the source's index in every row, with values v (STEPS,H,N,D) and a mean value of one.

    The rows of K are zero, so that attention weighs the chosen positions equally.
    """
    q, k = heads(source)
    store = Full(Shape(*q.shape), torch.float32, "cpu", channels, True)
    store.append(k.expand(STEPS, -1, -1, -1), v)
    store.v_mean.fill_(1)
    for chunk in store.chunks:
        chunk.k.zero_()
    return store


def log_alpha(y):
    """The logarithm of alpha, and the mean position of what was chosen.

    Values are (0, position, ...) and their mean is one, so that y = (1 - alpha, alpha * position + 1 - alpha, ...).
    """
    alpha = 1 - y[..., 0].double()
    return alpha.log(), (y[..., 1].double() - (1 - alpha)) / alpha


def settings(source, k, local, mean_value):
    """SparQ with a quarter of the source's channels, in 4 bits, and how to call its step."""
    D = heads(source)[0].shape[-1]
    return SparQ(D // 4, k, local, mean_value, channels="int4"), {"scale": D**-0.5, "softcap": None}


@functools.cache
def scored(source):
    """A store, and the log of alpha and the choice in floating point, of its codes and of keys as they are."""
    q, _ = heads(source)
    _, H, _, D = q.shape
    v = torch.zeros(STEPS, H, N, D)
    v[..., 1] = torch.arange(N) / N
    store, copy = (filled_store(source, channels, v) for channels in ("int4", "copy"))
    method, step = settings(source, 1, 0, True)
    of_codes = log_alpha(method.step(exact(store), q.double(), None, **step))
    return store, of_codes, log_alpha(replace(method, channels="copy").step(exact(copy), q.double(), None, **step))


@functools.cache
def weighed(source):
    """A store whose value g of a position is its weight for query g in dense attention, and its step's result."""
    q, k = heads(source)
    weights = (torch.einsum("shgd,hnd->shng", q, k) * q.shape[-1] ** -0.5).softmax(2)
    store = filled_store(source, "int4", torch.nn.functional.pad(weights, (0, q.shape[-1] - q.shape[2])))
    method, step = settings(source, CHOSEN, 0, False)
    return store, method.step(exact(store), q.double(), None, **step)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("isa", ISAS)
def test_scores_err_far_less_than_the_codes(isa, source):
    """With one position besides the current one, alpha is the share of the largest score, and tells its error."""
    q, _ = heads(source)
    store, (want, position), (unquantised, exact_choice) = scored(source)
    method, step = settings(source, 1, 0, True)
    with on(isa):
        got, chosen = log_alpha(method.attend(store, q, None, **step))
    clear = want > -7  # a smaller alpha vanishes beside one
    same, same_as_exact = (clear & ((other - position).abs() < 4e-4) for other in (chosen, exact_choice))
    assert same.sum() > 0.9 * clear.sum() > 20, "only where two scores are nearly equal may another position be chosen"
    error, error_of_codes = (got - want)[same], (unquantised - want)[same_as_exact]
    assert error_of_codes.square().mean() > 0.01**2
    assert error.square().mean() < 0.15**2 * error_of_codes.square().mean()
    # a weight errs by 1/254 of the largest of its group, and a code is at most 7.5 from the mean code
    i1 = top_channels(q, method.r)
    weights = take(q, i1) * inverse_temperature(q, i1, step["scale"], "coverage")  # (STEPS,H,G,r)
    steps = take(store.chunks[0].scale[:, :, : N // 256, 0], i1)  # (STEPS,H,groups,r)
    largest = (weights[:, :, :, None] * steps[:, :, None]).abs().amax((-1, -2))
    assert (error.abs() <= (2 * method.r * 7.5 / 254 * largest + 1e-3)[same]).all()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("isa", ISAS)
def test_the_chosen_positions_hold_as_much_mass(isa, source):
    """Measured by the weights of dense attention, whatever positions the scan chooses at nearly equal scores."""
    q, _ = heads(source)
    store, want = weighed(source)
    method, step = settings(source, CHOSEN, 0, False)
    with on(isa):
        got = method.attend(store, q, None, **step)
    G = q.shape[2]
    mass, reference = ((CHOSEN + 1) * y[..., :G].double().diagonal(dim1=-2, dim2=-1) for y in (got, want))
    assert reference.mean() > 0.2
    assert abs(mass.mean() - reference.mean()) < 0.01 * reference.mean()
    assert ((mass - reference).abs() > 0.02).double().mean() < 0.1
