"""Settings at a share of dense attention's bytes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from skimkv.eval import budgets
from skimkv.eval.answer import Question
from skimkv.eval.shared_prompt import layer_shapes, record_prompt
from skimkv.eval.sweeps import SWEEPS
from skimkv.methods import H2O, TOVA, Dense, Quest, Skim, SnapKV, SparQ, StreamingLLM, SubGenStream, parse
from skimkv.methods.subgen import count_founders, founding_keys
from skimkv.stores.base import Shape
from skimkv.testing import Sequences, prompt
from support.evaluation import builtin


def dense_store(poisoned=0):
    x = Sequences.random(Shape(1, 2, 1, 16), 400)
    if poisoned:
        x.k[0, 1, 7 : 7 + poisoned] = torch.nan
    return prompt(Dense(), x)


@pytest.mark.parametrize("poisoned", [0, 1, 400 - 7])
def test_subgen_stream_ends_and_fits_even_with_keys_that_are_not_numbers(poisoned):
    store = dense_store(poisoned)
    method = budgets.at_share(SubGenStream, 1 / 2, [store])
    assert method is None or isinstance(method, SubGenStream)
    if not poisoned:
        assert method is not None and method.s >= 80  # half of the bytes: n / 4 samples of 2D, as they are read
        clusters = [
            int(founding_keys(torch.cdist(k, k) <= method.delta).sum()) for k in store.history(slice(0, 1))[0][0]
        ]
        cost = method.traffic(400, store.shape, store.dtype, clusters=sum(clusters)).bytes
        assert 0.7 <= cost / (Dense().traffic(400, store.shape, store.dtype).bytes / 2) <= 1


@pytest.mark.parametrize(
    ("method", "share"),
    [
        (method, share)
        for method in (Quest, SnapKV, StreamingLLM, TOVA)
        for share in (1 / 2, 1 / 8, 1 / 16, 1 / 64)
        if (method, share) != (Quest, 1 / 64)
    ],
)
def test_methods_of_tokens_and_pages_read_the_share(method, share):
    """Of 4,000 tokens; one page or one token more would be too much."""
    n, store = 4000, prompt(Dense(), Sequences.random(Shape(1, 2, 1, 16), 4000))
    fitting, limit = (
        budgets.at_share(method, share, [store]),
        Dense().traffic(n, store.shape, store.dtype).bytes * share,
    )
    step = fitting.page if method is Quest else 1
    more = dataclasses.replace(fitting, k=fitting.k + step)
    reads = [each.traffic(n, store.shape, store.dtype).bytes for each in (fitting, more)]
    assert reads[0] <= limit < reads[1]
    if method is Quest:
        assert fitting.page == max(16, 2 / share) and fitting.k % fitting.page == 0


def test_where_bytes_depend_on_the_data_the_share_is_that_of_the_mean():
    """A measure that finds half of the closed form's bound gives twice the rows, or nearly, and other methods none."""
    n, store = 4000, prompt(Dense(), Sequences.random(Shape(1, 2, 1, 16), 4000))
    of_dense = Dense().traffic(n, store.shape, store.dtype).bytes

    def half_of_the_bound(method):
        return method.traffic(n, store.shape, store.dtype).bytes / of_dense / 2

    bound = budgets.at_share(Skim, 1 / 8, [store])
    fitting = budgets.at_share(Skim, 1 / 8, [store], half_of_the_bound)
    assert 0.97 / 8 < half_of_the_bound(fitting) <= 1 / 8 and fitting.k > 1.9 * bound.k

    def refuse(method):
        raise AssertionError(f"{method} has a closed form")

    for method in (Quest, H2O, TOVA):
        assert budgets.at_share(method, 1 / 8, [store], refuse) == budgets.at_share(method, 1 / 8, [store])


@torch.inference_mode()
def test_the_measured_share_is_that_of_the_steps_of_the_questions():
    """Of a method whose closed form is exact, it is the closed form's; Skim's is below its bound."""
    model, _ = builtin()
    prompt_ids = torch.randint(3, 900, (1, 300), generator=torch.Generator().manual_seed(1))
    questions = [Question([5, 6, 7], 0, 3), Question([8, 9, 10, 11], 0, 3)]
    mean_share = budgets.measured_share(record_prompt(model, prompt_ids), questions)
    ((shape, dtype),) = layer_shapes(model)
    moved, of_dense = (
        sum(method.traffic(n, shape, dtype).bytes for n in range(300, 306))
        for method in (SparQ(8, 16), Dense())
    )  # fmt: skip
    assert mean_share(SparQ(8, 16)) == pytest.approx(moved / of_dense, rel=1e-12)
    skim = Skim(40)
    bound = sum(skim.traffic(n, shape, dtype).bytes for n in range(300, 306)) / of_dense
    assert 0.1 * bound < mean_share(skim) < 0.95 * bound


def test_founders_are_counted_as_algorithm_1_founds_clusters():
    x = torch.randn(700, 8, generator=torch.Generator().manual_seed(2))
    for delta in (0.0, 1.5, 3.0, 20.0):
        assert count_founders(x, delta) == int(founding_keys(torch.cdist(x, x) <= delta).sum())


def test_a_share_that_bounds_and_a_page_exceed_is_out_of_reach():
    assert budgets.at_share(Quest, 1 / 64, [dense_store()]) is None  # of 400 tokens; pages would have 128


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_s_specs_are_methods(name):
    assert len({parse(spec) for spec in SWEEPS[name]}) == len(SWEEPS[name])
