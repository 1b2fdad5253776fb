"""KL(dense ‖ method): two distributions by hand, dense attention beside itself, methods, and what eval records."""

from __future__ import annotations

import json
import math

import pytest
import torch

import skimkv
from skimkv.eval import tasks
from skimkv.eval.divergence import MethodDivergence, kl_divergence, measure_divergence, read_documents
from skimkv.eval.forced import dense_logits, force_tokens
from skimkv.eval.plan import Plan, Setup, plan_job
from skimkv.eval.results import Results, summary
from skimkv.eval.run import Run, run_evaluation
from skimkv.eval.shared_prompt import record_prompt
from skimkv.methods import Dense, LMInfinite
from support.evaluation import builtin
from support.random_models import random_model, tiny_configuration
from support.tiny_models import family, prompt


def test_two_distributions_by_hand():
    """(1/2, 1/4, 1/4) beside (1/4, 1/4, 1/2): 1/2 ln 2 + 0 - 1/4 ln 2; a constant in the logits changes nothing."""
    p, q = (torch.tensor(x).log() for x in ([0.5, 0.25, 0.25], [0.25, 0.25, 0.5]))
    assert float(kl_divergence(p, q + 7)) == pytest.approx(0.25 * math.log(2))
    assert float(kl_divergence(p, p - 3)) == pytest.approx(0, abs=1e-12)
    certain = torch.tensor([0.0, -math.inf, -math.inf])
    assert float(kl_divergence(certain, p)) == pytest.approx(math.log(2)), "what dense excludes adds nothing"
    assert float(kl_divergence(p, certain)) == math.inf, "what only the method excludes cannot be coded"
    assert math.isnan(kl_divergence(p * math.nan, p)) and math.isnan(kl_divergence(p, p * math.nan))
    both = kl_divergence(torch.stack([p, q]), torch.stack([q, p]))
    assert both.dtype == torch.float64 and both.tolist() == pytest.approx([0.25 * math.log(2)] * 2)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "jamba"])
def test_the_whole_document_in_one_pass_says_the_same(name):
    """Dense's logits are those of the model without a cache; every method is compared at the right positions."""
    model = random_model(tiny_configuration(name)) if name == "jamba" else family(name)
    ids = prompt(3, 40)
    with torch.inference_mode():
        expected = model(ids).logits[:, 30:]
        recorded = record_prompt(model, ids[:, :30], new_tokens=10)
        dense = dense_logits(recorded, ids[:, 30:])
        assert torch.allclose(dense, expected, atol=1e-4)
        caches = [recorded.cache(method) for method in (Dense(), LMInfinite(k=4, initial=1))]
        exact, windowed = force_tokens(model, caches, ids[:, 30:], dense)
        own, cache = [], recorded.cache(LMInfinite(k=4, initial=1))
        for i in range(30, 40):
            own.append(model(ids[:, i : i + 1], past_key_values=cache).logits[:, 0])
    log_p = expected.log_softmax(-1)
    for row in range(3):
        nats = [-float(log_p[row, i, ids[row, 31 + i]]) for i in range(9)]
        assert exact[row].loss == pytest.approx(sum(nats) / 9, rel=1e-4)
        assert max(exact[row].kl) < 1e-9 and all(exact[row].agrees) and exact[row].steps == 10
        assert windowed[row].kl == pytest.approx(
            [float(kl_divergence(expected[row, i], own[i][row])) for i in range(10)], rel=1e-2, abs=1e-7
        )
        assert max(windowed[row].kl) > 1e-6
        agrees = [bool(expected[row, i].argmax() == own[i][row].argmax()) for i in range(10)]
        assert windowed[row].agrees == agrees
        assert exact[row].cost.bytes == exact[row].cost.dense_bytes > windowed[row].cost.bytes
    skimkv.detach(model)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """A file of texts that the bundled model was not trained on: lists of words that come again."""
    import random

    rng, path = random.Random(0), tmp_path_factory.mktemp("texts") / "words.txt"
    words = ["river", "mill", "stone", "the", "of", "a", "went", "to", "sea", "old", "and", "king", "said", "home"]
    path.write_text(" ".join(rng.choice(words) for _ in range(4000)))
    return path


TASK = "kl(context=96, reference=12)"
SPECS = ("Dense()", "SparQ(r=4, k=8)", "SparQ(r=16, k=32)", "SparQ(r=64, k=128)", "LMInfinite(k=16, initial=4)")


def kl_job(documents, limit=6, specs=SPECS, **options):
    """A setup of the bundled model, and a job of divergences on that file."""
    setup = Setup(*builtin(), "builtin", **{"batch": 4, **options})
    return setup, plan_job(setup, tasks.parse(TASK), "blind", [skimkv.parse(spec) for spec in specs], documents, limit)


@torch.inference_mode()
def test_a_model_that_exceeds_the_number_format_is_one_line():
    model, ids = random_model(tiny_configuration("llama")).half(), prompt(1, 8)
    recorded = record_prompt(model, ids[:, :4])
    model.lm_head.weight.data *= 1e9
    with pytest.raises(ValueError, match=r"logits exceed the range of float16 .* such as bfloat16"):
        dense_logits(recorded, ids[:, 4:])
    recorded = record_prompt(model.bfloat16(), ids[:, :4])
    model.lm_head.weight.data *= float("nan")
    with pytest.raises(ValueError, match=r"logits exceed the range of bfloat16 or are not numbers$"):
        dense_logits(recorded, ids[:, 4:])


def test_divergence_falls_with_the_budget(documents):
    setup, job = kl_job(documents)
    texts = [group[0].prompt + group[0].question.feed for group in job.groups]
    assert {len(text) for text in texts} == {108} and len(texts) == 6
    assert read_documents(setup.tokenizer, documents, 96, 12, limit=6) == texts
    dense, least, middle, most, windowed = measure_divergence(setup.model, texts, SPECS, 96, batch=4)
    assert dense.max < 1e-9 and dense.agreement == 1 and dense.share == 1
    assert least.mean > 2 * middle.mean > 4 * most.mean and most.mean < 1e-9, "all channels and all positions"
    assert least.share < middle.share and least.p99 <= least.max and windowed.mean > 10 * middle.mean
    assert least.kl.shape == least.agrees.shape == (6, 12)
    low, high = least.mean_interval()
    assert low is not None and high is not None and low < least.mean < high
    low, high = least.p99_interval()
    assert low is not None and high is not None and low <= least.p99 <= high
    difference, low, high = least.difference(middle)
    # records have five digits of every divergence
    assert (
        difference == pytest.approx(least.mean - middle.mean, rel=1e-5) and low is not None and low < difference < high
    )
    (counted,) = measure_divergence(setup.model, texts[:2], [skimkv.parse(SPECS[1])], 96, counted=True)
    assert counted.bytes_per_token == least.bytes_per_token and counted.share == pytest.approx(least.share)


def test_counted_bytes_include_layers_of_the_library():
    """Gemma 2 has a sliding layer, which costs the same whatever the method."""
    model, documents = family("gemma2"), prompt(3, 30).tolist()
    (closed,), (counted,) = (
        measure_divergence(model, documents, ["SparQ(r=4, k=8)"], 24, counted=counted) for counted in (False, True)
    )
    assert counted.bytes_per_token == closed.bytes_per_token and counted.share == closed.share < 1
    assert counted.mean == pytest.approx(closed.mean, rel=1e-3)


def test_rows_that_depend_on_the_data_are_counted_as_they_are_read():
    """Skim draws as many rows as the data ask for: the closed form is given how many each step read."""
    model, documents = family("llama"), prompt(3, 60).tolist()
    (closed,), (counted,) = (
        measure_divergence(model, documents, ["Skim(k=4, r=4)"], 48, counted=counted) for counted in (False, True)
    )
    assert counted.bytes_per_token == closed.bytes_per_token and counted.share == pytest.approx(closed.share)
    torch.testing.assert_close(counted.kl, closed.kl, rtol=1e-4, atol=1e-6)  # a reference counts, a kernel does not


def test_wrong_documents_are_one_line():
    for wrong, context, words in (([], 3, "no tokens"), ([[1, 2], [1]], 1, r"\[1, 2\] tokens"), ([[1, 2]], 2, "to 1")):
        with pytest.raises(ValueError, match=words):
            measure_divergence(None, wrong, [Dense()], context)
    ones, more = (MethodDivergence(Dense(), torch.zeros(n, 2), torch.ones(n, 2), None) for n in (1, 2))
    with pytest.raises(ValueError, match="measure both on the same"):
        ones.difference(more)


def test_records_and_rows(documents, tmp_path):
    """A run that goes on gives equal figures; the row holds the mean and the tail over all tokens."""
    setup, job = kl_job(documents)
    plan = Plan([job], [])
    with Results(tmp_path / "r.jsonl", "cpu") as results:
        whole = run_evaluation(setup, plan, results)
        rows = summary(whole)
        del results.records[7:]
        again = run_evaluation(setup, plan, results)
        assert again == whole and summary(again) == rows
    with Results(tmp_path / "r.jsonl", "cpu") as results:
        assert summary(run_evaluation(setup, plan, results)) == rows, "from the file alone"
    assert {record["mode"] for record in whole} == {"forced"}
    texts = [group[0].prompt + group[0].question.feed for group in job.groups]
    for row, alone in zip(rows, measure_divergence(setup.model, texts, SPECS, 96, batch=4), strict=True):
        told = json.loads(json.dumps(row.json()))
        assert row.n == 6 and told["kl_mean"] == told["mean"] == pytest.approx(alone.mean, rel=1e-3, abs=1e-9)
        assert told["kl_p99"] == pytest.approx(alone.p99, rel=1e-3, abs=1e-9)
        assert told["kl_max"] == pytest.approx(alone.max, rel=1e-3, abs=1e-9)
        assert told["agreement"] == pytest.approx(alone.agreement) and row.share == pytest.approx(alone.share)
        if row.method != "Dense()":
            assert told["diff_to_dense"] == pytest.approx(told["mean"], abs=1e-9)
    assert all("kl" not in record.json() for record in Run(other_job()[0]).records(other_job()[1]))


def other_job():
    """A job of another task, whose records hold no divergences."""
    setup = Setup(*builtin(), "builtin")
    return setup, plan_job(setup, tasks.parse("record(lines=8, asked=1)"), "blind", [Dense()], None, 1)


def test_documents_that_are_too_short(documents, tmp_path):
    """They are passed over; where all are too short, one line says how long they are."""
    setup = Setup(*builtin(), "builtin")
    (tmp_path / "a.txt").write_text("A short text.")
    (tmp_path / "b.txt").write_text(documents.read_text()[:3000])
    job = plan_job(setup, tasks.parse(TASK), "blind", [Dense()], tmp_path, 9)
    assert job.left_out == 1 and all(group[0].example.id.startswith("b:") for group in job.groups)
    with pytest.raises(
        ValueError, match=r"\A[^\n]*no document of .*a\.txt has context \+ reference = 108 tokens, the l"
    ):
        plan_job(setup, tasks.parse(TASK), "blind", [Dense()], tmp_path / "a.txt", 9)
    with pytest.raises(ValueError, match=r"context \+ reference = 10256 tokens exceed the model's 8192 positions"):
        plan_job(setup, tasks.parse("kl(context=10000)"), "blind", [Dense()], tmp_path, 9)
    with pytest.raises(ValueError, match=r"no document of .* = 108 tokens, the longest has"):
        read_documents(setup.tokenizer, tmp_path / "a.txt", 96, 12)
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match="holds no text"):
        plan_job(setup, tasks.parse(TASK), "blind", [Dense()], tmp_path / "a.txt", 9)
