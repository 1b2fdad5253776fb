"""Random cases of every method with kernels: a difference between kernel and reference is a fault of one of them.

The comparison (support/differential.py) knows what is none: choices among scores that are equal but for rounding, the
rounding of sums by their size, numbers too small to exist, and Skim's draws. That it sees faults is tested with faults.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from skimkv.ops.cpu import key_scores, prompt_attention
from skimkv.ops.cpu.run import CpuBackend
from skimkv.stores.base import Shape
from support import differential
from support.kernels import ISAS, NATIVE
from support.random_cases import Case, case_of

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native library is not built")


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))])
def test_random_cases(part):
    """About a minute in all. In one case of many, a head has too many decisions that rounding may turn."""
    undecided = []
    for seed in range(30 * part, 30 * part + 30):
        try:
            undecided.append(differential.compare(case_of(seed)))
        except AssertionError as error:
            raise AssertionError(f"{case_of(seed)}: {error}") from error
    assert sum(undecided) <= 0.05 * len(undecided)


def case(spec: str, **changes) -> Case:
    """A case of normal numbers with which nothing is wrong."""
    blocks = [(60, [0, 20]), (9, [0, 0])]
    plain = Case(7, spec, Shape(2, 2, 2, 32), "float32", blocks, 2, 32**-0.5, None, False, ISAS[0], 2, "normal", "gaps")
    return plain._replace(**changes)


CASES = {
    "Dense()": {}, "SparQ(8, 12, 3, True, channels='copy')": {}, "SparQ(8, 12, 3, True, channels='none')": {},
    "SparQ(8, 12, 3, False, channels='int8')": {"blocks": [(280, [0, 10])]},
    "SparQ(8, 12, 3, True, channels='int4')": {"blocks": [(280, [0, 10])]}, "TopK(9)": {},
    "TopK(9, oracle=True)": {}, "LowRank(6, 9)": {}, "H2O(24)": {}, "H2O(24, local=0, kv='int8')": {},
    "LMInfinite(24, initial=4)": {}, "Dense(kv='int4')": {}, "Skim(9, r=8)": {"blocks": [(80, [0, 20])]},
    "Skim(12, r=8)": {"kind": "exact in 8 bits", "blocks": [(300, [0, 0])]},
}  # fmt: skip


def run_with(change):
    """CpuBackend.run, around which `change(store, run)` does something wrong."""
    plain = CpuBackend.run

    def run(self, step, store, q, token, softmax):
        return change(store, q, lambda q=q, step=step: plain(self, step, store, q, token, softmax), step)

    return mock.patch.object(CpuBackend, "run", run)


def off_by_little(store, q, run, step):
    """One number of the result, by 2^-9 of the largest."""
    y = run()
    y[-1, -1, -1, -1] += 2.0**-9 * y.abs().max()
    return y


def one_row_is_another(store, q, run, step):
    """A row of the batch gets the result of another."""
    y = run().clone()
    y[1] = y[0]
    return y


def one_choice_less(store, q, run, step):
    """A position less is chosen."""
    return run(step=step._replace(k=step.k - 1)) if step.k > 1 else off_by_little(store, q, run, step)


def another_query(store, q, run, step):
    """Scores are those of a query that differs by 2% in its largest channel."""
    wrong = q.clone()
    at = wrong.abs().argmax(-1, keepdim=True)
    return run(q=wrong.scatter(-1, at, 1.02 * wrong.gather(-1, at)))


FAULTS = [off_by_little, one_row_is_another, one_choice_less, another_query]


@pytest.mark.slow
@pytest.mark.parametrize("spec", CASES)
def test_a_fault_is_seen(spec):
    """In a step of every method: each fault alone is flagged, and without one nothing is."""
    right = case(spec, **CASES[spec])
    assert differential.compare(right) == 0
    for fault in FAULTS:
        with run_with(fault), pytest.raises(AssertionError, match="step "):
            differential.compare(right)


def with_another_key(store, q, run, step):
    """The score of a key of the index that is not the best is raised, so that it is chosen."""
    if store.lengths[0] == 69:
        chunk = store.chunks[0]
        index = chunk.index.clone()
        index[0, 0, :, 5] = index[0, 0].abs().amax(-1) * index[0, 0, :, 5].sign()
        store.chunks = (replace(chunk, index=index), *store.chunks[1:])
    return run()


def with_exchanged_scores(store, q, run, step):
    """H2O's scores are exchanged between two tokens while a step runs, so that another one is dropped."""
    exchanged = torch.tensor([store.score[0, 0].argmax(), store.score[0, 0].argmin()])
    store.score[0, 0, exchanged] = store.score[0, 0, exchanged.flip(0)]
    return run()


@pytest.mark.parametrize(
    ("spec", "fault"),
    [("SparQ(8, 12, 3, False, channels='copy')", with_another_key), ("H2O(24, local=0)", with_exchanged_scores)],
)
def test_a_fault_of_one_number_that_is_kept_is_seen(spec, fault):
    with run_with(fault), pytest.raises(AssertionError, match="step "):
        differential.compare(case(spec))


def best_is_least(scores):
    """The largest score of every head becomes its smallest."""
    return scores.scatter(-1, scores.argmax(-1, keepdim=True), scores.amin(-1, keepdim=True))


def wrong_scores(*args, plain=key_scores.key_scores):
    return best_is_least(plain(*args))


def wrong_attention_and_scores(*args, plain=prompt_attention.attend_and_score, **softmax):
    y, scores = plain(*args, **softmax)
    return y, best_is_least(scores)


def wrong_attention(*args, plain=prompt_attention.attend, **softmax):
    y = plain(*args, **softmax)
    y[0, 0, 0, 3, 0] += 1e-3
    return y


@pytest.mark.parametrize(
    ("spec", "attend"),
    [
        *((spec, prompt_attention.attend) for spec in ("H2O(24)", "SnapKV(24, pool=1)", "TOVA(24)")),
        ("Dense()", wrong_attention),
    ],
)
def test_a_fault_in_a_prompt_is_seen(spec, attend):
    """The token with the largest score is dropped, or counted for less; of dense attention, an output is wrong."""
    right = case(spec, steps=0)
    with mock.patch.object(prompt_attention, "FAST", ISAS):
        assert differential.compare(right) == 0
        with (
            mock.patch.object(key_scores, "key_scores", wrong_scores),
            mock.patch.object(prompt_attention, "attend_and_score", wrong_attention_and_scores),
            mock.patch.object(prompt_attention, "attend", attend),
            pytest.raises(AssertionError, match="block 0"),
        ):
            differential.compare(right)
