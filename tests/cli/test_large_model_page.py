"""The commands of docs/run-on-a-large-model.md, on tiny random models in a cache of the Hub under the same names."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import skimkv
from skimkv import spec
from skimkv.eval.tasks import ruler
from skimkv.hf.load import BUILTIN
from skimkv.hf.tiny_models import random_model, tiny_configuration

PAGE = Path(__file__).parents[2] / "docs" / "run-on-a-large-model.md"
MODELS = {"meta-llama/Llama-3.1-8B": "llama", "Qwen/Qwen3-8B": "qwen3"}
# What is made smaller, so that two cores can do it: lengths, sizes and numbers of examples, and no GPU.
SMALLER = [
    (r"length=\d+", "length=1024"), (r"lines=\d+", "lines=12"),
    (r"context=\d+, reference=\d+", "context=60, reference=8"),
    (r"--limit \d+", "--limit 1"), (r"--device cuda", "--device cpu"), (r"--mode both", "--mode aware"),
    (r"(skimkv tune .*)--target-kl [\d.]+", r"\1--target-kl 9 --prompt 32 --scored 4 --pieces 5 --channels none"),
]  # fmt: skip
RUN = """
import json, sys
from skimkv.cli.app import main
for argv in json.load(sys.stdin):
    status = main(argv)
    print(status, argv, flush=True)
    if status:
        sys.exit(status)
"""


def commands() -> Iterator[list[str]]:
    """Every command of the page, its continuation lines joined."""
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        yield from filter(None, map(shlex.split, block.replace("\\\n", " ").splitlines()))


def smaller(argv: list[str]) -> list[str]:
    """The same command with what SMALLER says."""
    text = shlex.join(argv)
    for pattern, instead in SMALLER:
        text = re.sub(pattern, instead, text)
    return shlex.split(text)


def write_hub(home: Path) -> None:
    """Write both models into a folder as HF_HOME has it after a download."""
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN)
    for name, family in MODELS.items():
        repository = home / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(snapshot.name)
        sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 40960, "head_dim": 128}
        random_model(tiny_configuration(family, **sizes)).save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)


def write_data(folder: Path) -> None:
    """Write small files of what the page's tasks read, DATA and texts, and notes.txt."""
    data = folder / "DATA"
    (data / "essays").mkdir(parents=True)
    (folder / "texts").mkdir()
    prose = "".join(f"Day {i} brought rain and the river rose a little. " for i in range(400))
    for path in (data / "essays" / "a.txt", folder / "texts" / "a.txt", folder / "notes.txt"):
        path.write_text(prose)
    paragraphs = [
        {"context": f"Town {i} has {i} gates.", "qas": [
            {"id": f"{i}{j}", "question": f"How many {i}?", "answers": [{"text": str(i)}]} for j in "ab"]}
        for i in range(60)
    ]  # fmt: skip
    (data / "squad.json").write_text(json.dumps({"data": [{"title": "Towns", "paragraphs": paragraphs}]}))
    hotpot = [
        {"question": f"Who leads {i}?", "answer": f"Ann {i}", "context": [[f"T{i}{j}", ["It is. "]] for j in range(3)]}
        for i in range(30)
    ]
    (data / "hotpotqa.json").write_text(json.dumps(hotpot))
    trivia = {"id": "t", "question": "Who?", "answers": ["Ann"], "context": "Ann led the town. " * 9}
    (data / "triviaqa.jsonl").write_text(json.dumps(trivia))


def test_commands_that_another_program_runs():
    """The harness and the Hub's program get models of this page, and methods that exist."""
    others = [argv for argv in commands() if argv[0] != "skimkv"]
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
    own = [smaller(argv)[1:] for argv in commands() if argv[0] == "skimkv"]
    assert {argv[0] for argv in own} == {"info", "generate", "eval", "plot", "tune"} and len(own) >= 9
    write_hub(tmp_path / "home")
    write_data(tmp_path)
    source = str(Path(skimkv.__file__).parents[1])
    environment = {
        **os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": source,
    }  # fmt: skip
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"):
        environment.pop(name, None)
    run = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(own), capture_output=True, text=True, env=environment,
        cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
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
    assert (tmp_path / "llama.png").stat().st_size > 10_000 and run.stdout.count("SparQ(") > 4
