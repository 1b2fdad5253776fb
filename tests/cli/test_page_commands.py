"""Every command of the README and the pages runs, on stand-ins for their models and files, or says what it needs."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from typer.main import get_command

import skimkv
from skimkv.cli.app import app
from skimkv.eval.tasks import ruler
from support.command_server import Server
from support.gguf_files import VOCABULARY, write
from support.page_commands import TEMPLATE, Command, commands, run_commands, smaller, write_data, write_hub, write_model

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = [command for page in PAGES for command in commands(page)]
MODELS = {
    "meta-llama/Llama-3.2-1B": "llama", "meta-llama/Llama-3.2-1B-Instruct": "llama", "Qwen/Qwen3-0.6B": "qwen3",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "llama", "meta-llama/Llama-3.1-8B": "llama", "Qwen/Qwen3-8B": "qwen3",
}  # fmt: skip
# What is made smaller, so that two cores can do it: lengths, sizes and numbers of examples, and no GPU.
SMALLER = [
    (r"^skimkv demo$", "skimkv demo --model toy --lines 12 --asked 2"),
    (r"--lines \d+ --asked \d+", "--model toy --lines 12 --asked 2"),
    (r"--length \d+\+\d+", "--length 40+3"), (r"--length \d+", "--length 300"), (r"length=\d+", "length=1024"),
    (r"lines=\d+", "lines=12"), (r"context=\d+, reference=\d+", "context=60, reference=8"),
    (r"--shape [\w-]+ --layers \d+", "--shape tiny --layers 1"), (r"--max-new-tokens \d+", "--max-new-tokens 4"),
    (r"^(skimkv bench (attention|token|generate)\b)", r"\1 --rounds 1"),
    (r"^(skimkv bench attention\b)", r"\1 --heads 2 --head-dim 32"),
    (r"^(skimkv bench memory\b)", r"\1 --heads 2"),
    (r"^(skimkv bench serve\b.*)--memory \S+", r"\1--memory 1M --shape tiny --layers 1"),
    (r"^(skimkv bench serve\b(?!.*--length).*)", r"\1 --length 40+3 --length 40+6"),
    (r"^(skimkv analyse\b.*)", r"\1 --tokens 128 --pieces 2"),
    (r"^(skimkv generate\b(?!.*--max-new-tokens).*)", r"\1 --max-new-tokens 4"),
    (r"^(skimkv eval\b(?!.*--limit).*)", r"\1 --limit 1"), (r"--limit \d+", "--limit 1"),
    (r"--device cuda", "--device cpu"), (r"--mode both", "--mode aware"), (r"--target-kl [\d.]+", "--target-kl 9"),
    (r"^(skimkv tune\b.*)", r"\1 --prompt 32 --scored 4 --pieces 5 --channels none"),
]  # fmt: skip


def is_for_skimkv(command: Command) -> bool:
    """Whether skimkv itself runs this command, and nothing else is needed."""
    return command.argv[:1] == ["skimkv"] and not command.needs


def test_every_command_runs_here_or_says_what_it_needs() -> None:
    """Those of skimkv run below; `pip install .` and make targets are what the set-up and the tests themselves are."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    left = [
        command
        for command in COMMANDS
        if not command.needs and command.argv[0] != "skimkv"
        and command.argv[:3] != ["pip", "install", "."]
        and not (command.argv[0] == "make" and set(command.argv[1:]) <= set(targets))
    ]  # fmt: skip
    assert left == []
    assert len(COMMANDS) > 60 and sum(map(is_for_skimkv, COMMANDS)) > 30


def test_commands_that_need_something_are_spelt_right() -> None:
    """A command of skimkv that cannot run here names a command and options that there are."""
    checked = 0
    for command in COMMANDS:
        if not command.needs or command.argv[:1] != ["skimkv"]:
            continue
        group: object = get_command(app)
        words = command.argv[1:]
        while hasattr(group, "commands"):
            group = group.commands[words.pop(0)]
        known = {name for parameter in group.params for name in parameter.opts}  # type: ignore[attr-defined]
        assert {word for word in words if word.startswith("--")} <= known, command
        checked += 1
    assert checked > 3


def test_commands_of_the_harness() -> None:
    """They get models that the same page downloads, and methods that exist."""
    found = [command.argv for command in COMMANDS if command.page == "run-on-a-large-model.md"]
    models = [argv[-1] for argv in found if argv[:2] == ["hf", "download"]]
    harness = [argv for argv in found if argv[:3] == ["python", "-m", "skimkv.lm_eval"]]
    assert len(models) == len(harness) == 2 and set(models) <= set(MODELS)
    for argv in harness:
        arguments = argv[argv.index("--model_args") + 1]
        name, method = re.fullmatch(r"pretrained=([^,]+),dtype=bfloat16,method=(.+)", arguments).groups()  # type: ignore[union-attr]
        assert name in models and skimkv.parse(method)


def stand_ins(folder: Path) -> None:
    """Write into a new folder what the commands name: models of the Hub, MODEL, files of GGUF, texts and tasks."""
    folder.mkdir(exist_ok=True)
    write_hub(folder / "home", MODELS)
    write_model(folder / "MODEL", "llama")
    write_data(folder)
    text = (folder / "notes.txt").read_text()
    (folder / "book.txt").write_text(text)
    (folder / "TEXTS").mkdir()
    (folder / "TEXTS" / "a.txt").write_text(text)
    names = {word for command in COMMANDS for word in command.argv if re.fullmatch(r"[\w.-]+\.gguf", word)}
    config = LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=32768, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    for name in names:
        write(folder / name, LlamaForCausalLM(config).eval(), edit=lambda file: file.add_chat_template(TEMPLATE))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_run(tmp_path: Path) -> None:
    """All but servers, in their order in one process with the Hub out of reach; each page in a folder of its own."""
    stand_ins(tmp_path / "files")
    argvs: dict[tuple[str, ...], Path] = {}  # a command that stands on several pages runs once, if it leaves no record
    for command in filter(is_for_skimkv, COMMANDS):
        argv = tuple(smaller(command.argv, SMALLER)[1:])
        page = command.page if argv[0] in ("eval", "plot") else ""
        if argv[0] != "serve" and (page, *argv) not in argvs:
            argvs[(page, *argv)] = folder = tmp_path / command.page
            if not folder.exists():
                folder.mkdir()
                for path in (tmp_path / "files").iterdir():
                    (folder / path.name).symlink_to(path)
    printed = run_commands([(folder, list(argv[1:])) for argv, folder in argvs.items()], tmp_path / "files" / "home")
    assert len(re.findall(r"^0 \[", printed, re.MULTILINE)) == len(argvs) > 35
    llama, qwen = ({*ruler.RECIPES, "conversation", "squad", "triviaqa", "kl"}, {*ruler.RECIPES})
    for name, model, tasks in (("llama", "meta-llama/Llama-3.1-8B", llama), ("qwen", "Qwen/Qwen3-8B", qwen)):
        lines = (tmp_path / "run-on-a-large-model.md" / f"{name}.jsonl").read_text().splitlines()[1:]
        records = [json.loads(line) for line in lines]
        assert {(record["model"], record["dtype"]) for record in records} == {(model, "bfloat16")}
        found = {(record["task"].partition("(")[0], record["method"]) for record in records}
        assert len(found) == len(records) and Counter(task for task, _ in found) == dict.fromkeys(tasks, 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_servers_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `skimkv serve` of the pages starts, is healthy and answers."""
    stand_ins(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    servers = {tuple(command.argv[2:]) for command in COMMANDS if is_for_skimkv(command) and command.argv[1] == "serve"}
    assert len(servers) > 2
    for argv in sorted(servers):
        with Server(*argv) as server:
            with urllib.request.urlopen(f"{server.url.removesuffix('/v1')}/health", timeout=30) as answer:
                assert answer.status == 200
            assert server.complete(model=argv[0], prompt="the Cat", max_tokens=2)["choices"]
