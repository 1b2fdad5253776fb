"""The commands of docs/run-on-a-large-model.md, on tiny random models in a cache of the Hub under the same names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import skimkv
from skimkv import spec
from skimkv.eval.tasks import ruler
from support.page_commands import commands, run_commands, smaller, write_data, write_hub

PAGE = Path(__file__).parents[2] / "docs" / "run-on-a-large-model.md"
MODELS = {"meta-llama/Llama-3.1-8B": "llama", "Qwen/Qwen3-8B": "qwen3"}
# What is made smaller, so that two cores can do it: lengths, sizes and numbers of examples, and no GPU.
SMALLER = [
    (r"length=\d+", "length=1024"), (r"lines=\d+", "lines=12"),
    (r"context=\d+, reference=\d+", "context=60, reference=8"),
    (r"--limit \d+", "--limit 1"), (r"--device cuda", "--device cpu"), (r"--mode both", "--mode aware"),
    (r"(skimkv tune .*)--target-kl [\d.]+", r"\1--target-kl 9 --prompt 32 --scored 4 --pieces 5 --channels none"),
]  # fmt: skip


def test_commands_that_another_program_runs():
    """The harness and the Hub's program get models of this page, and methods that exist."""
    others = [argv for _, argv, _ in commands(PAGE) if argv[0] != "skimkv"]
    harness = [argv for argv in others if argv[:3] == ["python", "-m", "skimkv.lm_eval"]]
    assert [argv[-1] for argv in others if argv[:2] == ["hf", "download"]] == list(MODELS)
    assert len(harness) == 2 and len(others) == 5
    for argv in harness:
        assert argv[argv.index("--tasks") + 1] == "copa,mathqa,openbookqa,piqa,rte,winogrande"
        arguments = argv[argv.index("--model_args") + 1]
        name, method = re.fullmatch(r"pretrained=([^,]+),dtype=bfloat16,method=(.+)", arguments).groups()
        assert (
            name in MODELS and spec.parse_call(method, "method", "").name in ("SparQ", "H2O") and skimkv.parse(method)
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_run(tmp_path):
    """All in their order in one process, with the Hub out of reach; the records are of the models that it names."""
    own = [smaller(argv, SMALLER)[1:] for _, argv, _ in commands(PAGE) if argv[0] == "skimkv"]
    assert {argv[0] for argv in own} == {"info", "generate", "eval", "plot", "tune"} and len(own) >= 9
    write_hub(tmp_path / "home", MODELS)
    write_data(tmp_path)
    printed = run_commands([(tmp_path, argv) for argv in own], tmp_path / "home")
    found = {}
    for name, model in (("llama", "meta-llama/Llama-3.1-8B"), ("qwen", "Qwen/Qwen3-8B")):
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()[1:]]
        assert {record["model"] for record in lines} == {model}
        assert {record["dtype"] for record in lines} == {"bfloat16"}
        found[name] = {record["task"].partition("(")[0] for record in lines}
        for task in found[name]:
            methods = [record["method"] for record in lines if record["task"].partition("(")[0] == task]
            assert len(methods) == len(set(methods)) == 4, task
    assert found["qwen"] == set(ruler.RECIPES)
    assert found["llama"] == {*ruler.RECIPES, "conversation", "squad", "triviaqa", "kl"}
    assert (tmp_path / "llama.png").stat().st_size > 10_000 and printed.count("SparQ(") > 4
