"""The adapter of lm-evaluation-harness, on a local task: sparse decode runs, and at full budget it is dense."""

from __future__ import annotations

import json

import pytest
import torch

import skimkv
from skimkv.eval.tasks import record

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")

CONFIG = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{context}}}}{{{{question}}}}"
target_delimiter: ""
"""
CHOICE = 'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{label}}"\n'
UNTIL = """output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    """Eight questions on two records: which of four numbers, and what number."""
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("tasks")
    rows = []
    for context, questions in record.records(2, 30, 4):
        for i, (question, answer) in enumerate(questions):
            choices = [other for _, other in questions]
            rows.append({"context": context, "question": question, "answer": answer, "choices": choices, "label": i})
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, rest in (("local_choice", CHOICE), ("local_until", UNTIL)):
        (folder / f"{name}.yaml").write_text(CONFIG.format(name=name, data=data) + rest)
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.mark.timeout(280)
def test_sparse_decode_runs(manager, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    from skimkv.eval.lm_eval import SkimLM

    torch.set_num_threads(1)
    model, tokenizer = skimkv.load("builtin")
    calls, decode = [], skimkv.SparQ.decode
    monkeypatch.setattr(skimkv.SparQ, "decode", lambda *args, **kwargs: calls.append(1) or decode(*args, **kwargs))

    def run(lm):
        found = lm_eval.simple_evaluate(
            model=lm, tasks=["local_choice", "local_until"], task_manager=manager, bootstrap_iters=0
        )
        samples = {name: sorted(s["doc_id"] for s in found["samples"][name]) for name in found["samples"]}
        assert all(ids == list(range(8)) for ids in samples.values())
        answers = [s["filtered_resps"] for name in found["samples"] for s in found["samples"][name]]
        return found["results"], answers

    options = {"pretrained": model, "tokenizer": tokenizer, "batch_size": 4}
    own, said = run(HFLM(**options, backend="causal"))
    assert not calls
    full = SkimLM(**options, method="SparQ(r=64, k=2048)")
    results, answers = run(full)
    # a continuation is a space and five digits, six tokens: the last of the context and five of them are decoded
    assert full.decoded == 8 * 4 * 6 and len(calls) > 4 * 2 * 6
    for one, other in zip(said, answers, strict=True):
        if isinstance(one[0], str):
            assert one == other
        else:
            assert [a for a, _ in one] == pytest.approx([a for a, _ in other], rel=1e-3)
    few, _ = run(SkimLM(**options, method="LMInfinite(k=20)"))
    assert results["local_choice"]["acc,none"] == own["local_choice"]["acc,none"] == 1
    assert few["local_choice"]["acc,none"] < 1 > few["local_until"]["exact_match,none"]
    skimkv.detach(model)
