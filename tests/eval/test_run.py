"""Runs: the records are right, whatever the batch, and counted traffic is the predicted one."""

from __future__ import annotations

import json

import pytest

import skimkv
from skimkv.eval import sweeps, tasks
from skimkv.eval.plan import Plan, plan_evaluation
from skimkv.eval.results import RecordKey, Results
from skimkv.eval.run import run_evaluation
from support.evaluation import run_job, small_job


def test_records():
    setup, job = small_job()
    records = run_job(setup, job)
    assert len(records) == 18
    assert {record.key: record.source for record in records} == Plan([job], []).sources(setup)
    dense = [record for record in records if record.key.method == "Dense()"]
    assert sum(record.score for record in dense) >= 5, "a record of 12 lines is easy for the bundled model"
    for record in records:
        assert record.json() == json.loads(json.dumps(record.json()))
        assert (record.key.mode, record.key.seed, record.versions["skimkv"]) == ("blind", 0, skimkv.__version__)
        assert record.steps == record.fed_tokens + record.new_tokens - (record.output == "" or 1)
    for record in dense:
        n, steps = record.prompt_tokens, record.steps
        moved = sum(2 * 4 * 2 * 64 * (n + i + 1) * 4 for i in range(steps))  # k and v, 4 layers, 2 heads of 64
        assert record.bytes == record.dense_bytes == 4 * record.elements == moved


def test_only_missing_records_are_made(tmp_path):
    setup, job = small_job()
    plan, calls = Plan([job], []), []
    with Results(tmp_path / "r.jsonl", "cpu") as results:
        first = run_evaluation(setup, plan, results, lambda *call: calls.append(call))
        assert [(done, total) for done, total, _ in calls] == [(i, 18) for i in range(19)]
        assert [RecordKey.of(record) for record in first] == list(plan.sources(setup))
        assert [record.key for *_, record in calls[1:]] == [RecordKey.of(record) for record in results.records]
        del results.records[5], results.records[9]
        again = run_evaluation(setup, plan, results)
        assert again == first and len(results.records) == 18
        changed = [[planned._replace(source="x") for planned in group] for group in job.groups]
        with pytest.raises(ValueError, match="of another model or other data"):
            run_evaluation(setup, Plan([job._replace(groups=changed)], []), results)


@pytest.mark.parametrize("mode", sweeps.MODES)
def test_a_batch_of_prompts_says_what_each_says_alone(mode):
    """Contexts of different length in one batch, question-aware; more rows than examples on a context, blind."""
    alone, batched = (run_job(*small_job(mode=mode, batch=batch)) for batch in (1, 4))
    same = [{record.key: record._replace(batch=0) for record in records} for records in (alone, batched)]
    assert same[0] == same[1] and len(same[0]) == len(alone) == len(batched)


def test_counted_is_predicted():
    specs = ("Dense()", "SparQ(r=8, k=16)", "H2O(k=32)")
    predicted, counted = (run_job(*small_job(specs=specs, counted=counted, limit=3)) for counted in (False, True))
    figures = [
        sorted((r.key.method, r.key.id, r.elements, r.bytes) for r in records) for records in (predicted, counted)
    ]
    assert figures[0] == figures[1]
    assert {r.backend for r in counted} == {"ref"} and all(r.key.counted for r in counted)


def test_times_belong_to_the_run():
    """Every method is timed, with and without padding, and its records are those of a run that takes no times."""
    for options in ({}, {"mode": "aware", "batch": 4}):
        setup, job = small_job(**options)
        times = {}
        timed = run_job(setup, job, times=times)
        assert timed == run_job(setup, job)
        assert set(times) == {(job.task.spec, job.mode, repr(method)) for method in job.methods}
        assert all(0 < ms < 60_000 for ms in times.values())
        run_job(setup, job, {record.key for record in timed}, again := {})
        assert again == {}
    run_job(*small_job(counted=True, limit=1), times=(counted := {}))
    assert counted == {}, "the backend that counts is not the one that decodes"


def test_questions_on_one_context_say_so():
    setup, job = small_job()
    contexts = {record.key.id: record.context for record in run_job(setup, job)}
    assert [contexts[f"{i}-{j}"] == contexts["0-0"] for i in range(2) for j in range(3)] == [True] * 3 + [False] * 3
    aware = {record.key.id: record.context for record in run_job(*small_job(mode="aware"))}
    assert aware == contexts, "the question does not belong to the context"


@pytest.mark.slow
def test_an_example_longer_than_the_positions_is_answered_from_the_cache():
    """The passkey stands at the end, within the window."""
    setup, _ = small_job()
    method = skimkv.parse("LMInfinite(k=512, positions='cache')")
    plan = plan_evaluation(setup, [tasks.parse("passkey(length=8700)")], [method], limit=2)
    records = run_job(setup, plan.jobs[0])
    assert len(records) == 2 and all(record.prompt_tokens == 8192 and record.fed_tokens > 400 for record in records)
    assert all(record.steps == record.fed_tokens + record.new_tokens - (record.output == "" or 1) for record in records)
