"""The adapter of lm-evaluation-harness, on a local task: sparse decode runs, and at full budget it is dense."""

from __future__ import annotations

import json
import sys

import pytest
from transformers import AutoTokenizer

import skimkv
from skimkv.eval.tasks import record
from skimkv.hf.load import BUILTIN
from support.random_models import random_model, tiny_configuration

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
def task_folder(tmp_path_factory):
    """Eight questions on two records: which of four numbers, and what number."""
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
    return folder


@pytest.fixture(scope="module")
def manager(task_folder):
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(task_folder), include_defaults=False)


@pytest.mark.timeout(280)
def test_sparse_decode_runs(manager, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    from skimkv.eval.lm_eval import SkimLM

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


@pytest.mark.timeout(280)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_command(task_folder, tmp_path, monkeypatch, capsys, family):
    """`--model skimkv` with a method in --model_args: both kinds of requests are decoded, a bad method is one line."""
    from lm_eval.tasks import TaskManager

    from skimkv.lm_eval import main

    # without the harness's own tasks, of which an index takes many seconds
    monkeypatch.setattr(TaskManager.__init__, "__defaults__", (None, None, False, None))
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN)
    configuration = tiny_configuration(family, vocab_size=len(tokenizer), max_position_embeddings=2048)
    random_model(configuration).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    steps, decode = [], skimkv.SparQ.decode
    monkeypatch.setattr(skimkv.SparQ, "decode", lambda *args, **kwargs: steps.append(1) or decode(*args, **kwargs))

    def run(method: str) -> None:
        arguments = f"pretrained={tmp_path / 'model'},method={method},dtype=float32"
        command = ["--model", "skimkv", "--model_args", arguments, "--device", "cpu", "--batch_size", "2"]
        command += ["--tasks", "local_choice,local_until", "--include_path", str(task_folder), "--limit", "2"]
        monkeypatch.setattr(sys, "argv", ["skimkv.lm_eval", *command])
        main()

    run("SparQ(r=4, k=8)")
    printed = capsys.readouterr().out
    assert "method': 'SparQ(r=4, k=8)'" in printed and "|local_choice|" in printed and "|local_until" in printed
    # two layers; each of 2 * 4 choices takes 6 steps, and each of 2 answers 8, of which the first is the prompt's
    assert len(steps) >= 2 * (2 * 4 * 6 / 2 + 7)
    for wrong in ("SparQ(r=4 k=8)", ""):
        with pytest.raises(SystemExit, match=r"\Askimkv\.lm_eval: method[^\n]+\Z"):
            run(wrong)
