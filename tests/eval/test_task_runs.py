"""squad, triviaqa and summarise from small local files to their scores, with the bundled model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

import skimkv
from skimkv.eval import tasks
from skimkv.eval.plan import Job, Setup, plan_job
from skimkv.eval.results import Record
from skimkv.eval.tasks import passkey, summarise
from support.evaluation import builtin, run_job

METHODS = ("Dense()", "LMInfinite(k=64)")
MODES = ["blind", pytest.param("aware", marks=pytest.mark.slow)]


def run(task: str, data: Path, mode: str, limit: int) -> tuple[Job, dict[str, list[Record]]]:
    """Plan and run a task; return the job and the records of each method."""
    setup = Setup(*builtin(), "builtin", batch=2)
    job = plan_job(setup, tasks.parse(task), mode, [skimkv.parse(method) for method in METHODS], data, limit)
    records = run_job(setup, job)
    return job, {method: [r for r in records if r.key.method == method] for method in METHODS}


def decoded(ids: Iterable[int]) -> str:
    """The text of tokens, without the one that begins a text."""
    return str(builtin()[1].decode(list(ids), skip_special_tokens=True))


@pytest.mark.parametrize("mode", MODES)
def test_triviaqa(tmp_path, mode):
    """A document in which the bundled model finds the answer: dense attention does, a window of 64 tokens does not."""
    rows = []
    for number in ("73915", "46281"):
        hidden = f"The pass key is {number}. Remember it. {number} is the pass key.\n"
        context = passkey.HEAD + 6 * passkey.FILLER + hidden + 8 * passkey.FILLER
        rows.append({"id": number, "question": "What is the pass key?", "answers": ["x", number], "context": context})
    (tmp_path / "triviaqa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    job, records = run("triviaqa(cue='The pass key is')", tmp_path, mode, 5)
    for (planned,) in job.groups:
        whole = decoded([*planned.prompt, *planned.question.feed])
        assert whole.endswith("There and back again.\n\nQuestion: What is the pass key?\nThe pass key is")
        asked_before = decoded(planned.prompt).endswith("The pass key is")
        assert asked_before == (mode == "aware") and planned.question.new_tokens == 30
    assert [record.score for record in records["Dense()"]] == [1, 1]
    assert all(record.output.strip().startswith(record.key.id) for record in records["Dense()"])
    assert [record.score for record in records["LMInfinite(k=64)"]] == [0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_squad(tmp_path, mode):
    """Three paragraphs and the shot, word for word; an answer is right if the output begins with it."""
    paragraphs = [
        {"context": f"Town {i} has {i}{i} gates.", "qas": [
            {"id": f"{i}{j}", "question": f"What has {i}{j}?", "answers": [{"text": f"{i}{i} gates"}, {"text": "gates"}]
             } for j in "ab"]}
        for i in range(3)
    ]  # fmt: skip
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"title": "Old_Towns", "paragraphs": paragraphs}]}))
    job, records = run("squad(confusions=2)", tmp_path, mode, 4)
    planned = [planned for group in job.groups for planned in group]
    assert len(planned) == 4 == len(records["Dense()"])
    for one in planned:
        i, j = one.example.id
        whole = decoded([*one.prompt, *one.question.feed])
        assert whole.endswith(
            "\nFrom what you've just read about Old Towns, please answer the following questions."
            f"\nQuestion: What has {i}{'ab'.replace(j, '')}?\nAnswer: gates\nQuestion: What has {i}{j}?\nAnswer:"
        )
        for town in range(3):
            assert whole.count(f"Title: Old Towns. Background: Town {town} has {town}{town} gates.") == 1
    for method in METHODS:
        for record in records[method]:
            start = record.output.strip().lower()
            i = record.key.id[0]
            assert record.score == (start.startswith((f"{i}{i} gates", "gates"))) and "\n" not in record.output.strip()


def test_summarise(tmp_path):
    """An article of more than 4000 characters; the output is cut at the reference's tokens, and scored against it."""
    pytest.importorskip("rouge_score")
    article, summary = "The river rose and the town was wet. " * 120, "The river rose and the town was wet."
    (tmp_path / "cnn.jsonl").write_text(json.dumps({"id": "n", "article": article, "highlights": summary}))
    job, records = run("summarise", tmp_path, "blind", 1)
    ((planned,),) = job.groups
    assert decoded([*planned.prompt, *planned.question.feed]) == f"Article: {article}\nSummary:"
    reference = builtin()[1](summary, add_special_tokens=False).input_ids
    assert 0 <= planned.question.new_tokens - len(reference) <= 1
    for (record,) in records.values():
        assert 0 < record.new_tokens <= planned.question.new_tokens
        assert record.score == summarise.score(record.output, planned.example) <= 100
    assert summarise.score(summary, planned.example) == 100
