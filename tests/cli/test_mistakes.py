"""Mistakes on every command line: each ends in one line, and before anything heavy is imported where that can be."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.command_line import assert_mistake, run

LIGHT = """
import contextlib, io, json, sys
for heavy in ("torch", "transformers", "matplotlib", "numpy"):
    sys.modules[heavy] = None  # an import of it raises ImportError
from skimkv.cli import main
for argv in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(argv)
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""

# Command -> (what follows it, what the one line on stderr says); the folder they run in has the files "file" and
# "words", and the folder "notes", which holds another file.
AT_THE_DOOR = {
    "analyse": [
        ("--synthetic", "--synthetic measures methods; give at least one --method"),
        ("--method Dense() --tokens 128 --steps 128", "--steps 128 must be below --tokens 128"),
        ("--tokens 100", "--tokens 100 must be at least 128"),
        ("--text missing.txt", "--text missing.txt: there is no such file"),
        ("--out no/such/folder", "--out no/such/folder: there is no folder no/such"),
        ("--out file", "--out file: this is a file"),
        ("--clouds 0", "--clouds 0 must be at least 1"),
        ("--device toaster", "'toaster' is unknown"),
    ],
    "bench attention": [
        ("--heads 6 --kv-heads 4", "--heads 6 must be a multiple of --kv-heads 4"),
        ("--dtype int3", "unknown dtype 'int3'"),
        ("--plot no/such/f.png", "--plot no/such/f.png: there is no folder no/such"),
        ("--length 0", "--length 0 must be at least 1"),
        ("--threads -1", "--threads -1 must be at least 0"),
        ("--device tpu", "--device 'tpu' is unknown"),
        ("--device meta", "--device 'meta' is unknown"),
        ("--profile --device cuda", "--profile: it is measured with --device cpu only"),
        ("--against tflite", "--against 'tflite' is unknown; known is onnxruntime"),
        ("--sweep paper", "--sweep paper: only paper is known, with --device cuda"),
        ("--sweep all --device cuda", "--sweep all: only paper is known"),
        ("--method SparK(r=8,k=16)", "did you mean SparQ?"),
    ],
    "bench generate": [
        ("--length 40+1", "--length P+N: N must be at least 2"),
        ("--length 40", "--length '40' must be tokens of a prompt + new tokens"),
        ("--shape gpt-9", "unknown shape 'gpt-9'"),
        ("--model notes", "--model notes: no config.json; give the folder of a Hugging Face checkpoint"),
        ("--model builtin --weights int3", "--weights 'int3' is unknown; with --model known are"),
        ("--model builtin --shape tiny", "--shape: a model that is loaded has its own; give either"),
    ],
    "bench memory": [("--plot no/f.png", "--plot no/f.png: there is no folder no")],
    "bench serve": [
        ("--length 512", "--length '512' must be tokens of a prompt + new tokens, such as 512+1024"),
        ("--length 0+5", "--length '0+5' must be"),
        ("--memory 5MB", "--memory '5MB' must be a number of bytes"),
        ("--shape llama-9", "unknown shape 'llama-9'"),
        ("--engine sglang", "--engine 'sglang' is unknown; known are transformers and vllm"),
        ("--engine vllm --weights int8", "--weights int8: vLLM does not read such weights"),
        ("--requests 3", "--requests 3: only --engine vllm takes it"),
    ],
    "bench token": [
        ("--shape gpt-9", "unknown shape 'gpt-9'"),
        ("--shape tiny --weights int2", "unknown weights 'int2'"),
        ("--model no.gguf", "--model no.gguf: no such file"),
        ("--model file", "--model file: not a model folder; give the folder of a checkpoint, or a"),
        ("--model builtin --layers 2", "--layers: a model that is loaded has its own; give either"),
        ("--model builtin --against fork=/bin/sh", "--against: give --model FILE.gguf as well"),
        ("--against ollama=x", "--against 'ollama=x' must be llama.cpp=PATH or fork=PATH"),
        ("--against fork=x", "--against fork=x: x is no program that can be run"),
        ("--against fork=/bin/sh", "--against: give --model FILE.gguf as well"),
        ("--compile", "--compile: it is measured with --device cuda only"),
        ("--plot no/f.png", "there is no folder no"),
    ],
    "demo": [
        ("--lines 0", "--lines 0 must be at least 1"),
        ("--lines x", "--lines 'x' must be a valid integer"),
        ("--lines 3 --asked 4", "--asked 4 must be at most --lines 3"),
        ("--asked 0", "--asked 0 must be at least 1"),
        ("--model x --lines 9", "--lines is an option of --model toy"),
        ("--out no-such-folder/x.png", "there is no folder no-such-folder"),
        ("--out notes", "this is a folder"),
        ("--out figure.doc", "cannot be saved as .doc"),
    ],
    "doctor": [
        ("--weights int8", "--weights int8 belongs to --model"),
        ("--model builtin --weights int3", "--weights 'int3' is unknown"),
        ("--model none.gguf", "none.gguf"),
    ],
    "eval --method Dense()": [
        ("--task record(lines=0)", "lines = 0 must be a whole number of at least 1"),
        ("--task record(liness=3)", "liness"),
        ("--task lins", "did you mean lines"),
        ("--task nonsense", "unknown task 'nonsense'"),
        ("--task lines --data notes", "no lines_N.jsonl with N of at least"),
        ("--task squad --data none", "--data none: there is no such file or folder"),
        ("--task record --method SparQ(r=8,kk=16)", "no argument 'kk'; did you mean k?"),
        ("--task record --mode x", "--mode 'x' is not one of 'blind', 'aware', 'both'"),
        ("--task record --sweep grid", "--sweep 'grid' is not one of"),
        ("--task record --device tpu9", "tpu9"),
        ("--task lines --out no-such-folder/x.jsonl", "there is no folder no-such-folder"),
        ("--task lines --model ./missing-folder", "no such folder"),
    ],
    "generate": [
        ("--prompt-file missing.txt", "missing.txt: there is no such file"),
        ("--prompt-file notes", "this is a folder"),
        ("--prompt-file binary", "not UTF-8"),
        ("--prompt ' \n'", "the prompt is empty"),
        ("--prompt a\udcffb", "--prompt: not UTF-8 text"),
    ],
    "generate --prompt x": [
        ("--prompt-file file", "not both"),
        ("--prompt-cache notes", "--prompt-cache notes: this is a folder"),
        ("--prompt-cache no/cache", "--prompt-cache no/cache: there is no folder no"),
        ("--model ./missing-folder", "--model './missing-folder': no such folder"),
        ("--model missing.gguf", "no such file"),
        ("--model ~/no-such-folder", "--model '~/no-such-folder': no such folder"),
        ("--model a/b/c", "--model 'a/b/c': no such folder"),
        ("--model ''", "--model '': no such folder"),
        ("--model notes", "no config.json"),
        ("--dtype float23", "unknown dtype 'float23'"),
        ("--weights int3", "--weights 'int3' is unknown"),
        ("--weights int8 --compile", "--compile: a model with --weights or of a GGUF file cannot be compiled"),
        ("--device gpu", "--device 'gpu' is unknown; write cpu, cuda"),
        ("--method SparQ(r=32", "a closing parenthesis is missing"),
        ("--method SparQ(r=32,k=128,channels=int8)", "put quotes around it: channels='int8'"),
        ("--method PyramidKV(k=64)", "unknown method 'PyramidKV'"),
        ("--method SparQ(r=0,k=1)", "r = 0 must be an integer of at least 1"),
        ("""--method "__import__('os').getcwd()" """, "is not a method spec"),
        ("--max-new-tokens 0", "--max-new-tokens 0 must be at least 1"),
        ("--temperature 1e-45", "--temperature 1e-45 must be 0, or at least 1e-06"),
        ("--temperature -1", "--temperature -1.0 must be 0"),
        ("--temperature nan", "--temperature nan must be 0"),
        ("--temperature inf", "--temperature inf must be 0"),
        (f"--seed {10**30}", f"--seed {10**30} does not fit 64 bits"),
        (f"--seed {-(2**63) - 1}", "does not fit 64 bits"),
    ],
    "info": [("--models --model builtin", "not both"), ("--model ./none", "no such folder")],
    "plot": [
        ("words", "words, line 1: no record of an evaluation"),
        ("file", "holds no records"),
        ("missing.jsonl", "missing.jsonl: there is no such file"),
        ("file --out no-such-folder/x.png", "there is no folder no-such-folder"),
    ],
    "roofline": [
        ("--model llama-9", "'llama-9' is unknown"),
        ("--model notes", "no config.json"),
        ("--model no.gguf", "--model no.gguf: no such file"),
        ("--hardware abacus", "--hardware 'abacus' is unknown"),
        ("--sizes 1,2,three", "'1,2,three' must be numbers"),
        ("--sizes 64,64,4", "--sizes 64,64,4: the sizes must be hidden,intermediate"),
        ("--sizes 64,64,4,3,2,9", "--sizes 64,64,4,3,2,9: heads = 4 must be a multiple of kv_heads = 3"),
        ("--sizes 65,64,4,2,2,9", "hidden = 65 is no multiple of heads = 4: give head_dim as well"),
        ("--sizes 64,64,4,2,0,9", "each at least 1"),
        ("--weights int2", "--weights 'int2'"),
        ("--cache int2", "'int2'"),
        ("--method TopK(k=0)", "k = 0 must be an integer of at least 1"),
        ("--length 0", "--length 0 must be at least 1"),
        ("--plot no/such/f.png", "there is no folder no/such"),
    ],
    "serve": [("", "MODEL"), ("/nowhere/at/all", "/nowhere/at/all")],
    "serve builtin": [
        ("--method SparK(r=8)", "unknown method 'SparK'; did you mean SparQ?"),
        ("--weights int3", "--weights 'int3' is unknown"),
        ("--port 65536", "--port 65536"),
        ("--max-tokens 1", "--max-tokens 1 must be at least 2"),
        ("--conversations -1", "--conversations -1 must be at least 0"),
        ("--parallel 0", "--parallel 0 must be at least 1"),
        ("--grace -1", "--grace -1 must be at least 0"),
        ("--api-key short", "--api-key has 5 characters; it must be 8 or more, printable ASCII"),
        ("--max-body 0", "--max-body 0 refuses every request"),
        ("--max-body big", "--max-body 'big' must be a number of bytes such as"),
        ("--cors localhost", "--cors 'localhost' must be an origin such as http://localhost:3000"),
        ("--cors http://a.example/path", "--cors 'http://a.example/path' must be an origin"),
        ("--conversation-memory much", "--conversation-memory 'much' must be a number of bytes such as"),
        ("--cache-dir d --cache-dir-size 9X", "--cache-dir-size '9X' must be a number of bytes"),
        ("--cache-dir d --conversations 0", "--cache-dir with --conversations 0: nothing is kept"),
    ],
    "tune": [("--text missing.txt", "--text missing.txt: there is no such file")],
    "tune --text words": [
        ("--target-loss many", "--target-loss 'many' must be a share"),
        ("--target-loss 150%", "--target-loss '150%'"),
        ("--target-kl -1", "--target-kl -1.0 must be a number of nats"),
        ("--target-kl nan", "--target-kl nan must be"),
        ("--target-kl 0.1 --target-loss 2%", "--target-kl 0.1 and --target-loss 2% bound two things"),
        ("--channels int2", "--channels 'int2' is not one of 'none', 'copy', 'int8', 'int4'"),
        ("--prompt 8", "--prompt 8 must be at least 32"),
        ("--pieces 1", "--pieces 1 must be at least 2"),
        ("--out no/such/t.jsonl", "there is no folder no/such"),
        ("--plot no/such/t.png", "there is no folder no/such"),
    ],
}  # fmt: skip
# The same of mistakes that only a model or its library tells.
LATER = [
    ("analyse --text words --tokens 99999", "has fewer than --tokens 99999"),
    ("bench attention --device mps", "--device mps: benchmarks run on cpu or cuda"),
    ("demo --lines 1000", "14510 tokens do not fit the 8192"),
    ("eval --method Dense() --task record(lines=900,asked=1)", "8192"),
    ("eval --method SparQ(r=128,k=8) --task record", "r = 128 must be at most 64"),
    ("generate --prompt x --method SparQ(r=65,k=4)", "r = 65 must be at most 64"),
    ("generate --prompt x --chat", "no chat template"),
    ("roofline --model builtin --method SparQ(r=128,k=8)", "r = 128 must be at most 64"),
    ("serve builtin --cache-dir file", "--cache-dir file: File exists; give a folder"),
    ("tune --text words --prompt 10000", "do not fit the 8192 positions"),
    ("tune --text words --pieces 400", "too few for --pieces 400"),
    ("tune --text file", "file: the text has 0 pieces"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the commands run in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    (tmp_path / "file").touch()
    (tmp_path / "binary").write_bytes(b"abc\xff\xfe")
    (tmp_path / "words").write_text("The mill stood by the river, and the river ran to the sea. " * 60)
    return tmp_path


@pytest.mark.slow
def test_mistakes_are_found_before_anything_heavy_is_imported(folder: Path) -> None:
    cases = [(f"{command} {rest}", words) for command, own in AT_THE_DOOR.items() for rest, words in own]
    argvs = json.dumps([shlex.split(line) for line, _ in cases])
    process = subprocess.run([sys.executable, "-c", LIGHT, argvs], capture_output=True, text=True, cwd=folder)
    assert process.returncode == 0, process.stderr
    results = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(results) == len(cases)
    for (line, words), (status, out, err) in zip(cases, results, strict=True):
        assert (status, out) == (2, ""), line
        assert err.startswith("skimkv: ") and err.count("\n") == 1, line
        assert words in err, line


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("line", "words"), LATER)
def test_mistakes_that_a_model_or_its_library_tells(capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    assert_mistake(run(capsys, *line.split()), words)
